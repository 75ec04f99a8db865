// SPDX-License-Identifier: MIT OR Apache-2.0
//! Array maps, mapped into this process, which reads and writes them without system calls, at the
//! same time as the kernel side.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use libbpf_rs::MapCore;
use memmap2::{MmapOptions, MmapRaw};

/// Elements begin at multiples of this size in bytes, and are copied in words of this size, as in
/// the kernel: a counter is never read half written.
const WORD: usize = size_of::<u64>();

/// The elements of an array map with `BPF_F_MMAPABLE`. `T` is a struct of `bpf/types.h` for which
/// any bytes are a value.
pub struct Mapped<T> {
    memory: MmapRaw,
    nr_elements: u32,
    element: PhantomData<T>,
}

impl<T: Copy> Mapped<T> {
    /// Maps the whole array.
    ///
    /// # Errors
    /// When the map has elements of another size, or memory is short.
    pub(super) fn of(map: &impl MapCore) -> Result<Self> {
        let name = map.name().display();
        ensure!(
            map.value_size() as usize == size_of::<T>() && size_of::<T>().is_multiple_of(WORD),
            "{name}: elements of {} bytes, not {}",
            map.value_size(),
            size_of::<T>()
        );
        let nr_elements = map.max_entries();
        let memory = MmapOptions::new()
            .len(nr_elements as usize * size_of::<T>())
            .map_raw(&map.as_fd())
            .with_context(|| format!("mapping {name}"))?;
        Ok(Self {
            memory,
            nr_elements,
            element: PhantomData,
        })
    }

    /// The words of an element, from an offset in it on.
    ///
    /// # Panics
    /// When there is no such element.
    fn at(&self, index: u32, offset: usize) -> *mut u8 {
        assert!(index < self.nr_elements && offset < size_of::<T>());
        self.memory
            .as_mut_ptr()
            .wrapping_add(index as usize * size_of::<T>() + offset)
    }

    /// An element, read word by word: its words may be of different times.
    ///
    /// # Panics
    /// When there is no such element.
    pub fn get(&self, index: u32) -> T {
        let mut value = MaybeUninit::<T>::uninit();
        let from = self.at(index, 0).cast::<u64>();
        let to = value.as_mut_ptr().cast::<u64>();
        for word in 0..size_of::<T>() / WORD {
            // SAFETY: within the element, which begins on a word; volatile, since the kernel side
            // writes it.
            unsafe { to.add(word).write_unaligned(from.add(word).read_volatile()) };
        }
        // SAFETY: all words of the value have been written, and any bytes are a value.
        unsafe { value.assume_init() }
    }

    /// One word of an element: a counter. `offset` is that of the field (`offset_of!`). For scans:
    /// an element may have several cache lines.
    ///
    /// # Panics
    /// When there is no such element, or no word begins there.
    pub(super) fn get_field(&self, index: u32, offset: usize) -> u64 {
        assert!(offset.is_multiple_of(WORD));
        let field = self.at(index, offset).cast::<u64>();
        // SAFETY: as in get().
        unsafe { field.read_volatile() }
    }

    /// Elements with their numbers.
    ///
    /// # Panics
    /// When the range ends beyond the array.
    pub fn range(&self, range: Range<u32>) -> impl Iterator<Item = (u32, T)> {
        range.map(|index| (index, self.get(index)))
    }

    /// Writes an element, word by word.
    ///
    /// # Panics
    /// When there is no such element.
    pub(super) fn set(&self, index: u32, value: &T) {
        let from = std::ptr::from_ref(value).cast::<u64>();
        let to = self.at(index, 0).cast::<u64>();
        for word in 0..size_of::<T>() / WORD {
            // SAFETY: as in get().
            unsafe { to.add(word).write_volatile(from.add(word).read_unaligned()) };
        }
    }

    /// Writes one field of an element; the kernel side writes the other fields. `offset` is that of
    /// the field (`offset_of!`).
    ///
    /// # Panics
    /// When there is no such element, or the field is not in it.
    pub(super) fn set_field<F: Copy>(&self, index: u32, offset: usize, value: F) {
        assert!(
            offset.is_multiple_of(align_of::<F>()) && offset + size_of::<F>() <= size_of::<T>()
        );
        let field = self.at(index, offset).cast::<F>();
        // SAFETY: within the element, aligned as the element and the offset are.
        unsafe { field.write_volatile(value) };
    }

    /// Sets or clears a bit in one field of an element, which the kernel side does too, by atomics.
    ///
    /// # Panics
    /// As [`Self::set_field`].
    pub(super) fn set_bit(&self, index: u32, offset: usize, bit: u64, set: bool) {
        assert!(offset.is_multiple_of(WORD));
        let field = self.at(index, offset).cast::<u64>();
        // SAFETY: within the element, and on a word.
        let field = unsafe { AtomicU64::from_ptr(field) };
        match set {
            true => field.fetch_or(bit, Ordering::SeqCst),
            false => field.fetch_and(!bit, Ordering::SeqCst),
        };
    }
}
