// SPDX-License-Identifier: MIT OR Apache-2.0
//! Anonymous network namespaces, held by file descriptors only.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow};
use nix::fcntl::{OFlag, open};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, setns, unshare};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, chdir, gettid};
use rxsteer::host::cpumask::CpuMask;

use super::rtnl;

/// A network namespace, with a mount namespace in which `/sys` shows this network.
///
/// It has no name in the file system: the kernel removes it with all its devices when the last
/// clone, thread and child process is gone, killed or not. `lo` is up. Kernel defaults that send or
/// refuse packets on their own (router solicitations, duplicate address detection, link-local
/// addresses, reverse-path filter) are off, so that counters are exact.
#[derive(Clone)]
pub struct Netns(Arc<Handles>);

struct Handles {
    name: String,
    net: OwnedFd,
    mnt: OwnedFd,
}

impl Handles {
    /// Moves the calling thread in. Async-signal-safe, since it also runs between fork and exec.
    fn enter(&self, cwd: &CString) -> io::Result<()> {
        // setns() into a mount namespace requires an unshared root and working directory.
        unshare(CloneFlags::CLONE_FS)?;
        setns(&self.mnt, CloneFlags::CLONE_NEWNS)?;
        setns(&self.net, CloneFlags::CLONE_NEWNET)?;
        chdir(cwd.as_c_str())?;
        Ok(())
    }
}

impl Netns {
    /// Creates a namespace. `name` appears in thread names and errors only.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, or if a container's policy forbids namespaces or mounts.
    pub fn new(name: &str) -> Result<Self> {
        let (net, mnt) = thread::scope(|scope| {
            scope
                .spawn(create)
                .join()
                .map_err(|_| anyhow!("the thread that makes a network namespace panicked"))?
        })
        .with_context(|| format!("no network namespace for {name}"))?;
        Ok(Self(Arc::new(Handles {
            name: name.to_string(),
            net,
            mnt,
        })))
    }

    /// The network and mount namespaces of the calling thread.
    ///
    /// # Errors
    /// When /proc does not show them.
    pub fn current() -> Result<Self> {
        let (net, mnt) = own().context("cannot open the namespace that this runs in")?;
        let name = "of the host".to_owned();
        Ok(Self(Arc::new(Handles { name, net, mnt })))
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Descriptor of the network namespace, for rtnetlink's IFLA_NET_NS_FD.
    pub fn fd(&self) -> &OwnedFd {
        &self.0.net
    }

    /// Inode of the network namespace, as in `/proc/PID/ns/net`.
    pub fn inode(&self) -> Result<u64> {
        Ok(nix::sys::stat::fstat(&self.0.net)?.st_ino)
    }

    /// Makes the namespace a router of IPv4.
    ///
    /// # Errors
    /// It does not forward.
    pub fn forward(&self) -> Result<()> {
        self.run(|| {
            fs::write("/proc/sys/net/ipv4/ip_forward", "1")
                .context("a namespace that does not forward")
        })
    }

    /// Gives connections that it makes nearly all ports, and those of closed connections again after a second.
    ///
    /// # Errors
    /// The kernel has no such settings.
    pub fn many_ports(&self) -> Result<()> {
        self.run(|| {
            let path = "/proc/sys/net/ipv4";
            fs::write(format!("{path}/ip_local_port_range"), "1024 65000")?;
            fs::write(format!("{path}/tcp_tw_reuse"), "1").context("ports of closed connections")
        })
    }

    /// Runs `f` on a thread inside the namespace and waits for it. A panic propagates to the
    /// caller.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let cwd = cwd()?;
        thread::scope(|scope| {
            let inside = || {
                self.0
                    .enter(&cwd)
                    .with_context(|| format!("cannot enter namespace {}", self.0.name))?;
                f()
            };
            match scope.spawn(inside).join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Starts a thread inside the namespace, bound to `cpu` if given; returns once it is inside and
    /// bound. A running thread keeps the namespace alive.
    pub fn spawn<T: Send + 'static>(
        &self,
        cpu: Option<u32>,
        name: &str,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Thread<T>> {
        let (cwd, handles) = (cwd()?, self.0.clone());
        let (ready, entered) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(name.to_string())
            .spawn(move || {
                let prepared = handles
                    .enter(&cwd)
                    .map_err(Into::into)
                    .and_then(|()| cpu.map_or(Ok(()), |cpu| bind(Pid::from_raw(0), cpu)));
                let go = prepared.is_ok();
                // The receiver waits below, so the message arrives.
                let _ = ready.send(prepared.map(|()| gettid()));
                go.then(f)
            })?;
        let tid = entered
            .recv()
            .map_err(|_| anyhow!("thread {name} died before it began"))?
            .with_context(|| format!("cannot start {name} in namespace {}", self.0.name))?;
        Ok(Thread { tid, thread })
    }

    /// A command that runs in the namespace. It is killed when the *thread* that spawns it ends, so
    /// that it can't outlive the lab.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let (cwd, handles) = (cwd()?, self.0.clone());
        let parent = std::process::id();
        let mut command = Command::new(program);
        // SAFETY: the closure makes system calls only and allocates nothing between fork and exec.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
                // The parent may have died before prctl(). From another PID namespace it is 0.
                if ![0, parent].contains(&(libc::getppid() as u32)) {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                handles.enter(&cwd)
            });
        }
        Ok(command)
    }
}

/// A thread that has entered its namespace.
#[derive(Debug)]
pub struct Thread<T> {
    /// Its number, as the kernel has it.
    pub tid: Pid,
    thread: JoinHandle<Option<T>>,
}

impl<T> Thread<T> {
    /// Waits for its result. Panics if it has.
    pub fn join(self) -> T {
        match self.thread.join() {
            Ok(result) => result.expect("spawn() has seen it start"),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Moves it to another CPU.
    ///
    /// # Errors
    /// The CPU is offline, or the thread has ended.
    pub fn move_to(&self, cpu: u32) -> Result<()> {
        bind(self.tid, cpu)
    }
}

/// Binds a thread (0: the caller) to one CPU.
pub fn bind(thread: Pid, cpu: u32) -> Result<()> {
    confine(thread, &CpuMask::from_iter([cpu]))
}

/// Confines a thread (0: the caller), and those that it starts, to some CPUs.
pub(crate) fn confine(thread: Pid, cpus: &CpuMask) -> Result<()> {
    let set = || {
        let mut set = CpuSet::new();
        cpus.iter().try_for_each(|cpu| set.set(cpu as usize))?;
        sched_setaffinity(thread, &set)
    };
    set().with_context(|| format!("cannot run on CPUs {cpus}: are they online and allowed?"))
}

fn cwd() -> Result<CString> {
    let path = std::env::current_dir().context("the current folder is gone")?;
    Ok(CString::new(path.into_os_string().into_encoded_bytes())?)
}

/// Moves the calling thread into a new namespace and configures it.
fn create() -> Result<(OwnedFd, OwnedFd)> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
        .context("unshare() refused: run as root; in a container, with CAP_SYS_ADMIN")?;
    remount_sysfs().context("cannot mount a sysfs for a new network namespace")?;
    quiet().context("cannot set sysctls of a new network namespace")?;
    rtnl::run(async |handle| {
        use rtnetlink::LinkUnspec;
        let up = LinkUnspec::new_with_name("lo").up();
        handle.link().set(up.build()).execute().await
    })?
    .context("cannot bring lo up")?;
    Ok(own()?)
}

/// Namespaces of the calling thread.
fn own() -> io::Result<(OwnedFd, OwnedFd)> {
    let open = |kind| File::open(format!("/proc/thread-self/ns/{kind}")).map(OwnedFd::from);
    Ok((open("net")?, open("mnt")?))
}

/// Mounts a sysfs of the current network namespace; keeps the cgroup and BPF file systems below it
/// reachable.
fn remount_sysfs() -> Result<()> {
    let none = None::<&str>;
    // Slave, not private: no mount propagates out, and later mounts of the host are still seen.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
    let mut kept = Vec::new();
    for path in ["/sys/fs/cgroup", "/sys/fs/bpf"] {
        if Path::new(path).exists() {
            kept.push((path, open(path, OFlag::O_PATH, Mode::empty())?));
        }
    }
    mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none)?;
    for (path, old) in kept {
        let old = format!("/proc/thread-self/fd/{}", old.as_raw_fd());
        let bind = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(old.as_str()), path, none, bind, none)?;
    }
    Ok(())
}

/// Disables packets that the kernel sends on its own, and the source address check.
fn quiet() -> Result<()> {
    let mut sysctls = vec![("ipv4/conf/all/rp_filter", "0")];
    sysctls.push(("ipv4/conf/default/rp_filter", "0"));
    if Path::new("/proc/sys/net/ipv6").exists() {
        sysctls.extend([
            ("ipv6/conf/default/disable_ipv6", "1"),
            ("ipv6/conf/default/addr_gen_mode", "1"),
            ("ipv6/conf/default/accept_dad", "0"),
            ("ipv6/conf/default/accept_ra", "0"),
            ("ipv6/conf/default/router_solicitations", "0"),
        ]);
    }
    for (name, value) in sysctls {
        let path = format!("/proc/sys/net/{name}");
        fs::write(&path, value).with_context(|| format!("cannot write {path}"))?;
    }
    Ok(())
}
