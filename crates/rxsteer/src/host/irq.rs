// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU on which an interrupt or a NAPI thread runs.

use std::fs;

use super::cpumask::CpuMask;
use super::kthread;
use super::netdev::Napi;
use super::topology::Topology;

impl Topology {
    /// The CPU that receives packets of a device's queue; `None` unless exactly one is known.
    ///
    /// For threaded NAPI it is the thread's affinity, otherwise the interrupt's effective affinity.
    /// `napis` are the device's instances ([`crate::host::netdev::napis`]). They are used only if
    /// there is one for each of the `nr_queues` receive queues; otherwise, and before 6.8,
    /// interrupts and threads are found by name.
    pub fn interrupt_cpu(
        &self,
        device: &str,
        queue: u32,
        nr_queues: u32,
        napis: &[Napi],
    ) -> Option<u32> {
        let napi = of_queue(napis, queue, nr_queues);
        let threaded = self
            .read(&format!("sys/class/net/{device}/threaded"))
            .is_some_and(|value| value != "0");
        let thread = match napi {
            Some(napi) => napi.pid,
            None if threaded => self.napi_thread(device, queue, nr_queues),
            None => None,
        };
        if thread.is_some() || threaded {
            return self.thread_cpu(thread?);
        }
        self.irq_cpu(self.irq_of(device, queue, napi)?)
    }

    /// Interrupts of a device's queue since boot; `None` if they are not known. The arguments are those of
    /// [`Self::interrupt_cpu`].
    pub fn nr_interrupts(
        &self,
        device: &str,
        queue: u32,
        nr_queues: u32,
        napis: &[Napi],
    ) -> Option<u64> {
        let irq = self.irq_of(device, queue, of_queue(napis, queue, nr_queues))?;
        let table = self.read("proc/interrupts")?;
        let line = table.lines().find_map(|line| {
            let (number, rest) = line.split_once(':')?;
            (number.trim().parse() == Ok(irq)).then_some(rest)
        });
        // A number for each CPU, then the name.
        let words = line?
            .split_whitespace()
            .map_while(|n| n.parse::<u64>().ok());
        Some(words.sum())
    }

    fn irq_of(&self, device: &str, queue: u32, napi: Option<&Napi>) -> Option<u32> {
        napi.and_then(|napi| napi.irq)
            .or_else(|| self.named_interrupt(device, queue))
    }

    /// The CPU to which the kernel delivers interrupt `irq`; `smp_affinity` is only a request.
    pub(crate) fn irq_cpu(&self, irq: u32) -> Option<u32> {
        let list = self.read(&format!("proc/irq/{irq}/effective_affinity_list"))?;
        CpuMask::parse_list(&list).ok()?.first()
    }

    /// The interrupt of a receive queue, by drivers' names; `None` unless exactly one matches.
    pub(crate) fn named_interrupt(&self, device: &str, queue: u32) -> Option<u32> {
        let own = self.device_interrupts(device);
        let parent = fs::canonicalize(self.path(&format!("sys/class/net/{device}/device")))
            .ok()
            .and_then(|path| Some(path.file_name()?.to_str()?.to_string()));
        let table = self.read("proc/interrupts")?;
        let mut found = table.lines().filter_map(|line| {
            let (irq, rest) = line.split_once(':')?;
            let irq: u32 = irq.trim().parse().ok()?;
            let name = rest.split_whitespace().last()?;
            let ours = own.contains(&irq)
                || has_word(name, device)
                || parent
                    .as_deref()
                    .is_some_and(|parent| has_word(name, parent));
            (ours && rx_queue_of(name, device, parent.as_deref()) == Some(queue)).then_some(irq)
        });
        let first = found.next()?;
        found.next().is_none().then_some(first)
    }

    /// The interrupts of the bus device of `device`. Those of virtio belong to the parent device.
    fn device_interrupts(&self, device: &str) -> Vec<u32> {
        ["device/msi_irqs", "device/../msi_irqs"]
            .iter()
            .map(|dir| self.path(&format!("sys/class/net/{device}/{dir}")))
            .find_map(|dir| fs::read_dir(dir).ok())
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    }

    /// The thread `napi/DEVICE-ID` of a queue. NAPI ids ascend with a device's queues. `None`
    /// unless there is one thread per queue: names repeat in other network namespaces.
    pub(crate) fn napi_thread(&self, device: &str, queue: u32, nr_queues: u32) -> Option<u32> {
        let threads = kthread::numbered(&self.path("proc"), &format!("napi/{device}-"));
        (threads.len() == nr_queues as usize).then(|| threads.get(queue as usize).map(|t| t.1))?
    }

    /// The CPU to which a thread is bound; `None` if it may run on several.
    fn thread_cpu(&self, pid: u32) -> Option<u32> {
        let cpus = self.thread_cpus(pid)?;
        (cpus.len() == 1).then(|| cpus.first())?
    }

    /// The CPUs on which a thread may run; `None` if it has ended.
    pub(crate) fn thread_cpus(&self, pid: u32) -> Option<CpuMask> {
        let status = self.read(&format!("proc/{pid}/status"))?;
        let list = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        CpuMask::parse_list(list).ok()
    }
}

/// The instance of a queue, if there is one for each.
fn of_queue(napis: &[Napi], queue: u32, nr_queues: u32) -> Option<&Napi> {
    napis
        .get(queue as usize)
        .filter(|_| napis.len() == nr_queues as usize)
}

/// Whether `name` contains `word` as a whole word: `eth1` is not in `eth10-rx-0`.
fn has_word(name: &str, word: &str) -> bool {
    name.match_indices(word).any(|(at, _)| {
        let before = name[..at].chars().next_back();
        let after = name[at + word.len()..].chars().next();
        ![before, after]
            .into_iter()
            .flatten()
            .any(char::is_alphanumeric)
    })
}

/// The receive queue that an interrupt's name refers to.
///
/// Drivers write `eth0-TxRx-3`, `i40e-eth0-TxRx-3`, `ens5-Tx-Rx-3`, `eth0-rx-3`, `eth0-q3-rx`,
/// `eth0-3`, `virtio2-input.3`, `mlx5_comp3@pci:0000:01:00.0`.
fn rx_queue_of(name: &str, device: &str, parent: Option<&str>) -> Option<u32> {
    let name = name.split('@').next()?;
    let mut rest = name.replacen(device, "", 1);
    if let Some(parent) = parent {
        rest = rest.replacen(parent, "", 1);
    }
    let lower = rest.to_ascii_lowercase();
    let receives = ["rx", "input", "comp"]
        .iter()
        .any(|word| lower.contains(word));
    let plain = lower
        .strip_prefix('-')
        .is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    if !receives && !plain {
        return None;
    }
    lower
        .split(|c: char| !c.is_ascii_digit())
        .rfind(|digits| !digits.is_empty())?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::topology::tests::Fixture;

    /// A virtio device with the interrupt table of a guest of two CPUs.
    fn virtio() -> Fixture {
        let pci = "sys/devices/pci0000:00/0000:00:03.0";
        Fixture::new("0-3")
            .file(&format!("{pci}/msi_irqs/37"), "msix")
            .file(&format!("{pci}/msi_irqs/38"), "msix")
            .file(&format!("{pci}/msi_irqs/39"), "msix")
            .file(&format!("{pci}/virtio2/net/eth0/threaded"), "0")
            .link(&format!("{pci}/virtio2/net/eth0/device"), "../..")
            .link(
                "sys/class/net/eth0",
                "../../devices/pci0000:00/0000:00:03.0/virtio2/net/eth0",
            )
            .file(
                "proc/interrupts",
                "     CPU0 CPU1\n\
                 24: 1 0 IO-APIC 5-edge ACPI:Ged\n\
                 34: 9 0 PCI-MSIX-0000:00:05.0 1-edge virtio4-input\n\
                 37: 0 0 PCI-MSIX-0000:00:03.0 0-edge virtio2-config\n\
                 38: 0 3978 PCI-MSIX-0000:00:03.0 1-edge virtio2-input.0\n\
                 39: 2628 0 PCI-MSIX-0000:00:03.0 2-edge virtio2-output.0\n\
                 40: 2628 0 PCI-MSIX-0000:00:04.0 1-edge virtio3-input.0\n\
                 LOC: 1 2 Local timer interrupts",
            )
            .file("proc/irq/38/effective_affinity_list", "3")
            .file("proc/irq/39/effective_affinity_list", "0")
    }

    #[test]
    fn a_queues_interrupt_by_name() {
        let topology = virtio().topology_kept();
        assert_eq!(topology.1.interrupt_cpu("eth0", 0, 1, &[]), Some(3));
        assert_eq!(topology.1.interrupt_cpu("eth0", 1, 1, &[]), None);
        assert_eq!(topology.1.interrupt_cpu("eth9", 0, 1, &[]), None);
        assert_eq!(topology.1.nr_interrupts("eth0", 0, 1, &[]), Some(3978));
        assert_eq!(topology.1.nr_interrupts("eth0", 1, 1, &[]), None);
    }

    #[test]
    fn a_queues_interrupt_as_the_kernel_says() {
        let (_fixture, topology) = virtio().topology_kept();
        let napi = |irq| Napi {
            id: 8193,
            irq,
            ..Napi::default()
        };
        assert_eq!(
            topology.interrupt_cpu("eth0", 0, 1, &[napi(Some(39))]),
            Some(0)
        );
        assert_eq!(topology.interrupt_cpu("eth0", 0, 1, &[napi(None)]), Some(3));
    }

    #[test]
    fn threaded_napi_receives_where_its_thread_may_run() {
        let thread = |fixture: Fixture, pid: u32, comm: &str, cpus: &str| {
            let stat = kthread::stat(pid, comm, true);
            fixture.file(&format!("proc/{pid}/stat"), &stat).file(
                &format!("proc/{pid}/status"),
                &format!("Name: x\nCpus_allowed_list:\t{cpus}"),
            )
        };
        let fixture = Fixture::new("0-3").file("sys/class/net/veth0/threaded", "1");
        let fixture = thread(fixture, 70, "napi/veth0-8200", "2");
        let fixture = thread(fixture, 71, "napi/veth0-8199", "1");
        let fixture = thread(fixture, 72, "napi/veth00-8198", "3");
        let topology = fixture.topology();
        // By name: ids ascend with queues.
        assert_eq!(topology.interrupt_cpu("veth0", 0, 2, &[]), Some(1));
        assert_eq!(topology.interrupt_cpu("veth0", 1, 2, &[]), Some(2));
        // Two threads for one queue: another namespace has a device of this name.
        assert_eq!(topology.interrupt_cpu("veth0", 0, 1, &[]), None);
        // The kernel names the thread.
        let napi = Napi {
            id: 8200,
            pid: Some(70),
            ..Napi::default()
        };
        assert_eq!(topology.interrupt_cpu("veth0", 0, 1, &[napi]), Some(2));
        // A thread that may run on several CPUs has no single CPU.
        let fixture = thread(fixture, 70, "napi/veth0-8200", "0-3");
        assert_eq!(fixture.topology().interrupt_cpu("veth0", 1, 2, &[]), None);
    }

    #[test]
    fn names_of_interrupts() {
        let queue = |name| rx_queue_of(name, "eth0", Some("virtio2"));
        for (name, expected) in [
            ("eth0-TxRx-3", Some(3)),
            ("i40e-eth0-TxRx-12", Some(12)),
            ("eth0-Tx-Rx-3", Some(3)),
            ("eth0-rx-1", Some(1)),
            ("eth0-q2-rx", Some(2)),
            ("eth0-5", Some(5)),
            ("virtio2-input.4", Some(4)),
            ("mlx5_comp7@pci:0000:01:00.0", Some(7)),
            ("eth0-tx-1", None),
            ("eth0-q2-tx", None),
            ("virtio2-output.4", None),
            ("virtio2-config", None),
            ("mlx5_async0@pci:0000:01:00.0", None),
            ("eth0", None),
        ] {
            assert_eq!(queue(name), expected, "{name}");
        }
        assert!(has_word("eth1-rx-0", "eth1"));
        assert!(!has_word("eth10-rx-0", "eth1"));
        assert!(!has_word("veth1-rx-0", "eth1"));
    }
}
