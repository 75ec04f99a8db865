// SPDX-License-Identifier: MIT OR Apache-2.0
//! Values of maps as their types.

/// The bytes of a value that has come from, or goes to, a map of that type.
pub(crate) fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: `T` is one of the skeleton's plain C structs, whose padding is named in types.h.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }.to_vec()
}

/// The value in a map's bytes, if there are enough of them.
pub(super) fn read<T: Copy>(bytes: &[u8]) -> Option<T> {
    (bytes.len() >= size_of::<T>())
        // SAFETY: long enough, and `T` is a plain C struct of integers.
        .then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}
