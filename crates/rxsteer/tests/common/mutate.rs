// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutations of inputs, for fuzz tests.

/// The number of frames for a fuzz run: `RXSTEER_FRAMES` (`1e9`), set by `make fuzz`, or this.
pub fn frames(otherwise: u64) -> u64 {
    match std::env::var("RXSTEER_FRAMES") {
        Ok(text) => {
            let number: f64 = text.parse().expect("RXSTEER_FRAMES is a number");
            number as u64
        }
        Err(_) => otherwise,
    }
}

/// xorshift64*: an input takes a dozen numbers.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Different in each execution; printed with what a test found.
    pub fn seed() -> u64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |now| now.as_nanos() as u64)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    pub fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// One change: a bit, a byte, one of the bytes that are `telling` to the reader, a part twice, or
    /// a part less.
    pub fn mutate(&mut self, input: &mut Vec<u8>, telling: &[u8]) {
        if input.is_empty() {
            return;
        }
        let at = self.below(input.len());
        match self.below(8) {
            0 | 1 => input[at] ^= 1 << self.below(8),
            2 => input[at] = self.next() as u8,
            3 | 4 => input[at] = *self.of(telling),
            5 => input.truncate(at),
            6 => {
                let len = (1 + self.below(40)).min(input.len() - at);
                let part = input[at..at + len].to_vec();
                input.splice(at..at, part);
            }
            _ => {
                let len = (1 + self.below(8)).min(input.len() - at);
                input.drain(at..at + len);
            }
        }
    }
}
