//! A storm that can be run again: its setup and the steps that are kept. Written to and read from a
//! replay file.
//!
//! ```text
//! undercroft storm 1
//! seed = 17
//! ... (the lines of `StormSetup`)
//! steps = 0-511,513,600-602
//! ```
//! Each step draws its own random numbers from the seed and its number, so a step that is left out
//! changes no other step.

use std::fmt::{self, Display};

use super::setup::StormSetup;

const FIRST_LINE: &str = "undercroft storm 1";

/// Most steps a recipe may name: bounds what a file can ask for.
const STEPS_MAX: u64 = 100_000_000;

/// A storm as text: its setup and what must happen in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// The configuration.
    pub setup: StormSetup,
    /// Steps to take, ascending.
    pub steps: Vec<u64>,
}

/// A replay file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecipeError {
    /// The text is something else.
    #[error(
        "not a storm to replay: the first line must be `undercroft storm 1`, as `undercroft-lab storm` writes it"
    )]
    NotARecipe,
    /// A line is wrong.
    #[error("line {line}: {what}")]
    Line {
        /// From 1.
        line: usize,
        /// The reason.
        what: String,
    },
    /// A line is missing.
    #[error("no line begins with `{0} =`")]
    Missing(&'static str),
}

impl Recipe {
    /// Reads a replay file's text. Cost: O(text and steps).
    pub fn parse(text: &str) -> Result<Recipe, RecipeError> {
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, line)| line.trim()) != Some(FIRST_LINE) {
            return Err(RecipeError::NotARecipe);
        }
        let mut setup = StormSetup::of_seed(0);
        setup.tiers.clear();
        (setup.links, setup.beside) = (false, false);
        (setup.kernel_swap, setup.plugin) = (false, false);
        let (mut steps, mut seeded) = (None, false);
        for (at, line) in lines {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |what: String| RecipeError::Line { line: at + 1, what };
            let Some((key, value)) = line.split_once('=') else {
                return Err(wrong("neither `key = value` nor a `#` comment".to_owned()));
            };
            let (key, value) = (key.trim(), value.trim());
            seeded |= key == "seed";
            match key {
                "steps" => steps = Some(parse_steps(value).map_err(wrong)?),
                _ => {
                    if !setup.set(key, value).map_err(wrong)? {
                        return Err(wrong(format!("unknown key `{key}`")));
                    }
                }
            }
        }
        if !seeded {
            return Err(RecipeError::Missing("seed"));
        }
        if setup.tiers.is_empty() {
            return Err(RecipeError::Missing("tier"));
        }
        if setup.tiers.len() > undercroft_base::TierId::MAX {
            let most = undercroft_base::TierId::MAX;
            return Err(RecipeError::Line {
                line: 1,
                what: format!("more than {most} tiers"),
            });
        }
        let steps = steps.ok_or(RecipeError::Missing("steps"))?;
        Ok(Recipe { setup, steps })
    }
}

fn parse_steps(value: &str) -> Result<Vec<u64>, String> {
    let mut steps: Vec<u64> = Vec::new();
    for part in value.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (Ok(from), Ok(to)) = (from.trim().parse::<u64>(), to.trim().parse::<u64>()) else {
            return Err(format!("`{part}` is neither a step nor a range A-B"));
        };
        if to < from || to >= STEPS_MAX || steps.last().is_some_and(|last| *last >= from) {
            return Err(format!("`{part}`: steps ascend, and are below {STEPS_MAX}"));
        }
        steps.extend(from..=to);
    }
    Ok(steps)
}

impl Display for Recipe {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{FIRST_LINE}")?;
        write!(out, "{}", self.setup)?;
        write!(out, "steps = ")?;
        let mut at = 0;
        while at < self.steps.len() {
            let first = self.steps[at];
            let run = self.steps[at..]
                .iter()
                .zip(first..)
                .take_while(|(step, number)| **step == *number)
                .count();
            let comma = if at == 0 { "" } else { "," };
            match run {
                1 => write!(out, "{comma}{first}")?,
                run => write!(out, "{comma}{first}-{}", first + run as u64 - 1)?,
            }
            at += run;
        }
        writeln!(out)
    }
}

/// Reads `text` as a replay file. Panics if a file that was read is not the same after it is
/// written and read again. For the fuzz target and its test.
pub fn check(text: &str) -> bool {
    let Ok(recipe) = Recipe::parse(text) else {
        return false;
    };
    let again = Recipe::parse(&recipe.to_string());
    assert_eq!(again.as_ref(), Ok(&recipe), "written and read back");
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_seeded::Random;

    #[test]
    fn whatever_is_taken_for_a_recipe_reads_back() {
        let mut random = Random::new(11);
        let mut taken = 0;
        for round in 0..20_000 {
            let recipe = Recipe {
                setup: StormSetup::of_seed(round % 40),
                steps: vec![1, 2, 3, 9],
            };
            let mut text = recipe.to_string().into_bytes();
            for _ in 0..random.scaled(3) {
                let at = random.scaled(text.len() as u64) as usize;
                match random.scaled(3) {
                    0 => text[at] = b"0123456789,-= .\nx"[random.scaled(17) as usize],
                    1 => text.truncate(at.max(1)),
                    _ => text.insert(at, b'7'),
                }
            }
            taken += u32::from(check(&String::from_utf8_lossy(&text)));
        }
        assert!(taken > 5_000, "{taken} prove nothing");
    }
    use crate::storm::setup::Sabotage;

    #[test]
    fn recipe_text_reads_back() {
        for seed in 0..50 {
            let mut setup = StormSetup::of_seed(seed);
            setup.sabotage = (seed % 2 == 0).then_some(Sabotage::FreeEarly);
            let steps = (0..200).filter(|n| (n * seed) % 7 < 4).collect();
            let recipe = Recipe { setup, steps };
            assert_eq!(Recipe::parse(&recipe.to_string()), Ok(recipe));
        }
    }

    #[test]
    fn wrong_text_is_refused_by_line() {
        let good = Recipe {
            setup: StormSetup::of_seed(3),
            steps: vec![1, 2, 9],
        }
        .to_string();
        let refusals = [
            ("undercroft storm 1", "undercroft storm 2"),
            ("seed = 3", "seed = three"),
            ("seed = 3", ""),
            ("failures", "failurs"),
            ("steps = 1-2,9", "steps = 9,1"),
            ("steps = 1-2,9", "steps = 1-99999999999"),
            ("steps = 1-2,9", ""),
            ("pages=", "pags="),
            ("fault_threads = ", "fault_threads = x"),
        ];
        for (from, to) in refusals {
            assert!(good.contains(from), "{good}");
            let wrong = Recipe::parse(&good.replacen(from, to, 1));
            assert!(wrong.is_err(), "{from} -> {to}: {wrong:?}");
        }
        for cut in 0..good.len() {
            _ = Recipe::parse(&good[..cut]); // never a panic
        }
    }
}
