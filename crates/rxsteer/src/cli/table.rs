// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables in a terminal.

use comfy_table::{CellAlignment, Row, Table, presets};

/// A table with right-aligned numbers.
pub fn table(header: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Aligns columns of text to the left.
pub(super) fn align_left(table: &mut Table, columns: &[usize]) {
    for &column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Left);
        }
    }
}
