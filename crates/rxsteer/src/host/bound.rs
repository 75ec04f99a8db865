// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reason against a program that is bound to its device.

use super::device::Device;
use super::kernel::{Version, loses_bound_programs};
use super::objection::Objection;

impl Device {
    /// Against a program that is bound to this device. A device without hardware, such as a veth, ends
    /// with whatever holds its other end, at any time.
    pub fn objection_to_bound(&self, kernel: Version) -> Option<Objection> {
        (!self.hardware && loses_bound_programs(kernel)).then(|| Objection {
            reason: format!(
                "in native mode `--hash device` binds the program to {}, a device without hardware, \
                 which can end at any time with a container: Linux 6.18 can stop then",
                self.name
            ),
            remedy: "leave `--hash device`".into(),
            fatal: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::host::objection::tests::{card, veth};

    #[test]
    fn devices_that_end_with_a_container_are_refused_where_that_stops_the_kernel() {
        let refused = |kernel| veth().objection_to_bound(kernel).is_some();
        assert!(refused([6, 18, 0]) && refused([6, 18, 44]));
        assert!(!refused([6, 12, 9]) && !refused([6, 19, 0]) && !refused([0, 0, 0]));
        assert_eq!(card().objection_to_bound([6, 18, 44]), None);
    }
}
