// SPDX-License-Identifier: MIT OR Apache-2.0
//! Anonymous network namespaces: held by a file descriptor and by nothing else.

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
use nix::unistd::{Pid, chdir};

use super::rtnl;

/// A network namespace, with a mount namespace whose `/sys` shows this network.
///
/// It has no name in the file system, so when the last clone, thread and child is gone, killed or
/// not, the kernel removes it with all devices in it. `lo` is up; kernel defaults that would send
/// or refuse packets unasked (router solicitations, duplicate address detection, link-local
/// addresses, reverse-path filter) are off, so that counters can be exact.
#[derive(Clone)]
pub struct Netns(Arc<Handles>);

struct Handles {
    name: String,
    net: OwnedFd,
    mnt: OwnedFd,
}

impl Handles {
    /// Moves the calling thread in. Only system calls: it also runs between fork and exec.
    fn enter(&self, cwd: &CString) -> io::Result<()> {
        // setns() into a mount namespace needs a thread that shares its root and cwd with no other.
        unshare(CloneFlags::CLONE_FS)?;
        setns(&self.mnt, CloneFlags::CLONE_NEWNS)?;
        setns(&self.net, CloneFlags::CLONE_NEWNET)?;
        chdir(cwd.as_c_str())?;
        Ok(())
    }
}

impl Netns {
    /// Makes a namespace. `name` is for people only: it names threads and stands in errors.
    ///
    /// # Errors
    /// The process lacks CAP_SYS_ADMIN, or a container's policy forbids namespaces or mounts.
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

    /// That of the calling thread, with its mount namespace.
    ///
    /// # Errors
    /// When /proc does not show them.
    pub fn current() -> Result<Self> {
        let (net, mnt) = own().context("cannot open the namespace that this runs in")?;
        let name = "of the host".to_owned();
        Ok(Self(Arc::new(Handles { name, net, mnt })))
    }

    /// The name it was made with.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The namespace's descriptor, as rtnetlink's IFLA_NET_NS_FD wants it.
    pub fn fd(&self) -> &OwnedFd {
        &self.0.net
    }

    /// The inode that `/proc/PID/ns/net` shows for its members.
    pub fn inode(&self) -> Result<u64> {
        Ok(nix::sys::stat::fstat(&self.0.net)?.st_ino)
    }

    /// Runs `f` on a thread inside the namespace and waits for it. A panic goes on in the caller.
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

    /// Starts a thread inside the namespace, bound to `cpu` if there is one. It keeps the namespace
    /// alive until it ends. Returns once the thread is inside and bound.
    pub fn spawn<T: Send + 'static>(
        &self,
        cpu: Option<u32>,
        name: &str,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<Option<T>>> {
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
                // The receiver waits below, so this reaches it.
                let _ = ready.send(prepared);
                go.then(f)
            })?;
        entered
            .recv()
            .map_err(|_| anyhow!("thread {name} died before it began"))?
            .with_context(|| format!("cannot start {name} in namespace {}", self.0.name))?;
        Ok(thread)
    }

    /// A command whose process will live in the namespace, and is killed when the *thread* that
    /// spawns it ends, so that it can't outlive the lab.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let (cwd, handles) = (cwd()?, self.0.clone());
        let parent = std::process::id();
        let mut command = Command::new(program);
        // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
                // The parent may have died before the line above.
                if libc::getppid() as u32 != parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                handles.enter(&cwd)
            });
        }
        Ok(command)
    }
}

/// Binds a thread (0: the caller) to one CPU.
pub(crate) fn bind(thread: Pid, cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize)
        .and_then(|()| sched_setaffinity(thread, &set))
        .with_context(|| format!("cannot bind a thread to CPU {cpu}: is it online and allowed?"))
}

fn cwd() -> Result<CString> {
    let path = std::env::current_dir().context("the current folder is gone")?;
    Ok(CString::new(path.into_os_string().into_encoded_bytes())?)
}

/// Turns the calling thread into the first member of a new namespace, and prepares that.
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

/// The calling thread's.
fn own() -> io::Result<(OwnedFd, OwnedFd)> {
    let open = |kind| File::open(format!("/proc/thread-self/ns/{kind}")).map(OwnedFd::from);
    Ok((open("net")?, open("mnt")?))
}

/// A sysfs shows the network namespace of whoever mounted it; the cgroup and BPF file systems
/// under the old one stay in reach.
fn remount_sysfs() -> Result<()> {
    let none = None::<&str>;
    // Slave, not private: nothing leaks out, and what the host mounts later is still seen.
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

/// Nothing is sent that nobody asked for, and nothing is refused for where it comes from.
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
