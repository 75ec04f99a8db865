// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steering that is pinned in a folder of a BPF file system (docs/order.md, "Take-over").
//!
//! The folder has one generation, and two while one replaces the other. A generation is a folder:
//! `record`, `maps/`, `tables/`, `programs/` (those that return flows to INLINE), and links:
//! `trace/`, `sockets/`, `scheduler/` and `xdp/`, by interface index. The links of XDP programs are
//! pinned last and removed first, then the record: without both, a generation steers nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail, ensure};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};

use super::backlogged::{Backlogged, grace_period};
use super::call::call;
use super::record::Record;
use crate::host::bpffs::{self, Folder};
use crate::host::xdp;
use crate::types::{backlog_flushed, queue_return};

/// The links of XDP programs.
pub(super) const XDP: &str = "xdp";
/// Maps that live as long as the generation.
pub(super) const MAPS: &str = "maps";
/// Maps that a change of their sizes replaces.
pub(super) const TABLES: &str = "tables";
/// Programs that return flows to INLINE.
pub(super) const PROGRAMS: &str = "programs";
/// The links of tracepoints that count.
pub(super) const TRACE: &str = "trace";
/// The links of programs that watch sockets.
pub(super) const SOCKETS: &str = "sockets";
/// The link of the program that watches the scheduler, if there is one.
pub(super) const SCHEDULER: &str = "scheduler";

/// The programs on tracepoints that are attached as long as the data path exists.
pub(super) const COUNTING: [&str; 5] = [
    "on_cpumap_kthread",
    "on_cpumap_enqueue",
    "on_redirect_err",
    "on_napi_poll",
    "on_udp_full",
];

pub(super) const RECORD: &str = "record";
const NEW_RECORD: &str = "record-new";

/// The folders of a generation.
const KINDS: [&str; 7] = [XDP, SOCKETS, SCHEDULER, TRACE, PROGRAMS, TABLES, MAPS];

/// What is pinned in a folder.
pub struct Pins {
    path: PathBuf,
    pub(super) generations: Vec<Generation>,
}

/// See the module's documentation.
pub(super) struct Generation {
    folder: Folder,
    record: Result<Record>,
    /// Those whose devices exist.
    pub(super) links: Vec<XdpPin>,
}

/// A pinned link of an XDP program.
pub(super) struct XdpPin {
    pub(super) ifindex: u32,
    /// Id of the program.
    pub(super) program: u32,
    pub(super) link: OwnedFd,
    name: String,
    since: SystemTime,
}

impl Pins {
    /// Reads a folder, which may not exist.
    ///
    /// # Errors
    /// When others can change the folder, or it has what rxsteer does not pin.
    pub fn open(path: &Path) -> Result<Self> {
        let mut generations = Vec::new();
        if let Some(folder) = Folder::find(path)? {
            for name in folder.names()? {
                // What others have made must never be removed with it.
                let generation = folder.folder(&name).transpose();
                let generation = generation.filter(|_| is_generation(&name));
                let generation = generation.ok_or_else(|| bpffs::foreign(&path.join(&name)))?;
                generations.push(Generation::open(generation?)?);
            }
        }
        Ok(Self {
            path: path.to_owned(),
            generations,
        })
    }

    /// The folder's path.
    pub fn folder(&self) -> &Path {
        &self.path
    }

    /// Whether nothing is pinned here, not even leftovers.
    pub fn is_empty(&self) -> bool {
        self.generations.is_empty()
    }

    /// Ids of the XDP programs that are attached.
    pub fn programs(&self) -> BTreeSet<u32> {
        let links = self.generations.iter().flat_map(|g| &g.links);
        links.map(|link| link.program).collect()
    }

    /// Interface indices of the devices that are steered.
    pub fn devices(&self) -> BTreeSet<u32> {
        let links = self.generations.iter().flat_map(|g| &g.links);
        links.map(|link| link.ifindex).collect()
    }

    /// The version that pinned what steers, if its record can be read.
    pub fn version(&self) -> Option<&str> {
        let records = self.steering().filter_map(|g| g.record.as_ref().ok());
        records.map(Record::version).next()
    }

    /// When the program of each device was pinned, by interface index.
    pub fn since(&self) -> BTreeMap<u32, SystemTime> {
        let links = self.generations.iter().flat_map(|g| &g.links);
        links.map(|link| (link.ifindex, link.since)).collect()
    }

    /// Fails unless the pins can be taken over: complete, of a known format, of this network
    /// namespace. Pins that steer nothing always can.
    ///
    /// # Errors
    /// With the reason.
    pub fn are_sound(&self) -> Result<()> {
        for generation in self.steering() {
            generation.record()?.is_of_this_netns()?;
            Pinned::open(generation)?;
        }
        Ok(())
    }

    /// Returns every flow to INLINE. Whether all have returned within `patience`.
    ///
    /// # Errors
    /// When pins are missing or unknown.
    pub fn return_inline(&self, patience: Duration) -> Result<bool> {
        let mut returned = true;
        for generation in self.steering() {
            returned &= Pinned::open(generation)?.return_inline(patience)?;
        }
        Ok(returned)
    }

    /// The generations that steer. One whose pins are complete may do so by a link that is still
    /// pinned in another: a take-over was interrupted between the two.
    pub(super) fn steering(&self) -> impl Iterator<Item = &Generation> {
        let any = self.generations.iter().any(|g| !g.links.is_empty());
        let steers = move |g: &&Generation| any && (g.record.is_ok() || !g.links.is_empty());
        self.generations.iter().filter(steers)
    }

    /// Detaches and unpins everything.
    ///
    /// # Errors
    /// When a file can't be removed.
    pub fn remove(self) -> Result<()> {
        for generation in &self.generations {
            generation.remove()?;
        }
        remove_empty(&self.path)
    }
}

impl Generation {
    /// A new one, without pins.
    ///
    /// # Errors
    /// When its folders can't be made.
    pub(super) fn create(folder: &Path) -> Result<Self> {
        let name = format!("{:016x}", super::config::draw()?);
        let folder = Folder::make(folder)?.make_folder(name)?;
        for kind in KINDS {
            folder.make_folder(kind)?;
        }
        Ok(Self {
            folder,
            record: Err(anyhow!("there is no record")),
            links: Vec::new(),
        })
    }

    /// One that is there, if all in it is what rxsteer pins.
    fn open(folder: Folder) -> Result<Self> {
        for name in folder.names()? {
            let at = match &*name {
                RECORD | NEW_RECORD => folder.object(&name).map(|_| None)?,
                kind if KINDS.contains(&kind) => folder.folder(kind)?,
                _ => return Err(bpffs::foreign(&folder.path().join(name))),
            };
            if let Some(kind) = at {
                for name in kind.names()? {
                    kind.object(&name)?;
                }
            }
        }
        Ok(Self {
            record: Record::open(&folder, RECORD),
            links: links(&folder)?,
            folder,
        })
    }

    /// The record.
    ///
    /// # Errors
    /// When there is none that can be read.
    pub(super) fn record(&self) -> Result<&Record> {
        let why = |e: &anyhow::Error| anyhow!("{}: {e:#}", self.folder.path().display());
        self.record.as_ref().map_err(why)
    }

    /// Writes the record, or replaces it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn write(&mut self, record: Record) -> Result<()> {
        // Of a process that was killed here.
        self.folder.unpin(NEW_RECORD)?;
        self.folder.pin(NEW_RECORD, record.map()?.as_fd())?;
        self.folder.rename(NEW_RECORD, &self.folder, RECORD)?;
        self.record = Ok(record);
        Ok(())
    }

    /// Pins an object.
    ///
    /// # Errors
    /// As [`Folder::pin`].
    pub(super) fn pin(&self, kind: &str, name: &str, object: BorrowedFd<'_>) -> Result<()> {
        self.kind(kind)?.pin(name, object)
    }

    /// Pins these objects, and removes all others of their kind.
    ///
    /// # Errors
    /// As [`Folder::pin`].
    pub(super) fn repin<'a>(
        &self,
        kind: &str,
        objects: impl IntoIterator<Item = (&'a str, BorrowedFd<'a>)>,
    ) -> Result<()> {
        self.unpin(kind)?;
        for (name, object) in objects {
            self.pin(kind, name, object)?;
        }
        Ok(())
    }

    /// Removes all files of a kind.
    ///
    /// # Errors
    /// When a file can't be removed.
    pub(super) fn unpin(&self, kind: &str) -> Result<()> {
        let Some(kind) = self.folder.folder(kind)? else {
            return Ok(());
        };
        kind.names()?.iter().try_for_each(|name| kind.unpin(name))
    }

    /// Removes the link of a device, if it is pinned.
    ///
    /// # Errors
    /// When the file can't be removed.
    pub(super) fn unpin_device(&self, ifindex: u32) -> Result<()> {
        let links = self.folder.folder(XDP)?;
        links.map_or(Ok(()), |links| links.unpin(&ifindex.to_string()))
    }

    /// Removes a link that was found here.
    ///
    /// # Errors
    /// When the file can't be removed.
    pub(super) fn unpin_link(&self, link: &XdpPin) -> Result<()> {
        self.kind(XDP)?.unpin(&link.name)
    }

    /// Gives a link that was found here to a newer generation.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn give(&self, link: &XdpPin, newer: &Self) -> Result<()> {
        let name = link.ifindex.to_string();
        self.kind(XDP)?.rename(&link.name, &newer.kind(XDP)?, &name)
    }

    /// The folder of a kind.
    fn kind(&self, kind: &str) -> Result<Folder> {
        let folder = self.folder.folder(kind)?;
        folder.with_context(|| format!("{} has no {kind}", self.folder.path().display()))
    }

    /// A pinned program.
    ///
    /// # Errors
    /// When it is not pinned.
    fn program(&self, name: &str) -> Result<OwnedFd> {
        self.kind(PROGRAMS)?.open(name)
    }

    /// The pinned link of a tracepoint.
    ///
    /// # Errors
    /// When it is not pinned.
    pub(super) fn tracepoint(&self, name: &str) -> Result<Link> {
        let folder = self.kind(TRACE)?;
        Ok(Link::open(folder.way_to_object(name)?)?)
    }

    /// A pinned map.
    ///
    /// # Errors
    /// When it is not pinned.
    pub(super) fn map(&self, kind: &str, name: &str) -> Result<MapHandle> {
        let folder = self.kind(kind)?;
        let map = MapHandle::from_pinned_path(folder.way_to_object(name)?);
        map.with_context(|| format!("opening {}", folder.path().join(name).display()))
    }

    /// The cpumap of each queue.
    ///
    /// # Errors
    /// When one is missing.
    pub(super) fn cpumaps(&self) -> Result<Vec<MapHandle>> {
        let cpumaps = self.map(MAPS, "cpumaps")?;
        let cpumap = |queue: u32| {
            // The value that user space reads is the map's id.
            let id = cpumaps.lookup(&queue.to_ne_bytes(), MapFlags::ANY)?;
            let id = id.and_then(|id| id.try_into().ok());
            let id = id.with_context(|| format!("queue {queue} has no cpumap"))?;
            Ok(MapHandle::from_map_id(u32::from_ne_bytes(id))?)
        };
        (0..cpumaps.max_entries()).map(cpumap).collect()
    }

    /// Fails unless every device of the record has a link, whose program uses the pinned tables, and
    /// frames are counted.
    ///
    /// # Errors
    /// With the reason.
    pub(super) fn is_whole(&self) -> Result<()> {
        let record = self.record()?;
        let trace = self.kind(TRACE)?;
        for name in COUNTING {
            ensure!(trace.object(name)?.is_some(), "nothing counts its frames");
        }
        let table = self.map(TABLES, "dev_flow_tables")?.info()?.info.id;
        for device in &record.devices {
            let link = self.links.iter().find(|l| l.ifindex == device.ifindex);
            let link = link.context("a device has no program any more")?;
            ensure!(
                xdp::maps_of(link.program).contains(&table),
                "a change of its tables was not completed"
            );
        }
        ensure!(
            record.devices.len() == self.links.len(),
            "it steers devices that are not in its record"
        );
        Ok(())
    }

    /// Detaches and unpins everything. XDP programs that no process holds are detached at once.
    ///
    /// # Errors
    /// When a file can't be removed.
    pub(super) fn remove(&self) -> Result<()> {
        self.unpin(XDP)?;
        // Without a record, the rest are leftovers.
        for name in [RECORD, NEW_RECORD] {
            self.folder.unpin(name)?;
        }
        for kind in KINDS {
            self.unpin(kind)?;
            self.folder.remove_folder(kind)?;
        }
        remove_empty(self.folder.path())?;
        self.folder.path().parent().map_or(Ok(()), remove_empty)
    }
}

/// Whether a folder has the name of a generation.
pub(super) fn is_generation(name: &str) -> bool {
    name.len() == 16 && u64::from_str_radix(name, 16).is_ok()
}

/// The links of XDP programs in a generation's folder.
pub(super) fn links(generation: &Folder) -> Result<Vec<XdpPin>> {
    let mut links = Vec::new();
    let Some(folder) = generation.folder(XDP)? else {
        return Ok(links);
    };
    for name in folder.names()? {
        let path = folder.path().join(&name);
        let facts = folder.object(&name)?.context("it was just there")?;
        let link = folder.open(&name)?;
        let (ifindex, program) = xdp::facts(&link).map_err(|_| bpffs::foreign(&path))?;
        // The device is gone: the kernel has detached the program.
        if ifindex == 0 {
            continue;
        }
        let since = Duration::new(facts.st_mtime.try_into()?, facts.st_mtime_nsec.try_into()?);
        links.push(XdpPin {
            ifindex,
            program,
            link,
            name,
            since: SystemTime::UNIX_EPOCH + since,
        });
    }
    Ok(links)
}

/// Removes a folder and its parent of this program's, if they are empty.
pub(super) fn remove_empty(folder: &Path) -> Result<()> {
    let is_ours = |path: &&Path| path.file_name().is_some_and(|name| name == "rxsteer");
    let parent = folder.parent().filter(is_ours);
    for path in std::iter::once(folder).chain(parent) {
        // The root of a BPF file system stays, mounted as it is.
        let above = path.parent().map_or(Ok(None), Folder::find);
        if let (Ok(Some(above)), Some(name)) = (above, path.file_name()) {
            above.remove_folder(name)?;
        }
    }
    Ok(())
}

/// Pinned steering of any version, with the programs by which its flows return to INLINE.
struct Pinned {
    nr_queues: u32,
    nr_cpus: u32,
    queue_return: OwnedFd,
    backlog_tail: OwnedFd,
    backlog_drained: OwnedFd,
    backlog_settled: OwnedFd,
    cpumaps: MapHandle,
    cpumap: MapHandle,
}

/// The programs of [`Pinned`].
pub(super) const RETURNING: [&str; 4] = [
    "queue_return",
    "backlog_tail",
    "backlog_drained",
    "backlog_settled",
];

impl Pinned {
    fn open(generation: &Generation) -> Result<Self> {
        let record = generation.record()?;
        let open = |name: &str| generation.program(name);
        let [queue_return, backlog_tail, backlog_drained, backlog_settled] = RETURNING;
        let cpumap = generation.cpumaps()?.into_iter().next();
        Ok(Self {
            nr_queues: record.nr_queues,
            nr_cpus: record.nr_cpus,
            queue_return: open(queue_return)?,
            backlog_tail: open(backlog_tail)?,
            backlog_drained: open(backlog_drained)?,
            backlog_settled: open(backlog_settled)?,
            cpumaps: generation.map(MAPS, "cpumaps")?,
            cpumap: cpumap.context("there is no cpumap")?,
        })
    }

    /// The backlog's index and the frames that ever entered it, and whether some are queued or have
    /// vanished.
    fn look(&self, index: u32) -> Result<(backlog_flushed, bool)> {
        let mut flushed = backlog_flushed {
            index,
            ..Default::default()
        };
        let holds = call(self.backlog_tail.as_fd(), &mut flushed)? == 1;
        Ok((flushed, holds))
    }
}

impl Backlogged for Pinned {
    fn nr_queues(&self) -> u32 {
        self.nr_queues
    }

    fn nr_cpus(&self) -> u32 {
        self.nr_cpus
    }

    fn send(&self, queue: u32, location: u16) -> Result<()> {
        let mut wish = queue_return {
            queue,
            location: location.into(),
        };
        match call(self.queue_return.as_fd(), &mut wish)? {
            1 => Ok(()),
            _ => bail!("there is no queue {queue}"),
        }
    }

    fn entered(&self, queue: u32, cpu: u32) -> Result<u64> {
        Ok(self.look(queue * self.nr_cpus + cpu)?.0.tail)
    }

    fn drained(&self, queue: u32, cpu: u32) -> Result<bool> {
        let mut index = queue * self.nr_cpus + cpu;
        Ok(call(self.backlog_drained.as_fd(), &mut index)? == 1)
    }

    fn find_vanished(&self) -> Result<()> {
        let mut flushed = Vec::new();
        for index in 0..self.nr_queues * self.nr_cpus {
            let (backlog, holds) = self.look(index)?;
            flushed.extend(holds.then_some(backlog));
        }
        self.grace_period()?;
        for mut backlog in flushed {
            call(self.backlog_settled.as_fd(), &mut backlog)?;
        }
        Ok(())
    }

    fn grace_period(&self) -> Result<()> {
        grace_period(&self.cpumaps, self.cpumap.as_fd())
    }
}
