//! The ways to run a program of the experiment `programs`: the default settings, fixed ones, and
//! the kernel's swap.

use anyhow::ensure;
use undercroft_base::Bytes;

use crate::experiments::Lab;
use crate::policy_file;
use crate::rig::{Rig, SwapFile, TierChoice, Undercroft, Zram};

/// The default settings: those with which all others are compared.
pub(super) const DEFAULT: &str = "undercroft";

/// The tiers of a fixed setting.
#[derive(Clone, Copy)]
enum Tiers {
    /// As the default settings have them.
    RamThenFile,
    /// The RAM tier takes at most this percentage of the limit, and all of it where pages leave.
    RamShare(u64),
    File,
}

/// A setting that does not adapt.
struct Fixed {
    name: &'static str,
    tiers: Tiers,
    arguments: &'static [&'static str],
    /// A policy file.
    file: Option<&'static str>,
}

const FIXED: [Fixed; 9] = [
    policy("undercroft-lru", &["--policy", "lru"]),
    by_file("undercroft-clock", "clock"),
    by_file("undercroft-clock_w", "clock_w"),
    policy(
        "undercroft-active_inactive",
        &["--policy", "active_inactive"],
    ),
    file("undercroft-share-0", &[]),
    share("undercroft-share-25", 25),
    share("undercroft-share-50", 50),
    share("undercroft-share-75", 75),
    file("undercroft-share-0-lru", &["--policy", "lru"]),
];

const fn policy(name: &'static str, arguments: &'static [&'static str]) -> Fixed {
    Fixed {
        name,
        tiers: Tiers::RamThenFile,
        arguments,
        file: None,
    }
}

const fn by_file(name: &'static str, file: &'static str) -> Fixed {
    Fixed {
        file: Some(file),
        ..policy(name, &[])
    }
}

const fn file(name: &'static str, arguments: &'static [&'static str]) -> Fixed {
    Fixed {
        name,
        tiers: Tiers::File,
        arguments,
        file: None,
    }
}

const fn share(name: &'static str, percent: u64) -> Fixed {
    Fixed {
        name,
        tiers: Tiers::RamShare(percent),
        arguments: &["--placement", "waterfall"],
        file: None,
    }
}

/// The names of the fixed settings.
pub(super) fn fixed() -> impl Iterator<Item = &'static str> {
    FIXED.iter().map(|fixed| fixed.name)
}

/// Refuses names that no setting has.
pub(super) fn check(wanted: &[String]) -> anyhow::Result<()> {
    let names: Vec<&str> = [DEFAULT, "swapfile", "zram"]
        .into_iter()
        .chain(fixed())
        .collect();
    for name in wanted {
        let known = names.contains(&name.as_str());
        ensure!(known, "no setting `{name}`; there are {}", names.join(", "));
    }
    Ok(())
}

/// The rigs that take turns. Those with policy files are among them if such can be built here.
/// * `swap`: size of swap areas and file tiers; nothing outgrows it.
pub(super) fn rigs(lab: &Lab, swap: Bytes) -> anyhow::Result<Vec<Box<dyn Rig>>> {
    let wanted = &lab.options.settings;
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|of| of == name);
    let has_compiler = policy_file::lacks().is_none();
    let directory = lab.swap_directory();
    let default = lab.undercroft(TierChoice::RamThenFile(directory.clone()), swap);
    let mut rigs: Vec<Box<dyn Rig>> = default.into_iter().collect();
    if let Some(binary) = &lab.options.undercroft_binary {
        for fixed in FIXED.iter().filter(|fixed| is_wanted(fixed.name)) {
            let policy = match fixed.file {
                Some(name) if has_compiler => {
                    let file = policy_file::build(&lab.options.out, name, &[])?;
                    vec!["--policy".to_owned(), file.display().to_string()]
                }
                Some(_) => continue,
                None => Vec::new(),
            };
            let tier = match fixed.tiers {
                Tiers::RamThenFile => TierChoice::RamThenFile(directory.clone()),
                Tiers::RamShare(percent) => {
                    TierChoice::RamShareThenFile(percent, directory.clone())
                }
                Tiers::File => TierChoice::File(directory.clone()),
            };
            let given = lab.options.undercroft_arguments.iter().cloned();
            let own = fixed.arguments.iter().map(ToString::to_string);
            rigs.push(Box::new(Undercroft {
                binary: binary.clone(),
                name: Some(fixed.name),
                tier,
                swap,
                directory: lab.options.out.clone(),
                extra: given.chain(own).chain(policy).collect(),
                alone: true,
            }));
        }
    }
    rigs.push(Box::new(SwapFile { swap, directory }));
    rigs.push(Box::new(Zram { swap }));
    rigs.retain(|rig| is_wanted(rig.name()));
    Ok(rigs)
}
