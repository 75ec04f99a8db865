// SPDX-License-Identifier: MIT OR Apache-2.0
//! Values of maps as their types.

/// The bytes of a map's value.
pub(crate) fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: `T` is one of the skeleton's plain C structs, in which types.h names all padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }.to_vec()
}

/// The value in a map's bytes; `None` if these are too few.
pub(super) fn read<T: Copy>(bytes: &[u8]) -> Option<T> {
    (bytes.len() >= size_of::<T>())
        // SAFETY: the bytes are long enough, and `T` is a plain C struct of integers.
        .then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}
