// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the sockets that rules select, and enables or pauses polling.

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

/// The search for new processes and sockets takes at most 1/REST of the time: its interval is REST
/// times its duration, from TICK to TICKS_MAX.
const TICK: Duration = Duration::from_millis(100);
const TICKS_MAX: Duration = Duration::from_secs(2);
const REST: u32 = 20;

/// Limit of remembered sockets that no process with a rule has open; another process may.
const GONE_MAX: usize = 1024;

/// An adaptive rule judges a process at least this long, and after at least this number of waits.
const TRIAL: Duration = Duration::from_secs(1);
const WAITS: u64 = 20;

/// Pauses of a process that finds too little double up to this.
const PAUSE_MAX: Duration = Duration::from_secs(64);

/// Sets sockets, including new ones. All are restored when this is dropped or its process ends.
pub struct Poller {
    rules: Vec<Rule>,
    guardian: Guardian,
    /// Counters of polls, or why polls can't be counted.
    stats: Result<Stats>,
    processes: HashMap<u32, Chosen>,
    /// Inspected sockets, by inode.
    sockets: HashMap<u64, Socket>,
    /// By port: the settings that accepted connections would have without this process.
    listeners: HashMap<u16, Polling>,
    /// Processes that may not be traced and were logged.
    refused: HashSet<u32>,
    /// Processes that only their user excludes, logged.
    others: HashSet<u32>,
    /// The kernel has no busy-poll parameters of epoll instances; logged.
    no_epoll: bool,
}

/// A process with polling sockets.
struct Chosen {
    target: Target,
    rule: usize,
    /// Present settings of its sockets.
    set: Polling,
    /// Epoll instances that were set.
    epolls: HashSet<RawFd>,
    /// Number of its polling sockets at the last search.
    nr_sockets: usize,
    /// Time when the process was chosen, and the counters then.
    since: (Instant, Counts),
    /// Its threads wait, but none has polled yet; logged.
    in_vain: bool,
    /// It has been logged. Rules without a process id also choose processes without such sockets.
    announced: bool,
    /// One of its threads has polled.
    polled: bool,
    trial: Trial,
}

/// Evaluation of an adaptive rule.
struct Trial {
    /// Start of the trial or pause.
    start: Instant,
    /// Counters at that time.
    counts: Counts,
    /// Length of the present pause; `None` during a trial.
    pause: Option<Duration>,
    /// Length of the last pause.
    last_pause: Duration,
}

/// An inspected socket.
struct Socket {
    cookie: u64,
    /// Local port of a listening socket.
    listens: Option<u16>,
    /// A rule selects it.
    polls: bool,
    /// At the last search no process with a rule had it open.
    gone: bool,
}

impl Poller {
    /// Starts the guardian; sets no sockets yet.
    ///
    /// # Errors
    /// When a rule is invalid, or a process that it names doesn't exist.
    pub fn new(rules: &[Rule]) -> Result<Self> {
        for rule in rules {
            if let Some(objection) = rule.objection() {
                bail!("{objection}");
            }
            if let Some(pid) = rule.pid {
                Target::open(pid).map_err(|_| anyhow!("there is no process {pid}"))?;
            }
        }
        Ok(Self {
            rules: rules.to_vec(),
            guardian: Guardian::start(undo::COMMAND, None)?,
            stats: Stats::attach(),
            processes: HashMap::new(),
            sockets: HashMap::new(),
            listeners: HashMap::new(),
            refused: HashSet::new(),
            others: HashSet::new(),
            no_epoll: false,
        })
    }

    /// The rules by which it searches.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Searches once and sets new sockets. Returns the time to wait before the next search.
    ///
    /// # Errors
    /// When the kernel has no busy polling, or a process named by a rule may not be traced.
    pub fn tick(&mut self) -> Result<Duration> {
        let start = Instant::now();
        let mut before = std::mem::take(&mut self.processes);
        let mut inodes = HashSet::new();
        let all = process::all().context("cannot read /proc")?;
        // A process id is reused after its process has ended.
        self.refused.retain(|pid| all.contains(pid));
        self.others.retain(|pid| all.contains(pid));
        for pid in all {
            if self.refused.contains(&pid) {
                continue;
            }
            let Some(rule) = self.rule_of(pid, before.contains_key(&pid)) else {
                continue;
            };
            let known = before.remove(&pid);
            let Ok(mut chosen) = known.map_or_else(|| self.choose(pid, rule), Ok) else {
                continue;
            };
            let judged = self.judge(&mut chosen);
            match judged.and_then(|()| self.look_at(&mut chosen, &mut inodes)) {
                Ok(()) => {
                    let named = self.rules[rule].pid.is_some();
                    if !chosen.announced && (named || chosen.nr_sockets > 0) {
                        info!("{}", chosen.words(&self.rules[rule]));
                        chosen.announced = true;
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
            if ended.announced {
                info!(
                    "process {} ({}) has ended",
                    ended.target.pid, ended.target.comm
                );
            }
        }
        self.forget(&inodes)?;
        Ok((start.elapsed() * REST).clamp(TICK, TICKS_MAX))
    }

    /// Whether all rules name processes that have ended.
    pub fn has_ended(&self) -> bool {
        self.processes.is_empty() && self.rules.iter().all(|rule| rule.pid.is_some())
    }

    /// The first rule that selects this process. A process that is `known` may have changed its user,
    /// as daemons do that give up root's rights. Logs a process that only its user excludes.
    fn rule_of(&mut self, pid: u32, known: bool) -> Option<usize> {
        let mut other = None;
        for (i, rule) in self.rules.iter().enumerate() {
            if !process::means(rule, pid) {
                continue;
            }
            let Some(wanted) = rule.uid().filter(|_| !known) else {
                return Some(i);
            };
            let uid = process::uid(pid)?;
            if uid == wanted {
                return Some(i);
            }
            other = Some((rule, uid));
        }
        let (rule, uid) = other?;
        // A port alone means all processes of this network namespace.
        let named = rule.comm.is_some() || rule.exe.is_some();
        if named && rule.user.is_none() && self.others.insert(pid) {
            warn!(
                "process {pid} belongs to user {uid}; without a user, {rule} selects root's \
                 processes: --user {uid}"
            );
        }
        None
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
            announced: false,
            polled: false,
            trial: Trial {
                start: now,
                counts,
                pause: None,
                last_pause: Duration::ZERO,
            },
        })
    }

    /// Starts a pause for a process if most of its waits found nothing, or ends the pause.
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
                // A wait ends either with a packet or with a sleep.
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

    /// Logs a process with polling enabled that does not poll.
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

    /// Changes all sockets and epoll instances of a process that have been set before.
    fn set_all(&mut self, chosen: &mut Chosen, now: Polling) -> Result<()> {
        let before = chosen.set;
        if before == now {
            return Ok(());
        }
        chosen.set = now;
        for open in chosen.target.opened()? {
            match open {
                Open::Socket { inode, .. } => {
                    let known = self.sockets.get(&inode).filter(|socket| socket.polls);
                    let (Some(known), Some(socket)) = (known, chosen.target.borrow(open)?) else {
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
                    let Some(epoll) = chosen.target.borrow(open)? else {
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

    /// The busy-poll counters per process.
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

    /// Restores everything.
    ///
    /// # Errors
    /// When a socket could not be restored.
    pub fn stop(mut self) -> Result<()> {
        self.guardian.end()
    }

    /// Handles an error: ignored if the process has ended, logged once, or returned.
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
            // A process that is ending may refuse access.
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

    /// Sets a process's new sockets and epoll instances; adds its sockets to `inodes`.
    fn look_at(&mut self, chosen: &mut Chosen, inodes: &mut HashSet<u64>) -> Result<()> {
        let opened = chosen.target.opened()?;
        // Listeners are set last: connections found now were accepted before.
        let mut listeners = Vec::new();
        let (mut epolls, mut nr_sockets) = (Vec::new(), 0);
        for open in opened {
            match open {
                Open::Epoll(fd) => epolls.push(fd),
                Open::Socket { inode, .. } => {
                    inodes.insert(inode);
                    let known = self.sockets.get(&inode).filter(|socket| !socket.gone);
                    match known.map(|socket| socket.polls) {
                        Some(polls) => nr_sockets += usize::from(polls),
                        None if self.look_at_socket(chosen, open, inode, false)? => {
                            listeners.push((open, inode));
                        }
                        None => {}
                    }
                }
            }
        }
        for (open, inode) in listeners {
            self.look_at_socket(chosen, open, inode, true)?;
        }
        chosen.nr_sockets = nr_sockets;
        epolls
            .into_iter()
            .try_for_each(|fd| self.look_at_epoll(chosen, fd))
    }

    /// Sets an unknown socket if a rule selects it. Returns true, without setting it, for a
    /// listening socket unless `listeners`.
    fn look_at_socket(
        &mut self,
        chosen: &Chosen,
        open: Open,
        inode: u64,
        listeners: bool,
    ) -> Result<bool> {
        let rule = &self.rules[chosen.rule];
        let Some(socket) = chosen.target.borrow(open)? else {
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
            // The socket may be bound later.
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
            // Already as wanted: accepted on a listener that was set here, or set otherwise.
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

    /// Sets an epoll instance that waits for a polling socket.
    fn look_at_epoll(&mut self, chosen: &mut Chosen, fd: RawFd) -> Result<()> {
        if self.no_epoll {
            return Ok(());
        }
        let Some(epoll) = chosen.target.borrow(Open::Epoll(fd))? else {
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

    /// Forgets closed sockets: those neither in `inodes` nor open in a process without a rule.
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
    /// The change of one of its epoll instances.
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
