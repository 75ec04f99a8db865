// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random and mutated frames through the parser, natively and in the kernel: there is no difference.
//! `make fuzz FRAMES=1e9` runs it at length.

use crate::common::key::words;
use crate::common::mutate::Random;
use crate::common::mutate::frames;
use crate::fixture;
use crate::fixture::outer;
use anyhow::{Context, Result, bail, ensure};
use rxlab::test_name;
use rxlab::testing::not_run;
use rxlab::testing::probe::{FRAME_MAX, FRAME_MIN, Probe};
use rxsteer::datapath::native;
use rxsteer::types::{flow_key, flow_option, flow_result, flow_secret};

/// Frames of a short run, which takes some seconds.
const FRAMES: u64 = 400_000;

/// Frames that are made and compared at once.
const BATCH: usize = 4096;

const ALL: u32 = flow_option::FLOW_TUNNEL_IPIP.0
    | flow_option::FLOW_TUNNEL_GRE.0
    | flow_option::FLOW_TUNNEL_VXLAN.0
    | flow_option::FLOW_TUNNEL_GENEVE.0
    | flow_option::FLOW_TUNNEL_GTPU.0;

/// Bytes that mean something to the parser: lengths, versions, protocols, ports, flags.
const TELLING: [u8; 24] = [
    0, 1, 4, 5, 6, 17, 20, 41, 43, 44, 47, 50, 51, 59, 60, 0x08, 0x45, 0x46, 0x4f, 0x60, 0x81,
    0x86, 0x88, 0xff,
];

/// Makes frames from those of the fixtures.
struct Mutator {
    random: Random,
    seeds: Vec<Vec<u8>>,
}

impl Mutator {
    fn new(seed: u64) -> Self {
        let seeds = fixture::all().into_iter().map(|fixture| fixture.packet);
        Self {
            random: Random::new(seed),
            seeds: seeds.filter(|packet| packet.len() >= FRAME_MIN).collect(),
        }
    }

    fn make(&mut self, frame: &mut Vec<u8>) {
        frame.clear();
        match self.random.below(16) {
            0 => self.noise(frame),
            1 => {
                // The head of one frame, the tail of another.
                let [head, tail] = [0, 1].map(|_| self.random.below(self.seeds.len()));
                let cut = self.random.below(self.seeds[head].len());
                let from = self.random.below(self.seeds[tail].len());
                frame.extend(&self.seeds[head][..cut]);
                frame.extend(&self.seeds[tail][from..]);
            }
            _ => {
                frame.extend(self.random.of(&self.seeds));
            }
        }
        for _ in 0..self.random.below(5) {
            self.random.mutate(frame, &TELLING);
        }
        frame.truncate(FRAME_MAX);
        frame.resize(frame.len().max(FRAME_MIN), 0);
    }

    /// Random bytes after the type of an Ethernet frame that the parser follows.
    fn noise(&mut self, frame: &mut Vec<u8>) {
        const TYPES: [[u8; 2]; 5] = [[8, 0], [0x86, 0xdd], [0x81, 0], [0x88, 0xa8], [0x88, 0x64]];
        let len = FRAME_MIN + self.random.below(200);
        while frame.len() < len {
            frame.extend(self.random.next().to_ne_bytes());
        }
        frame[12..14].copy_from_slice(&TYPES[self.random.below(TYPES.len())]);
        if frame.len() > 14 && self.random.below(2) == 0 {
            frame[14] = *self.random.of(&[0x45, 0x60]);
        }
    }
}

/// Results of the native parser, by kind.
#[derive(Debug, Default)]
struct Kinds {
    keyed: u64,
    truncated: u64,
    unknown: u64,
}

/// Compares the kernel's parser of `in_kernel` tunnels with the native one of `native` tunnels on so
/// many frames.
///
/// # Errors
/// With the first frame on which they differ.
fn compare(in_kernel: u32, tunnels: u32, seed: u64, nr_frames: u64) -> Result<Kinds> {
    let mut mutator = Mutator::new(seed);
    let secret = flow_secret {
        addend: mutator.random.next(),
        multiplier: std::array::from_fn(|_| mutator.random.next()),
    };
    let mut probe = Probe::load(in_kernel, &secret)?;
    let mut batch = vec![Vec::new(); BATCH];
    let mut kinds = Kinds::default();
    let mut left = nr_frames;
    while left > 0 {
        let nr = left.min(BATCH as u64) as usize;
        left -= nr as u64;
        batch[..nr].iter_mut().for_each(|frame| mutator.make(frame));
        let mut different = None;
        probe.parse(&batch[..nr], |number, (kernel, hash)| {
            let frame = &batch[number];
            let ours = native::flow_parse(frame, frame.len() as u32, tunnels);
            match ours {
                Ok(_) => kinds.keyed += 1,
                Err(flow_result::FLOW_TRUNCATED) => kinds.truncated += 1,
                Err(_) => kinds.unknown += 1,
            }
            let key = ours.unwrap_or_default();
            let all = |key: flow_key| (words(&key), outer(&key));
            let same = kernel.map(all) == ours.map(all) && hash == native::flow_hash(&key, &secret);
            if !same && different.is_none() {
                different = Some(number);
            }
        })?;
        if let Some(number) = different {
            let hex: String = batch[number].iter().map(|b| format!("{b:02x}")).collect();
            bail!("kernel and native differ, tunnels {tunnels:#x}, seed {seed}: {hex}");
        }
    }
    Ok(kinds)
}

#[test]
fn the_kernel_and_the_native_parser_agree() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        not_run(test_name!(), "loading BPF programs needs root");
        return Ok(());
    }
    let now = Random::seed();
    // Without tunnels, each alone, and all; and with both directions alike.
    let symmetric = ALL | flow_option::FLOW_SYMMETRIC.0;
    let tunnels: Vec<u32> = (0..5)
        .map(|bit| 1 << bit)
        .chain([0, ALL, symmetric])
        .collect();
    let each = frames(FRAMES).div_ceil(tunnels.len() as u64);
    for (number, &tunnels) in (0..).zip(&tunnels) {
        let kinds = compare(tunnels, tunnels, now ^ (number << 56), each)
            .with_context(|| format!("tunnels {tunnels:#x}"))?;
        eprintln!("tunnels {tunnels:#x}: {kinds:?}");
        // Every kind of result is common among the frames.
        let least = [kinds.keyed, kinds.truncated, kinds.unknown]
            .into_iter()
            .min();
        ensure!(least > Some(each / 100), "{kinds:?}");
    }
    // Control: a parser that follows other tunnels is found out.
    let error = compare(0, ALL, now, FRAMES).expect_err("these parsers differ");
    ensure!(
        format!("{error:#}").contains("kernel and native differ"),
        "{error:#}"
    );
    Ok(())
}
