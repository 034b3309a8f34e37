//! The undercroft rig: the command behind `undercroft run`. A cgroup without a limit meters it, as
//! an independent check.

use super::cgroup::Cgroup;
use super::{Facts, Rig, RigError, Stage, StoreMeter, swap};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use undercroft_base::Bytes;

/// Where evicted pages go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierChoice {
    /// Compressed RAM only (`--tier ram`).
    Ram,
    /// A file in this directory only (`--tier file:PATH`).
    File(PathBuf),
    /// Compressed RAM, overflowing to a file in this directory.
    RamThenFile(PathBuf),
    /// The same, with at most this percentage of the limit for compressed RAM.
    RamShareThenFile(u64, PathBuf),
    /// These tiers, as `--tier` takes them, under a name for the results.
    Named(&'static str, Vec<String>),
}

/// `undercroft run --memory-max LIMIT --tier ... --report FILE --quiet -- COMMAND`.
pub struct Undercroft {
    /// The program under test.
    pub binary: PathBuf,
    /// Its name in results; `None`: that of its tiers.
    pub name: Option<&'static str>,
    /// Its tiers.
    pub tier: TierChoice,
    /// Size of a file tier.
    pub swap: Bytes,
    /// Where reports go.
    pub directory: PathBuf,
    /// More arguments before `--`, e.g. `--policy lru`.
    pub extra: Vec<String>,
    /// Whether it waits for other labs, and for another active swap to go.
    pub alone: bool,
}

impl Undercroft {
    fn tiers(&self, limit: Bytes) -> Vec<OsString> {
        let file = |directory: &PathBuf| {
            let path = directory.join(format!("undercroft-lab-{}.tier", std::process::id()));
            OsString::from(format!("file:{},size={}", path.display(), self.swap.0))
        };
        match &self.tier {
            TierChoice::Ram => vec!["ram".into()],
            TierChoice::File(directory) => vec![file(directory)],
            TierChoice::RamThenFile(directory) => vec!["ram".into(), file(directory)],
            TierChoice::RamShareThenFile(percent, directory) => {
                let most = limit.0 * percent / 100;
                vec![format!("ram,max={most}").into(), file(directory)]
            }
            TierChoice::Named(_, specs) => specs.iter().map(OsString::from).collect(),
        }
    }
}

impl Rig for Undercroft {
    fn name(&self) -> &'static str {
        if let Some(name) = self.name {
            return name;
        }
        match self.tier {
            TierChoice::Ram => "undercroft-ram",
            TierChoice::File(_) => "undercroft-file",
            TierChoice::RamThenFile(_) | TierChoice::RamShareThenFile(..) => "undercroft",
            TierChoice::Named(name, _) => name,
        }
    }

    fn stores_outside_limit(&self) -> bool {
        false // `--memory-max` counts the RAM tier
    }

    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        crate::interrupt::install();
        // A lab that may not open the lock (another user's) goes on without it.
        let lock = self.alone.then(swap::lock).and_then(Result::ok);
        if self.alone {
            swap::wait_until_alone()?;
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let report = self
            .directory
            .join(format!("report-{}-{number}.json", std::process::id()));
        let mut prefix: Vec<OsString> = vec![self.binary.clone().into(), "run".into()];
        prefix.extend(["--memory-max".into(), limit.0.to_string().into()]);
        for tier in self.tiers(limit) {
            prefix.extend(["--tier".into(), tier]);
        }
        prefix.extend(["--report".into(), report.clone().into(), "--quiet".into()]);
        prefix.extend(self.extra.iter().map(OsString::from));
        prefix.push("--".into());
        let mut facts = Facts::new();
        let words: Vec<_> = prefix.iter().map(|word| word.to_string_lossy()).collect();
        facts.insert("command".into(), words.join(" "));
        let cgroup = if Cgroup::available() {
            Some(Cgroup::create(None)?)
        } else {
            None
        };
        Ok(Stage {
            prefix,
            facts,
            limit,
            meter: StoreMeter::None,
            report: Some(report),
            _swap: None,
            cgroup,
            _lock: lock,
        })
    }
}

/// The same rig for a monitor of virtual machines: `undercroft vm --memory SIZE` in place of `run`.
pub struct UndercroftGuest {
    /// All else.
    pub run: Undercroft,
    /// Memory of the machine.
    pub memory: Bytes,
}

impl Rig for UndercroftGuest {
    fn name(&self) -> &'static str {
        self.run.name()
    }

    fn stores_outside_limit(&self) -> bool {
        self.run.stores_outside_limit()
    }

    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError> {
        let mut stage = self.run.set_up(limit)?;
        let words = [
            "vm".into(),
            "--memory".into(),
            self.memory.0.to_string().into(),
        ];
        stage.prefix.splice(1..2, words);
        let command = stage.facts.get_mut("command");
        if let Some(command) = command {
            *command = command.replacen(" run ", &format!(" vm --memory {} ", self.memory.0), 1);
        }
        Ok(stage)
    }
}
