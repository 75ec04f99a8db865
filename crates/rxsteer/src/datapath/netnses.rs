// SPDX-License-Identifier: MIT OR Apache-2.0
//! Answers to the programs at sockets: whether packets of the steered devices reach a network namespace
//! (`bpf/netns.h`).

use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags};

use super::value::{bytes_of, read};
use crate::host::reach::Reach;
use crate::types::{netns_known, netns_reach};

/// Questions that a look answers. Each takes some 0.1 ms.
const ANSWERS: usize = 16;

/// Earlier answers that a look checks: links between namespaces come and go.
const CHECKS: usize = 4;

/// Time of a look after which the rest of the questions wait for the next one: the thread that steers
/// looks.
const TIME: Duration = Duration::from_millis(20);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Netnses {
    /// Questions at the last look that left none.
    answered: u64,
    /// The key of the answer that was checked last.
    checked: Option<Vec<u8>>,
}

impl Netnses {
    /// To be called now and then; `asked`: the number of questions so far.
    ///
    /// # Errors
    /// When the map can't be read or written.
    pub(super) fn look(&mut self, known: &impl MapCore, asked: u64, steered: &[u32]) -> Result<()> {
        let mut all: Vec<Vec<u8>> = known.keys().collect();
        all.sort_unstable();
        let mut keys: Vec<Vec<u8>> = Vec::new();
        if asked != self.answered {
            let is_asked = |key: &&Vec<u8>| {
                get(known, key).is_some_and(|of| of.reach == netns_reach::NETNS_ASKED.0)
            };
            keys.extend(all.iter().filter(is_asked).take(ANSWERS).cloned());
            if keys.len() < ANSWERS {
                self.answered = asked;
            }
        }
        // Those after the one that was checked last, in a circle.
        let checked = self.checked.as_ref();
        let begin = all.partition_point(|key| checked.is_some_and(|checked| key <= checked));
        all.rotate_left(begin);
        let checks = all.into_iter().take(CHECKS);
        for key in checks {
            self.checked = Some(key.clone());
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        if keys.is_empty() {
            return Ok(());
        }
        let reach = Reach::new(steered)?;
        let start = Instant::now();
        for key in keys {
            if start.elapsed() > TIME {
                self.answered = asked.wrapping_sub(1);
                break;
            }
            answer(known, &key, &reach)?;
        }
        Ok(())
    }
}

fn get(known: &impl MapCore, key: &[u8]) -> Option<netns_known> {
    read(&known.lookup(key, MapFlags::ANY).ok()??)
}

/// Stores the answer. A namespace that is not found any more is forgotten: its sockets ask again.
fn answer(known: &impl MapCore, key: &[u8], reach: &Reach<'_>) -> Result<()> {
    let Some(before) = get(known, key) else {
        return Ok(());
    };
    let cookie = u64::from_ne_bytes(key.try_into()?);
    let Some(path) = reach.find(before.tid, cookie) else {
        return match before.reach {
            // Whoever asked is not where its socket is.
            asked if asked == netns_reach::NETNS_ASKED.0 => {
                store(known, key, before.tid, netns_reach::NETNS_APART)
            }
            _ => Ok(known.delete(key).or_else(|e| match e.kind() {
                libbpf_rs::ErrorKind::NotFound => Ok(()),
                _ => Err(e),
            })?),
        };
    };
    // A process there, if the one that asked is not there any more.
    let process = path.strip_prefix("/proc").ok();
    let process = process.and_then(|path| path.iter().next()?.to_str()?.parse().ok());
    let tid = process.unwrap_or(before.tid);
    let state = match reach.reaches(&path) {
        true => netns_reach::NETNS_REACHED,
        false => netns_reach::NETNS_APART,
    };
    store(known, key, tid, state)
}

fn store(known: &impl MapCore, key: &[u8], tid: u32, reach: netns_reach) -> Result<()> {
    let value = netns_known {
        tid,
        reach: reach.0,
    };
    Ok(known.update(key, &bytes_of(&value), MapFlags::ANY)?)
}
