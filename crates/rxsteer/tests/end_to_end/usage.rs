// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wrong usage: exit status 2 and a message with a remedy. No test needs root.

use std::fs;

use clap::CommandFactory;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rxlab::testing::usage::{Program, SECONDS};
use rxsteer::cli::Cli;

const RXSTEER: Program = Program(env!("CARGO_BIN_EXE_rxsteer"));

/// As [`Program::wrong`].
fn wrong(args: &[&str], what: &[&str]) {
    RXSTEER.wrong(args, what);
}

#[test]
fn commands() {
    wrong(&[], &["Usage", "run", "status", "set", "poll"]);
    wrong(&["steer"], &["unrecognized subcommand", "steer"]);
    wrong(&["run", "lo", "--polcy=rps"], &["--polcy", "--policy"]);
    let cli = Cli::command();
    let shown = cli
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    for command in shown.map(|command| command.get_name()) {
        wrong(&[command, "--no-such-option"], &["--no-such-option"]);
        let help = RXSTEER.run(&[command, "--help"]);
        assert_eq!(help.status.code(), Some(0), "{command}");
    }
}

/// What has no content, or no end, is not read.
#[test]
fn configurations_are_regular_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [fifo, long, fits] = ["fifo", "long", "fits"].map(path);
    mkfifo(&fifo[..], Mode::S_IRUSR).unwrap();
    let text = format!("devices = \"lo\"\n#{}", "x".repeat(4 << 20));
    fs::write(&long, &text).unwrap();
    fs::write(&fits, &text[..4 << 20]).unwrap();
    let commands: [&[&str]; 2] = [&["check"], &["run", "--config"]];
    for command in commands {
        let with = |file: &str, why: &str| wrong(&[command, &[file]].concat(), &[file, why]);
        with(&fifo, "not a regular file");
        with("/dev/zero", "not a regular file");
        with(folder.path().to_str().unwrap(), "not a regular file");
        with(&long, "longer than 4 MiB");
    }
    // The control; a link to /dev/null leaves out a vendor's file.
    for file in [&fits, "/dev/null"] {
        let checked = RXSTEER.run(&["check", file]);
        assert_eq!(checked.status.code(), Some(0), "{file}: {checked:?}");
    }
}

/// Invalid lists of CPUs, for every option that takes one.
const CPUS: [(&str, &str); 11] = [
    ("", "no CPUs given; write a list"),
    (" ", "no CPUs given; write a list"),
    ("0x0", "no CPUs given; write a list"),
    ("cpu0", "is not a CPU or a range of CPUs; write a list"),
    ("AUTO", "is not a CPU or a range of CPUs; write a list"),
    ("ff", "or a mask such as `0x10f`"),
    ("0xcpu", "is not a mask; write `0x`"),
    ("0-", "is not a CPU or a range of CPUs; write a list"),
    ("3-1", "write the lower CPU first"),
    ("0-7:3/2", "USED <= GROUP"),
    ("0-8192", "CPU 8192 does not exist"),
];

#[test]
fn cpus() {
    for (cpus, why) in CPUS {
        let option = format!("--rps-cpus={cpus}");
        wrong(&["run", "lo", &option], &["--rps-cpus", why]);
        wrong(
            &["run", "lo", &format!("--queue=0={cpus}")],
            &["--queue", why],
        );
        wrong(&["set", "lo", &option], &["--rps-cpus", why]);
    }
}

#[test]
fn napi() {
    wrong(&["napi", "--threaded", "on"], &["<DEVICE>"]);
    wrong(
        &["napi", "lo", "--json", "--threaded", "on"],
        &["--json", "cannot be used"],
    );
    wrong(
        &["napi", "lo", "--threaded", "always"],
        &["on", "off", "busy-poll"],
    );
    wrong(
        &["napi", "lo", "--defer-hard-irqs", "2147483648"],
        &["--defer-hard-irqs", "from 0 to 2147483647 (polls)"],
    );
}

#[test]
fn run() {
    wrong(&["run"], &["no device", "/etc/rxsteer/rxsteer.toml"]);
    wrong(
        &["run", "lo", "--policy=rfs2"],
        &["rfs, rps or off", "+idle"],
    );
    wrong(&["run", "lo", "--policy"], &["--policy"]);
    wrong(
        &["run", "lo", "--policy=off+idle"],
        &["nothing can be added to off"],
    );
    wrong(&["run", "lo", "--mode=xdp"], &["auto, native, softirq"]);
    for (queue, why) in [
        ("", "write QUEUE=CPUS, for example"),
        ("0", "write QUEUE=CPUS, for example"),
        ("=1", "is not a queue number"),
        ("x=1", "is not a queue number"),
        ("-1=1", "is not a queue number"),
        ("4294967296=1", "is not a queue number"),
        ("eth0:=1", "is not a queue number"),
        (":0=1", "no device has such a name"),
        ("dev/eth0:0=1", "no device has such a name"),
    ] {
        wrong(
            &["run", "lo", &format!("--queue={queue}")],
            &["--queue", why],
        );
    }
    wrong(
        &["run", "lo", "--policy=nearest"],
        &["adaptive, rfs, rps or off"],
    );
    for tunnels in ["ipsec", "gre,", "gre;vxlan"] {
        let option = format!("--tunnels={tunnels}");
        let all = "ipip, gre, vxlan, geneve, gtp-u, all";
        wrong(&["run", "lo", &option], &["--tunnels", all]);
    }
    for class in ["nice=-21", "nice=20", "rr"] {
        let option = format!("--backlog-sched={class}");
        wrong(
            &["run", "lo", &option],
            &["--backlog-sched", class, "nice=N"],
        );
    }
    wrong(
        &["run", "lo", "--hash=crc32"],
        &["packet, symmetric, device"],
    );
    wrong(&["run", "lo", "--dry-run=yes"], &["--dry-run"]);
    for value in [
        "99999",
        "0",
        "x",
        "",
        "192.0.2.7",
        "::1",
        "192.0.2.7:0",
        "[::1]:65536",
    ] {
        let option = format!("--metrics={value}");
        let form = ["--metrics=[ADDRESS:]PORT", "a port from 1 to 65535"];
        wrong(
            &["run", "lo", &option],
            &form[..if value.is_empty() { 0 } else { 2 }],
        );
    }
    // A value after a space is the name of a device.
    for value in ["192.0.2.7:9", "[::1]:99999", ":9"] {
        let form =
            "for the address of --metrics, write --metrics=[ADDRESS:]PORT, with an equals sign";
        wrong(
            &["run", "lo", "--metrics", value],
            &[value, "no device has such a name", form],
        );
    }
    let folder = "/sys/fs/bpf/x";
    let form = "write --pin=FOLDER, with an equals sign";
    wrong(
        &["run", "lo", "--pin", folder],
        &[folder, "no device has such a name", form],
    );
    wrong(&["run", ""], &["no device has such a name"]);
    // A device may have a number for its name.
    let meant = |args: &[&str]| {
        let output = RXSTEER.run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            errors.contains("there is no network device `99999`"),
            "{errors}"
        );
        errors.contains("for the port of --metrics, write --metrics=[ADDRESS:]PORT")
    };
    assert!(meant(&["run", "99999", "--metrics"]));
    // The control.
    assert!(!meant(&["run", "99999"]));
}

/// Each option that is a number says which numbers there are, of what.
#[test]
fn numbers() {
    let table = "from 0 to 16777216";
    for (args, option, wrong_ones, range) in [
        // A ring holds 16384 frames, 16 of which are released late.
        (
            &["run", "lo"][..],
            "--backlog",
            ["0", "16369"],
            "from 1 to 16368 (frames)",
        ),
        (
            &["run", "lo"],
            "--flow-limit",
            ["101", "5%"],
            "from 0 to 100 (percent)",
        ),
        (
            &["run", "lo"],
            "--inline-ports",
            ["65536", "ptp"],
            "from 0 to 65535 (ports)",
        ),
        (&["run", "lo"], "--rps-flow-cnt", ["16777217", "4k"], table),
        (
            &["run", "lo"],
            "--rps-sock-flow-entries",
            ["16777217", "4k"],
            table,
        ),
        (&["set"], "--rps-flow-cnt", ["16777217", "4k"], table),
        (
            &["set"],
            "--rps-sock-flow-entries",
            ["16777217", "4k"],
            table,
        ),
        (
            &["set", "lo", "--rps-cpus=1"],
            "--queue",
            ["4294967296", "rx-0"],
            "(a receive queue)",
        ),
        (
            &["flows"],
            "--limit",
            ["0", "10001"],
            "from 1 to 10000 (flows)",
        ),
        (
            &["explain", "9"],
            "--limit",
            ["0", "10001"],
            "from 1 to 10000 (flows)",
        ),
        (
            &["poll", "--usecs=5"],
            "--pid",
            ["0", "nginx"],
            "from 1 to 2147483647 (a process id)",
        ),
        (
            &["poll", "--usecs=5"],
            "--port",
            ["0", "http"],
            "from 1 to 65535 (a port)",
        ),
        (
            &["poll", "--pid=1"],
            "--usecs",
            ["1000001", "50us"],
            "from 0 to 1000000 (microseconds)",
        ),
        (
            &["napi", "lo"],
            "--defer-hard-irqs",
            ["2147483648", "x"],
            "from 0 to 2147483647 (polls)",
        ),
        (
            &["napi", "lo"],
            "--gro-flush-timeout",
            ["0.1", "20us"],
            "from 0 to 18446744073709551615 (nanoseconds)",
        ),
        (
            &["napi", "lo"],
            "--irq-suspend-timeout",
            ["0.1", "20us"],
            "(nanoseconds)",
        ),
    ] {
        for number in wrong_ones.into_iter().chain(["-1", "1k", ""]) {
            let given = format!("{option}={number}");
            let told = format!("'{number}' for '{option} <");
            wrong(
                &[args, &[&given]].concat(),
                &[&told, "write a whole number from", range],
            );
        }
    }
}

/// What a start refuses on any host is refused in files, with file, line and keys.
#[test]
fn check() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().display().to_string();
    let checked = |text: &str| {
        std::fs::write(&file, text).expect("the file can be written");
        let output = RXSTEER.run(&["check", &path]);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), errors)
    };
    for (key, word) in [
        ("prepare = true", "puts settings back"),
        ("dry-run = true", "nothing that could go on"),
        ("follow-nat = true", "programs at tc ingress"),
        ("mode = \"softirq\"", "softirq mode ends with its process"),
        ("hash = \"device\"", "can't be pinned safely"),
        ("backlog-sched = \"fifo\"", "threads' budget"),
        (
            "devices = [\"veth*\"]",
            "softirq mode ends with its process",
        ),
    ] {
        let (code, errors) = checked(&format!("pin = true\n\n{key}\n"));
        let name = key.split(' ').next().expect("a key");
        let place = format!("{path}:3: {name}, with pin ({path}:1): ");
        let told = errors.contains(&place) && errors.contains(word);
        assert!(code == Some(2) && told, "{key}: {errors}");
        // The control: each is possible without the other.
        assert_eq!(checked(&format!("{key}\npin = false")).0, Some(0), "{key}");
    }
    let (code, errors) = checked("policy = \"rfs\"\nhash = \"symmetric\"");
    let place = format!("{path}:2: hash, with policy ({path}:1): ");
    assert!(code == Some(2) && errors.contains(&place), "{errors}");
    let (code, errors) = checked("devices = [\"eth0\", \"eth1\"]\nqueue = [\"0=1\"]");
    let place = format!("{path}:2: queue, with devices ({path}:1): say which device");
    assert!(code == Some(2) && errors.contains(&place), "{errors}");
    let (code, errors) = checked("devices = [\"veth*\"]\nqueue = [\"veth*:0=1\"]");
    let place = format!("{path}:2: queue, with devices ({path}:1): veth* stands for several");
    assert!(code == Some(2) && errors.contains(&place), "{errors}");
    assert_eq!(checked("mode = \"native\"\nhash = \"device\"").0, Some(0));
    assert_eq!(checked("pin = true\nmetrics = true").0, Some(0));
    for (text, line, why) in [
        ("\u{0}ELF", 1, "this is not a text file"),
        (
            "\n{\"devices\": [\"eth0\"]}",
            2,
            "this is JSON, and a configuration is TOML",
        ),
        (
            "devices = 3",
            1,
            "devices: write names in quotes, as devices = [\"eth0\"",
        ),
        (
            "pin = true\ndevices = \"/dev/net\"",
            2,
            "devices: \"/dev/net\": no device has such a name",
        ),
        ("metrics = 99999", 1, "a port from 1 to 65535"),
    ] {
        let (code, errors) = checked(text);
        let place = format!("{path}:{line}: ");
        let told = errors.contains(&place) && errors.contains(why);
        assert!(code == Some(2) && told, "{text:?}: {errors}");
    }
    // The controls.
    assert_eq!(checked("devices = \"eth0\"\nmetrics = 65535").0, Some(0));
}

/// Mistakes that each new start would repeat have an exit status of their own, for service managers
/// (dist/rxsteer.service). What the host lacks has not.
#[test]
fn mistakes_have_their_exit_status() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().display().to_string();
    let run = |text: &str, args: &[&str]| {
        std::fs::write(&file, text).expect("the file can be written");
        RXSTEER.run(&[&["run"], args].concat()).status.code()
    };
    let config = ["--config", &path];
    for text in [
        "polcy = \"rfs\"",
        "",
        "pin = true\nprepare = true",
        "devices = 3",
        "{",
    ] {
        assert_eq!(run(text, &config), Some(2), "{text}");
    }
    assert_eq!(run("", &["lo", "--pin", "--prepare"]), Some(2));
    assert_eq!(run("", &["lo", "--no-such-option"]), Some(2));
    // The control: the device may come.
    assert_eq!(run("devices = [\"no-such-device\"]", &config), Some(1));
    assert_eq!(run("", &["no-such-device"]), Some(1));
    assert_eq!(run("", &["--config", "/no/such/file"]), Some(1));
}

#[test]
fn set() {
    let all = [
        "--rps-cpus",
        "--policy",
        "--rps-sock-flow-entries",
        "--rps-flow-cnt",
    ];
    wrong(&["set"], &all);
    wrong(&["set", "lo"], &all);
    wrong(&["set", "--queue=0", "--policy=rps"], &["--rps-cpus"]);
    wrong(&["set", "--policy=nearest"], &["adaptive, rfs, rps or off"]);
}

#[test]
fn status() {
    wrong(&["status", "eth0"], &["eth0"]);
    for (seconds, why) in SECONDS {
        wrong(&["status", &format!("--interval={seconds}")], &[why]);
    }
}

#[test]
fn advise() {
    for (seconds, why) in SECONDS {
        wrong(&["advise", &format!("--seconds={seconds}")], &[why]);
    }
    wrong(
        &["advise", "--rps-cpus=3-1"],
        &["write the lower CPU first"],
    );
}

#[test]
fn top() {
    wrong(&["top", "eth0", "eth1"], &["eth1"]);
    for (seconds, why) in SECONDS {
        wrong(&["top", &format!("--interval={seconds}")], &[why]);
    }
}

#[test]
fn flows_and_explain() {
    wrong(&["flows", "eth0"], &["eth0"]);
    wrong(&["explain"], &["<FLOW|HASH|PID|PORT>"]);
    for (target, why) in [
        ("eth0", "write PROTOCOL/ADDRESS:PORT/LOCAL-PORT"),
        ("eth0", "pid:NUMBER asks about a process"),
        ("udp/192.0.2.1/9", "is not an address"),
        ("0x123456789", "up to 8 hex digits"),
        ("port:65536", "is not a port"),
        ("pid:x", "is not a process id"),
    ] {
        wrong(&["explain", target], &[why]);
    }
}

/// The control: the valid options used above are accepted.
#[test]
fn valid_usage_gets_further() {
    for cpus in ["1", "0x3", "0-1", "0,1", "0xf,ffffffff", "0-7:1/2", "auto"] {
        let option = format!("--rps-cpus={cpus}");
        let args = ["run", "no-such-device", "--backlog=16368", "--policy=off"];
        let output = RXSTEER.run(&[&args[..], &[&option, "--rps-flow-cnt=1"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        // Fails later: the device doesn't exist, or the right to steer is missing.
        assert_eq!(output.status.code(), Some(1), "{option}: {stderr}");
        assert!(output.stdout.is_empty(), "{output:?}");
        assert!(!stderr.contains('\u{1b}'), "colours in a pipe: {stderr}");
    }
}
