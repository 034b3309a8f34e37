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
fn every_sample_has_a_type_a_unit_and_only_the_labels_client_and_tier() {
    let text = text(&clients());
    let mut once = BTreeSet::new();
    let mut emulated = 0;
    for (name, labels, value) in samples(&text) {
        let kind = |kind: &str| text.contains(&format!("# TYPE {name} {kind}\n"));
        assert!(kind("gauge") ^ kind("counter"), "{name}");
        assert_eq!(kind("counter"), name.ends_with("_total"), "{name}");
        assert!(
            name.starts_with("undercroft_") && value.is_finite(),
            "{name}"
        );
        assert!(
            labels.keys().all(|key| key == "client" || key == "tier"),
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
    let odd = once.iter().any(|(_, labels)| {
        labels
            .get("client")
            .is_some_and(|client| client == "200 odd \"na\\me\n<b>")
    });
    assert!(
        odd,
        "a name with quotes and a line end comes through as it is"
    );
}

#[test]
fn the_dashboard_asks_only_for_metrics_that_exist() {
    let known: BTreeSet<String> = samples(&text(&clients()))
        .into_iter()
        .map(|of| of.0)
        .collect();
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
