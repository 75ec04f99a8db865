// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer set`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::pinned;
use crate::api::client;
use crate::api::set::Change;
use crate::daemon::options::{RpsCpus, TABLE_MAX, device_name};
use crate::datapath::policy::Policy;
use crate::host::cpumask::CpuMaskError;
use crate::host::number::whole;

/// Options of `rxsteer set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// The device of the CPUs; needed if several are steered
    #[arg(value_parser = device_name)]
    pub device: Option<String>,

    /// Set only this receive queue's CPUs
    #[arg(long, value_name = "QUEUE", requires = "rps_cpus",
          value_parser = whole(0, u32::MAX, "a receive queue"))]
    pub queue: Option<u32>,

    /// At least one change.
    #[command(flatten)]
    pub changes: Changes,
}

/// Settings that can be changed.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct Changes {
    /// CPUs that may process packets: as in `run`
    #[arg(long, value_name = "CPUS", value_parser = rps_cpus)]
    pub rps_cpus: Option<String>,

    /// How packets find their CPU, for all devices: as in `run`
    #[arg(long)]
    pub policy: Option<Policy>,

    /// As in `run`. All flows start anew
    #[arg(long, value_name = "ENTRIES", value_parser = whole(0, TABLE_MAX, "entries"))]
    pub rps_sock_flow_entries: Option<u32>,

    /// As in `run`. All flows start anew
    #[arg(long, value_name = "SLOTS", value_parser = whole(0, TABLE_MAX, "slots"))]
    pub rps_flow_cnt: Option<u32>,
}

impl SetArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        let so = "only a running rxsteer can change it, and nothing has changed";
        for line in pinned::or_say(client::set(self.into()), so)? {
            println!("{line}");
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl From<SetArgs> for Change {
    fn from(args: SetArgs) -> Self {
        Self {
            device: args.device,
            queue: args.queue,
            rps_cpus: args.changes.rps_cpus,
            policy: args.changes.policy,
            rps_sock_flow_entries: args.changes.rps_sock_flow_entries,
            rps_flow_cnt: args.changes.rps_flow_cnt,
        }
    }
}

/// Checks the syntax only: the running rxsteer, which knows the interrupt's CPU, interprets the
/// text.
fn rps_cpus(text: &str) -> Result<String, CpuMaskError> {
    text.parse::<RpsCpus>().map(|_| text.to_owned())
}
