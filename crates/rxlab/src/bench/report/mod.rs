// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports: figures as JSON and as a page, comparisons, and several reports side by side.

pub mod columns;
pub mod compare;
pub mod document;
pub mod files;
pub mod host;
pub mod page;
pub mod plot;
pub mod published;
