// SPDX-License-Identifier: MIT OR Apache-2.0
//! The options of `rxsteer run`.

use std::path::PathBuf;

use clap::Args;

use crate::daemon::options::Options;
use crate::datapath::hash::Hash;
use crate::datapath::policy::Policy;

/// Options of `rxsteer run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// What to steer, and how.
    #[command(flatten)]
    pub options: Options,

    /// How packets find their CPU [default: adaptive; with --hash device or symmetric: rps+adapt, unless --follow-nat]
    ///
    /// rfs: the CPU of the flow's application, or as rps if that CPU is unknown. rps: by hash, over
    /// the CPUs of --rps-cpus. off: every packet is parsed, counted, and processed where it is
    /// received. Additions to rfs and rps: +idle, an idle CPU near a busy application; +adapt,
    /// where the packet is received while that CPU has room, then a CPU that has room. adaptive
    /// is rfs+adapt.
    #[arg(long)]
    pub policy: Option<Policy>,

    /// TOML file with these options by name; the command line takes precedence
    ///
    /// For example policy = "rfs", rps-cpus = "0-3", devices = ["eth0"]. [[busy_poll]] tables have
    /// the options of `rxsteer poll`. Without this and without DEVICE, /etc/rxsteer/rxsteer.toml and
    /// the files in /etc/rxsteer/rxsteer.d are read.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl RunArgs {
    /// The options, with the chosen policy or the default one. The default depends on the hash:
    /// sockets don't know the hash that a device computes, unless they keep that of their packets.
    pub(super) fn options(self) -> Options {
        let policy = self.policy.unwrap_or(match self.options.hash {
            Hash::Device | Hash::Symmetric if !self.options.follow_nat => {
                Policy::default().without_following()
            }
            _ => Policy::default(),
        });
        Options {
            policy,
            ..self.options
        }
    }
}
