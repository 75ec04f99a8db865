// SPDX-License-Identifier: MIT OR Apache-2.0
//! Array maps, mapped into this process: read and written without system calls, while the kernel side
//! does the same.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use anyhow::{Context, Result, ensure};
use libbpf_rs::MapCore;
use memmap2::{MmapOptions, MmapRaw};

/// Elements begin at multiples of this, in bytes, and are copied in words of it, as the kernel does:
/// a counter is never read half written.
const WORD: usize = size_of::<u64>();

/// The elements of an array map with `BPF_F_MMAPABLE`. `T` is a struct of `bpf/types.h`, any bytes of
/// which are a value.
pub struct Mapped<T> {
    memory: MmapRaw,
    nr_elements: u32,
    element: PhantomData<T>,
}

impl<T: Copy> Mapped<T> {
    /// Maps all of it.
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

    /// An element, word by word: words may be of different moments.
    ///
    /// # Panics
    /// When there is no such element.
    pub fn get(&self, index: u32) -> T {
        let mut value = MaybeUninit::<T>::uninit();
        let from = self.at(index, 0).cast::<u64>();
        let to = value.as_mut_ptr().cast::<u64>();
        for word in 0..size_of::<T>() / WORD {
            // SAFETY: within the element, which begins on a word; volatile, since others write it.
            unsafe { to.add(word).write_unaligned(from.add(word).read_volatile()) };
        }
        // SAFETY: all of its words have been written, and any bytes are a value.
        unsafe { value.assume_init() }
    }

    /// Elements with their numbers.
    ///
    /// # Panics
    /// When they are more than there are.
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

    /// Writes one field of an element whose others the kernel side writes. `offset` is the field's
    /// (`offset_of!`).
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
}
