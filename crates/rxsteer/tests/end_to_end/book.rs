// SPDX-License-Identifier: MIT OR Apache-2.0
//! The book: every page is in it, the commands in it are valid, and those of its first pages run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::helpers::process::{RXSTEER, Rxsteer};
use anyhow::{Context, Result, ensure};
use clap::Parser;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rxlab::in_lab;
use rxlab::lab::netns::Netns;
use rxlab::lab::rtnl;
use rxlab::testing::testbed::until;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(root().join(path)).with_context(|| path.to_owned())
}

/// The documents in docs/, as paths from there.
fn pages() -> Result<BTreeSet<String>> {
    let mut pages = BTreeSet::new();
    for folder in ["", "manual/"] {
        for entry in fs::read_dir(root().join("docs").join(folder))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.ends_with(".md") && name != "SUMMARY.md" {
                pages.insert(format!("{folder}{name}"));
            }
        }
    }
    Ok(pages)
}

#[test]
fn every_page_is_in_the_book() -> Result<()> {
    let summary = read("docs/SUMMARY.md")?;
    let target = |line: &str| {
        let (_, rest) = line.split_once("](")?;
        Some(rest.split_once(')')?.0.to_owned())
    };
    let listed: BTreeSet<_> = summary.lines().filter_map(target).collect();
    ensure!(listed == pages()?, "{listed:#?}");
    Ok(())
}

/// The words of a shell's line up to a comment, a pipe or a redirection. Single quotes alone quote.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut is_quoted = false;
    for (at, part) in line.split('\'').enumerate() {
        is_quoted = at % 2 == 1;
        if is_quoted {
            words.push(part.to_owned());
            continue;
        }
        for word in part.split_whitespace() {
            if word.starts_with(['#', '|', '>', '&']) {
                return words;
            }
            words.push(word.to_owned());
        }
    }
    assert!(!is_quoted, "a quote without its end: {line}");
    words
}

/// The command of rxsteer or rxlab in this line; a line of output that begins with a version is none.
fn command(line: &str) -> Option<Vec<String>> {
    let line = line.trim();
    let line = line.strip_prefix("$ ").unwrap_or(line);
    let line = line.strip_prefix("sudo ").unwrap_or(line);
    let words = words(line.starts_with("rx").then_some(line)?);
    let [program, first, ..] = &words[..] else {
        return None;
    };
    let is_program = ["rxsteer", "rxlab"].contains(&program.as_str());
    (is_program && !first.starts_with(|c: char| c.is_ascii_digit())).then_some(words)
}

/// The commands in blocks of code, and those in cells of tables. In a block with a prompt, lines without
/// it are output.
fn commands(text: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let (mut is_code, mut has_prompt) = (false, false);
    for line in text.lines() {
        if line.starts_with("```") {
            (is_code, has_prompt) = (!is_code, false);
        } else if is_code {
            has_prompt |= line.starts_with("$ ");
            found.extend(command(line).filter(|_| !has_prompt || line.starts_with("$ ")));
        } else if line.starts_with("| ") {
            let cells = line.split(" | ").map(|cell| cell.trim_matches([' ', '|']));
            let code = |cell: &str| {
                let code = cell.strip_prefix('`')?.strip_suffix('`')?;
                (!code.contains('`')).then(|| command(code))?
            };
            found.extend(cells.filter_map(code));
        }
    }
    found
}

/// Whether the program takes these words; for a command that is not complete, why not.
fn check(words: &[String]) -> Result<()> {
    match words[0].as_str() {
        "rxlab" => drop(rxlab::cli::Cli::try_parse_from(words)?),
        _ => drop(rxsteer::cli::Cli::try_parse_from(words)?),
    }
    Ok(())
}

#[test]
fn commands_in_the_documents_are_valid() -> Result<()> {
    let mut nr = 0;
    let pages = pages()?.into_iter().map(|page| format!("docs/{page}"));
    for page in pages.chain(["README.md".to_owned()]) {
        for words in commands(&read(&page)?) {
            check(&words).with_context(|| format!("{page}: {words:?}"))?;
            nr += 1;
        }
    }
    ensure!(nr > 50, "{nr} commands found");
    // The control: the same line with a misspelt option, in a block and in a table.
    for text in [
        "```console\n$ rxsteer run eth0 --polcy rps # as RPS\n```",
        "| Host | `rxsteer run eth0 --polcy rps` | fast |",
    ] {
        let found = commands(text);
        ensure!(found.len() == 1 && check(&found[0]).is_err(), "{found:?}");
    }
    Ok(())
}

/// What runs until it is stopped.
enum Running {
    Run(Rxsteer),
    Poll(std::process::Child),
}

/// Ends it as Ctrl-C does.
fn stop(running: Running) -> Result<()> {
    match running {
        Running::Run(rxsteer) => {
            let ended = rxsteer.stop(Signal::SIGINT)?;
            ensure!(ended.code == Some(0), "{ended:?}");
        }
        Running::Poll(mut child) => {
            kill(Pid::from_raw(child.id().try_into()?), Signal::SIGINT)?;
            ensure!(child.wait()?.success(), "poll fails");
        }
    }
    Ok(())
}

/// Runs a page's commands in their order, on a host with devices eth0 and eth1; the number of commands.
fn run(text: &str) -> Result<usize> {
    let host = Netns::new("host")?;
    host.run(|| rtnl::veths("eth", 2))?;
    let mut running = None;
    let mut nr = 0;
    for words in commands(text) {
        let said = words.join(" ");
        // This reads the configuration of the host that runs the test.
        if words[0] != "rxsteer" || said == "rxsteer check" {
            continue;
        }
        nr += 1;
        let mut command = host.command(RXSTEER)?;
        command.args(&words[1..]).stdin(Stdio::null());
        if words[1] != "run" && words[1] != "poll" {
            let output = command.output()?;
            ensure!(output.status.success(), "{said}: {output:?}");
            continue;
        }
        running.take().map_or(Ok(()), stop)?;
        running = Some(match words[1].as_str() {
            "run" => {
                command.stdout(Stdio::null());
                let rxsteer = Rxsteer::spawn(&host, command, true)?;
                Running::Run(rxsteer.map_err(|e| anyhow::anyhow!("{said}: {e:?}"))?)
            }
            _ => {
                let child = command
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()?;
                until("poll answers", || {
                    let status = host.command(RXSTEER)?.arg("status").output()?;
                    Ok(status.status.success().then_some(()))
                })?;
                Running::Poll(child)
            }
        });
    }
    running.take().map_or(Ok(()), stop)?;
    Ok(nr)
}

#[test]
fn the_first_page_runs() -> Result<()> {
    in_lab!();
    let nr = run(&read("docs/manual/start.md")?)?;
    ensure!(nr >= 6, "{nr} commands");
    // The control: a command that fails fails the page.
    ensure!(run("```console\n$ rxsteer status\n```").is_err());
    Ok(())
}

#[test]
fn commands_for_hosts_run() -> Result<()> {
    in_lab!();
    let nr = run(&read("docs/manual/which.md")?)?;
    ensure!(nr >= 12, "{nr} commands");
    // The control.
    ensure!(run("| a router | `rxsteer run eth9` |").is_err());
    Ok(())
}

/// rxsteer's sources in one line, as far as strings continue.
fn sources(folder: &Path) -> Result<String> {
    let mut all = String::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            all += &sources(&path)?;
        } else {
            let text = fs::read_to_string(&path)?;
            let lines = text.split("\\\n").enumerate();
            all.extend(lines.map(|(at, part)| if at == 0 { part } else { part.trim_start() }));
        }
    }
    Ok(all)
}

/// The messages in the first cells of the tables.
fn messages(text: &str) -> Vec<&str> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split_once('`'))
        .map(|(message, _)| message)
        .collect()
}

#[test]
fn messages_in_the_book_are_those_of_the_program() -> Result<()> {
    let sources = sources(&root().join("crates/rxsteer/src"))?;
    let page = read("docs/manual/failures.md")?;
    let messages = messages(&page);
    ensure!(messages.len() > 15, "{messages:?}");
    for message in messages {
        ensure!(sources.contains(message), "no source says: {message}");
    }
    // The control.
    ensure!(!sources.contains("this message does not exist"));
    Ok(())
}

/// mdbook makes a page for each document, if it is there.
#[test]
fn the_book_can_be_made() -> Result<()> {
    let target =
        std::env::var("CARGO_TARGET_DIR").map_or_else(|_| root().join("target"), Into::into);
    let mdbook = target.join("tools/mdbook/bin/mdbook");
    if !mdbook.is_file() {
        let why = "mdbook is missing (`make docs` installs it)";
        rxlab::testing::not_run("the_book_can_be_made", why);
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(mdbook);
    command
        .arg("build")
        .arg(root().join("docs"))
        .arg("--dest-dir");
    let output = command.arg(folder.path()).output()?;
    ensure!(output.status.success(), "{output:?}");
    for page in pages()? {
        let html = folder.path().join(Path::new(&page).with_extension("html"));
        ensure!(html.is_file(), "{} is missing", html.display());
    }
    Ok(())
}
