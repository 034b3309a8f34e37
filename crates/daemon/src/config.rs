//! The configuration: a TOML file, and drop-ins beside it. Every value is parsed into a type that
//! cannot be wrong, and an error says where it is.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use toml::Spanned;
use undercroft_base::{Bytes, Cpus, CpusError};
use undercroft_proto::options::PluginFile;
use undercroft_qos::LatencyBound;
use undercroft_sys::process;
use undercroft_tier::profile::{self, Profile};
use undercroft_tier::spec::TierSpec;

/// The class of a run that names none.
pub const DEFAULT_CLASS: &str = "default";

/// Least memory that is worth dividing, and least that a client is given.
pub const GRANT_MIN: Bytes = Bytes(4 << 20);

/// Largest weight.
const WEIGHT_MAX: u32 = 10_000;

/// Longest configuration file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// CPUs that a class names: the daemon may use each of them, so its clients may, as a rule.
fn cpus(text: &Spanned<String>) -> Result<Cpus, String> {
    let named: Cpus = (text.get_ref().parse()).map_err(|why: CpusError| why.to_string())?;
    let usable = process::allowed_cpus(0).map_err(|error| error.to_string())?;
    let usable = Cpus::of(usable).ok_or("no CPU can be used here")?;
    let mut wrong = named.numbers().iter();
    match wrong.find(|cpu| !usable.numbers().contains(cpu)) {
        None => Ok(named),
        Some(cpu) => Err(format!(
            "CPU {cpu} cannot be used here; these can: {usable}"
        )),
    }
}

/// A policy file. Its path may begin in the folder of the configuration `beside`.
fn policy(file: &str, beside: &Path, check: CheckPolicy) -> Result<PluginFile, String> {
    let path = beside.parent().unwrap_or(beside).join(file);
    let refused = |why: String| format!("{} is no policy: {why}", path.display());
    let read = PluginFile::read(&path).map_err(|why| refused(why.to_string()))?;
    check(&read.module).map_err(refused)?;
    Ok(read)
}

/// The memory and storage that the daemon divides, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// DRAM of all clients together.
    pub memory: Bytes,
    /// How it is divided.
    pub divide: Divide,
    /// Tiers of each client, fastest first; empty: each run has its own.
    pub tiers: Vec<Budget>,
    /// By name. [`DEFAULT_CLASS`] is always among them.
    pub classes: BTreeMap<String, Class>,
}

/// How memory is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Divide {
    /// By miss-ratio curves where they are known, by weights where they are not.
    #[default]
    Auto,
    /// By weights alone.
    Weights,
}

/// A tier, and what clients get of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Budget {
    /// As a client opens it: a file as long as all of it, mapped memory with the size of a grant.
    pub spec: TierSpec,
    /// All that may be given, and what each client gets at its start; `None`: it is compressed
    /// memory, which is part of a client's DRAM.
    pub sizes: Option<(Bytes, Bytes)>,
    /// Earlier measurements of its device (`undercroft tiers --measure`).
    pub profile: Option<Profile>,
}

impl Budget {
    /// With what was measured before. A damaged file is as none: each run warns of it.
    fn of(spec: TierSpec, sizes: Option<(Bytes, Bytes)>) -> Budget {
        Budget {
            profile: profile::known(&spec).unwrap_or_default(),
            spec,
            sizes,
        }
    }

    /// A client may have more of it than its grant. Mapped memory has all of its space from the
    /// start.
    pub fn grows(&self) -> bool {
        self.spec.facts().grows
    }
}

/// A class of clients: what each of them may have.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// How much memory and waiting count, 1 at least.
    pub weight: u32,
    /// Protection: a client is never asked to keep to less.
    pub memory_min: Bytes,
    /// A client never gets more.
    pub memory_max: Bytes,
    /// The bound of its page-ins.
    pub latency: Option<LatencyBound>,
    /// Page-ins a second that it is thought to need, until they are measured.
    pub demand: Option<u32>,
    /// CPUs of its manager; `None` = all.
    pub cpus: Option<Cpus>,
    /// Its manager may have real-time priority.
    pub realtime: bool,
    /// Bytes a second that its manager may move between tiers; `None` = as without a daemon.
    pub moves: Option<Bytes>,
    /// The policy file of its runs.
    pub policy: Option<Arc<PluginFile>>,
}

/// Tells whether a file's bytes are a policy. Errors: why not.
pub type CheckPolicy = fn(&[u8]) -> Result<(), String>;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("{}: {why}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Something in a file is wrong.
    #[error("{}:{place}: {why}", .path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Where.
        place: Position,
        /// The error, with the fix.
        why: String,
    },
    /// The files contradict themselves or the machine.
    #[error("{}: {why}", .path.display())]
    Contradicts {
        /// The main file.
        path: PathBuf,
        /// The contradiction, with the fix.
        why: String,
    },
}

/// Line and column, both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position(pub usize, pub usize);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0, self.1)
    }
}

impl Position {
    fn of(text: &str, at: usize) -> Position {
        let before = text.get(..at).unwrap_or(text);
        let line = before.rsplit('\n').next().unwrap_or_default();
        Position(before.matches('\n').count() + 1, line.chars().count() + 1)
    }
}

/// A file as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table")]
struct Written {
    memory: Option<Spanned<String>>,
    divide: Option<Divide>,
    #[serde(default)]
    tier: Vec<WrittenTier>,
    #[serde(default)]
    class: BTreeMap<Spanned<String>, WrittenClass>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table: [[tier]]")]
struct WrittenTier {
    spec: Spanned<String>,
    grant: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table, such as [class.web]")]
struct WrittenClass {
    weight: Option<Spanned<u32>>,
    memory_min: Option<Spanned<String>>,
    memory_max: Option<Spanned<String>>,
    latency: Option<Spanned<String>>,
    demand: Option<u32>,
    cpus: Option<Spanned<String>>,
    realtime: Option<bool>,
    moves: Option<Spanned<String>>,
    policy: Option<Spanned<String>>,
}

/// The text of a file, to say where something is wrong.
struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    fn read(path: &Path) -> Result<Source, ConfigError> {
        let unreadable = |why: String| ConfigError::Unreadable {
            path: path.to_owned(),
            why,
        };
        let found = std::fs::metadata(path).map_err(|error| unreadable(error.to_string()))?;
        if !found.is_file() || found.len() > FILE_BYTES_MAX {
            return Err(unreadable("this is no configuration file".to_owned()));
        }
        let text = std::fs::read_to_string(path).map_err(|error| unreadable(error.to_string()))?;
        let path = path.to_owned();
        Ok(Source { path, text })
    }

    fn written(&self) -> Result<Written, ConfigError> {
        toml::from_str(&self.text).map_err(|error| {
            let at = error.span().unwrap_or_default();
            // The words for what `class` and `tier` are.
            let why = (error.message().trim())
                .replace("expected a map", "expected tables, such as [class.web]")
                .replace("expected a sequence", "expected tables: [[tier]]");
            self.wrong(&at, why)
        })
    }

    fn wrong(&self, at: &Range<usize>, why: String) -> ConfigError {
        ConfigError::Wrong {
            path: self.path.clone(),
            place: Position::of(&self.text, at.start),
            why,
        }
    }

    fn size(&self, text: &Spanned<String>, whole: Option<Bytes>) -> Result<Bytes, ConfigError> {
        size(text.get_ref(), whole).map_err(|why| self.wrong(&text.span(), why))
    }
}

/// A size, or a share of `whole` if there is one.
fn size(text: &str, whole: Option<Bytes>) -> Result<Bytes, String> {
    let parsed = match (text.trim().strip_suffix('%'), whole) {
        (Some(number), Some(whole)) => match number.trim().parse::<f64>() {
            Ok(percent) if percent > 0.0 && percent <= 100.0 => {
                Bytes((whole.0 as f64 * percent / 100.0) as u64)
            }
            _ => return Err(format!("`{text}` is no share; use for example \"50%\"")),
        },
        _ => text.parse::<Bytes>().map_err(|error| error.to_string())?,
    };
    if parsed < GRANT_MIN {
        return Err(format!("{parsed} is too little; {GRANT_MIN} at least"));
    }
    Ok(parsed)
}

impl Config {
    /// Reads a file and its drop-ins: `FILE.d/*.toml`, in the order of their names. A drop-in
    /// replaces `memory`, `divide` and whole classes, and adds tiers.
    ///
    /// * `machine`: memory of this machine.
    /// * `check`: looks at policy files.
    ///
    /// Errors: with file, line and column.
    pub fn read(path: &Path, machine: Bytes, check: CheckPolicy) -> Result<Config, ConfigError> {
        let mut config = Config {
            memory: Bytes(0),
            divide: Divide::default(),
            tiers: Vec::new(),
            classes: BTreeMap::new(),
        };
        for path in files(path)? {
            config.add(&Source::read(&path)?, machine, check)?;
        }
        config.finish(path, machine)
    }

    fn add(
        &mut self,
        source: &Source,
        machine: Bytes,
        check: CheckPolicy,
    ) -> Result<(), ConfigError> {
        let written = source.written()?;
        if let Some(memory) = &written.memory {
            self.memory = source.size(memory, Some(machine))?;
        }
        if let Some(divide) = written.divide {
            self.divide = divide;
        }
        for tier in &written.tier {
            self.tiers.push(tier.parse(source)?);
        }
        for (name, class) in &written.class {
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            if name.get_ref().is_empty()
                || name.get_ref().len() > 32
                || !name.get_ref().chars().all(plain)
            {
                let why = "a class is named by up to 32 letters, digits, `-` and `_`".to_owned();
                return Err(source.wrong(&name.span(), why));
            }
            let mut parsed = class.parse(source, machine)?;
            if let Some(file) = &class.policy {
                let read = policy(file.get_ref(), &source.path, check);
                let wrong = |why| format!("class {}: {why}", name.get_ref());
                let read = read.map_err(|why| source.wrong(&file.span(), wrong(why)))?;
                parsed.policy = Some(Arc::new(read));
            }
            self.classes.insert(name.get_ref().clone(), parsed);
        }
        Ok(())
    }

    /// Checks what no file alone can be checked for.
    fn finish(mut self, path: &Path, machine: Bytes) -> Result<Config, ConfigError> {
        let contradicts = |why: String| ConfigError::Contradicts {
            path: path.to_owned(),
            why,
        };
        if self.memory == Bytes(0) {
            let why = "`memory` is missing: what is there to divide? For example memory = \"8G\"";
            return Err(contradicts(why.to_owned()));
        }
        if self.memory > machine {
            let why = format!(
                "memory = {} is more than this machine has, {machine}",
                self.memory
            );
            return Err(contradicts(why));
        }
        let standard = Class {
            weight: 1,
            memory_min: GRANT_MIN,
            memory_max: self.memory,
            latency: None,
            demand: None,
            cpus: None,
            realtime: true,
            moves: None,
            policy: None,
        };
        self.classes
            .entry(DEFAULT_CLASS.to_owned())
            .or_insert(standard);
        for (name, class) in &mut self.classes {
            class.memory_max = class.memory_max.min(self.memory);
            if class.memory_min > self.memory {
                let why = format!(
                    "class {name}: memory_min = {} is more than all memory, {}",
                    class.memory_min, self.memory
                );
                return Err(contradicts(why));
            }
        }
        for budget in &self.tiers {
            if let (Some((size, _)), Some(directory)) = (budget.sizes, &budget.spec.path) {
                let free = free_space(directory).map_err(|why| contradicts(why.to_string()))?;
                if size > free {
                    let why = format!(
                        "the tier in {} has size={size}, and its file system has {free} free: \
                         give a smaller size",
                        directory.display()
                    );
                    return Err(contradicts(why));
                }
            }
        }
        Ok(self)
    }
}

/// The file and its drop-ins.
fn files(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let mut folder = path.as_os_str().to_owned();
    folder.push(".d");
    let folder = PathBuf::from(folder);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(vec![path.to_owned()]);
        }
        Err(error) => {
            let (path, why) = (folder, error.to_string());
            return Err(ConfigError::Unreadable { path, why });
        }
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.retain(|path| path.extension().is_some_and(|end| end == "toml"));
    found.sort();
    found.insert(0, path.to_owned());
    Ok(found)
}

fn free_space(directory: &Path) -> std::io::Result<Bytes> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(Bytes(found.f_bavail * found.f_frsize))
}

impl WrittenTier {
    fn parse(&self, source: &Source) -> Result<Budget, ConfigError> {
        let wrong = |why: String| source.wrong(&self.spec.span(), why);
        let mut spec: TierSpec = (self.spec.get_ref().parse())
            .map_err(|error: undercroft_tier::spec::SpecError| wrong(error.to_string()))?;
        if spec.facts().charged_to_limit {
            return match &self.grant {
                None => Ok(Budget::of(spec, None)),
                Some(grant) => {
                    let why = "compressed memory is part of a client's DRAM: leave `grant` out";
                    Err(source.wrong(&grant.span(), why.to_owned()))
                }
            };
        }
        let Some(path) = spec.path.clone() else {
            let why = "a cluster has no sizes to grant; give the tier to `undercroft run`";
            return Err(wrong(why.to_owned()));
        };
        let Some(whole) = spec.size else {
            let why = "a size is needed, such as file:/var/swap,size=100G: clients share it";
            return Err(wrong(why.to_owned()));
        };
        let Some(grant) = &self.grant else {
            let why = "`grant` is missing: how much does each client get at its start, and keep? \
                       For example \"10G\"";
            return Err(wrong(why.to_owned()));
        };
        let each = source.size(grant, Some(whole))?;
        if each > whole {
            let why = format!("a grant of {each} does not fit in the tier's {whole}");
            return Err(source.wrong(&grant.span(), why));
        }
        if !spec.facts().grows {
            spec.size = Some(each);
        }
        if !path.is_dir() {
            let why = format!(
                "{} is no directory; clients have a file of their own in one",
                path.display()
            );
            return Err(wrong(why));
        }
        Ok(Budget::of(spec, Some((whole, each))))
    }
}

impl WrittenClass {
    fn parse(&self, source: &Source, machine: Bytes) -> Result<Class, ConfigError> {
        let weight = match &self.weight {
            None => 1,
            Some(weight) if (1..=WEIGHT_MAX).contains(weight.get_ref()) => *weight.get_ref(),
            Some(weight) => {
                let why = format!("a weight is from 1 to {WEIGHT_MAX}");
                return Err(source.wrong(&weight.span(), why));
            }
        };
        let size = |text: &Option<Spanned<String>>| {
            let text = text.as_ref();
            text.map(|text| source.size(text, Some(machine)))
                .transpose()
        };
        let (least, most) = (size(&self.memory_min)?, size(&self.memory_max)?);
        let class = Class {
            weight,
            memory_min: least.unwrap_or(GRANT_MIN),
            memory_max: most.unwrap_or(Bytes(u64::MAX)),
            latency: match &self.latency {
                None => None,
                Some(text) => {
                    let parsed = text.get_ref().parse::<LatencyBound>();
                    Some(parsed.map_err(|why| source.wrong(&text.span(), why.to_string()))?)
                }
            },
            demand: self.demand,
            cpus: match &self.cpus {
                None => None,
                Some(text) => Some(cpus(text).map_err(|why| source.wrong(&text.span(), why))?),
            },
            realtime: self.realtime.unwrap_or(true),
            moves: size(&self.moves)?,
            policy: None,
        };
        if let Some(least) = &self.memory_min
            && class.memory_min > class.memory_max
        {
            let why = format!(
                "memory_min = {} is above memory_max = {}",
                class.memory_min, class.memory_max
            );
            return Err(source.wrong(&least.span(), why));
        }
        Ok(class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Bytes = Bytes(64 << 30);

    fn check(module: &[u8]) -> Result<(), String> {
        let is_good = module == b"good";
        is_good.then_some(()).ok_or("it is bad".to_owned())
    }

    fn read(text: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("u.toml");
        let text = text.replace("HERE", &folder.path().display().to_string());
        std::fs::write(&path, text).expect("a file");
        std::fs::write(folder.path().join("good.wasm"), "good").expect("a file");
        std::fs::write(folder.path().join("bad.wasm"), "bad").expect("a file");
        Config::read(&path, MACHINE, check).map_err(|error| {
            let folder = format!("{}/", folder.path().display());
            error.to_string().replace(&folder, "")
        })
    }

    #[test]
    fn a_whole_configuration_means_what_it_says() {
        let config = read(
            "memory = \"25%\"\ndivide = \"weights\"\n[[tier]]\nspec = \"ram,zstd\"\n[[tier]]\n\
             spec = \"file:HERE,size=64M\"\ngrant = \"16M\"\n[class.web]\nweight = 4\n\
             memory_min = \"1G\"\nmemory_max = \"6G\"\nlatency = \"p99=200us\"\n\
             cpus = \"0\"\nrealtime = false\nmoves = \"8M\"\npolicy = \"good.wasm\"\n",
        )
        .expect("a configuration");
        assert_eq!(config.memory, Bytes(16 << 30));
        assert_eq!(config.divide, Divide::Weights);
        assert_eq!(config.tiers[0].sizes, None);
        assert_eq!(
            config.tiers[1].sizes,
            Some((Bytes(64 << 20), Bytes(16 << 20)))
        );
        assert!(config.tiers[1].spec.to_string().contains("size=64"));
        let web = &config.classes["web"];
        assert_eq!((web.weight, web.memory_min), (4, Bytes(1 << 30)));
        assert_eq!(web.cpus, "0".parse().ok());
        assert_eq!((web.realtime, web.moves), (false, Some(Bytes(8 << 20))));
        let policy = web.policy.as_ref().expect("a policy");
        assert!(policy.file.ends_with("/good.wasm") && policy.module == b"good");
        let default = &config.classes[DEFAULT_CLASS];
        assert_eq!((&default.cpus, default.realtime), (&None, true));
        assert_eq!(default.memory_max, config.memory);
    }

    /// A file, where it is wrong, and what is said.
    const WRONG: &[(&str, &str, &str)] = &[
        ("memory = \"8G\"\nmemry = 1\n", "u.toml:2:1", "memry"),
        ("memory = 8\n", "u.toml:1:10", "string"),
        ("memory = \"8G\n", "u.toml:1:", ""),
        ("memory = \"lots\"\n", "u.toml:1:10", "512M"),
        ("memory = \"101%\"\n", "u.toml:1:10", "share"),
        ("memory = \"1K\"\n", "u.toml:1:10", "at least"),
        ("memory = \"65G\"\n", "u.toml:", "more than this machine"),
        ("divide = \"auto\"\n", "u.toml:", "`memory` is missing"),
        ("divide = \"fairly\"\n", "u.toml:1:10", "weights"),
        (
            "memory = \"8G\"\n[class.web]\nweight = 0\n",
            "u.toml:3:10",
            "from 1 to",
        ),
        (
            "memory = \"8G\"\n[class.web]\nmemory_min = \"2G\"\nmemory_max = \"1G\"\n",
            "u.toml:3:14",
            "above memory_max",
        ),
        (
            "memory = \"8G\"\n[class.web]\nmemory_min = \"9G\"\n",
            "u.toml:",
            "class web: memory_min",
        ),
        (
            "memory = \"8G\"\n[class.web]\nlatency = \"soon\"\n",
            "u.toml:3:11",
            "pPERCENTILE",
        ),
        (
            "memory = \"8G\"\n[class.web]\ncpus = \"all\"\n",
            "u.toml:3:8",
            "example: 0-3,6",
        ),
        (
            "memory = \"8G\"\n[class.web]\ncpus = \"0,1023\"\n",
            "u.toml:3:8",
            "CPU 1023 cannot be used",
        ),
        (
            "memory = \"8G\"\n[class.web]\nmoves = \"1K\"\n",
            "u.toml:3:9",
            "at least",
        ),
        (
            "memory = \"8G\"\n[class.web]\npolicy = \"bad.wasm\"\n",
            "u.toml:3:10",
            "class web: bad.wasm is no policy: it is bad",
        ),
        (
            "memory = \"8G\"\n[class.web]\npolicy = \"/\"\n",
            "u.toml:3:10",
            "class web: / is no policy: it is no file",
        ),
        (
            "memory = \"8G\"\n[class.\"a b\"]\n",
            "u.toml:2:8",
            "letters",
        ),
        (
            "memory = \"8G\"\n[[tier]]\nspec = \"rom\"\n",
            "u.toml:3:8",
            "rom",
        ),
        (
            "memory = \"8G\"\n[[tier]]\nspec = \"file:HERE,size=64M\"\n",
            "u.toml:3:8",
            "`grant` is missing",
        ),
        (
            "memory = \"8G\"\n[[tier]]\nspec = \"file:HERE,size=64M\"\ngrant = \"65M\"\n",
            "u.toml:4:9",
            "does not fit",
        ),
        (
            "memory = \"8G\"\n[[tier]]\nspec = \"file:HERE/u.toml,size=64M\"\ngrant = \"6M\"\n",
            "u.toml:3:8",
            "no directory",
        ),
        (
            "memory = \"8G\"\n[[tier]]\nspec = \"file:HERE,size=4000T\"\ngrant = \"6M\"\n",
            "u.toml:",
            "free",
        ),
        (
            "memory = \"8G\"\n[[tier]]\nspec = \"ram\"\ngrant = \"6M\"\n",
            "u.toml:4:9",
            "leave `grant` out",
        ),
    ];

    #[test]
    fn what_is_wrong_is_refused_with_its_place_and_the_fix() {
        for (text, place, part) in WRONG.iter().copied() {
            let error = read(text).expect_err(text);
            assert!(error.starts_with(place), "{text}: {error}");
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn drop_ins_replace_in_the_order_of_their_names_and_say_where_they_are_wrong() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("u.toml");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text);
        std::fs::create_dir(folder.path().join("u.toml.d")).expect("a folder");
        write("u.toml", "memory = \"1G\"\n[class.a]\nweight = 2\n").expect("a file");
        write("u.toml.d/2.toml", "memory = \"3G\"\n").expect("a file");
        write("u.toml.d/1.toml", "memory = \"2G\"\n[class.a]\n[class.b]\n").expect("a file");
        write("u.toml.d/9.txt", "nothing\n").expect("a file");
        let config = Config::read(&path, MACHINE, check).expect("a configuration");
        assert_eq!(config.memory, Bytes(3 << 30));
        assert_eq!(config.classes.len(), 3);
        assert_eq!(
            config.classes["a"].weight, 1,
            "a class is replaced as a whole"
        );
        write("u.toml.d/3.toml", "\n  speed = 1\n").expect("a file");
        let error = Config::read(&path, MACHINE, check)
            .expect_err("speed")
            .to_string();
        assert!(error.contains("u.toml.d/3.toml:2:3"), "{error}");
        let missing = Config::read(&folder.path().join("none"), MACHINE, check);
        assert!(missing.expect_err("none").to_string().contains("none: "));
    }
}
