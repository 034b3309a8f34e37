//! Tests of the routes: the document describes them, and refusals have their status.

use std::collections::BTreeSet;
use std::sync::Mutex;

use super::*;
use crate::source::Source;
use crate::token::Token;

/// Two clients, with every field of every part.
pub(crate) fn clients() -> Vec<Snapshot> {
    let all: Vec<Snapshot> = serde_json::from_str(include_str!("sample.json")).expect("snapshots");
    assert!(
        all.iter()
            .any(|client| client.tiers.iter().any(|tier| tier.figures.emulated))
    );
    all
}

/// Takes what it is asked for, except that it refuses to drain.
#[derive(Default)]
struct Fixed(Mutex<Vec<Change>>);

impl Source for Fixed {
    fn clients(&self) -> Vec<Snapshot> {
        clients()
    }

    fn change(&self, _: u32, change: Change) -> Result<(), NotChanged> {
        self.0.lock().expect("no panic").push(change.clone());
        match change {
            Change::Latency(_) | Change::MemoryMax(_) | Change::Pause(_) => Ok(()),
            Change::Reopen(_) | Change::Add(_) | Change::Demote(_) => Ok(()),
            Change::Policy(_) | Change::Parameter(..) => Ok(()),
            Change::Drain(_) | Change::Remove(_) => Err(NotChanged::Refused("no room".to_owned())),
        }
    }
}

fn shared(rights: Rights, is_tcp: bool) -> Shared {
    Shared::new(Box::new(Fixed::default()), rights, is_tcp, None)
}

fn request(method: &str, path: &str, body: &str) -> Request {
    Request {
        method: method.to_owned(),
        path: path.to_owned(),
        is_old: false,
        authorization: None,
        host: Some("127.0.0.1:9750".to_owned()),
        origin: None,
        content_type: Some("application/json".to_owned()),
        body: body.as_bytes().to_vec(),
    }
}

fn openapi() -> Value {
    serde_json::from_str(&DOCUMENT).expect("JSON")
}

/// Differences of `value` by the schema: each field is described, and nothing else is.
fn differences(document: &Value, schema: &Value, value: &Value, at: &str, wrong: &mut Vec<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.trim_start_matches("#/components/schemas/");
        let target = &document["components"]["schemas"][name];
        return differences(document, target, value, at, wrong);
    }
    if let Some(any) = schema["anyOf"].as_array() {
        assert_eq!(any[1]["type"], "null", "{at}");
        return match value {
            Value::Null => {}
            _ => differences(document, &any[0], value, at, wrong),
        };
    }
    if let Some(words) = schema["oneOf"].as_array() {
        if !words.iter().any(|word| word["const"] == *value) {
            wrong.push(format!("{at}: {value} is none of {words:?}"));
        }
        return;
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_u64() || number.is_i64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let allowed = schema["type"].to_string();
    let fits = allowed.contains(&format!("\"{kind}\""));
    let is_whole = kind == "integer" && allowed.contains("\"number\"");
    if !(fits || is_whole) {
        wrong.push(format!("{at}: {kind} is not {allowed}"));
    }
    for (position, item) in value.as_array().into_iter().flatten().enumerate() {
        differences(
            document,
            &schema["items"],
            item,
            &format!("{at}[{position}]"),
            wrong,
        );
    }
    if let (Some(fields), Some(described)) = (value.as_object(), schema["properties"].as_object()) {
        let names =
            |of: &serde_json::Map<String, Value>| of.keys().cloned().collect::<BTreeSet<_>>();
        let (found, known) = (names(fields), names(described));
        for name in found.symmetric_difference(&known) {
            wrong.push(format!("{at}.{name}: in one of answer and document"));
        }
        for name in found.intersection(&known) {
            differences(
                document,
                &described[name],
                &fields[name],
                &format!("{at}.{name}"),
                wrong,
            );
        }
    }
}

#[test]
fn the_document_describes_each_route_and_each_field_of_the_answers_and_no_other() {
    let (document, shared) = (openapi(), shared(Rights::Change, false));
    let pid = clients()[0].pid.to_string();
    let mut described = 0;
    for (path, methods) in document["paths"].as_object().expect("paths") {
        let real = path.replace("{pid}", &pid).replace("{number}", "1");
        for method in ["get", "post", "put", "delete", "patch"] {
            let body = if path.ends_with("{pid}") {
                "{\"latency\":\"p99=1ms\"}"
            } else {
                "{}"
            };
            let answer = answer(&request(&method.to_uppercase(), &real, body), &shared);
            let of = &methods[method];
            if of.is_null() {
                assert_eq!(answer.status, 405, "{method} {path}");
                continue;
            }
            described += 1;
            let response = &of["responses"][answer.status.to_string()];
            let kind = answer.content_type.split(';').next().unwrap_or_default();
            let schema = &response["content"][kind]["schema"];
            assert!(
                schema.is_object(),
                "{method} {path}: {} {kind}",
                answer.status
            );
            if kind == "application/json" && path != "/v1/openapi.json" {
                let value = serde_json::from_slice(&answer.body).expect("JSON");
                let mut wrong = Vec::new();
                differences(&document, schema, &value, path, &mut wrong);
                assert!(wrong.is_empty(), "{wrong:#?}");
            }
        }
    }
    assert_eq!(described, 18, "a route is added or removed: describe it");
    let mut wrong = Vec::new();
    let none = serde_json::json!({"what": "a", "why": "b"});
    let error = &document["components"]["schemas"]["Error"];
    differences(&document, error, &none, "", &mut wrong);
    assert_eq!(wrong.len(), 1, "the comparison finds a missing field");
}

/// Descriptions are doc comments, which are written for `cargo doc`, too.
#[test]
fn every_type_and_field_is_described_in_words_that_a_reader_of_the_document_knows() {
    let document = openapi();
    let schemas = document["components"]["schemas"].as_object();
    for (name, schema) in schemas.expect("schemas") {
        let fields = schema["properties"].as_object().into_iter().flatten();
        for (at, of) in fields.chain([(name, schema)]) {
            let target = of["$ref"].as_str().is_some() || of["anyOf"].is_array();
            let says = of["description"].as_str().unwrap_or_default();
            assert!(target || !says.is_empty(), "{name}.{at} is not described");
            assert!(!says.contains("[`"), "{name}.{at}: {says}");
        }
    }
}

#[test]
fn requests_that_cannot_be_answered_have_their_status_and_say_what_why_and_fix() {
    let (local, tcp) = (shared(Rights::Change, false), shared(Rights::Read, true));
    let pid = clients()[0].pid;
    let of = |method: &str, path: &str, body: &str| answer(&request(method, path, body), &local);
    let client = format!("/v1/clients/{pid}");
    let drain = |number: &str| format!("{client}/tiers/{number}/drain");
    let demote = format!("{client}/demote");
    for (answer, status) in [
        (of("GET", "/v2", ""), 404),
        (of("GET", "/v1/clients/1x", ""), 404),
        (of("GET", "/v1/clients/4294967296", ""), 404),
        (of("DELETE", &client, ""), 405),
        (of("POST", "/metrics", ""), 405),
        (of("GET", &drain("1"), ""), 405),
        (of("POST", &demote, "{\"older-than\":\"x\"}"), 422),
        (of("POST", &client, "{"), 400),
        (of("POST", &client, "{\"memory\":1}"), 422),
        (of("POST", &client, "{\"latency\":\"fast\"}"), 422),
        (of("POST", &client, "{\"latency\":7}"), 422),
        (of("POST", &client, "{\"memory-max\":\"much\"}"), 422),
        // The daemon gives this one its memory.
        (of("POST", &client, "{\"memory-max\":\"512M\"}"), 409),
        (of("POST", &client, "{\"stall-max\":\"30%\"}"), 422),
        (of("POST", &client, "{\"policy\":\"mine.wasm\"}"), 422),
        (of("POST", &client, "{\"policy.behind\":\"1.5\"}"), 422),
        (
            of("POST", &client, "{\"latency\":null,\"policy\":null}"),
            422,
        ),
        (of("POST", &drain("0"), "{}"), 404),
        (of("POST", &drain("257"), "{}"), 404),
        (of("POST", &drain("1"), "{}"), 409),
        (of("POST", &format!("{client}/tiers/1/remove"), "{}"), 409),
        (of("POST", &format!("{client}/tiers"), "{\"tier\":1}"), 422),
        (of("PUT", &format!("{client}/tiers"), ""), 405),
        (of("GET", &format!("{client}/pause"), ""), 405),
        (of("POST", &format!("{client}/pause"), "{\"for\":1}"), 422),
        (
            answer(&request("POST", &format!("{client}/resume"), "{}"), &tcp),
            403,
        ),
        (
            answer(&request("POST", &client, "{\"latency\":null}"), &tcp),
            403,
        ),
    ] {
        let body: Value = serde_json::from_slice(&answer.body).expect("JSON");
        assert_eq!(answer.status, status, "{body}");
        for part in ["what", "why", "fix"] {
            assert!(
                body[part].as_str().is_some_and(|text| !text.is_empty()),
                "{body}"
            );
        }
    }
    let client = format!("/v1/clients/{}", clients()[1].pid);
    for body in [
        "{\"latency\":\"p99=300us\"}",
        "{\"latency\":null}",
        "{\"memory-max\":\"512M\"}",
        "{\"memory-max\":\"max\"}",
        "{\"policy\":\"/srv/mine.wasm\"}",
        "{\"policy\":null}",
        "{\"policy.behind\":\"-9\"}",
    ] {
        assert_eq!(of("POST", &client, body).status, 200, "{body}");
    }
}

#[test]
fn requests_that_a_page_of_another_site_can_cause_are_refused() {
    let (local, tcp) = (shared(Rights::Change, false), shared(Rights::Read, true));
    let client = format!("/v1/clients/{}", clients()[0].pid);
    let mut form = request("POST", &client, "{\"latency\":null}");
    form.content_type = Some("text/plain".to_owned());
    assert_eq!(answer(&form, &local).status, 415);
    let mut other = request("GET", &client, "");
    other.origin = Some("http://evil.example".to_owned());
    assert_eq!(answer(&other, &tcp).status, 403);
    other.origin = Some("http://127.0.0.1:9750".to_owned());
    assert_eq!(answer(&other, &tcp).status, 200);
    for host in [Some("evil.example"), None] {
        other.host = host.map(str::to_owned);
        other.origin = None;
        assert_eq!(answer(&other, &tcp).status, 421, "{host:?}");
        other.is_old = true; // a monitor; a browser names the host in HTTP/1.0, too
        let status = if host.is_none() { 200 } else { 421 };
        assert_eq!(answer(&other, &tcp).status, status, "{host:?}");
        other.is_old = false;
    }
}

#[test]
fn a_server_with_a_token_answers_who_says_it_and_tells_everyone_that_it_lives() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("token");
    std::fs::write(&path, "0123456789abcdef").expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, mode).expect("ours");
    let mut shared = shared(Rights::Read, true);
    shared.token = Some(Token::read(&path).expect("a token"));
    for path in ["/", "/metrics", "/v1/clients", "/v1/openapi.json", "/v2"] {
        let mut asked = request("GET", path, "");
        let refused = answer(&asked, &shared);
        assert_eq!(refused.status, 401, "{path}");
        let head = String::from_utf8(refused.bytes(true)).expect("UTF-8");
        assert!(head.contains("WWW-Authenticate: Basic"), "{head}");
        asked.authorization = Some("Bearer 0123456789abcdef".to_owned());
        let expected = if path == "/v2" { 404 } else { 200 };
        assert_eq!(answer(&asked, &shared).status, expected, "{path}");
    }
    let alive = answer(&request("GET", "/healthz", ""), &shared);
    assert_eq!((alive.status, &alive.body[..]), (200, &b"ok\n"[..]));
    assert_eq!(
        answer(&request("POST", "/healthz", ""), &shared).status,
        405
    );
}

#[test]
fn a_client_is_named_by_any_of_its_processes_its_name_or_its_program() {
    let own = std::process::id();
    let mut all = clients();
    all[0].client_pid = own; // the test is its program
    let shared = Shared::new(Box::new(Two(all)), Rights::Read, false, None);
    let of = |word: &str| {
        let answer = answer(&request("GET", &format!("/v1/clients/{word}"), ""), &shared);
        let body: Value = serde_json::from_slice(&answer.body).expect("JSON");
        (answer.status, body["pid"].as_u64())
    };
    let mut child = std::process::Command::new("sleep");
    let mut child = child.arg("60").spawn().expect("a child");
    for word in ["100", "web-1", "redis-server", &child.id().to_string()] {
        assert_eq!(of(word), (200, Some(100)), "{word}");
    }
    child.kill().and_then(|()| child.wait()).expect("it ends");
    assert_eq!(of("redis").0, 404);
    let mut both = clients();
    both[1].name = both[0].name.clone();
    let shared = Shared::new(Box::new(Two(both)), Rights::Read, false, None);
    let answer = answer(&request("GET", "/v1/clients/web-1", ""), &shared);
    let body: Value = serde_json::from_slice(&answer.body).expect("JSON");
    assert_eq!(answer.status, 409);
    assert!(
        body["why"]
            .as_str()
            .is_some_and(|why| why.contains("100 or ")),
        "{body}"
    );
}

/// These clients, which take no change.
struct Two(Vec<Snapshot>);

impl Source for Two {
    fn clients(&self) -> Vec<Snapshot> {
        self.0.clone()
    }

    fn change(&self, _: u32, _: Change) -> Result<(), NotChanged> {
        Err(NotChanged::NoAnswer)
    }
}

#[test]
fn the_tiers_of_one_client_are_its_own() {
    let of = |path: &str| -> Value {
        let answer = answer(&request("GET", path, ""), &shared(Rights::Read, true));
        serde_json::from_slice(&answer.body).expect("JSON")
    };
    let all = of("/v1/tiers");
    let all = all["tiers"].as_array().expect("tiers");
    let pid = clients()[1].pid;
    let ours = of(&format!("/v1/clients/{pid}/tiers"));
    let ours = ours["tiers"].as_array().expect("tiers");
    let expected: Vec<&Value> = all.iter().filter(|tier| tier["pid"] == pid).collect();
    assert_eq!(ours.iter().collect::<Vec<_>>(), expected);
    assert!(!ours.is_empty() && ours.len() < all.len());
}

/// Every user of the machine may call over TCP; arguments may be secrets.
#[test]
fn arguments_of_programs_are_told_over_a_unix_socket_alone() {
    let (unix, tcp) = (shared(Rights::Read, false), shared(Rights::Read, true));
    let argument = clients()[0].command[1].clone();
    let one = format!("/v1/clients/{}", clients()[0].pid);
    for path in ["/v1/clients", &one, "/v1/tiers", "/metrics"] {
        let said = |shared: &Shared| {
            let answer = answer(&request("GET", path, ""), shared);
            assert_eq!(answer.status, 200, "{path}");
            String::from_utf8(answer.body).expect("UTF-8")
        };
        assert!(!said(&tcp).contains(&argument), "{path}: {}", said(&tcp));
        let shows = path.contains("clients");
        assert_eq!(said(&unix).contains(&argument), shows, "{path}");
        assert_eq!(said(&tcp).contains("\"arguments\":2"), shows, "{path}");
    }
}

#[test]
fn the_page_allows_its_own_script_alone_and_names_nothing_outside() {
    let (first, second) = (page(), page());
    let policy = first.security_policy.clone().expect("a policy");
    assert!(
        policy.contains("default-src 'none'") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert_ne!(policy, second.security_policy.expect("a policy"));
    let text = String::from_utf8(first.body).expect("UTF-8");
    assert!(!text.contains("NONCE") && !text.contains("innerHTML"));
    for figure in [
        "c.latency_bound",
        "c.counters.lost",
        "c.limit_exceeded.seconds",
        "c.guest.resident_bytes",
        "c.guest.given_back_bytes",
        "t.logical_bytes",
        "t.stored_bytes",
        "t.held_bytes",
    ] {
        assert!(text.contains(figure), "{figure} is not shown");
    }
    for (at, _) in text.match_indices("http") {
        assert!(
            text[at..].starts_with("http://www.w3.org/2000/svg"),
            "{}",
            &text[at..at + 30]
        );
    }
}
