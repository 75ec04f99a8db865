// SPDX-License-Identifier: MIT OR Apache-2.0
//! An answer as text.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::api::explain::{Application, Explanation, Explanations, Seen, Unknown, Wait};
use crate::api::flows::{Entry, Location, Reason};
use crate::cli::flows::ago;
use crate::datapath::load::Pressure;
use crate::datapath::policy::Policy;

/// The answer of `rxsteer explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The target of the question as it was interpreted: `pid:1`, `port:9`, a flow, a hash.
    pub target: String,
    /// Remarks on the question.
    pub notes: Vec<String>,
    /// The answer of the running rxsteer.
    #[serde(flatten)]
    pub explanations: Explanations,
}

/// The text; ends with a newline.
pub fn render(answer: &Answer) -> String {
    let all = &answer.explanations;
    let mut out = String::new();
    for note in &answer.notes {
        let _ = writeln!(out, "{note}");
    }
    for (i, explanation) in all.flows.iter().enumerate() {
        if i > 0 || !answer.notes.is_empty() {
            out.push('\n');
        }
        one(&mut out, explanation, all);
    }
    if all.flows.len() < all.total {
        let _ = writeln!(
            out,
            "\n{} of {} flows, those with the most packets",
            all.flows.len(),
            all.total
        );
    }
    out
}

fn one(out: &mut String, e: &Explanation, all: &Explanations) {
    if e.seen.is_empty() {
        let _ = writeln!(out, "{}", e.not_seen(&all.devices));
        return;
    }
    let name = e.flow.map_or("unknown flow".to_owned(), |f| f.to_string());
    let _ = writeln!(out, "{name} (hash {})", e.hash);
    let a = &e.application;
    let _ = match a.unknown {
        None => writeln!(out, "  application: {}", application(a)),
        Some(unknown) => writeln!(
            out,
            "  application: not known where: {}",
            why_unknown(unknown, all.policy, &all.not_followed)
        ),
    };
    for seen in &e.seen {
        let entry = &seen.entry;
        let _ = writeln!(out, "  {} queue {}:", entry.device, entry.queue);
        let _ = writeln!(out, "    {}", was_at(seen));
        if a.unknown != Some(Unknown::Closed) {
            let next = [wants(seen)].into_iter();
            for line in next.chain(pressure(seen)).chain(waits(seen)) {
                let _ = writeln!(out, "    {line}");
            }
        }
        let _ = writeln!(
            out,
            "    {}; moved {} time{}.",
            packets(entry.packets.into()),
            entry.moves,
            if entry.moves == 1 { "" } else { "s" },
        );
        if let Some(dropped) = dropped(seen) {
            let _ = writeln!(out, "    {dropped}");
        }
        let _ = writeln!(
            out,
            "    dev_flow_table slot {} of {}; rps_map slot {} of {}: {}{}",
            seen.slot,
            seen.slots,
            seen.rps_slot,
            seen.rps_slots,
            seen.rps,
            if seen.rps_offline { ", offline" } else { "" },
        );
    }
    let _ = writeln!(
        out,
        "  sock_flow_table entry {} of {}: {}",
        a.entry,
        a.entries,
        match (a.value.0, a.cpu) {
            (0, _) => "empty".to_owned(),
            (_, Some(cpu)) => format!("{}, CPU {cpu}", a.value),
            (_, None) if a.polls => format!("{}, polls", a.value),
            (_, None) if a.unknown == Some(Unknown::Closed) => format!("{}, closed", a.value),
            (_, None) => format!("{}, not this flow's", a.value),
        }
    );
    for other in &e.others {
        let _ = writeln!(
            out,
            "  {} queue {}: slot {} is now that of {}",
            other.device, other.queue, other.slot, other.owner
        );
    }
}

fn application(a: &Application) -> String {
    if a.polls {
        return "its reads poll the queue themselves (SO_BUSY_POLL), wherever they run.".to_owned();
    }
    let cpu = a.cpu.unwrap_or_default();
    let offline = match a.offline {
        true => ", which is offline now",
        false => "",
    };
    format!("it last took or sent data of this flow on CPU {cpu}{offline}.")
}

/// Where the last packet was processed: in the past tense.
fn was_at(seen: &Seen) -> String {
    let entry = &seen.entry;
    let place = match (entry.location, entry.polling_cpu) {
        (Location::Cpu(cpu), _) if seen.softirq => {
            format!("on CPU {cpu}, from its softnet backlog")
        }
        (Location::Cpu(cpu), _) => {
            format!("on CPU {cpu}, by the thread of the queue's backlog there")
        }
        (Location::Inline, Some(cpu)) => {
            format!("where it was received (INLINE); CPU {cpu} was the last to poll the queue")
        }
        (Location::Inline, None) => "where it was received (INLINE)".to_owned(),
    };
    format!(
        "Its last packet, {} ago, was processed {place}.",
        ago(entry.idle_seconds)
    )
}

/// The wanted location and the reason: in the present tense if the tables determine it, in the past
/// tense if it was decided by the load.
fn wants(seen: &Seen) -> String {
    let entry = &seen.entry;
    let (decided, why) = why(seen);
    let place = match (decided, entry.wanted == entry.location, entry.wanted) {
        (false, true, _) => "It wants to be there".to_owned(),
        (false, false, Location::Inline) => {
            "It wants to be processed where it is received (INLINE)".to_owned()
        }
        (false, false, Location::Cpu(cpu)) => format!("It wants to be on CPU {cpu}"),
        (true, true, _) => "The last decision was to leave it there".to_owned(),
        (true, false, Location::Inline) => {
            "The last decision was to process it where it is received (INLINE)".to_owned()
        }
        (true, false, Location::Cpu(cpu)) => {
            format!("The last decision was to move it to CPU {cpu}")
        }
    };
    format!("{place}: {why}.")
}

/// Whether the wanted location was decided by the load, and the reason.
fn why(seen: &Seen) -> (bool, String) {
    let entry = &seen.entry;
    // If the CPU that the flow wants polls, the wanted location is INLINE.
    let cpu = match (entry.wanted, entry.polling_cpu) {
        (Location::Inline, Some(cpu)) => format!("CPU {cpu}, which also polls the queue"),
        _ => "that CPU".to_owned(),
    };
    let polling = polling(entry.polling_cpu);
    let tables = |why: String| (false, why);
    let decided = |why: String| (true, why);
    match entry.reason {
        Reason::Application => tables(format!("its application is on {cpu}")),
        Reason::BusyPoll => {
            tables("its application polls the queue, and would not find it elsewhere".to_owned())
        }
        Reason::Rps => tables(match entry.application_cpu {
            None => format!("without the CPU of an application, its hash chooses {cpu}"),
            Some(of) if entry.application_offline => {
                format!("its application's CPU {of} is offline, and its hash chooses {cpu}")
            }
            Some(of) => format!(
                "its application's CPU {of} takes no flows (it is not among --rps-cpus, or its backlog \
                 is stalled), and its hash chooses {cpu}"
            ),
        }),
        Reason::PolicyOff => tables("policy off steers nothing".to_owned()),
        Reason::Offline => tables("every CPU that it could want is offline or stalled".to_owned()),
        Reason::Undecided => tables(
            "it did so at its last packet, and the load decides about its next ones".to_owned(),
        ),
        Reason::Room => decided(format!("{polling}, which polled the queue, had room")),
        Reason::Unhelpful => decided(
            "no more was delivered when the flows of its queue moved; that is tried again"
                .to_owned(),
        ),
        Reason::NoGain => decided(no_gain(entry)),
        Reason::Consumer => decided("its application was there, and that CPU had room".to_owned()),
        Reason::Spread => decided("that CPU of its queue had room".to_owned()),
        Reason::IdleCpu => decided(format!(
            "that CPU was idle, and is near {}, which was busy",
            base(entry)
        )),
        Reason::Merged => decided(
            "GRO merges its segments there, which costs less than a hop for each of them"
                .to_owned(),
        ),
        Reason::Stay => decided(match entry.wanted {
            Location::Inline => format!(
                "{polling}, which polled the queue, had no room for more flows, but kept those it \
                 had"
            ),
            Location::Cpu(_) => "another CPU would have gained it nothing".to_owned(),
        }),
    }
}

/// The polling CPU.
fn polling(cpu: Option<u32>) -> String {
    cpu.map_or("the CPU".to_owned(), |cpu| format!("CPU {cpu}"))
}

/// The CPU by the tables, and its origin.
fn base(entry: &Entry) -> String {
    match (entry.base, entry.application_cpu) {
        (Some(Location::Cpu(cpu)), Some(application)) if cpu == application => {
            format!("CPU {cpu}, its application's")
        }
        (Some(Location::Cpu(cpu)), _) => format!("CPU {cpu}, its hash's choice"),
        _ => "the CPU that the tables say".to_owned(),
    }
}

/// Why a flow stays although it may leave.
fn no_gain(entry: &Entry) -> String {
    match entry.base {
        Some(Location::Cpu(_)) => format!(
            "no other CPU could take it: {}, and the CPUs of its queue had no room",
            base(entry)
        ),
        _ => "no other CPU of its queue had room".to_owned(),
    }
}

fn packets(number: u64) -> String {
    format!("{number} packet{}", if number == 1 { "" } else { "s" })
}

/// The load of the polling CPU, if the policy depends on it.
fn pressure(seen: &Seen) -> Option<String> {
    let load = seen.decision.as_ref()?.load.as_ref()?;
    let state = match load.pressure {
        Pressure::Relaxed => "has room for all flows of the queue",
        Pressure::Full => "has no room for more flows",
        Pressure::Saturated => "is saturated",
        Pressure::Kept => "keeps all flows of the queue, since moving them did not help",
        Pressure::Polled => "runs an application that polls for its own packets",
    };
    Some(format!(
        "Now {}, which polls the queue, {state}: busy {} % of the time, {} % in its polls.",
        polling(load.polling_cpu),
        load.busy_percent,
        load.polls_percent
    ))
}

/// The flow's dropped packets, and the reasons according to its queue's counters.
fn dropped(seen: &Seen) -> Option<String> {
    let of_queue = seen.queue_dropped.as_ref()?;
    let reasons = [
        (of_queue.full, "a backlog was full"),
        (
            of_queue.shed,
            "a flow had to leave a backlog and could not yet (shed)",
        ),
        (
            of_queue.limited,
            "a backlog was half full, and the flow large",
        ),
    ];
    let reasons: Vec<_> = reasons.iter().filter(|(count, _)| *count > 0).collect();
    let why = match &reasons[..] {
        [] => return None,
        [(_, why)] => (*why).to_owned(),
        several => {
            let each = several
                .iter()
                .map(|(count, why)| format!("{count}, since {why}"));
            let each: Vec<_> = each.collect();
            format!("this queue dropped {}", each.join("; "))
        }
    };
    let was = if seen.entry.dropped == 1 {
        "was"
    } else {
        "were"
    };
    Some(format!(
        "{} of it {was} dropped before the stack: {why}.",
        packets(seen.entry.dropped.into())
    ))
}

/// The event that the flow waits for, in lines.
fn waits(seen: &Seen) -> Vec<String> {
    let thread = |name: &Option<String>, cpu: u32| match name {
        Some(name) => format!("CPU {cpu}'s thread ({name})"),
        None if seen.softirq => format!("CPU {cpu}'s softnet backlog"),
        None => format!("CPU {cpu}'s thread"),
    };
    let mut lines = match &seen.waits {
        None => Vec::new(),
        Some(Wait::Packet) => vec![
            "All its packets so far have been delivered: it moves with its next one.".to_owned(),
        ],
        Some(Wait::Backlog {
            cpu,
            frames,
            thread: name,
        }) => vec![
            "It has to wait, or its next packets would overtake those that are queued.".to_owned(),
            format!(
                "{} still has {} to process, up to its last one. If that number does \
                 not fall, something else keeps CPU {cpu} busy.",
                thread(name, *cpu),
                packets(*frames),
            ),
        ],
        Some(Wait::Delivery { cpu, .. }) if seen.softirq => vec![
            "It has to wait, or its next packets would overtake earlier ones.".to_owned(),
            format!(
                "CPU {cpu} has taken all its packets out of its softnet backlog, and may be at work on \
                 the last one."
            ),
        ],
        Some(Wait::Delivery { cpu, thread: name }) => vec![
            "It has to wait, or its next packets would overtake earlier ones.".to_owned(),
            format!(
                "{} has dequeued all its packets and may be at work on them: they are known to be \
                 delivered when it sleeps, or holds back nothing to merge (GRO) at its next packets.",
                thread(name, *cpu),
            ),
        ],
        Some(Wait::Poll) => vec![
            "It moves with its next packet, if by then the poll that received its last one has ended \
             and nothing is held back to be merged with later packets (GRO)."
                .to_owned(),
        ],
        Some(Wait::NewBacklog { cpu, asked: true }) => vec![format!(
            "It stays until the queue's backlog for CPU {cpu}, a thread there, has been made. It has \
             been asked for; if that takes longer than a moment, see what `rxsteer run` says."
        )],
        Some(Wait::NewBacklog { cpu, asked: false }) => vec![format!(
            "The queue has no backlog for CPU {cpu} yet, that is a thread there: its next packet asks \
             for one, and it stays until then."
        )],
    };
    if seen.entry.shed {
        lines.push(
            "The backlog was full: until it can leave, its packets are dropped (shed).".to_owned(),
        );
    }
    lines
}

/// Why the CPU of the flow's application is unknown.
fn why_unknown(unknown: Unknown, policy: Policy, not_followed: &[String]) -> String {
    let text = match unknown {
        Unknown::PolicyRps => {
            return format!(
                "policy {policy} does not follow applications (`rxsteer set --policy {}` does).",
                policy.with_following()
            );
        }
        Unknown::PolicyOff => "policy off steers nothing (`rxsteer set --policy rfs`).",
        Unknown::NoTable => {
            "rps_sock_flow_entries or rps_flow_cnt is 0, so no application is followed (`rxsteer \
             set` changes both)."
        }
        Unknown::Unsupported => {
            "this kernel does not let applications be followed; `rxsteer run` has said why."
        }
        Unknown::DeviceHash => {
            "with --hash device flows have the network card's hash, which sockets don't know."
        }
        Unknown::SymmetricHash => {
            "with --hash symmetric flows have a hash that sockets don't know, unless --follow-nat \
             tells them."
        }
        Unknown::NoPorts => {
            "its packets carry no ports (fragments, ICMP, ESP, …), so the socket they are for can't \
             be told."
        }
        Unknown::Tunnel => {
            "it is a tunnel, which the kernel unpacks; to follow the flows inside, start rxsteer \
             with --tunnels."
        }
        Unknown::EntryTaken => {
            "another flow has its entry of the sock_flow_table. If that is often so, make the table \
             larger: `rxsteer set --rps-sock-flow-entries`."
        }
        Unknown::Unconnected => {
            "its UDP socket is not connected, and the application was not seen to ask who sent: use \
             recvfrom() or recvmsg() with an address, or connect() the socket."
        }
        Unknown::Closed => "it has closed its socket, and late packets go where their hash says.",
        Unknown::NotSeen => {
            "no application was seen to take or send its data. Seen are recvmsg(), sendmsg() and all \
             calls like them, on a connected socket or when they ask who sent; not seen are \
             splice(), zero-copy reads, sockets behind NAT without --follow-nat, and packets that are \
             only forwarded."
        }
    };
    match unknown {
        Unknown::Unconnected if !not_followed.is_empty() => {
            format!(
                "its UDP socket is not connected, and {}.",
                not_followed.join("; ")
            )
        }
        Unknown::NotSeen if !not_followed.is_empty() => {
            format!("{text} On this host {}.", not_followed.join("; "))
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
#[path = "words_tests.rs"]
mod tests;
