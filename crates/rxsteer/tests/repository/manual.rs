// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tables of options and the example of a configuration in docs/manual/ say what `--help` and the
//! man pages say, the table of metrics what their HELP says, and the schema what the types say. With
//! `RXSTEER_WRITE_MANUAL=1` in the environment they are written instead of compared.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, Command, CommandFactory};
use rxsteer::api::status::Status;
use rxsteer::cli::{Cli, example, status};
use rxsteer::metrics::exposition;

/// Whether the manual is to be written instead of compared.
fn writes() -> bool {
    std::env::var_os("RXSTEER_WRITE_MANUAL").is_some()
}

/// Compares the part of a page between two comments with what it should be, or writes it.
fn part(page: &Path, name: &str, should: &str) {
    let text = fs::read_to_string(page).unwrap_or_else(|e| panic!("{}: {e}", page.display()));
    let [begin, end] = ["", "end of "].map(|prefix| format!("<!-- {prefix}{name} -->\n"));
    let parts = text.split_once(&begin).and_then(|(before, rest)| {
        let (is, after) = rest.split_once(&end)?;
        Some((before, is, after))
    });
    let (before, is, after) = parts.unwrap_or_else(|| panic!("{}: no {name}", page.display()));
    if writes() {
        fs::write(page, [before, &begin, should, &end, after].concat()).unwrap();
        return;
    }
    assert!(
        is == should,
        "{}: its {name} are not those of the program: run this test once with \
         RXSTEER_WRITE_MANUAL=1.\n{should}",
        page.display()
    );
}

fn manual() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/manual")
}

/// An option with its value's name, or a positional argument's name.
fn synopsis(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let value = match arg.get_possible_values() {
        values if values.is_empty() || !arg.get_action().takes_values() => names.join(" "),
        values => {
            let names = values.iter().map(|value| value.get_name().to_owned());
            names.collect::<Vec<_>>().join("\\|")
        }
    };
    match arg.get_long() {
        Some(long) if arg.is_require_equals_set() => format!("`--{long}[={value}]`"),
        Some(long) if arg.get_action().takes_values() => format!("`--{long} {value}`"),
        Some(long) => format!("`--{long}`"),
        None => format!("`{value}`").replace('|', "\\|"),
    }
}

/// Its description as one paragraph of Markdown, with values and default.
fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help()).expect("described");
    let help = help.to_string();
    let paragraphs = help.split("\n\n");
    let paragraphs = paragraphs.map(|text| text.trim_end_matches('.').replace('\n', " "));
    let mut text = paragraphs.collect::<Vec<_>>().join(". ");
    let values = arg.get_possible_values();
    let described = values.iter().filter_map(|value| {
        let help = value.get_help()?;
        Some(format!("`{}`, {help}", value.get_name()))
    });
    let described = described.collect::<Vec<_>>().join("; ");
    if arg.get_action().takes_values() && !described.is_empty() {
        let _ = write!(text, ": {described}");
    }
    let defaults = arg.get_default_values().iter();
    let defaults: Vec<_> = defaults.map(|value| value.to_string_lossy()).collect();
    if arg.get_action().takes_values() && !defaults.is_empty() {
        let _ = write!(text, ". Default: `{}`", defaults.join(","));
    }
    text.replace('|', "\\|").replace('[', "\\[")
}

/// The subcommands that have a page.
fn pages(cli: &mut Command) -> impl Iterator<Item = &Command> {
    cli.build();
    let shown = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    cli.get_subcommands().filter(shown)
}

fn table(command: &Command) -> String {
    let mut text = "| Option | Meaning |\n|---|---|\n".to_owned();
    let own = |arg: &&Arg| !["help", "version"].contains(&arg.get_id().as_str());
    for arg in command.get_arguments().filter(own) {
        let _ = writeln!(text, "| {} | {} |", synopsis(arg), meaning(arg));
    }
    text
}

#[test]
fn the_manual_has_the_options_of_the_command_line() {
    let mut cli = Cli::command();
    let mut nr_pages = 0;
    for command in pages(&mut cli) {
        let page = manual().join(format!("{}.md", command.get_name()));
        part(&page, "options", &table(command));
        nr_pages += 1;
    }
    assert!(nr_pages > 9, "{nr_pages} pages");
    // The control: another option is another table.
    let mut other = Cli::command().find_subcommand("status").unwrap().clone();
    let before = table(&other);
    other = other.arg(Arg::new("new").long("new").help("A new option"));
    assert_ne!(before, table(&other));
}

/// The table of metrics, from their HELP and TYPE.
fn metrics() -> String {
    let text = exposition::text(Status::default()).unwrap();
    let mut table = "| Metric | Type | Meaning |\n|---|---|---|\n".to_owned();
    let mut lines = text.lines().filter(|line| line.starts_with("# "));
    while let (Some(help), Some(kind)) = (lines.next(), lines.next()) {
        let (name, help) = help["# HELP ".len()..].split_once(' ').unwrap();
        let kind = kind.rsplit(' ').next().unwrap();
        let _ = writeln!(table, "| `{name}` | {kind} | {help} |");
    }
    table
}

#[test]
fn the_manual_has_the_metrics() {
    part(&manual().join("metrics.md"), "metrics", &metrics());
}

/// Compares a file with what it should be, or writes it.
fn whole(name: &str, should: &str) {
    let path = manual().join(name);
    if writes() {
        fs::write(&path, should).unwrap();
    }
    let is = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        is == should,
        "{} is not that of the program: run this test once with RXSTEER_WRITE_MANUAL=1",
        path.display()
    );
}

#[test]
fn the_manual_has_the_example_of_a_configuration() {
    let licence = "# SPDX-License-Identifier: MIT OR Apache-2.0\n";
    whole("rxsteer.toml", &[licence, &example::text()].concat());
}

#[test]
fn the_manual_has_the_schema_of_the_status() {
    let schema = serde_json::to_string_pretty(&status::schema()).unwrap();
    whole("status.schema.json", &(schema + "\n"));
}

#[test]
fn each_subcommand_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let rxsteer = env!("CARGO_BIN_EXE_rxsteer");
    let man = std::process::Command::new(rxsteer)
        .arg("man")
        .arg(folder.path())
        .status();
    assert!(man.unwrap().success());
    let mut cli = Cli::command();
    for command in pages(&mut cli) {
        let path = folder
            .path()
            .join(format!("rxsteer-{}.8", command.get_name()));
        let page = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for long in command.get_arguments().filter_map(Arg::get_long) {
            // As roff has it.
            let option = format!("\\-\\-{}", long.replace('-', "\\-"));
            assert!(page.contains(&option), "{} lacks {option}", path.display());
        }
    }
}
