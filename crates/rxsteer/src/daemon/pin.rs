// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--pin`: steering goes on without this process, and a later start takes it over; `rxsteer detach`
//! ends it (docs/order.md, "Take-over").

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tracing::{info, warn};

use super::options::{Mode, Options, Pin};
use crate::api::control::Role;
use crate::api::server::Server;
use crate::api::status::{Pinned, PinnedDevice};
use crate::datapath::pin_folders::pin_folders;
use crate::datapath::pins::Pins;
use crate::datapath::{Config, Datapath, DeviceConfig};
use crate::host::bpffs::{self, Folder};
use crate::host::claim::Claim;
use crate::host::device::name_of;
use crate::host::netns;
use crate::host::shell::quoted;

/// The parent of the folders of network namespaces.
const FOLDER: &str = "/sys/fs/bpf/rxsteer";

/// The log's words for packets that may be overtaken.
const OVERTAKEN: &str = "some packets were still queued: what follows may overtake them";

/// The folder that this names, in the network namespace of the calling thread.
///
/// # Errors
/// When /proc does not show the namespace.
pub fn folder(pin: &Pin) -> Result<PathBuf> {
    Ok(match pin {
        Pin::Folder(folder) => folder.clone(),
        Pin::Default => PathBuf::from(FOLDER).join(format!("net-{}", netns::inode()?)),
    })
}

/// The command that takes over what is pinned in this folder.
fn taking_over(folder: &Path) -> String {
    let named = named(folder).map(|folder| format!("={folder}"));
    format!("`rxsteer run --pin{}`", named.unwrap_or_default())
}

/// The command that ends it, with these options.
fn ending(folder: &Path, options: &str) -> String {
    let named = named(folder).map(|folder| format!(" --pin={folder}"));
    format!("`rxsteer detach{options}{}`", named.unwrap_or_default())
}

/// What can be done about what is pinned in this folder.
pub fn ways(folder: &Path) -> String {
    let (taking_over, ending) = (taking_over(folder), ending(folder, ""));
    format!("{taking_over} takes it over, {ending} ends it")
}

/// The folder as a word of a shell, unless it is the default one.
fn named(path: &Path) -> Option<String> {
    let is_default = folder(&Pin::Default).is_ok_and(|default| default == path);
    (!is_default).then(|| quoted(path))
}

/// The options with a mode in which steering can be pinned. Without `--pin`: as they are.
///
/// # Errors
/// Without a BPF file system; when steering is pinned and these options don't take it over.
pub(super) fn checked(options: &Options) -> Result<Options> {
    let mut options = options.clone();
    let none_at = |folder: &Path| {
        bail!(
            "steering is pinned at {}: take it over with {}, or end it with {}",
            folder.display(),
            taking_over(folder),
            ending(folder, "")
        )
    };
    let own = options.pin.as_ref().map(folder).transpose()?;
    let own_id = own.as_deref().map(id).transpose()?.flatten();
    for folder in pin_folders() {
        if own_id.is_none() || id(&folder)? != own_id {
            none_at(&folder)?;
        }
    }
    let Some(pin) = &options.pin else {
        let default = folder(&Pin::Default)?;
        match Folder::find(&default).and_then(|f| f.map_or(Ok(Vec::new()), |f| f.names())) {
            Ok(names) if names.is_empty() => {}
            Ok(_) => none_at(&default)?,
            // Another user could have made the folder, to prevent every start.
            Err(e) => warn!("whether steering is pinned is not known: {e:#}"),
        }
        return Ok(options);
    };
    bpffs::ensure_is_in(&folder(pin)?)?;
    if options.mode == Mode::Auto {
        info!("with --pin, devices are steered in native mode");
        options.mode = Mode::Native;
    }
    Ok(options)
}

/// What an earlier start has pinned.
///
/// # Errors
/// When it can't be taken over.
pub(super) fn found(options: &Options) -> Result<Option<Pins>> {
    let Some(pin) = &options.pin else {
        return Ok(None);
    };
    let pins = Pins::open(&folder(pin)?)?;
    pins.are_sound().with_context(|| {
        let folder = pins.folder();
        format!(
            "what is pinned at {} can't be taken over: {} removes it",
            folder.display(),
            ending(folder, " --force")
        )
    })?;
    Ok(Some(pins))
}

/// Device and inode of a folder; `None` if it does not exist.
fn id(folder: &Path) -> Result<Option<(u64, u64)>> {
    let folder = Folder::find(folder)?;
    folder.map(|folder| folder.id()).transpose()
}

/// Steering from before this start that goes on until [`Before::end`].
pub(super) struct Before(Option<Pins>);

/// The data path: the pinned one if this start may go on with it, else a new one.
///
/// # Errors
/// When the kernel refuses it.
pub(super) fn load(
    config: &Config,
    devices: &[DeviceConfig],
    found: Option<Pins>,
) -> Result<(Datapath, Before)> {
    let Some(pins) = found.filter(|pins| !pins.devices().is_empty()) else {
        return Ok((Datapath::load(config, devices)?, Before(None)));
    };
    let folder = pins.folder().display().to_string();
    match pins.difference(config, devices)? {
        None => {
            let datapath = Datapath::adopt(config, devices, pins)?;
            info!(
                "the steering pinned at {folder} goes on: programs, tables and counters are the same"
            );
            Ok((datapath, Before(None)))
        }
        Some(why) => {
            info!(
                "the steering pinned at {folder} is replaced, since {why}: first every flow returns \
                 to its polling CPU"
            );
            Ok((Datapath::load(config, devices)?, Before(Some(pins))))
        }
    }
}

impl Before {
    /// Pins a new data path, and ends the steering from before.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn end(
        self,
        datapath: &mut Datapath,
        options: &Options,
        patience: Duration,
    ) -> Result<()> {
        let Some(pin) = options.pin.as_ref().filter(|_| !datapath.is_pinned()) else {
            return Ok(());
        };
        let folder = folder(pin)?;
        if self.0.is_none() {
            // Leftovers of a process that was killed while it unpinned them.
            Pins::open(&folder)?.remove()?;
        }
        datapath.pin(&folder)?;
        let Some(pins) = self.0 else {
            return Ok(());
        };
        let replaced = datapath.replace(pins, patience)?;
        if !replaced.returned {
            warn!("{OVERTAKEN}");
        }
        if !replaced.carried {
            info!("counters begin at 0: this version can't read those from before");
        }
        Ok(())
    }
}

/// Says that steering goes on.
pub(super) fn say_it_goes_on(options: &Options) -> Result<()> {
    if let Some(pin) = &options.pin {
        let folder = folder(pin)?;
        info!(
            "steering goes on, pinned at {}: {}",
            folder.display(),
            ways(&folder)
        );
    }
    Ok(())
}

/// The steering that is pinned there and in force; `None` if there is none.
///
/// # Errors
/// When the pins can't be read.
pub fn in_force(pin: &Pin) -> Result<Option<Pinned>> {
    let folder = folder(pin)?;
    let pins = Pins::open(&folder)?;
    let device = |(ifindex, since)| PinnedDevice {
        device: name_of(ifindex),
        ifindex,
        since: humantime::format_rfc3339_seconds(since).to_string(),
    };
    let devices: Vec<_> = pins.since().into_iter().map(device).collect();
    Ok((!devices.is_empty()).then(|| Pinned {
        folder: folder.display().to_string(),
        version: pins.version().map(str::to_owned),
        devices,
    }))
}

/// What `rxsteer detach` has done.
#[derive(Debug)]
pub struct Detached {
    /// The folder.
    pub folder: PathBuf,
    /// Number of devices that were steered; `None` if nothing was pinned.
    pub nr_devices: Option<usize>,
    /// Why later packets may overtake those that are queued, in words; `None` if they can't.
    pub disorder: Option<String>,
}

/// Returns every flow to INLINE, and detaches and unpins everything. With `force` also if flows can't
/// be returned.
///
/// # Errors
/// With the reason, while rxsteer runs here, or if flows did not return and there is no `force`: it
/// is pinned as before then.
pub fn detach(pin: &Pin, force: bool, patience: Duration) -> Result<Detached> {
    let folder = folder(pin)?;
    let detached = |nr_devices, disorder| Detached {
        folder: folder.clone(),
        nr_devices,
        disorder,
    };
    // The kernel may allow no claim where nothing can be pinned: in a container without privileges.
    if Folder::find(&folder)?.is_none() {
        return Ok(detached(None, None));
    }
    let no_other = "`rxsteer detach` ends what is pinned, once no rxsteer runs";
    let _server = Server::new(Role::Steer).context(no_other)?;
    let _claim = Claim::new().context(no_other)?;
    let pins = Pins::open(&folder)?;
    if pins.is_empty() {
        pins.remove()?;
        return Ok(detached(None, None));
    }
    let nr_devices = pins.devices().len();
    let returned = pins.are_sound().and_then(|()| {
        ensure!(
            pins.return_inline(patience)?,
            "some packets are still queued"
        );
        Ok(())
    });
    let disorder = match returned {
        Ok(()) => None,
        Err(e) if force => Some(format!("{e:#}")),
        Err(e) => bail!(
            "{} is left as it is, since flows can't be returned to their polling CPUs: {e:#}. Try \
             again; {} removes it all the same, and packets may then overtake those of their flow \
             that are still queued",
            folder.display(),
            ending(&folder, " --force")
        ),
    };
    pins.remove()?;
    Ok(detached(Some(nr_devices), disorder))
}
