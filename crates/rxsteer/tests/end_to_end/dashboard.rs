// SPDX-License-Identifier: MIT OR Apache-2.0
//! The queries of dist/grafana.json name metrics and labels that `--metrics` serves.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;

use crate::helpers::scrape::{Family, Verdict, after_traffic, parse, promtool, scrape};
use anyhow::Result;
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::test_name;
use rxlab::testing::not_run;
use rxlab::testing::testbed::Testbed;
use serde_json::Value;

fn dashboard() -> Value {
    serde_json::from_str(include_str!("../../../../dist/grafana.json")).unwrap()
}

/// Texts with this key, wherever they are.
fn texts<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if name == key => found.push(text),
                    _ => texts(value, key, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| texts(value, key, found)),
        _ => {}
    }
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The names in a list such as `by (device, cpu)` or `{device=~"x", cpu="1"}`.
fn names<'a>(query: &'a str, open: &str, close: char) -> Vec<&'a str> {
    let mut found = Vec::new();
    for (at, _) in query.match_indices(open) {
        let list = &query[at + open.len()..];
        let list = list.split(close).next().unwrap_or_default();
        found.extend(list.split(',').map(|name| word(name.trim())));
    }
    found.retain(|name| !name.is_empty());
    found
}

/// Names in a query that no series has.
fn unknown(query: &str, metrics: &BTreeMap<String, Family>) -> Vec<String> {
    let mut unknown = Vec::new();
    // Prometheus adds the label `instance`.
    let mut labels = BTreeSet::from(["instance"]);
    for (at, _) in query.match_indices("rxsteer_") {
        let name = word(&query[at..]);
        match metrics
            .get(name)
            .filter(|family| !family.samples.is_empty())
        {
            Some(family) => labels.extend(family.samples[0].0.keys().map(String::as_str)),
            None => unknown.push(name.to_owned()),
        }
    }
    let used = [("by (", ')'), ("on (", ')'), ("{", '}')];
    let used = used.map(|(open, close)| names(query, open, close)).concat();
    let other = used.into_iter().filter(|name| !labels.contains(name));
    unknown.extend(other.map(str::to_owned));
    unknown
}

/// What promtool says to these queries, as rules in a file, with values for Grafana's variables.
fn check(queries: &[&str]) -> Result<Option<Verdict>> {
    let mut rules = "groups:\n- name: dashboard\n  rules:\n".to_owned();
    for (number, query) in queries.iter().enumerate() {
        let query = query.replace("$__rate_interval", "1m");
        let _ = writeln!(rules, "  - record: query{number}\n    expr: '{query}'");
    }
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(rules.as_bytes())?;
    promtool(&["rules", &file.path().to_string_lossy()], "")
}

#[test]
fn queries_find_what_they_name() -> Result<()> {
    in_lab!();
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = after_traffic(&bed)?;
    let metrics = parse(&scrape(&running.netns)?)?;
    let dashboard = dashboard();
    let mut queries = Vec::new();
    texts(&dashboard, "expr", &mut queries);
    assert!(queries.len() > 10, "{queries:?}");
    let mut variables = Vec::new();
    texts(&dashboard, "query", &mut variables);
    variables.retain(|query| query.starts_with("label_values("));
    assert_eq!(variables.len(), 2);
    for query in queries.iter().chain(&variables) {
        assert!(query.contains("rxsteer_"), "{query}");
        assert_eq!(unknown(query, &metrics), [""; 0], "{query}");
    }
    let mut legends = Vec::new();
    texts(&dashboard, "legendFormat", &mut legends);
    assert_eq!(legends.len(), queries.len());
    for (legend, query) in legends.iter().zip(&queries) {
        for label in names(legend, "{{", '}') {
            let kept = names(query, "by (", ')');
            let kept = kept.is_empty() || kept.contains(&label);
            let known = unknown(&format!("{query} by ({label})"), &metrics).is_empty();
            assert!(kept && known, "{legend}: {query}");
        }
    }
    // The control.
    for (query, wrong) in [
        (
            "rate(rxsteer_queue_sent_frames_total[1m])",
            "rxsteer_queue_sent_frames_total",
        ),
        ("sum by (flow) (rxsteer_backlog_stalled)", "flow"),
        ("sum by (le) (rxsteer_backlog_wait_seconds_count)", "le"),
        ("rxsteer_queue_moves_total{device=\"x\", cpu=\"1\"}", "cpu"),
    ] {
        assert_eq!(unknown(query, &metrics), [wrong], "{query}");
    }
    let Some(verdict) = check(&queries)? else {
        not_run(
            test_name!(),
            "promtool is missing: Debian's package prometheus has it",
        );
        return Ok(());
    };
    assert!(verdict.is_ok(), "{verdict:?}");
    let verdict = check(&["sum by device (rxsteer_backlogs)"])?;
    assert!(verdict.is_some_and(|v| v.is_err()), "the control");
    Ok(())
}
