// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wrong usage: status 2, and a message with the correct usage. Needs no root.

use rxlab::testing::usage::{Program, SECONDS};

const RXLAB: Program = Program(env!("CARGO_BIN_EXE_rxlab"));

/// As [`Program::wrong`].
fn wrong(args: &[&str], what: &[&str]) {
    RXLAB.wrong(args, what);
}

#[test]
fn commands() {
    wrong(&[], &["Usage", "demo", "bench"]);
    for command in ["demo", "bench"] {
        wrong(&[command, "--no-such-option"], &["--no-such-option"]);
        let help = RXLAB.run(&[command, "--help"]);
        assert_eq!(help.status.code(), Some(0), "{command}");
    }
}

#[test]
fn demo() {
    for (seconds, why) in SECONDS {
        wrong(&["demo", &format!("--seconds={seconds}")], &[why]);
    }
}

#[test]
fn bench() {
    wrong(
        &["bench", "floods"],
        &[
            "decide, record, follow, flood, ramp, wakeup, fairness, rr, crr, nat, rpc, stream, mixed, busypoll, lossfree, forward, firewall, reorder",
        ],
    );
    for (seconds, why) in SECONDS {
        wrong(
            &["bench", "decide", &format!("--seconds={seconds}")],
            &[why],
        );
    }
    for rounds in ["0", "-1", "x"] {
        let option = format!("--rounds={rounds}");
        wrong(
            &["bench", "decide", &option],
            &["--rounds", "from 1 to 4294967295 (rounds)"],
        );
    }
    for report in ["decide", "report.html", "", "json"] {
        let option = format!("--report={report}");
        wrong(&["bench", "decide", &option], &["write FILE.json"]);
    }
    wrong(&["bench", "compare", "old.json"], &["<NEW.json>"]);
}

#[test]
fn bench_of_unknown_modes() {
    if !nix::unistd::geteuid().is_root() {
        let why = "bench needs root before it looks at its scenarios";
        return rxlab::testing::not_run("bench_of_unknown_modes", why);
    }
    // The name of a mode has its mask; the other one is known.
    for (given, said) in [
        ("--mode=kernel-rps", "no mode `kernel-rps`"),
        ("--case=no-such", "no case with `no-such`"),
    ] {
        let ended = RXLAB.run(&["bench", "flood", "--mode=none", given]);
        let said_all = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(1), "{said_all}");
        assert!(said_all.contains(said), "{said_all}");
        assert!(said_all.contains("kernel-rps (all)"), "{said_all}");
    }
}

#[test]
fn bench_between_hosts() {
    wrong(&["bench", "--on=eth0"], &["--peer"]);
    wrong(&["bench", "--peer=192.0.2.1"], &["--on"]);
    // The device's own configuration applies.
    let on = ["bench", "--on=eth0", "--peer=192.0.2.1"];
    for condition in ["--napi=thread", "--gro=on"] {
        let args = [&on[..], &[condition]].concat();
        wrong(&args, &["cannot be used with"]);
    }
    for address in ["host", "192.0.2.1:x", "2001:db8::2:"] {
        let peer = format!("--peer={address}");
        wrong(
            &["bench", "--on=eth0", &peer],
            &["is not an address", "192.0.2.2:5533"],
        );
    }
    wrong(&["bench", "serve", "--listen=x"], &["is not an address"]);
    wrong(&["bench", "serve", "flood"], &["flood"]);
}
