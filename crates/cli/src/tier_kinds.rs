//! `undercroft tiers`: which kinds of tiers there are, and what was measured.

use serde::Serialize;
use undercroft_proto::report::SCHEMA_VERSION;
use undercroft_tier::profile::{self, Profile, ProfileError};
use undercroft_tier::spec::{KINDS, Kind, Setting};

use crate::measure;
use crate::show::{json, line};
use undercroft_terminal::{Failure, status};

/// A kind of tier.
#[derive(Debug, Serialize)]
struct KindShown {
    kind: &'static str,
    syntax: &'static str,
    example: &'static str,
    meaning: &'static str,
    options: &'static [Setting],
}

impl KindShown {
    fn of(row: &Kind) -> KindShown {
        KindShown {
            kind: row.facts.kind,
            syntax: row.syntax,
            example: row.example,
            meaning: row.meaning,
            options: row.settings,
        }
    }
}

/// The kinds that a user can name.
fn named() -> impl Iterator<Item = &'static &'static Kind> {
    KINDS.iter().filter(|row| !row.facts.is_source)
}

/// `undercroft tiers`: prints both.
///
/// Errors: a file of profiles is damaged.
pub(crate) fn print(as_json: bool) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Tiers {
        schema_version: u32,
        tiers: Vec<KindShown>,
        profiles: Vec<Profile>,
    }
    let mut profiles = Vec::new();
    for place in profile::places() {
        let damaged = |error: ProfileError| {
            let path = place.path().display().to_string();
            let fix = format!("`rm {path}`, then `undercroft tiers --measure` again");
            Failure::new(
                status::FAILED,
                "cannot read profiles",
                error.to_string(),
                fix,
            )
        };
        profiles.extend(place.all().map_err(damaged)?);
    }
    if as_json {
        json(&Tiers {
            schema_version: SCHEMA_VERSION,
            tiers: named().map(|row| KindShown::of(row)).collect(),
            profiles,
        })?;
        return Ok(0);
    }
    for tier in named() {
        line(&format!(
            "{}\n  {}\n  example: --tier {}",
            tier.syntax, tier.meaning, tier.example
        ))?;
        for option in tier.settings {
            line(&format!(
                "  {:<18} {} (default: {})",
                option.name, option.meaning, option.default
            ))?;
        }
    }
    line(&format!(
        "\nDEVICE is one of: {}.",
        undercroft_tier::shape::names()
    ))?;
    line("\nGive --tier once for each tier, fastest first. Full tiers overflow into the next.")?;
    if profiles.is_empty() {
        line("Nothing is measured yet: `undercroft tiers --measure SPEC`.")?;
    } else {
        line("\nMeasured before (`--measure`):")?;
        measure::table(&profiles)?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guide_names_every_shape() {
        let guide = include_str!("../../../docs/guide/tiers.md");
        for name in undercroft_tier::shape::names().split(", ") {
            assert!(guide.contains(&format!("`{name}`")), "{name}");
        }
    }
}
