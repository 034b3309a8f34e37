//! The routes: what each path and method answers. `openapi.rs` describes them; a test compares.

use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::str::FromStr;

use serde_json::Value;
use undercroft_keeper::wanted::{Found, find};
use undercroft_proto::report::{SCHEMA_VERSION, Snapshot};

use crate::answer::Answer;
use crate::bodies::{ClientTier, Clients, Curve, Done, Tiers};
use crate::http::{Request, is_address};
use crate::metrics;
use crate::openapi::DOCUMENT;
use crate::shared::{Rights, Shared};
use crate::source::{Change, NotChanged};

const PAGE: &str = include_str!("page.html");

/// The methods of a path that can only be read.
const READING: &str = "GET, HEAD";

/// Answers a request. It may take as long as the clients take to answer.
pub(crate) fn answer(request: &Request, shared: &Shared) -> Answer {
    if let Some(refusal) = misdirected(request, shared) {
        return refusal;
    }
    if request.path == "/healthz" {
        let text = "text/plain; charset=utf-8";
        return read(request, || Answer::new(text, "ok\n"));
    }
    match unknown_caller(request, shared) {
        Some(refusal) => refusal,
        None => route(request, shared),
    }
}

fn route(request: &Request, shared: &Shared) -> Answer {
    let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    match parts[..] {
        [""] => read(request, page),
        ["metrics"] => read(request, || {
            let text = metrics::text(&shared.clients());
            Answer::new("text/plain; version=0.0.4; charset=utf-8", text)
        }),
        ["v1", "openapi.json"] => read(request, || {
            Answer::new("application/json", DOCUMENT.as_str())
        }),
        ["v1", "clients"] => read(request, || {
            let clients = shared.clients();
            Answer::json(&Clients {
                schema_version: SCHEMA_VERSION,
                clients: &clients,
            })
        }),
        ["v1", "tiers"] => read(request, || tiers(&shared.clients())),
        ["v1", "clients", pid] if request.method == "POST" => {
            with(shared, pid, |client| set(request, shared, client))
        }
        ["v1", "clients", pid] => match request.method.as_str() {
            "GET" | "HEAD" => with(shared, pid, Answer::json),
            _ => wrong_method("GET, HEAD, POST"),
        },
        ["v1", "clients", pid, "curve"] => read(request, || with(shared, pid, curve)),
        ["v1", "clients", pid, "pressure"] => read(request, || with(shared, pid, pressure)),
        ["v1", "clients", pid, "tiers"] => match request.method.as_str() {
            "POST" => with(shared, pid, |client| add_tier(request, shared, client)),
            "GET" | "HEAD" => with(shared, pid, |client| tiers(std::slice::from_ref(client))),
            _ => wrong_method("GET, HEAD, POST"),
        },
        ["v1", "clients", pid, "demote"] => posted(request, || {
            with(shared, pid, |client| demote(request, shared, client))
        }),
        ["v1", "clients", pid, what @ ("pause" | "resume")] => posted(request, || {
            with(shared, pid, |client| {
                let change = Change::Pause(what == "pause");
                plain(request, shared, || carry_out(shared, client.pid, change))
            })
        }),
        [
            "v1",
            "clients",
            pid,
            "tiers",
            number,
            verb @ ("drain" | "remove" | "reopen"),
        ] => {
            let change = match verb {
                "drain" => Change::Drain,
                "remove" => Change::Remove,
                _ => Change::Reopen,
            };
            posted(request, || {
                with(shared, pid, |client| {
                    change_tier(request, shared, client, number, change)
                })
            })
        }
        _ => Answer::error(
            404,
            "there is no such path",
            "no route has it",
            "GET /v1/openapi.json lists the routes",
        ),
    }
}

fn read(request: &Request, answer: impl FnOnce() -> Answer) -> Answer {
    match request.method.as_str() {
        "GET" | "HEAD" => answer(),
        _ => wrong_method(READING),
    }
}

/// The answer of a path that is only changed.
fn posted(request: &Request, answer: impl FnOnce() -> Answer) -> Answer {
    match request.method.as_str() {
        "POST" => answer(),
        _ => wrong_method("POST"),
    }
}

fn wrong_method(allow: &'static str) -> Answer {
    let why = format!("it has {allow}");
    let fix = "use one of these methods";
    Answer {
        allow: Some(allow),
        ..Answer::error(405, "the path has no such method", &why, fix)
    }
}

/// A request that a page of another site may have caused.
fn misdirected(request: &Request, shared: &Shared) -> Option<Answer> {
    let host = request.host.as_deref().unwrap_or_default();
    let has_no_host = request.is_old && request.host.is_none();
    if shared.is_tcp && !has_no_host && !is_address(host) {
        return Some(Answer::error(
            421,
            "the request is for another host",
            "its Host is neither an IP address nor localhost: a web page may have caused it",
            "use the address that `undercroft serve` prints",
        ));
    }
    let ours = |origin: &str| origin.strip_prefix("http://") == Some(host);
    if request
        .origin
        .as_deref()
        .is_some_and(|origin| !ours(origin))
    {
        return Some(Answer::error(
            403,
            "the request comes from another site",
            "its Origin is not this server",
            "open this server's own page",
        ));
    }
    None
}

/// A request without the token that the server asks for.
fn unknown_caller(request: &Request, shared: &Shared) -> Option<Answer> {
    let token = shared.token.as_ref()?;
    if token.is_in(request.authorization.as_deref()) {
        return None;
    }
    Some(Answer::error(
        401,
        "the token is missing or wrong",
        "the server was started with --token-file",
        "send `Authorization: Bearer TOKEN`; in a browser any user name, and the token as password",
    ))
}

/// Answers for the client that a path names: by any process of it, by its name or its program.
fn with(shared: &Shared, word: &str, answer: impl FnOnce(&Snapshot) -> Answer) -> Answer {
    let clients = shared.clients();
    let found = word
        .parse()
        .map_or(Found::None, |wanted| find(&clients, &wanted));
    let fix = "GET /v1/clients lists the runs";
    match found {
        Found::One(client) => answer(client),
        Found::Several(clients) => {
            let pids = clients.iter().map(|client| client.pid.to_string());
            let why = format!("it may be {}", pids.collect::<Vec<_>>().join(" or "));
            Answer::error(
                409,
                "several runs have this name",
                &why,
                "give the process id",
            )
        }
        Found::None => Answer::error(
            404,
            "no run has this process id or name",
            "it has ended, or belongs to another user, or to another UNDERCROFT_DIR",
            fix,
        ),
    }
}

/// The page, with a new number that allows its own script and style, and no other.
fn page() -> Answer {
    let mut random = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    if let Err(error) = read {
        let why = format!("/dev/urandom: {error}");
        return Answer::error(500, "the page cannot be protected", &why, "use the API");
    }
    let nonce: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    Answer {
        security_policy: Some(policy),
        ..Answer::new("text/html; charset=utf-8", PAGE.replace("NONCE", &nonce))
    }
}

fn tiers(clients: &[Snapshot]) -> Answer {
    let of = |client: &'_ Snapshot| client.pid;
    let tiers = clients.iter().flat_map(|client| {
        client
            .tiers
            .iter()
            .enumerate()
            .map(move |(at, tier)| ClientTier {
                pid: of(client),
                number: at + 1,
                tier,
            })
    });
    Answer::json(&Tiers {
        schema_version: SCHEMA_VERSION,
        tiers: tiers.collect(),
    })
}

fn curve(client: &Snapshot) -> Answer {
    Answer::json(&Curve {
        schema_version: SCHEMA_VERSION,
        pid: client.pid,
        mrc: client.mrc.as_ref(),
    })
}

fn pressure(client: &Snapshot) -> Answer {
    let text = format!("{}\n", client.pressure_line());
    Answer::new("text/plain; charset=utf-8", text)
}

/// The body of a change. Errors: it may not be made.
fn change_body(request: &Request, shared: &Shared) -> Result<Value, Answer> {
    if shared.rights == Rights::Read {
        return Err(Answer::error(
            403,
            "nothing can be changed here",
            "the server was started to be read",
            "undercroft serve --listen unix:PATH --allow-changes, or `undercroft set`",
        ));
    }
    let kind = request.content_type.as_deref().unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        return Err(Answer::error(
            415,
            "the change is not made",
            "a change is JSON, and says so: no form of another site does",
            "send Content-Type: application/json",
        ));
    }
    serde_json::from_slice(&request.body).map_err(|error| {
        let why = error.to_string();
        Answer::error(
            400,
            "the body is no JSON",
            &why,
            "send for example {\"latency\": \"p99=300us\"}",
        )
    })
}

/// A key of `undercroft set`, as `{"latency": "p99=300us"}`; null, `"none"` or `"max"`: without.
fn set(request: &Request, shared: &Shared, client: &Snapshot) -> Answer {
    let body = match change_body(request, shared) {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    match change_of(&body) {
        Ok(Change::MemoryMax(_)) if client.class.is_some() => {
            let why = client.limit_is_kept_by().unwrap_or_default();
            let fix = "change memory_max of the class in the daemon's configuration";
            Answer::error(409, "the run refuses the change", &why, fix)
        }
        Ok(change) => carry_out(shared, client.pid, change),
        Err(why) => {
            let fix = "send for example {\"latency\": \"p99=300us\"} or {\"memory-max\": \"512M\"}";
            Answer::error(422, "the change cannot be understood", &why, fix)
        }
    }
}

fn change_of(body: &Value) -> Result<Change, String> {
    let fields = body.as_object().ok_or("the body is no object")?;
    let mut fields = fields.iter();
    let (Some((key, value)), None) = (fields.next(), fields.next()) else {
        return Err("one key is changed at a time".to_owned());
    };
    let text = match value {
        Value::Null => None,
        Value::String(text) => Some(text.as_str()).filter(|text| !["none", "max"].contains(text)),
        _ => return Err(format!("{key} is a text, or null")),
    };
    match key.as_str() {
        "latency" => Ok(Change::Latency(parsed(text)?)),
        "memory-max" => Ok(Change::MemoryMax(parsed(text)?)),
        "policy" => match text.filter(|text| *text != "auto") {
            None => Ok(Change::Policy(None)),
            Some(path) if path.starts_with('/') => Ok(Change::Policy(Some(path.into()))),
            Some(path) => Err(format!("{path} is no absolute path of a policy file")),
        },
        key if key.starts_with("policy.") => match text.unwrap_or_default().parse() {
            Ok(value) => Ok(Change::Parameter(key["policy.".len()..].to_owned(), value)),
            Err(_) => Err(format!("{key} is the text of a whole number of 64 bits")),
        },
        _ => Err("`latency`, `memory-max`, `policy` and `policy.NAME` can be set".to_owned()),
    }
}

/// The value of a text; `None`: there is none.
fn parsed<T: FromStr<Err: Display>>(text: Option<&str>) -> Result<Option<T>, String> {
    let parsed = text.map(|text| text.parse().map_err(|error: T::Err| error.to_string()));
    parsed.transpose()
}

/// Another tier, as `{"tier": "file:/var/swap,size=1G"}`.
fn add_tier(request: &Request, shared: &Shared, client: &Snapshot) -> Answer {
    let fix = "send for example {\"tier\": \"file:/var/swap,size=1G\"}";
    with_text(request, shared, client, ("tier", fix), |spec| {
        Ok(Change::Add(spec.to_owned()))
    })
}

/// Pages that were not used for a time leave, as `{"older-than": "10m"}`.
fn demote(request: &Request, shared: &Shared, client: &Snapshot) -> Answer {
    let fix = "send for example {\"older-than\": \"10m\"}";
    with_text(request, shared, client, ("older-than", fix), |time| {
        let time = time.parse();
        time.map(Change::Demote).map_err(|error| error.to_string())
    })
}

/// Makes a change that one text says.
///
/// * `key`: of the text in the body, and an example.
fn with_text(
    request: &Request,
    shared: &Shared,
    client: &Snapshot,
    (key, fix): (&str, &str),
    change: impl FnOnce(&str) -> Result<Change, String>,
) -> Answer {
    let body = match change_body(request, shared) {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let fields = body.as_object().filter(|fields| fields.len() == 1);
    let text = fields.and_then(|fields| fields.get(key)?.as_str());
    let text = text.ok_or_else(|| format!("it has not exactly one text, `{key}`"));
    match text.and_then(change) {
        Ok(change) => carry_out(shared, client.pid, change),
        Err(why) => Answer::error(422, "the change cannot be understood", &why, fix),
    }
}

/// Makes a change that has no options, as its empty body says.
fn plain(request: &Request, shared: &Shared, change: impl FnOnce() -> Answer) -> Answer {
    match change_body(request, shared) {
        Ok(Value::Object(fields)) if fields.is_empty() => change(),
        Ok(_) => {
            let why = "this change has no options";
            Answer::error(422, "the change cannot be understood", why, "send {}")
        }
        Err(refusal) => refusal,
    }
}

fn change_tier(
    request: &Request,
    shared: &Shared,
    client: &Snapshot,
    number: &str,
    change: fn(u8) -> Change,
) -> Answer {
    let known = 1..=client.tiers.len().min(usize::from(u8::MAX));
    plain(request, shared, || {
        match number
            .parse::<usize>()
            .ok()
            .filter(|number| known.contains(number))
        {
            Some(number) => carry_out(shared, client.pid, change((number - 1) as u8)),
            None => {
                let why = format!("it has {}, counted from 1", client.tiers.len());
                let fix = "GET /v1/clients/PID/tiers lists them";
                Answer::error(404, "the run has no such tier", &why, fix)
            }
        }
    })
}

fn carry_out(shared: &Shared, pid: u32, change: Change) -> Answer {
    match shared.source.change(pid, change) {
        Ok(()) => {
            shared.forget();
            Answer::json(&Done {
                schema_version: SCHEMA_VERSION,
                pid,
                done: true,
            })
        }
        Err(NotChanged::Refused(why)) => {
            let fix = "ask for what the run can do; nothing was changed";
            Answer::error(409, "the run refuses the change", &why, fix)
        }
        Err(NotChanged::NoAnswer) => Answer::error(
            503,
            "the run does not answer",
            "it has ended, or its manager is very busy",
            "try again",
        ),
    }
}

#[cfg(test)]
#[path = "routes_tests.rs"]
pub(crate) mod tests;
