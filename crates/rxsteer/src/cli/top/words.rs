// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lines that the screen and the text have in common.

use super::figures::{count, figure};
use super::model::View;

/// Devices that are named.
const DEVICES: usize = 4;

/// Policy and devices.
pub fn subject(view: &View) -> String {
    let more = view.devices.len().saturating_sub(DEVICES);
    let named = &view.devices[..view.devices.len() - more];
    let more = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("policy {}  {}{more}", view.policy, named.join(", "))
}

/// Sums over all queues.
pub fn totals(view: &View) -> String {
    let r = &view.rates;
    let [exist, most] = view.nr_backlogs;
    // What matters most comes first: a narrow screen cuts the end off.
    format!(
        "received {}/s  inline {}  redirected {}  dropped {}  queued {}  lost {}  moves {}  \
         backlogs {exist}/{most}",
        figure(r.received),
        figure(r.inline),
        figure(r.redirected),
        figure(r.dropped),
        count(view.queued),
        figure(r.lost),
        figure(r.moves),
    )
}
