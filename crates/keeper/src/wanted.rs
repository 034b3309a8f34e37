//! Which run a user means: by a process id, by its name, or by its program.

use std::fmt;
use std::str::FromStr;

use undercroft_proto::report::Snapshot;
use undercroft_sys::procfs::status_number;

/// A run, as a user writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Any process of the program, or of ours.
    Process(u32),
    /// The name of the run (`run --name`). If none has it: its program, such as `redis-server`.
    Name(String),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        if text.is_empty() {
            return Err("give a process id, a name, or a program".to_owned());
        }
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(Wanted::Name(text.to_owned()));
        }
        match text.parse() {
            Ok(pid) if pid > 0 => Ok(Wanted::Process(pid)),
            _ => Err("no process has this id".to_owned()),
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wanted::Process(pid) => write!(f, "{pid}"),
            Wanted::Name(name) => f.write_str(name),
        }
    }
}

/// The runs that a user may mean.
#[derive(Clone, Debug, PartialEq)]
pub enum Found<'a> {
    /// No run.
    None,
    /// This one.
    One(&'a Snapshot),
    /// Several: the user has to choose.
    Several(Vec<&'a Snapshot>),
}

/// The run that a user means, among `runs`.
pub fn find<'a>(runs: &'a [Snapshot], wanted: &Wanted) -> Found<'a> {
    let all = match wanted {
        Wanted::Process(pid) => run_of(runs, *pid).into_iter().collect(),
        Wanted::Name(name) => {
            let named: Vec<_> = (runs.iter())
                .filter(|run| run.name.as_ref() == Some(name))
                .collect();
            if named.is_empty() {
                let is_it =
                    |run: &&Snapshot| [run.program(), run.program_path()].contains(&&**name);
                runs.iter().filter(is_it).collect()
            } else {
                named
            }
        }
    };
    match all[..] {
        [] => Found::None,
        [one] => Found::One(one),
        _ => Found::Several(all),
    }
}

/// Most ancestors of a process that are looked at.
const ANCESTORS_MAX: usize = 256;

/// The run that a process belongs to: any of the program, or of ours. Of a run inside a run it is
/// the inner one. `None`: it belongs to none of them.
fn run_of(runs: &[Snapshot], pid: u32) -> Option<&Snapshot> {
    let mut line = std::iter::successors(Some(pid), |pid| parent(*pid)).take(ANCESTORS_MAX);
    line.find_map(|pid| runs.iter().find(|run| run.is_of(pid)))
}

/// The parent of a process. `None`: it has none here, or has ended.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    let parent = status_number(pid, "PPid")?;
    u32::try_from(parent).ok().filter(|parent| *parent > 0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run of this keeper with this program.
    pub(crate) fn run(pid: u32, name: Option<&str>, program: &str) -> Snapshot {
        let text = include_str!("../../cli/src/top/snapshot.json");
        let run: Snapshot = serde_json::from_str(text).expect("a snapshot");
        Snapshot {
            pid,
            client_pid: 0,
            name: name.map(str::to_owned),
            command: vec![program.to_owned()],
            ..run
        }
    }

    fn pids(found: Found<'_>) -> Vec<u32> {
        match found {
            Found::None => Vec::new(),
            Found::One(run) => vec![run.pid],
            Found::Several(runs) => runs.iter().map(|run| run.pid).collect(),
        }
    }

    #[test]
    fn a_run_is_found_by_process_name_or_program_and_names_come_first() {
        let own = std::process::id();
        let runs = [
            run(own, Some("web"), "/usr/bin/redis-server"),
            run(4_000_001, None, "redis-server"),
            run(4_000_002, Some("python3"), "node"),
            run(4_000_003, None, "/usr/bin/python3"),
        ];
        let child = std::process::Command::new("sleep").arg("60").spawn();
        let mut child = child.expect("a child");
        let child_pid = child.id().to_string();
        for (text, expected) in [
            (own.to_string().as_str(), vec![own]),
            (&child_pid, vec![own]),
            ("web", vec![own]),
            ("redis-server", vec![own, 4_000_001]),
            ("/usr/bin/redis-server", vec![own]),
            ("python3", vec![4_000_002]),
            ("node", vec![4_000_002]),
            ("redis", vec![]),
            ("1", vec![]),
        ] {
            let wanted = text.parse().expect("a run");
            assert_eq!(pids(find(&runs, &wanted)), expected, "{text}");
        }
        child.kill().and_then(|()| child.wait()).expect("it ends");
        for text in ["", "0", "4294967296"] {
            assert!(text.parse::<Wanted>().is_err(), "{text}");
        }
    }
}
