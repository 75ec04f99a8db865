// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the files of this repository say of each other: layers, links, the manual, the packages.

mod docs;
mod layers;
mod manual;
mod packages;
