// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables in a terminal.

use comfy_table::{CellAlignment, Table, presets};

/// A table with right-aligned numbers.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
