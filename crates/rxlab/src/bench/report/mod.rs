// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports: figures as JSON and as text, comparisons, and several reports side by side.

pub mod columns;
pub mod compare;
pub mod document;
pub mod files;
pub mod host;
