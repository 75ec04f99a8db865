// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rxsteer set`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::value::table_size;
use crate::api::client;
use crate::api::set::Change;
use crate::daemon::options::RpsCpus;
use crate::datapath::policy::Policy;
use crate::host::cpumask::CpuMaskError;

/// Options of `rxsteer set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// The device whose CPUs are set; needed if several are steered
    pub device: Option<String>,

    /// The CPUs from now on: a list, a mask or auto
    #[arg(long, value_name = "CPUS", value_parser = rps_cpus,
          required_unless_present_any = ["policy", "rps_sock_flow_entries", "rps_flow_cnt"])]
    pub rps_cpus: Option<String>,

    /// Only this receive queue's CPUs
    #[arg(long, value_name = "QUEUE", requires = "rps_cpus")]
    pub queue: Option<u32>,

    /// How packets find their CPU from now on, on all devices: as in `run`
    #[arg(long)]
    pub policy: Option<Policy>,

    /// As in `run`. All flows start anew
    #[arg(long, value_name = "ENTRIES", value_parser = table_size())]
    pub rps_sock_flow_entries: Option<u32>,

    /// As in `run`. All flows start anew
    #[arg(long, value_name = "SLOTS", value_parser = table_size())]
    pub rps_flow_cnt: Option<u32>,
}

impl SetArgs {
    pub(super) fn run(self) -> Result<ExitCode> {
        for line in client::set(self.into())? {
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
            rps_cpus: args.rps_cpus,
            policy: args.policy,
            rps_sock_flow_entries: args.rps_sock_flow_entries,
            rps_flow_cnt: args.rps_flow_cnt,
        }
    }
}

/// Checked here, understood by the running rxsteer, which knows the interrupt's CPU.
fn rps_cpus(text: &str) -> Result<String, CpuMaskError> {
    text.parse::<RpsCpus>().map(|_| text.to_owned())
}
