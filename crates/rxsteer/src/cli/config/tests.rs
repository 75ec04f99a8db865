// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration files as texts, and the options that they give.

use std::fs;

use super::*;
use crate::daemon::options::Pin;
use crate::datapath::policy::Policy;

/// The options of files with these texts.
fn read_all(texts: &[&str], given: &[&str]) -> Result<Options> {
    let folder = tempfile::tempdir()?;
    let file = |(number, text): (usize, &&str)| {
        let path = folder.path().join(number.to_string());
        fs::write(&path, text)?;
        Ok(path)
    };
    let files: Vec<PathBuf> = texts.iter().enumerate().map(file).collect::<Result<_>>()?;
    let line = [&["rxsteer", "run"], given].concat();
    let run = RunArgs::augment_args(Command::new("run"));
    let cli = Command::new("rxsteer").subcommand(run);
    super::read(&files, cli, line.iter().map(OsString::from))
}

fn read(text: &str, given: &[&str]) -> Result<Options> {
    read_all(&[text], given)
}

#[test]
fn keys_of_later_files_replace_those_of_earlier_ones() {
    let vendor = "
        devices = [\"eth0\"]
        policy = \"rfs\"
        dry-run = true
        tunnels = [\"gre\", \"vxlan\"]
        flow-limit = 5
        [[busy_poll]]
        comm = \"nginx\"
        usecs = 50
    ";
    let own = "
        devices = [\"eth1\"]
        policy = \"rps\"
        dry-run = false
        tunnels = []
        [[busy_poll]]
        port = 53
        usecs = 20
    ";
    let options = read_all(&[vendor, "", own], &[]).unwrap();
    assert_eq!(
        (&options.devices[..], options.policy),
        (&["eth1".to_owned()][..], Policy::RPS)
    );
    assert_eq!((options.dry_run, options.tunnels.len()), (false, 0));
    assert_eq!((options.flow_limit, options.busy_poll.len()), (5, 2));
    // The control: the order decides.
    let options = read_all(&[own, vendor], &[]).unwrap();
    assert_eq!(
        (&options.devices[..], options.policy),
        (&["eth0".to_owned()][..], Policy::RFS)
    );
    assert!(options.dry_run);
    // Mistakes of all files are named.
    let error = read_all(&["x-y-z = 1", vendor, "\npolcy = 1"], &[])
        .unwrap_err()
        .to_string();
    let lines: Vec<&str> = error.lines().collect();
    let [first, second] = lines[..] else {
        panic!("{error}")
    };
    assert!(
        first.contains("/0:1: ") && second.contains("/2:2: "),
        "{error}"
    );
}

#[test]
fn the_command_line_takes_precedence() {
    let text = "
        devices = [\"eth0\", \"eth1\"]
        policy = \"rfs\"
        backlog = 100
        dry-run = true
        ignore-unconnected = false
        follow-nat = true
        metrics = \"[::1]:9\"
        tunnels = [\"gre\", \"vxlan\"]
        queue = [\"eth0:0=1-1\", \"eth1:0=0-0\"]
        [[busy_poll]]
        comm = \"nginx\"
        usecs = 50
        [[busy_poll]]
        port = 53
        usecs = 20
        adaptive = true
    ";
    let options = read(text, &[]).unwrap();
    assert_eq!(options.devices, ["eth0", "eth1"]);
    assert_eq!(options.policy, Policy::RFS);
    assert_eq!((options.backlog, options.dry_run), (Some(100), true));
    assert!(!options.ignore_unconnected && options.follow_nat);
    assert_eq!(options.metrics, "[::1]:9".parse().ok());
    assert_eq!((options.queues.len(), options.tunnels.len()), (2, 2));
    let [nginx, port] = &options.busy_poll[..] else {
        panic!("{:?}", options.busy_poll);
    };
    assert_eq!((nginx.comm.as_deref(), nginx.usecs), (Some("nginx"), 50));
    assert_eq!((port.port, port.adaptive), (Some(53), true));

    let line = ["eth2", "--policy", "rps", "--backlog=7", "--queue=0=2"];
    let options = read(text, &line).unwrap();
    assert_eq!(options.devices, ["eth2"]);
    assert_eq!((options.policy, options.backlog), (Policy::RPS, Some(7)));
    assert_eq!(options.queues.len(), 1);
    let options = read(text, &["--metrics"]).unwrap();
    assert_eq!(options.metrics, "127.0.0.1:14779".parse().ok());
    assert!(options.dry_run);
}

#[test]
fn a_list_replaces_the_default() {
    let ports = |text: &str, given: &[&str]| {
        let options = read(&format!("devices = [\"eth0\"]\n{text}"), given);
        options.unwrap().inline_ports
    };
    assert_eq!(ports("", &[]), [123, 319]);
    assert_eq!(ports("inline-ports = [319, 320]", &[]), [319, 320]);
    assert_eq!(ports("inline-ports = []", &[]), [0; 0]);
    assert_eq!(ports("inline-ports = []", &["--inline-ports=1,2"]), [1, 2]);
    assert_eq!(ports("", &["--inline-ports=0"]), [0]);
}

#[test]
fn values_that_may_be_left_out() {
    let pin = |text: &str, given: &[&str]| read(text, given).unwrap().pin;
    let folder = Some(Pin::Folder("/sys/fs/bpf/x".into()));
    assert_eq!(pin("", &[]), None);
    assert_eq!(pin("pin = false", &[]), None);
    assert_eq!(pin("pin = true", &[]), Some(Pin::Default));
    assert_eq!(pin("pin = \"/sys/fs/bpf/x\"", &[]), folder);
    assert_eq!(pin("pin = true", &["--pin=/sys/fs/bpf/x"]), folder);
    assert_eq!(pin("", &["--pin"]), Some(Pin::Default));
    let metrics = |text: &str, given: &[&str]| read(text, given).unwrap().metrics;
    let default = "127.0.0.1:14779".parse().ok();
    assert_eq!(metrics("metrics = true", &[]), default);
    assert_eq!(metrics("", &["--metrics"]), default);
    assert_eq!(metrics("metrics = false", &[]), None);
    let later = |later| read_all(&["metrics = true\npin = true", later], &[]).unwrap();
    let options = later("metrics = false\npin = false");
    assert_eq!((options.metrics, options.pin), (None, None));
    assert_eq!(later("").metrics, default);
    for (wrong, why) in [
        ("pin = \"x\"", "whole path"),
        ("pin = 3", "whole path"),
        ("pin = {}", "pin: true, false or a text is expected"),
        (
            "metrics = 1.5",
            "metrics: true, false or a text is expected",
        ),
        ("metrics = \"x\"", "metrics"),
        // The control: no other option takes a truth value.
        ("backlog = true", "backlog: a text or a number is expected"),
    ] {
        let error = format!("{:#}", read(wrong, &[]).unwrap_err());
        assert!(error.contains(why), "{wrong}: {error}");
    }
}

#[test]
fn contradictions_are_named_with_their_lines() {
    let error = |texts: &[&str], given: &[&str]| {
        let error = read_all(texts, given).map(|_| ()).unwrap_err();
        format!("{error:#}")
    };
    let text = error(&["devices = [\"eth0\"]\npin = true\n\nprepare = true"], &[]);
    assert!(text.contains("/0:4: prepare, with pin ("), "{text}");
    assert!(
        text.contains("/0:2): --prepare puts settings back"),
        "{text}"
    );
    let text = error(
        &["pin = true", "\nmode = \"softirq\"\nhash = \"device\""],
        &[],
    );
    let lines: Vec<&str> = text.lines().collect();
    let [hash, mode, _] = lines[..] else {
        panic!("{text}")
    };
    assert!(
        hash.contains("/1:3: hash, with pin (") && hash.contains("/0:1): "),
        "{text}"
    );
    assert!(
        mode.contains("/1:2: mode, with pin (") && mode.contains("/0:1): "),
        "{text}"
    );
    // What the command line gives has no place, and may end a contradiction.
    let text = error(&["\npin = true"], &["--prepare"]);
    assert!(
        text.contains("/0:2: pin: --prepare puts settings back"),
        "{text}"
    );
    let text = error(&[""], &["--pin", "--prepare"]);
    assert!(text.starts_with("--prepare puts settings back"), "{text}");
    let options = read("pin = true\nmode = \"softirq\"", &["--mode=native"]).unwrap();
    assert_eq!(options.pin, Some(Pin::Default));
    // The controls.
    read("pin = true", &[]).unwrap();
    read("prepare = true\npin = false", &[]).unwrap();
}

#[test]
fn the_default_policy_depends_on_the_hash() {
    let device = "devices = [\"eth0\"]\n";
    let policy = |text: &str| read(&format!("{device}{text}"), &[]).unwrap().policy;
    assert_eq!(policy(""), Policy::ADAPTIVE);
    let by_hash = Policy::ADAPTIVE.without_following();
    assert_eq!(policy("hash = \"device\""), by_hash);
    assert_eq!(Options::new(["eth0"]).policy, Policy::ADAPTIVE);
    assert_eq!(policy("hash = \"device\"\npolicy = \"off\""), Policy::OFF);
}

#[test]
fn mistakes_are_named_with_their_line() {
    for (text, line, why) in [
        ("\npolcy = \"rfs\"", ":2: ", "did you mean \"policy\"?"),
        ("rps_cpus = \"3\"", ":1: ", "did you mean \"rps-cpus\"?"),
        ("xyz = 3", ":1: ", "there are "),
        ("# first\npolicy = \"fast\"", ":2: ", "fast"),
        ("policy = {}", ":1: ", "policy: a text"),
        ("policy = false", ":1: ", "policy: a text"),
        ("dry-run = 3", ":1: ", "true or false"),
        ("backlog = 0", ":1: ", "1 to 16368"),
        ("config = \"FILE\"", ":1: ", "another one"),
        ("devices = 3", ":1: ", "devices: write names in quotes"),
        ("devices = [3]", ":1: ", "devices = [\"eth0\", \"eth1\"]"),
        (
            "\nbacklog = \"many\"",
            ":2: ",
            "backlog: 'many': write a whole number from 1 to 16368 (frames)",
        ),
        ("pin = {}", ":1: ", "as in pin = true"),
        (
            "backlog = 99999999999999999999",
            ":1: ",
            "backlog: the number is too large",
        ),
        (
            "policy = [\"rfs\", \"rps\"]",
            ":1: ",
            "policy: one value is expected",
        ),
        (
            "mode = \"x\"",
            ":1: ",
            "'--mode <MODE>' [possible values: auto, native",
        ),
        (
            "policy = \"\\q\"",
            ":1: ",
            "policy: no character comes after \\",
        ),
        ("\n[busy_poll]\nusecs = 50", ":2: ", "a line [[busy_poll]]"),
        ("busy_poll = 3", ":1: ", "a line [[busy_poll]]"),
        ("busy_poll = [3]", ":1: ", "a line [[busy_poll]]"),
        (
            "[[busy_poll]]\npid = 1\nusecs = 99999999999999999999",
            ":3: ",
            "[[busy_poll]]: usecs: the number is too large",
        ),
        (
            "[[busy_poll]]\npid = \"x\"\nusecs = 5",
            ":2: ",
            "[[busy_poll]]: pid: 'x'",
        ),
        ("[[busy_poll]]\nport = 0\nusecs = 5", ":2: ", "port: '0': "),
        (
            "[[busy_poll]]\npid = 1\nusecs = 5\nprefer = 1",
            ":4: ",
            "prefer: true or false",
        ),
        (
            "\npolicy = rfs",
            ":2: ",
            "policy: the text has no quotes: write KEY = VALUE",
        ),
        ("policy: rfs", ":1: ", "policy: there is no value"),
        ("devices = [\"eth0\"\n", ":1: ", "devices = [\"eth0\"]"),
        (
            "pin = true\npin = true",
            ":2: ",
            "pin: this key is there twice: keep one",
        ),
        (
            "\n{\n\"devices\": [\"eth0\"]}",
            ":2: ",
            "this is JSON, and a configuration is TOML",
        ),
        ("mode = \"nativ\"", ":1: ", "did you mean \"native\"?"),
        (
            "devices = [\"eth0\"]\n[[busy_poll]]\nusecs = 50",
            ":2: ",
            "no sockets selected",
        ),
        (
            "devices = [\"eth0\"]\n[[busy_poll]]\npid = 1",
            ":2: ",
            "[[busy_poll]]: usecs is missing: add it, as usecs = 50",
        ),
        (
            "devices = [\"eth0\"]\n[[busy_poll]]\npid = 1\nusecs = 5\nbudget = 3",
            ":5: ",
            "budget",
        ),
        (
            "[[busy_poll]]\npid = 1\nusec = 5",
            ":3: ",
            "[[busy_poll]]: unknown key \"usec\": did you mean \"usecs\"?",
        ),
        ("[busy", ":1: ", "]"),
    ] {
        let error = format!("{:#}", read(text, &[]).map(|_| ()).unwrap_err());
        assert!(error.contains(why), "{text:?}: {error}");
        assert!(error.contains(line), "{text:?}: {error}");
        for jargon in [
            "expected a",
            "literal",
            "sequence",
            "..=",
            "u32",
            "u16",
            "invalid type",
            "digit",
        ] {
            assert!(!error.contains(jargon), "{text:?}: {error}");
        }
    }
}

#[test]
fn all_mistakes_are_named_in_the_order_of_lines() {
    let text = "
        policy = \"fast\"
        backlog = 0
        devics = [\"eth0\"]
        dry-run = true
        [[busy_poll]]
        usecs = 50
        [[busy_poll]]
        port = 53
        usecs = 50
        [[busy_poll]]
        exe = \"nginx\"
        usecs = 50
    ";
    let error = read(text, &[]).unwrap_err().to_string();
    let lines: Vec<&str> = error.lines().collect();
    let expected = [
        ":2: policy: 'fast': ",
        ":3: backlog: '0': ",
        ":4: unknown key",
        ":6: [[busy_poll]]: no sockets",
        ":11: [[busy_poll]]: nginx",
    ];
    assert_eq!(lines.len(), expected.len(), "{error}");
    for (line, part) in lines.iter().zip(expected) {
        assert!(line.contains(part), "{error}");
    }
}

#[test]
fn one_device_needs_no_brackets() {
    let devices = |text: &str| read(text, &[]).unwrap().devices;
    assert_eq!(devices("devices = \"eth0\""), ["eth0"]);
    assert_eq!(devices("devices = [\"eth0\", \"eth1\"]"), ["eth0", "eth1"]);
    assert_eq!(devices("devices = []"), [""; 0]);
}

#[test]
fn what_is_no_text_is_named_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rxsteer.toml");
    let error = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        content(std::slice::from_ref(&file))
            .map(|_| ())
            .map_err(|e| format!("{e:#}"))
    };
    let place = |line: u32| format!("{}:{line}: ", file.display());
    for (bytes, line, why) in [
        (
            &b"\x7fELF\x02\x01\x01\0\0\xff"[..],
            1,
            "this is not a text file",
        ),
        // UTF-16.
        (b"\xff\xfep\0i\0n\0", 1, "this is not a text file"),
        // Latin-1.
        (b"# Ger\xe4t\npin = true", 1, "0xe4"),
        (b"pin = true\n\n# Ger\xe4t", 3, "encoding UTF-8"),
    ] {
        let said = error(bytes).unwrap_err();
        assert!(
            said.starts_with(&place(line)) && said.contains(why),
            "{said}"
        );
    }
    // The control: the same text in UTF-8.
    assert_eq!(error("# Ger\u{e4}t\npin = true".as_bytes()), Ok(()));
}
