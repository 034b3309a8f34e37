//! Tests of the metrics: the text format, the labels, and the dashboard that asks for them.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::routes::tests::clients;

/// The samples: name, labels and value. Panics: a line is not of the text format 0.0.4.
fn samples(text: &str) -> Vec<(String, BTreeMap<String, String>, f64)> {
    let mut found = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (head, value) = line.rsplit_once(' ').expect("a value");
        let value = value.parse().expect("a number");
        let (name, labels) = match head.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}').expect("a brace")),
            None => (head, ""),
        };
        let is_name =
            |letter: char| letter.is_ascii_lowercase() || letter == '_' || letter.is_ascii_digit();
        assert!(name.chars().all(is_name), "{line}");
        found.push((name.to_owned(), labels_of(labels), value));
    }
    found
}

fn labels_of(mut rest: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    while !rest.is_empty() {
        let (name, after) = rest.split_once("=\"").expect("a label");
        let (mut value, mut letters) = (String::new(), after.char_indices());
        let end = loop {
            match letters.next().expect("a closing quote") {
                (at, '"') => break at,
                (_, '\\') => match letters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, letter @ ('\\' | '"'))) => value.push(letter),
                    other => panic!("{other:?} is no escape"),
                },
                (_, letter) => value.push(letter),
            }
        };
        labels.insert(name.trim_start_matches(',').to_owned(), value);
        rest = &after[end + 1..];
    }
    labels
}

#[test]
fn every_sample_has_a_type_a_unit_and_only_known_labels() {
    let text = text(&clients());
    let mut once = BTreeSet::new();
    let mut emulated = 0;
    for (name, labels, value) in samples(&text) {
        let kind = |name: &str, kind: &str| text.contains(&format!("# TYPE {name} {kind}\n"));
        let part = ["_bucket", "_sum", "_count"].iter();
        let whole = part.filter_map(|part| name.strip_suffix(part)).next();
        assert!(
            kind(&name, "gauge")
                ^ kind(&name, "counter")
                ^ whole.is_some_and(|whole| kind(whole, "histogram")),
            "{name}"
        );
        assert_eq!(kind(&name, "counter"), name.ends_with("_total"), "{name}");
        assert!(
            name.starts_with("undercroft_") && value.is_finite(),
            "{name}"
        );
        let known = [
            "pid", "command", "class", "name", "uid", "tier", "le", "version",
        ];
        assert!(
            labels.keys().all(|key| known.contains(&key.as_str())),
            "{labels:?}"
        );
        if name == "undercroft_tier_emulated" {
            assert_eq!(
                value == 1.0,
                labels["tier"].ends_with("(emulated)"),
                "{labels:?}"
            );
            emulated += u32::from(value == 1.0);
        }
        assert!(once.insert((name, labels)), "a sample is there twice");
    }
    assert_eq!(emulated, 2);
    let of = |key: &str, value: &str| {
        let has = |labels: &BTreeMap<String, String>| labels.get(key).is_some_and(|is| is == value);
        once.iter().any(|(_, labels)| has(labels))
    };
    assert!(
        of("command", "odd \"na\\me\n<b>"),
        "a name with quotes and a line end comes through as it is"
    );
    assert!(of("command", "redis-server") && of("pid", "100") && of("class", "web"));
    assert!(of("name", "web-1") && of("uid", "1000"));
    assert!(of("version", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_virtual_machine_has_metrics_of_its_own_and_others_have_none() {
    let all = samples(&text(&clients()));
    let of_guest = all
        .iter()
        .filter(|of| of.0.starts_with("undercroft_guest_"));
    let of_guest: Vec<_> = of_guest
        .map(|(name, labels, value)| (&name[17..], labels["pid"].as_str(), *value))
        .collect();
    let mib = |count: f64| count * 1_048_576.0;
    let expected = [
        ("bytes", "200", mib(160.0)),
        ("resident_bytes", "200", mib(60.0)),
        ("stored_bytes", "200", mib(90.0)),
        ("given_back_bytes_total", "200", mib(30.0)),
        ("locked_bytes", "200", 0.0),
    ];
    assert_eq!(of_guest, expected);
}

#[test]
fn the_histogram_counts_up_to_all_faults_and_is_absent_where_a_run_tells_none() {
    let all = samples(&text(&clients()));
    let of = |name: &str| -> Vec<(String, f64)> {
        let named = all.iter().filter(|of| of.0 == name);
        let bound = |labels: &BTreeMap<String, String>| labels.get("le").cloned();
        named
            .map(|(_, labels, value)| {
                assert_eq!(labels["pid"], "100");
                (bound(labels).unwrap_or_default(), *value)
            })
            .collect()
    };
    let bound = |le: &str, count: f64| (le.to_owned(), count);
    let expected = [
        bound("0.00025", 200.0),
        bound("10", 250.0),
        bound("+Inf", 251.0),
    ];
    assert_eq!(of("undercroft_fault_latency_seconds_bucket"), expected);
    assert_eq!(of("undercroft_fault_latency_seconds_count")[0].1, 251.0);
    assert_eq!(of("undercroft_fault_latency_seconds_sum")[0].1, 0.4);
}

#[test]
fn the_dashboard_asks_only_for_metrics_that_exist() {
    let samples = samples(&text(&clients()));
    let known: BTreeSet<String> = samples.iter().map(|of| of.0.clone()).collect();
    let dashboard = include_str!("../../../packaging/grafana-dashboard.json");
    let parsed: serde_json::Value = serde_json::from_str(dashboard).expect("JSON");
    let is_name =
        |letter: char| letter.is_ascii_lowercase() || letter == '_' || letter.is_ascii_digit();
    let mut asked = 0;
    for panel in parsed["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let query = target["expr"].as_str().expect("a query");
            for word in query.split(|letter| !is_name(letter)) {
                if word.starts_with("undercroft_") {
                    assert!(known.contains(word), "{word} in {query}");
                    asked += 1;
                }
            }
        }
    }
    assert!(asked >= 10, "{asked}");
}
