//! The tables of the rules. Lists of exceptions may only shrink: an unnecessary row fails.

/// Every crate and the crates of the workspace it may use. Nothing points up; see ARCHITECTURE.md.
pub(super) const ARROWS: [(&str, &[&str]); 31] = [
    ("base", &[]),
    ("device", &[]),
    ("seeded", &[]),
    ("resp", &[]),
    ("terminal", &[]),
    ("wire", &[]),
    ("shim", &["wire"]),
    ("policy-core", &["base"]),
    ("policy", &["base", "policy-core"]),
    ("qos", &["base"]),
    ("sys", &["base"]),
    ("model", &["base", "seeded"]),
    ("trace", &["base"]),
    ("engine", &["base", "policy"]),
    ("plugin", &["base", "engine", "policy"]),
    ("plugin-wasm", &["base", "plugin"]),
    ("tier-redis", &["base", "sys"]),
    ("tier", &["base", "device", "sys", "tier-redis"]),
    (
        "proto",
        &[
            "base", "engine", "policy", "qos", "sys", "terminal", "tier", "wire",
        ],
    ),
    (
        "manager",
        &[
            "base", "engine", "plugin", "policy", "proto", "qos", "sys", "tier", "trace", "wire",
        ],
    ),
    (
        "keeper",
        &["base", "engine", "proto", "sys", "terminal", "tier", "wire"],
    ),
    ("references", &["base", "seeded", "trace"]),
    (
        "sim",
        &[
            "base",
            "device",
            "engine",
            "model",
            "plugin",
            "plugin-wasm",
            "policy",
            "qos",
            "references",
            "seeded",
            "trace",
        ],
    ),
    ("api", &["base", "keeper", "proto", "qos"]),
    (
        "daemon",
        &["base", "keeper", "proto", "qos", "sys", "terminal", "tier"],
    ),
    ("rig", &["base"]),
    (
        "experiments",
        &["base", "references", "rig", "seeded", "sim", "trace"],
    ),
    (
        "cli",
        &[
            "api",
            "base",
            "daemon",
            "keeper",
            "manager",
            "plugin",
            "plugin-wasm",
            "policy",
            "proto",
            "qos",
            "resp",
            "rig",
            "seeded",
            "sys",
            "terminal",
            "tier",
        ],
    ),
    (
        "command",
        &[
            "base",
            "experiments",
            "policy",
            "qos",
            "references",
            "sim",
            "terminal",
            "trace",
        ],
    ),
    ("tests", &["resp", "seeded"]),
    ("xtask", &[]),
];

/// Crates that tests may use as well: fakes, oracles, seeded random numbers, servers.
pub(super) const TEST_ARROWS: [&str; 3] = ["model", "resp", "seeded"];

/// The only homes of `unsafe`.
pub(super) const UNSAFE_HOMES: [&str; 2] = ["sys", "shim"];

/// Crates that know the kinds of tiers. All others ask facts.
pub(super) const KIND_HOMES: [&str; 2] = ["tier", "tier-redis"];

/// Files that compare such a name all the same, and why.
pub(super) const KIND_NAMES: &[(&str, &str)] = &[
    (
        "crates/rig/src/process.rs",
        "it reads a report, as a user does",
    ),
    (
        "lab/experiments/src/cost/simulated.rs",
        "tiers of simulations have names of their own",
    ),
    (
        "lab/experiments/src/experiments/programs/list.rs",
        "these are names of programs",
    ),
    (
        "lab/sim/src/setup.rs",
        "it reads the command line of a simulation",
    ),
];

/// Files that make a `Reclaimer`: when pages leave, and how many, is decided in one place for all.
pub(super) const RECLAIM_DRIVERS: [&str; 3] = [
    "crates/manager/src/evict/mod.rs",
    "lab/sim/src/replay/client.rs",
    "lab/sim/src/storm/evictor.rs",
];

/// Crates that decide, and what they may not name, so that the same code runs live and simulated.
pub(super) const PURE: [&str; 4] = ["engine", "policy", "policy-core", "qos"];
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

/// Macros that manager and keeper do not use. One has a log, and the other a voice
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

/// Words with which no doc comment begins: they stand for a thing that it does not name.
pub(super) const PRONOUNS: [&str; 5] = ["What", "One", "Those", "It", "By which"];

pub(super) const FILE_LINES_MAX: usize = 800;
pub(super) const COMMENT_WIDTH_MAX: usize = 100;
pub(super) const TEXT_WIDTH_MAX: usize = 120;

/// Most lines of a function, and of a function in [`LONG_FUNCTIONS`].
pub(super) const FUNCTION_LINES_MAX: usize = 70;
pub(super) const LONGEST_LINES_MAX: usize = 100;

/// Most methods of a trait of policies.
pub(super) const TRAIT_METHODS_MAX: usize = 6;

/// Functions over [`FUNCTION_LINES_MAX`] lines, as `crate::name`, and why each stays whole.
pub(super) const LONG_FUNCTIONS: &[(&str, &str)] = &[
    (
        "command::record::record",
        "the order of set-up and clean-up around valgrind",
    ),
    (
        "command::trace::generated_trace_is_shown_printed_and_imported_again",
        "one session, told step by step",
    ),
    (
        "command::trace::recorded_program_has_the_references_it_made",
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
            "sync", "log", "gauges", "signals", "record", "advice", "cpus", "books", "space",
            "fault", "evict", "migrate", "control",
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
            "doors",
            "strays",
            "beside",
            "stall",
            "bound",
            "obey",
            "resize",
            "errand",
            "add",
            "policy",
            "core",
            "onset",
            "still",
            "reaper",
            "handed",
            "view",
            "handshake",
            "given_back",
            "told",
            "guest",
            "toll",
            "tell",
            "swap",
            "check",
            "takeover",
            "parting",
            "start",
        ],
    ),
    (
        "evict",
        &[
            "allowance",
            "inside",
            "advised",
            "choose",
            "wayout",
            "compressors",
            "aside",
            "publish",
            "store",
            "pending",
            "adopt",
            "demote",
        ],
    ),
    (
        "fault",
        &[
            "inbox",
            "awake",
            "install",
            "guards",
            "lane",
            "ahead",
            "registers",
            "relief",
            "views",
        ],
    ),
    (
        "gauges",
        &["knobs", "latency", "limit", "page_ins", "scale"],
    ),
    ("migrate", &["copies"]),
    ("cpus", &["pin", "guard"]),
    ("record", &["known", "writer"]),
    (
        "space",
        &[
            "port",
            "anonymous",
            "locks",
            "views",
            "guest",
            "handed",
            "model",
            "command",
            "agent",
            "order",
            "trail",
            "dropping",
            "ground",
            "partners",
            "refused",
            "backlog",
            "identity",
            "relatives",
            "process",
            "ticket",
            "processes",
            "arrivals",
            "graves",
            "shared",
            "pool",
            "foreign",
            "parts",
            "bring_home",
            "still",
            "cow",
            "correction",
            "claims",
            "layout",
            "discover",
            "give_way",
            "watch",
            "scans",
            "findings",
            "guest_access",
            "access",
        ],
    ),
];
