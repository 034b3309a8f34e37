//! The tables of the rules. Lists of exceptions may only shrink: an unnecessary row fails.

/// Every crate and the crates of the workspace it may use. Nothing points up; see ARCHITECTURE.md.
pub(super) const ARROWS: [(&str, &[&str]); 21] = [
    ("base", &[]),
    ("device", &[]),
    ("seeded", &[]),
    ("resp", &[]),
    ("wire", &[]),
    ("shim", &["wire"]),
    ("policy", &["base"]),
    ("qos", &["base"]),
    ("sys", &["base"]),
    ("model", &["base", "seeded"]),
    ("trace", &["base", "seeded"]),
    ("engine", &["base", "policy"]),
    ("tier", &["base", "device", "sys"]),
    (
        "manager",
        &[
            "base", "engine", "policy", "qos", "sys", "tier", "trace", "wire",
        ],
    ),
    (
        "sim",
        &[
            "base", "device", "engine", "model", "policy", "qos", "seeded", "trace",
        ],
    ),
    ("api", &["base", "manager", "qos"]),
    ("daemon", &["base", "manager", "qos", "sys", "tier"]),
    ("lab", &["base", "seeded", "sim", "trace"]),
    (
        "cli",
        &[
            "api", "base", "daemon", "lab", "manager", "policy", "qos", "resp", "seeded", "sim",
            "sys", "tier", "trace",
        ],
    ),
    ("tests", &["resp", "seeded"]),
    ("xtask", &[]),
];

/// Crates that tests may use as well: fakes, oracles, seeded random numbers, servers.
pub(super) const TEST_ARROWS: [&str; 3] = ["model", "resp", "seeded"];

/// The only homes of `unsafe`.
pub(super) const UNSAFE_HOMES: [&str; 2] = ["sys", "shim"];

/// Crates that decide, and what they may not name, so that the same code runs live and simulated.
pub(super) const PURE: [&str; 3] = ["engine", "policy", "qos"];
pub(super) const IMPURE_WORDS: [&str; 17] = [
    "Condvar",
    "Instant",
    "Mutex",
    "RwLock",
    "SystemTime",
    "std::time",
    "std::thread",
    "std::fs",
    "std::env",
    "std::net",
    "std::process",
    "std::os",
    "std::io",
    "undercroft_model",
    "undercroft_sim",
    "undercroft_sys",
    "undercroft_trace",
];

/// Macros that the manager does not use. It has a log, and the keeper has a voice
/// (ARCHITECTURE.md).
pub(super) const PRINTING: [&str; 5] = ["print!", "println!", "eprint!", "eprintln!", "dbg!"];

/// Phrases that are read twice, and what to write. Looked for in comments and in Markdown.
pub(super) const PHRASES: &[(&str, &str)] = &[
    ("so many", "name the number, or `this many`"),
    ("on the way of", "say where: `on the path of`"),
    ("by and by", "`gradually`, or `a few at a time`"),
    ("whoever", "name the thing: `the thread that`"),
    ("nobody", "name the thing: `no process`"),
    ("the latter", "name it again"),
    ("the former", "name it again"),
    ("respectively", "two sentences"),
    ("in order to", "`to`"),
    ("i.e", "`that is`, or another sentence"),
    ("thereby", "another sentence"),
    ("whereby", "`by which`, or another sentence"),
    ("utilize", "`use`"),
    ("leverage", "`use`"),
];

pub(super) const FILE_LINES_MAX: usize = 800;
pub(super) const COMMENT_WIDTH_MAX: usize = 100;
pub(super) const TEXT_WIDTH_MAX: usize = 120;

/// Most lines of a function, and of a function in [`LONG_FUNCTIONS`].
pub(super) const FUNCTION_LINES_MAX: usize = 70;
pub(super) const LONGEST_LINES_MAX: usize = 100;

/// Functions over [`FUNCTION_LINES_MAX`] lines, as `crate::name`, and why each stays whole.
pub(super) const LONG_FUNCTIONS: &[(&str, &str)] = &[
    (
        "cli::record::record",
        "the order of set-up and clean-up around valgrind",
    ),
    (
        "cli::trace::generated_trace_is_shown_printed_and_imported_again",
        "one session, told step by step",
    ),
    (
        "cli::trace::recorded_program_has_the_references_it_made",
        "one session, told step by step",
    ),
    ("manager::scenes::events", "one scene, told step by step"),
    ("manager::writer::write", "one arm an event"),
    (
        "model::tier::store",
        "one decision table: what a tier may do with a page, by failure",
    ),
    (
        "tests::servers::redis_session",
        "one session, told step by step",
    ),
];

/// The files and folders of the manager, by their folder (the first is the crate's root), lowest
/// first. Each may use those before it, and what a folder's `mod.rs` has.
pub(super) const MANAGER_ORDER: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "sync",
            "log",
            "options",
            "report",
            "gauges",
            "signals",
            "record",
            "placement",
            "legacy",
            "grant",
            "books",
            "space",
            "fault",
            "evict",
            "migrate",
            "control",
            "versions",
            "keeper",
        ],
    ),
    (
        "books",
        &[
            "ledger", "metered", "runs", "tiers", "table", "curve", "drain",
        ],
    ),
    (
        "control",
        &[
            "ending",
            "launch",
            "strays",
            "beside",
            "bound",
            "obey",
            "stall",
            "resize",
            "add",
            "onset",
            "handshake",
            "tell",
            "check",
            "takeover",
            "start",
        ],
    ),
    (
        "evict",
        &[
            "backoff", "loan", "urgency", "aside", "group", "adopt", "demote", "full",
        ],
    ),
    ("fault", &["inbox", "awake", "install", "lane", "relief"]),
    (
        "gauges",
        &["knobs", "latency", "limit", "page_ins", "scale"],
    ),
    (
        "keeper",
        &[
            "voice",
            "said",
            "passing",
            "place",
            "status",
            "held",
            "upgrade",
            "estate",
            "succession",
        ],
    ),
    ("legacy", &["inbox", "row"]),
    ("migrate", &["copies"]),
    ("placement", &["pin", "guard"]),
    ("record", &["known", "writer"]),
    (
        "report",
        &["bound", "cost", "curve", "remote", "now", "summary"],
    ),
    (
        "space",
        &[
            "port",
            "anonymous",
            "model",
            "command",
            "agent",
            "order",
            "trail",
            "dropping",
            "process",
            "foreign",
            "processes",
            "arrivals",
            "graves",
            "shared",
            "parts",
            "cow",
            "correction",
            "layout",
            "discover",
            "watch",
            "access",
        ],
    ),
];
