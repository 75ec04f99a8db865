// SPDX-License-Identifier: MIT OR Apache-2.0
//! Published measurements by the authors of receive steering, on other machines, kernels and years:
//! for reference beside our figures, not for comparison of numbers.

/// A table, copied cell by cell.
#[derive(Debug)]
pub struct Published {
    /// Our scenario with the same question.
    pub scenario: &'static str,
    /// Our figure that corresponds to these numbers.
    pub figure: &'static str,
    /// Title of the publication.
    pub source: &'static str,
    /// Author as in the text.
    pub author: &'static str,
    /// Date, if the text has one.
    pub date: Option<&'static str>,
    /// The measurement and its tool.
    pub test: &'static str,
    /// Machine, if the text names it.
    pub machine: Option<&'static str>,
    /// Headings; the first column names the row.
    pub columns: &'static [&'static str],
    /// One cell per column.
    pub rows: &'static [&'static [&'static str]],
    /// Remark for the reader of the table.
    pub note: Option<&'static str>,
}

/// Tables for a scenario.
pub fn of(scenario: &str) -> impl Iterator<Item = &'static Published> {
    PUBLISHED
        .iter()
        .filter(move |table| table.scenario == scenario)
}

const RPS: Published = Published {
    scenario: "rr",
    figure: "transactions per second",
    source: "rps: Receive Packet Steering",
    author: "Tom Herbert",
    date: Some("16 March 2010"),
    test: "500 instances of netperf TCP_RR, 1 byte request and response: cumulative transaction rate \
           and system CPU utilization.",
    machine: None,
    columns: &["", "tps", "CPU"],
    rows: &[],
    note: None,
};

const RFS: Published = Published {
    source: "rfs: Receive Flow Steering",
    date: None,
    ..RPS
};

pub const PUBLISHED: [Published; 7] = [
    Published {
        machine: Some("e1000e on 8 core Intel"),
        rows: &[
            &["Without RPS", "108K", "33%"],
            &["With RPS", "311K", "64%"],
        ],
        ..RPS
    },
    Published {
        machine: Some("forcedeth on 16 core AMD"),
        rows: &[
            &["Without RPS", "156K", "15%"],
            &["With RPS", "404K", "49%"],
        ],
        ..RPS
    },
    Published {
        machine: Some("bnx2x on 16 core AMD"),
        rows: &[
            &["Without RPS (4 HW RX queues)", "567K", "61%"],
            &["Without RPS (8 HW RX queues)", "738K", "96%"],
            &["With RPS (4 HW RX queues)", "854K", "76%"],
        ],
        ..RPS
    },
    Published {
        test: "500 instances of netperf TCP_RR, 1 byte request and response.",
        machine: Some("e1000e on 8 core Intel"),
        rows: &[
            &["No RFS or RPS", "104K", "30%"],
            &["No RFS (best RPS config)", "290K", "63%"],
            &["RFS", "303K", "61%"],
        ],
        ..RFS
    },
    Published {
        scenario: "rpc",
        figure: "transactions per second and latency",
        test: "A request/response test similar in structure to netperf's RR test, with 100 threads on \
               each host, that does more work in user space than netperf.",
        columns: &[
            "",
            "tps",
            "CPU%",
            "50/90/99% usec latency",
            "Latency StdDev",
        ],
        rows: &[
            &["No RFS/RPS", "103K", "48%", "757/900/3185", "4472.35"],
            &["RPS only", "174K", "73%", "415/993/2468", "491.66"],
            &["RFS", "223K", "73%", "379/651/1382", "315.61"],
        ],
        ..RFS
    },
    Published {
        scenario: "stream",
        figure: "throughput",
        source: "[RFC] net;sched: Try to find idle cpu for RPS to handle packets",
        author: "Kirill Tkhai",
        date: Some("19 September 2018"),
        test: "netperf -L 127.0.0.1 -p 1234 -l 100: five runs without the patch and five with it.",
        machine: None,
        // The text omits the headings of netperf's output.
        columns: &[
            "",
            "receive socket, bytes",
            "send socket, bytes",
            "message, bytes",
            "elapsed, s",
            "throughput, 10^6 bit/s",
        ],
        rows: &[
            &["Before", "87380", "16384", "16384", "100.00", "60323.56"],
            &["Before", "87380", "16384", "16384", "100.00", "60388.46"],
            &["Before", "87380", "16384", "16384", "100.00", "60217.68"],
            &["Before", "87380", "16384", "16384", "100.00", "57995.41"],
            &["Before", "87380", "16384", "16384", "100.00", "60659.00"],
            &["After", "87380", "16384", "16384", "100.00", "64569.09"],
            &["After", "87380", "16384", "16384", "100.00", "64569.25"],
            &["After", "87380", "16384", "16384", "100.00", "64691.63"],
            &["After", "87380", "16384", "16384", "100.00", "64930.14"],
            &["After", "87380", "16384", "16384", "100.00", "62670.15"],
        ],
        note: Some("The difference between best runs is +7%, the worst runs differ +8%."),
    },
    Published {
        scenario: "busypoll",
        figure: "transactions per second",
        source: "Merge branch 'll_poll'",
        author: "Eliezer Tamir",
        date: Some("11 June 2013"),
        test: "netperf tcp_rr and udp_rr, 1 byte: round trips per second.",
        machine: Some(
            "machines each with two Intel Xeon 2680 CPUs and X520 (82599) optical NICs; \
             unmodified and patched Linux 3.9",
        ),
        columns: &[
            "kernel, config",
            "C3/6",
            "rx-usecs",
            "TCP_RR tps",
            "cpu%",
            "S.dem",
            "UDP_RR tps",
            "cpu%",
            "S.dem",
        ],
        rows: &[
            &[
                "patched optimized",
                "on",
                "100",
                "87k",
                "3.13",
                "11.4",
                "94K",
                "3.17",
                "10.7",
            ],
            &[
                "patched optimized",
                "on",
                "0",
                "71k",
                "3.12",
                "14.0",
                "84k",
                "3.19",
                "12.0",
            ],
            &[
                "patched optimized",
                "on",
                "adaptive",
                "80k",
                "3.13",
                "12.5",
                "90k",
                "3.46",
                "12.2",
            ],
            &[
                "patched typical",
                "on",
                "100",
                "72",
                "3.13",
                "14.0",
                "79k",
                "3.17",
                "12.8",
            ],
            &[
                "patched typical",
                "on",
                "0",
                "60k",
                "2.13",
                "16.5",
                "71k",
                "3.18",
                "14.0",
            ],
            &[
                "patched typical",
                "on",
                "adaptive",
                "67k",
                "3.51",
                "16.7",
                "75k",
                "3.36",
                "14.5",
            ],
            &[
                "3.9 optimized",
                "on",
                "adaptive",
                "25k",
                "1.0",
                "12.7",
                "28k",
                "0.98",
                "11.2",
            ],
            &[
                "3.9 typical",
                "off",
                "0",
                "48k",
                "1.09",
                "7.3",
                "52k",
                "1.11",
                "4.18",
            ],
            &[
                "3.9 typical",
                "0ff",
                "adaptive",
                "35k",
                "1.12",
                "4.08",
                "38k",
                "0.65",
                "5.49",
            ],
            &[
                "3.9 optimized",
                "off",
                "adaptive",
                "40k",
                "0.82",
                "4.83",
                "43k",
                "0.70",
                "5.23",
            ],
            &[
                "3.9 optimized",
                "off",
                "0",
                "57k",
                "1.17",
                "4.08",
                "62k",
                "1.04",
                "3.95",
            ],
        ],
        note: Some(
            "Cells are as in the text, \"72\" and \"0ff\" too. Config: typical is derived from RH6.2, \
             optimized is a stripped down config. rx-usecs: 0=off, 1=adaptive, 100 us. When C3/6 states \
             were turned on (via BIOS) the performance governor was used. Measured with v2 of the patch \
             set.",
        ),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A row with a wrong number of cells would shift its numbers.
    #[test]
    fn every_number_has_its_heading() {
        for table in &PUBLISHED {
            for row in table.rows {
                assert_eq!(row.len(), table.columns.len(), "{}: {row:?}", table.source);
            }
        }
    }

    /// Checks sums over the columns, computed from the texts.
    #[test]
    fn no_number_is_lost_or_altered() {
        let sum = |scenario, column: usize| -> f64 {
            let rows = of(scenario).flat_map(|table| table.rows);
            let digits = |cell: &str| cell.trim_end_matches(['k', 'K', '%']).parse::<f64>();
            let sum: f64 = rows.map(|row| digits(row[column]).unwrap()).sum();
            (sum * 100.0).round() / 100.0
        };
        assert_eq!([1, 2].map(|column| sum("rr", column)), [3835.0, 548.0]);
        assert_eq!(
            [1, 2, 4].map(|column| sum("rpc", column)),
            [500.0, 194.0, 5279.62]
        );
        assert_eq!(sum("stream", 5), 621_014.37);
        assert_eq!(
            [3, 4, 5, 6, 7, 8].map(|column| sum("busypoll", column)),
            [642.0, 23.35, 118.09, 716.0, 24.01, 106.25]
        );
    }
}
