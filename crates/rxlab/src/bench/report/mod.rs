// SPDX-License-Identifier: MIT OR Apache-2.0
//! What was found: the figures, as a page, compared and side by side.

pub mod columns;
pub mod compare;
pub mod document;
pub mod files;
pub mod host;
pub mod page;
pub mod plot;
pub mod published;
