//! The OpenAPI document: a row for each route, and the schemas of the types that answers are made
//! of. A test asks each route, and compares.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};
use undercroft_proto::report::Snapshot;

use crate::answer::Error;
use crate::bodies::{Clients, Curve, Done, Tiers};

/// The document, as it is sent.
pub(crate) static DOCUMENT: LazyLock<String> = LazyLock::new(|| document().to_string());

/// Statuses of any route besides 200.
const REFUSALS: [(&str, &str); 13] = [
    ("400", "The request cannot be read."),
    ("401", "The token is missing or wrong."),
    ("403", "Another site asks, or nothing can be changed here."),
    ("404", "There is no such client or path."),
    ("405", "The path has no such method."),
    ("408", "The request is late."),
    (
        "409",
        "Several runs have this name, or the run refuses the change.",
    ),
    ("411", "The length is missing."),
    ("413", "The body is too large."),
    ("421", "The Host is neither an address nor localhost."),
    ("431", "The headers are too large."),
    ("500", "The answer cannot be made."),
    ("503", "Too many connections, or the run does not answer."),
];
/// Refusals of a change besides.
const CHANGE_REFUSALS: [(&str, &str); 2] = [
    ("415", "The Content-Type is not application/json."),
    ("422", "The change cannot be understood."),
];

/// Parameters and answers of a route.
enum Route {
    /// GET: text of this type.
    Text(&'static str, &'static str),
    /// GET: JSON of a type.
    Json(fn(&mut SchemaGenerator) -> Schema),
    /// POST: a change with this body.
    Change(fn() -> Value),
}

use Route::{Change, Json, Text};

/// Path, summary, and what it takes and gives.
const ROUTES: [(&str, &str, Route); 18] = [
    ("/", "The web page.", Text("text/html", "The page.")),
    (
        "/healthz",
        "Whether the server lives. It asks no client, and no token.",
        Text("text/plain", "The word ok."),
    ),
    (
        "/metrics",
        "Metrics for Prometheus.",
        Text("text/plain", "Text format 0.0.4."),
    ),
    (
        "/v1/openapi.json",
        "This document.",
        Json(SchemaGenerator::subschema_for::<Map<String, Value>>),
    ),
    (
        "/v1/clients",
        "The running clients.",
        Json(SchemaGenerator::subschema_for::<Clients<'_>>),
    ),
    (
        "/v1/tiers",
        "The tiers of all clients.",
        Json(SchemaGenerator::subschema_for::<Tiers<'_>>),
    ),
    (
        "/v1/clients/{pid}",
        "One client.",
        Json(SchemaGenerator::subschema_for::<Snapshot>),
    ),
    (
        "/v1/clients/{pid}",
        "Changes an option of a client.",
        Change(options),
    ),
    (
        "/v1/clients/{pid}/curve",
        "Its miss-ratio curve.",
        Json(SchemaGenerator::subschema_for::<Curve<'_>>),
    ),
    (
        "/v1/clients/{pid}/pressure",
        "Its pressure, as /proc/pressure/memory has it.",
        Text("text/plain", "One line."),
    ),
    (
        "/v1/clients/{pid}/pause",
        "Evicts nothing and moves nothing between tiers from now on; the limit is not kept, and faults are served.",
        Change(nothing),
    ),
    (
        "/v1/clients/{pid}/resume",
        "Goes on after a pause.",
        Change(nothing),
    ),
    (
        "/v1/clients/{pid}/demote",
        "Pages that were not used for a time leave memory; `ages` of the client has the result.",
        Change(older_than),
    ),
    (
        "/v1/clients/{pid}/tiers",
        "The tiers of one client.",
        Json(SchemaGenerator::subschema_for::<Tiers<'_>>),
    ),
    (
        "/v1/clients/{pid}/tiers",
        "Uses another tier from now on, at the place that its measured speed gives it.",
        Change(tier),
    ),
    (
        "/v1/clients/{pid}/tiers/{number}/drain",
        "Empties a tier, and uses it no more.",
        Change(nothing),
    ),
    (
        "/v1/clients/{pid}/tiers/{number}/remove",
        "Empties a tier, and gives its space back.",
        Change(nothing),
    ),
    (
        "/v1/clients/{pid}/tiers/{number}/reopen",
        "Uses a tier again that is or was emptied.",
        Change(nothing),
    ),
];

fn options() -> Value {
    let text = |says: &str| json!({"type": ["string", "null"], "description": says});
    json!({
        "type": "object",
        "description": "One of the keys of `undercroft set`.",
        "properties": {
            "latency": text("Bound of page-ins, such as p99=300us; none or null: no bound."),
            "memory-max": text(
                "DRAM for the program and its compressed pages, such as 512M; max or null: no limit."
            ),
            "policy": text(
                "Absolute path of a policy file, which the server reads; none or null: no file."
            ),
        },
        "patternProperties": {
            "^policy\\.[A-Za-z0-9_]+$": {
                "type": "string",
                "description": "A parameter of the policy file: a whole number of 64 bits.",
            },
        },
        "additionalProperties": false,
        "minProperties": 1,
        "maxProperties": 1,
    })
}

fn tier() -> Value {
    let says = "Its kind and options, as `undercroft run --tier` takes them, with an absolute path: \
                file:PATH,size=SIZE or nvm:PATH,size=SIZE.";
    json!({
        "type": "object",
        "properties": {"tier": {"type": "string", "description": says}},
        "required": ["tier"],
        "additionalProperties": false,
    })
}

fn older_than() -> Value {
    json!({
        "type": "object",
        "properties": {"older-than": {"type": "string", "description": "Such as 90s, 10m or 1h."}},
        "required": ["older-than"],
        "additionalProperties": false,
    })
}

fn nothing() -> Value {
    json!({"type": "object", "description": "No options.", "additionalProperties": false})
}

fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let mut generator = settings
        .with(|settings| settings.definitions_path = "/components/schemas".into())
        .into_generator();
    let mut paths = Map::new();
    for (path, summary, route) in &ROUTES {
        let of = paths
            .entry(*path)
            .or_insert_with(|| json!({"parameters": parameters(path)}));
        let method = match route {
            Change(_) => "post",
            Text(..) | Json(_) => "get",
        };
        of[method] = operation(summary, route, &mut generator);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Undercroft",
            "version": "1",
            "description": "Running programs under Undercroft. Times in seconds, sizes in bytes. \
                            Tiers whose speed is emulated say so.",
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        // With and without: only a server that was started with --token-file asks for it.
        "security": [{}, {"token": []}],
        "components": {
            "schemas": generator.take_definitions(true),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    })
}

fn operation(summary: &str, route: &Route, generator: &mut SchemaGenerator) -> Value {
    let content = |kind: &str, schema: Value| json!({kind: {"schema": schema}});
    let (says, given) = match route {
        Text(kind, says) => (*says, content(kind, json!({"type": "string"}))),
        Json(schema) => (
            "Done.",
            content("application/json", json!(schema(generator))),
        ),
        Change(_) => {
            let done = generator.subschema_for::<Done>();
            ("Done.", content("application/json", json!(done)))
        }
    };
    let error = generator.subschema_for::<Error<'_>>();
    let error = content("application/json", json!(error));
    let mut responses = Map::new();
    let mut gives = |status: &str, says: &str, content: &Value| {
        responses.insert(
            status.to_owned(),
            json!({"description": says, "content": content}),
        );
    };
    gives("200", says, &given);
    for (status, says) in &REFUSALS {
        gives(status, says, &error);
    }
    let Change(body) = route else {
        return json!({"summary": summary, "responses": responses});
    };
    for (status, says) in &CHANGE_REFUSALS {
        gives(status, says, &error);
    }
    json!({
        "summary": format!("{summary} Only over a Unix socket, with --allow-changes."),
        "requestBody": {"required": true, "content": content("application/json", body())},
        "responses": responses,
    })
}

fn parameters(path: &str) -> Vec<Value> {
    let all = [
        (
            "pid",
            json!({"type": "string"}),
            "Process id of any process of it, its name (run --name), or its program, such as redis-server.",
        ),
        (
            "number",
            json!({"type": "integer", "minimum": 1}),
            "Counted from 1, as GET /v1/clients/{pid}/tiers says.",
        ),
    ];
    let ours = (all.into_iter()).filter(|(name, ..)| path.contains(&format!("{{{name}}}")));
    ours.map(|(name, schema, says)| {
        json!({
            "name": name,
            "in": "path",
            "required": true,
            "description": says,
            "schema": schema,
        })
    })
    .collect()
}
