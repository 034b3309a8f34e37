//! `undercroft daemon`: divides memory among runs, checks its configuration, or shows who has what.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::SIGHUP;

use undercroft_base::Bytes;
use undercroft_daemon::{Config, ConfigError, ServeError};
use undercroft_keeper::held;
use undercroft_proto::grant::{DaemonStatus, MemberLatency, MemberStatus};

use crate::args::{DaemonArgs, DaemonCommand};
use crate::memory::Memory;
use crate::plugin;
use crate::{serve, show};
use undercroft_terminal::{Failure, LogFormat, status};

/// Serves until SIGINT or SIGTERM, or does what the subcommand says.
pub(crate) fn daemon(args: DaemonArgs) -> Result<u8, Failure> {
    match args.command {
        None => serve_runs(&args.config, args.log.into()),
        Some(DaemonCommand::Check { config }) => check(&config),
        Some(DaemonCommand::Status(args)) => show_status(args.json),
    }
}

fn read(path: &Path) -> Result<Config, Failure> {
    let check = |module: &[u8]| plugin::read(module).map(|_| ());
    Config::read(path, Memory::here()?.all(), check).map_err(|error| {
        let fix = match error {
            ConfigError::Unreadable { .. } => "name another with --config; `undercroft daemon --help` shows one",
            ConfigError::Wrong { .. } | ConfigError::Contradicts { .. } => {
                "mend it; `undercroft daemon --help` shows one, and `undercroft daemon check` tries it"
            }
        };
        Failure::new(
            status::CONFIGURATION,
            "the configuration is refused",
            error.to_string(),
            fix,
        )
    })
}

fn serve_runs(path: &Path, log: LogFormat) -> Result<u8, Failure> {
    let config = read(path)?;
    let failed = |why: String| {
        Failure::new(
            status::FAILED,
            "the daemon does not start",
            why,
            "`undercroft daemon status` shows one that runs; UNDERCROFT_DIR names another directory",
        )
    };
    // Before anything else: a signal then finds its handler.
    let (ended, signal) = serve::signals().map_err(|error| failed(error.to_string()))?;
    let new = Arc::new(Mutex::new(None));
    on_hangup(path, signal, new.clone()).map_err(|error| failed(error.to_string()))?;
    let ready = |socket: &Path, memory: Bytes| {
        // A closed standard output is no reason to fail.
        let _ = writeln!(io::stdout(), "Dividing {memory} at {}", socket.display());
    };
    let next = || {
        let new = take(&new)?;
        (&ended).read_exact(&mut [0]).ok()?;
        Some(new)
    };
    undercroft_daemon::serve(config, log, &ended, next, ready)
        .map_err(|error: ServeError| failed(error.to_string()))?;
    Ok(0)
}

fn take(new: &Mutex<Option<Config>>) -> Option<Config> {
    new.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Starts a thread that reads the configuration again at each SIGHUP. One that is right is left in
/// `new`, and `signal` gets a byte; of another one it says why, and nothing changes.
fn on_hangup(path: &Path, signal: UnixStream, new: Arc<Mutex<Option<Config>>>) -> io::Result<()> {
    let (mut heard, told) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(SIGHUP, told)?;
    let path = path.to_owned();
    let body = move || {
        while heard.read_exact(&mut [0]).is_ok() {
            match read(&path) {
                Ok(config) => {
                    let mut new = new.lock().unwrap_or_else(PoisonError::into_inner);
                    // A byte is under way for one that was not taken yet.
                    if new.replace(config).is_none() {
                        let _ = (&signal).write_all(&[1]);
                    }
                }
                // A closed standard error is no reason to end.
                Err(failure) => _ = writeln!(io::stderr(), "{failure}"),
            }
        }
    };
    let thread = std::thread::Builder::new().name("uc-config".into());
    thread.spawn(body).map(|_| ())
}

fn check(path: &Path) -> Result<u8, Failure> {
    let config = read(path)?;
    show::line(&format!("{} is right.", path.display()))?;
    show::line(&format!("memory {}", config.memory))?;
    for budget in &config.tiers {
        show::line(&match budget.sizes {
            Some((whole, each)) => format!(
                "tier {}: {} clients, {each} each from the start{}",
                budget.spec,
                whole.0 / each.0,
                if budget.grows() {
                    ", and more while others use less"
                } else {
                    ""
                }
            ),
            None => format!("tier {}", budget.spec),
        })?;
    }
    for (name, class) in &config.classes {
        let bound = class.latency.as_ref();
        let bound = bound.map_or(String::new(), |bound| format!(", {bound}"));
        let mut rights = String::new();
        if let Some(cpus) = &class.cpus {
            rights += &format!(", CPUs {cpus}");
        }
        if !class.realtime {
            rights += ", no real-time priority";
        }
        if let Some(moves) = class.moves {
            rights += &format!(", {moves} a second move");
        }
        if let Some(policy) = &class.policy {
            rights += &format!(", policy {}", policy.file);
        }
        show::line(&format!(
            "class {name}: weight {}, {} to {}{bound}{rights}",
            class.weight, class.memory_min, class.memory_max
        ))?;
    }
    Ok(0)
}

fn show_status(json: bool) -> Result<u8, Failure> {
    let found = held::daemon_status().ok_or_else(|| {
        Failure::new(
            status::DAEMON_AWAY,
            "no daemon answers",
            "none of this user runs, or it has another UNDERCROFT_DIR",
            "start `undercroft daemon --config FILE`",
        )
    })?;
    if json {
        let text = serde_json::to_string_pretty(&found).map_err(|error| {
            Failure::new(status::FAILED, "no JSON", error.to_string(), "report this")
        })?;
        show::line(&text)?;
    } else {
        show::line(table(&found).trim_end())?;
    }
    Ok(0)
}

/// The status for people.
fn table(found: &DaemonStatus) -> String {
    let mut text = format!(
        "daemon {}: {} of {} given, {} free; {} clients, {} wait, {} refused, {} limits changed\n",
        found.pid,
        Bytes(found.held_bytes),
        Bytes(found.memory_bytes),
        Bytes(found.free_bytes),
        found.clients.len(),
        found.waiting,
        found.refused,
        found.moves,
    );
    for tier in &found.tiers {
        text.push_str(&format!(
            "tier {}: {} of {} given, {} used\n",
            tier.spec,
            Bytes(tier.granted_bytes),
            Bytes(tier.size_bytes),
            Bytes(tier.used_bytes)
        ));
    }
    if found.clients.is_empty() {
        return text;
    }
    let header = [
        "pid", "class", "weight", "limit", "target", "uses", "stall", "bound", "kept", "command",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    rows.extend(found.clients.iter().map(cells));
    let last = header.len() - 1;
    for row in &rows {
        for (at, cell) in row[..last].iter().enumerate() {
            let width = rows.iter().map(|row| row[at].len()).max().unwrap_or(0);
            text.push_str(&format!("{cell:>width$}  "));
        }
        text.push_str(&row[last]);
        text.push('\n');
    }
    text
}

fn cells(client: &MemberStatus) -> [String; 10] {
    let latency = client.latency.as_ref();
    let windows = |of: &MemberLatency| {
        let all = of.windows_kept + of.windows_missed;
        format!("{} of {all}", of.windows_kept)
    };
    let none = || "-".to_owned();
    [
        client.pid.to_string(),
        client.class.clone(),
        client.weight.to_string(),
        Bytes(client.limit_bytes).to_string(),
        Bytes(client.target_bytes).to_string(),
        Bytes(client.dram_bytes).to_string(),
        format!("{:.1} s", client.stall_seconds),
        latency.map_or_else(none, |of| of.bound.0.to_string()),
        latency.map_or_else(none, windows),
        client.command.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use undercroft_proto::grant::{Bound, Goes, Turn};

    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_client_under_its_header() {
        let client = MemberStatus {
            pid: 4711,
            command: "redis-server --port 7001".to_owned(),
            class: "web".to_owned(),
            weight: 4,
            memory_min_bytes: 0,
            limit_bytes: 3 << 29,
            target_bytes: 1 << 30,
            dram_bytes: 1 << 29,
            has_curve: true,
            stall_seconds: 1.25,
            swap_ins: 7,
            storage: Vec::new(),
            claimed: false,
            latency: Some(MemberLatency {
                bound: Bound("p99=300us".parse().expect("a bound")),
                windows_kept: 7,
                windows_missed: 2,
                turn: Turn {
                    batch: 9,
                    goes: Goes::ToBuffer,
                },
            }),
        };
        let found = DaemonStatus {
            schema_version: 1,
            pid: 9,
            uptime_seconds: 1.0,
            memory_bytes: 8 << 30,
            held_bytes: 3 << 29,
            free_bytes: 13 << 29,
            tiers: Vec::new(),
            clients: vec![client],
            waiting: 0,
            refused: 2,
            moves: 5,
        };
        let text = table(&found);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("1.5 GiB of 8.0 GiB given"), "{text}");
        assert_eq!(lines.len(), 3);
        let at = |line: &str, part: &str| line.find(part).map(|at| at + part.len());
        assert_eq!(at(lines[1], "class"), at(lines[2], "web"), "{text}");
        assert!(
            lines[2].ends_with("p99=300us  7 of 9  redis-server --port 7001"),
            "{text}"
        );
    }
}
