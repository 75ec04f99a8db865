// SPDX-License-Identifier: MIT OR Apache-2.0
//! docs/manual/status.schema.json describes what `rxsteer status --json` prints.

use crate::helpers::process::rxsteer;
use crate::helpers::scrape::after_traffic;
use anyhow::{Context, Result, ensure};
use rxlab::in_lab;
use rxlab::lab::link::LinkConfig;
use rxlab::testing::testbed::Testbed;
use serde_json::{Value, json};

#[test]
fn the_status_is_as_its_schema_says() -> Result<()> {
    in_lab!();
    let schema = include_str!("../../../../docs/manual/status.schema.json");
    let schema: Value = serde_json::from_str(schema)?;
    let schema = jsonschema::draft202012::new(&schema)?;
    let bed = Testbed::new(&LinkConfig::default())?;
    let running = after_traffic(&bed)?;
    let output = rxsteer(&running.netns, &["status", "--json"])?;
    let status: Value = serde_json::from_slice(&output.stdout)?;
    let errors: Vec<_> = schema.iter_errors(&status).collect();
    assert!(errors.is_empty(), "{errors:?}\n{status}");
    // What may be missing is there.
    for place in [
        "/devices/0/queues/0/backlogs/0/waits/half_below_us",
        "/devices/0/queues/0/load/pressure",
    ] {
        ensure!(status.pointer(place).is_some(), "no {place}: {status}");
    }
    // The control: other types and values, and no value.
    for (place, other) in [
        ("/pid", json!("7")),
        ("/devices", json!({})),
        ("/devices/0/queues/0/received", json!(-1)),
        ("/devices/0/queues/0/backlogs/0/cpu", json!(1.5)),
        ("/devices/0/queues/0/backlogs/0/waits/buckets", json!([1])),
        ("/devices/0/queues/0/load/pressure", json!("heavy")),
        ("/busy_poll", json!(0)),
    ] {
        let mut changed = status.clone();
        *changed.pointer_mut(place).context(place)? = other;
        assert!(!schema.is_valid(&changed), "{place}");
    }
    let mut changed = status.clone();
    let queue = changed
        .pointer_mut("/devices/0/queues/0")
        .context("a queue")?;
    let removed = queue.as_object_mut().context("an object")?.remove("inline");
    assert!(removed.is_some() && !schema.is_valid(&changed));
    Ok(())
}
