// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks for the sockets that rules mean, sets them, and gives up where nothing comes of it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use socket2::SockRef;
use tracing::{debug, info, warn};

use super::process::{self, Open, Target};
use super::rule::Rule;
use super::stats::{Counts, Stats};
use super::undo::{self, Change, internet};
use crate::api::busy_poll::{Application, IN_VAIN, Status};
use crate::host::guardian::Guardian;
use crate::host::polling::{self, Polling};

/// How often new processes and sockets are looked for: so often that it takes a twentieth of the time,
/// at most.
const TICK: Duration = Duration::from_millis(100);
const TICKS_MAX: Duration = Duration::from_secs(2);
const REST: u32 = 20;

/// So many sockets are remembered that no process with a rule has any more: another may.
const GONE_MAX: usize = 1024;

/// An adaptive rule judges a process by what so long brought, and by so many waits at least.
const TRIAL: Duration = Duration::from_secs(1);
const WAITS: u64 = 20;

/// How long a process that finds too little does not poll: twice as long each time, up to this.
const PAUSE_MAX: Duration = Duration::from_secs(64);

/// Sets sockets, and keeps looking for new ones. When it is dropped, or its process ends, they are as
/// they were.
pub struct Poller {
    rules: Vec<Rule>,
    guardian: Guardian,
    /// Polls can be counted, or why they can't.
    stats: Result<Stats>,
    processes: HashMap<u32, Chosen>,
    /// By inode, those that have been looked at.
    sockets: HashMap<u64, Socket>,
    /// How connections would begin that are accepted on these ports.
    listeners: HashMap<u16, Polling>,
    /// Processes that may not be touched; it has been said.
    refused: HashSet<u32>,
    /// The kernel has no parameters for epoll instances; it has been said.
    no_epoll: bool,
}

/// A process whose sockets poll.
struct Chosen {
    target: Target,
    rule: usize,
    /// What its sockets are set to.
    set: Polling,
    /// Epoll instances that have been set.
    epolls: HashSet<RawFd>,
    /// That poll, in the latest look.
    nr_sockets: usize,
    /// When the first was set, and what the kernel had counted then.
    since: (Instant, Counts),
    /// Its threads wait, but none has polled yet; it has been said.
    in_vain: bool,
    /// One has.
    polled: bool,
    trial: Trial,
}

/// Whether it pays that a process polls.
struct Trial {
    /// Of the trial, or of the pause.
    start: Instant,
    /// What had been counted then.
    counts: Counts,
    /// It does not poll for so long.
    pause: Option<Duration>,
    /// How long it did not the last time.
    last_pause: Duration,
}

/// A socket that has been looked at.
struct Socket {
    cookie: u64,
    /// If connections are accepted on it, the port.
    listens: Option<u16>,
    /// It polls, by a rule.
    polls: bool,
    /// In the latest look no process with a rule had it.
    gone: bool,
}

impl Poller {
    /// Nothing is set yet.
    ///
    /// # Errors
    /// When a rule means nothing, or a process that it names is not there.
    pub fn new(rules: &[Rule]) -> Result<Self> {
        for rule in rules {
            if let Some(objection) = rule.objection() {
                bail!("{objection}");
            }
            if let Some(pid) = rule.pid {
                Target::open(pid).map_err(|_| anyhow!("there is no process {pid}"))?;
            }
        }
        for rule in rules.iter().filter(|rule| rule.pid.is_none()) {
            info!(
                "looking for sockets of {rule}: they poll for up to {} us",
                rule.usecs
            );
        }
        Ok(Self {
            rules: rules.to_vec(),
            guardian: Guardian::start(undo::COMMAND, None)?,
            stats: Stats::attach(),
            processes: HashMap::new(),
            sockets: HashMap::new(),
            listeners: HashMap::new(),
            refused: HashSet::new(),
            no_epoll: false,
        })
    }

    /// Sets what is new. Returns how long to wait before the next time.
    ///
    /// # Errors
    /// When the kernel refuses what it would refuse every socket.
    pub fn tick(&mut self) -> Result<Duration> {
        let start = Instant::now();
        let mut before = std::mem::take(&mut self.processes);
        let mut inodes = HashSet::new();
        let all = process::all().context("cannot read /proc")?;
        // Another may have the number of one that has ended.
        self.refused.retain(|pid| all.contains(pid));
        for pid in all {
            let rule = self.rules.iter().position(|rule| process::means(rule, pid));
            let Some(rule) = rule.filter(|_| !self.refused.contains(&pid)) else {
                continue;
            };
            let known = before.remove(&pid);
            let new = known.is_none();
            let Ok(mut chosen) = known.map_or_else(|| self.choose(pid, rule), Ok) else {
                continue;
            };
            let judged = self.judge(&mut chosen);
            match judged.and_then(|()| self.look_at(&mut chosen, &mut inodes)) {
                Ok(()) => {
                    if new {
                        info!("{}", chosen.words(&self.rules[rule]));
                    }
                    self.doubt(&mut chosen)?;
                    self.processes.insert(pid, chosen);
                }
                Err(e) => self.give_up(&chosen, e)?,
            }
        }
        for ended in before.values() {
            if let Ok(stats) = &self.stats {
                stats.forget(ended.target.pid);
            }
            info!(
                "process {} ({}) has ended",
                ended.target.pid, ended.target.comm
            );
        }
        self.forget(&inodes)?;
        Ok((start.elapsed() * REST).clamp(TICK, TICKS_MAX))
    }

    /// Whether nobody will ever be chosen again: all rules name processes that have ended.
    pub fn has_ended(&self) -> bool {
        self.processes.is_empty() && self.rules.iter().all(|rule| rule.pid.is_some())
    }

    fn choose(&self, pid: u32, rule: usize) -> Result<Chosen> {
        let target = Target::open(pid)?;
        let mut counts = Counts::default();
        if let Ok(stats) = &self.stats {
            stats.watch(pid)?;
            counts = stats.counts(pid)?;
        }
        let now = Instant::now();
        Ok(Chosen {
            target,
            rule,
            set: self.rules[rule].polling(),
            epolls: HashSet::new(),
            nr_sockets: 0,
            since: (now, counts),
            in_vain: false,
            polled: false,
            trial: Trial {
                start: now,
                counts,
                pause: None,
                last_pause: Duration::ZERO,
            },
        })
    }

    /// Lets a process pause for which most waits found nothing, and begin again after a while.
    fn judge(&mut self, chosen: &mut Chosen) -> Result<()> {
        let rule = &self.rules[chosen.rule];
        let Ok(stats) = &self.stats else {
            return Ok(());
        };
        if !rule.adaptive || chosen.trial.start.elapsed() < chosen.trial.pause.unwrap_or(TRIAL) {
            return Ok(());
        }
        let counts = stats.counts(chosen.target.pid)?;
        let (pid, comm) = (chosen.target.pid, &chosen.target.comm);
        let trial = &mut chosen.trial;
        let begin = match trial.pause {
            Some(_) => {
                debug!("process {pid} ({comm}) polls again");
                trial.pause = None;
                true
            }
            None => {
                let new = counts.since(trial.counts);
                // A wait ends with a packet or with a sleep.
                if new.found + new.sleeps < WAITS {
                    return Ok(());
                }
                let pays = new.found >= new.sleeps;
                trial.pause = (!pays).then(|| (trial.last_pause * 2).clamp(TRIAL, PAUSE_MAX));
                trial.last_pause = trial.pause.unwrap_or(Duration::ZERO);
                if let Some(pause) = trial.pause {
                    debug!(
                        "process {pid} ({comm}) does not poll for {pause:?}: it found too little"
                    );
                }
                pays
            }
        };
        (trial.start, trial.counts) = (Instant::now(), counts);
        let polling = match begin {
            true => rule.polling(),
            false => Polling::default(),
        };
        self.set_all(chosen, polling)
    }

    /// Says it if a process's waits don't poll.
    fn doubt(&self, chosen: &mut Chosen) -> Result<()> {
        let (start, before) = chosen.since;
        let Ok(stats) = &self.stats else {
            return Ok(());
        };
        let off = chosen.nr_sockets == 0 || chosen.set == Polling::default();
        if chosen.polled || off || start.elapsed() < TRIAL {
            return Ok(());
        }
        let counts = stats.counts(chosen.target.pid)?.since(before);
        chosen.polled = counts.polls > 0;
        let in_vain = !chosen.polled && counts.sleeps >= WAITS;
        if in_vain && !chosen.in_vain {
            let Target { pid, comm, .. } = &chosen.target;
            warn!("process {pid} ({comm}): {}", IN_VAIN);
        }
        chosen.in_vain = in_vain;
        Ok(())
    }

    /// Sets what has been set before.
    fn set_all(&mut self, chosen: &mut Chosen, now: Polling) -> Result<()> {
        let before = chosen.set;
        if before == now {
            return Ok(());
        }
        chosen.set = now;
        for open in chosen.target.opened()? {
            match open {
                Open::Socket { fd, inode } => {
                    let known = self.sockets.get(&inode).filter(|socket| socket.polls);
                    let (Some(known), Some(socket)) =
                        (known, unless_closed(chosen.target.borrow(fd))?)
                    else {
                        continue;
                    };
                    let cookie = polling::cookie(&socket)?;
                    if cookie == known.cookie && Polling::of_socket(&socket)? == before {
                        let listens = known.listens;
                        self.guardian.tell(&Change::Socket {
                            inode,
                            cookie,
                            listens,
                            before,
                            now,
                        })?;
                        now.set_socket(&socket)?;
                    }
                }
                Open::Epoll(fd) if chosen.epolls.contains(&fd) => {
                    let Some(epoll) = unless_closed(chosen.target.borrow(fd))? else {
                        continue;
                    };
                    if Polling::of_epoll(&epoll)? == before {
                        self.guardian.tell(&chosen.epoll(fd, before))?;
                        now.set_epoll(&epoll)?;
                    }
                }
                Open::Epoll(_) => {}
            }
        }
        Ok(())
    }

    /// Whose sockets poll, and what comes of it.
    ///
    /// # Errors
    /// When the counts can't be read.
    pub fn status(&self) -> Result<Status> {
        let applications = self.processes.values().map(|chosen| {
            let application = Application {
                pid: chosen.target.pid,
                comm: chosen.target.comm.clone(),
                usecs: chosen.set.usecs,
                sockets: chosen.nr_sockets,
                epolls: chosen.epolls.len(),
                in_vain: chosen.in_vain,
                seconds: 0.0,
                polls: 0,
                found: 0,
                packets: 0,
                polling_seconds: 0.0,
                sleeps: 0,
                wake_up_us: None,
                won_seconds: None,
            };
            let (start, before) = chosen.since;
            let counts = match &self.stats {
                Ok(stats) => stats.counts(chosen.target.pid)?.since(before),
                Err(_) => Counts::default(),
            };
            Ok(application.counted(counts, start.elapsed()))
        });
        let mut applications = applications.collect::<Result<Vec<_>>>()?;
        applications.sort_by_key(|application| application.pid);
        Ok(Status {
            pid: std::process::id(),
            applications,
            uncounted: self.stats.as_ref().err().map(|why| format!("{why:#}")),
        })
    }

    /// Puts everything back.
    ///
    /// # Errors
    /// When something still polls.
    pub fn stop(mut self) -> Result<()> {
        self.guardian.end()
    }

    /// Why a process could not be looked at to the end: said once, or a reason to stop.
    fn give_up(&mut self, chosen: &Chosen, error: anyhow::Error) -> Result<()> {
        let Target { pid, comm, .. } = &chosen.target;
        if let Ok(stats) = &self.stats {
            stats.forget(*pid);
        }
        match error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error)
        {
            Some(libc::ESRCH | libc::ENOENT) => Ok(()),
            // What is left of one that ends may not be touched.
            _ if chosen.target.has_ended() => Ok(()),
            Some(libc::EPERM | libc::EACCES) => {
                let why = format!(
                    "process {pid} ({comm}) may not be touched: the kernel asks for the right to \
                     trace it (root, CAP_SYS_PTRACE)"
                );
                if self.rules[chosen.rule].pid.is_some() {
                    bail!(why);
                }
                warn!("{why}");
                self.refused.insert(*pid);
                Ok(())
            }
            Some(libc::ENOPROTOOPT) => bail!(
                "this kernel has no busy polling: it was built without CONFIG_NET_RX_BUSY_POLL"
            ),
            _ => Err(error).with_context(|| format!("process {pid} ({comm})")),
        }
    }

    /// Sets what is new in a process; `inodes` gets the sockets that it has.
    fn look_at(&mut self, chosen: &mut Chosen, inodes: &mut HashSet<u64>) -> Result<()> {
        let opened = chosen.target.opened()?;
        // Connections that are there already were accepted before their listener is changed.
        let mut listeners = Vec::new();
        let (mut epolls, mut nr_sockets) = (Vec::new(), 0);
        for open in opened {
            match open {
                Open::Epoll(fd) => epolls.push(fd),
                Open::Socket { fd, inode } => {
                    inodes.insert(inode);
                    let known = self.sockets.get(&inode).filter(|socket| !socket.gone);
                    match known.map(|socket| socket.polls) {
                        Some(polls) => nr_sockets += usize::from(polls),
                        None if self.look_at_socket(chosen, fd, inode, false)? => {
                            listeners.push((fd, inode));
                        }
                        None => {}
                    }
                }
            }
        }
        for (fd, inode) in listeners {
            self.look_at_socket(chosen, fd, inode, true)?;
        }
        chosen.nr_sockets = nr_sockets;
        epolls
            .into_iter()
            .try_for_each(|fd| self.look_at_epoll(chosen, fd))
    }

    /// Sets a socket that is not known yet, if a rule means it. True, and nothing done, if connections
    /// are accepted on it and it is not the time for these.
    fn look_at_socket(
        &mut self,
        chosen: &Chosen,
        fd: RawFd,
        inode: u64,
        listeners: bool,
    ) -> Result<bool> {
        let rule = &self.rules[chosen.rule];
        let Some(socket) = unless_closed(chosen.target.borrow(fd))? else {
            return Ok(false);
        };
        let seen = SockRef::from(&socket);
        let listens = seen.is_listener().unwrap_or(false);
        if listens && !listeners {
            return Ok(true);
        }
        let port = internet(&seen);
        let listens = port.flatten().filter(|_| listens);
        let polls = match (port, rule.port) {
            (None, _) => false,
            (Some(_), None) => true,
            // It may get one later.
            (Some(None), Some(_)) => return Ok(false),
            (Some(port), wanted) => port == wanted,
        };
        let cookie = polling::cookie(&socket)?;
        if let Some(known) = self.sockets.get_mut(&inode).filter(|s| s.cookie == cookie) {
            known.gone = false;
            return Ok(false);
        }
        if polls {
            let now = chosen.set;
            let found = Polling::of_socket(&socket)?;
            // As it is wanted: accepted on a listener that had been changed, or made so by somebody.
            let before = match port.flatten().and_then(|port| self.listeners.get(&port)) {
                Some(before) if found == now => *before,
                _ => found,
            };
            if before == now {
                self.guardian.tell(&Change::Found { cookie })?;
            } else {
                self.guardian.tell(&Change::Socket {
                    inode,
                    cookie,
                    listens,
                    before,
                    now,
                })?;
                now.set_socket(&socket)?;
                self.listeners.extend(listens.map(|port| (port, before)));
            }
        }
        let gone = false;
        let socket = Socket {
            cookie,
            listens,
            polls,
            gone,
        };
        self.sockets.insert(inode, socket);
        Ok(false)
    }

    /// Sets an epoll instance that waits for a socket that polls.
    fn look_at_epoll(&mut self, chosen: &mut Chosen, fd: RawFd) -> Result<()> {
        if self.no_epoll {
            return Ok(());
        }
        let Some(epoll) = unless_closed(chosen.target.borrow(fd))? else {
            return Ok(());
        };
        let now = chosen.set;
        let before = match Polling::of_epoll(&epoll) {
            Ok(before) => before,
            Err(e) if [Some(libc::ENOTTY), Some(libc::EINVAL)].contains(&e.raw_os_error()) => {
                self.no_epoll = true;
                warn!(
                    "before Linux 6.9 epoll_wait() polls only for the whole host: --host-wide asks for that"
                );
                return Ok(());
            }
            Err(e) => return Err(e.into()),
        };
        if before == now {
            return Ok(());
        }
        let polls = |inode| self.sockets.get(&inode).is_some_and(|socket| socket.polls);
        let waits_for = chosen.target.waits_for(fd).unwrap_or_default();
        if waits_for.into_iter().any(polls) {
            self.guardian.tell(&chosen.epoll(fd, before))?;
            now.set_epoll(&epoll)?;
            chosen.epolls.insert(fd);
            debug!("epoll instance {fd} of process {} polls", chosen.target.pid);
        }
        Ok(())
    }

    /// Forgets sockets that are closed. `inodes` are those of all processes with a rule; others may
    /// have been given some.
    fn forget(&mut self, inodes: &HashSet<u64>) -> Result<()> {
        for (inode, socket) in &mut self.sockets {
            socket.gone = !inodes.contains(inode);
        }
        if self.sockets.values().filter(|socket| socket.gone).count() <= GONE_MAX {
            return Ok(());
        }
        let anywhere = process::sockets()?;
        let closed = self
            .sockets
            .extract_if(|inode, socket| socket.gone && !anywhere.contains(inode));
        for (_, Socket { cookie, .. }) in closed {
            self.guardian.tell(&Change::Gone { cookie })?;
        }
        Ok(())
    }
}

impl Chosen {
    /// An epoll instance of its is set.
    fn epoll(&self, fd: RawFd, before: Polling) -> Change {
        Change::Epoll {
            pid: self.target.pid,
            start: self.target.start,
            fd,
            before,
            now: self.set,
        }
    }

    fn words(&self, rule: &Rule) -> String {
        let Target { pid, comm, .. } = &self.target;
        format!(
            "process {pid} ({comm}): its sockets poll for up to {} us",
            rule.usecs
        )
    }
}

/// `None` if it has been closed meanwhile.
fn unless_closed<T>(borrowed: io::Result<T>) -> io::Result<Option<T>> {
    match borrowed {
        Ok(borrowed) => Ok(Some(borrowed)),
        Err(e) if e.raw_os_error() == Some(libc::EBADF) => Ok(None),
        Err(e) => Err(e),
    }
}
