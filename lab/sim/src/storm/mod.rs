//! Storms: the real engine in a model world, driven by seed through operations, failures and
//! interleavings.
//!
//! `world.rs` does what the live manager does, one small step at a time: `faults.rs` and `evict.rs`
//! have the steps, `reclaim.rs` what the reclaim machine says, and `work.rs` what is under way.
//! Beside it runs a program that touches and changes its memory (`program.rs`). Devices and the
//! kernel fail (`failures.rs`), managers die (`takeover.rs`), a placement links the wrong pages
//! (`tangle.rs`), a prefetcher brings the wrong neighbours (`beside.rs`), and a plugin names the
//! wrong pages (`meddler.rs`). A byte oracle is asked after every step (`check.rs`). A listener of
//! the engine (`heard.rs`) is compared with the books now and then, while no event waits. `run.rs`
//! runs seeds, `minimise.rs` shrinks one that failed, and `recipe.rs` writes it down.

mod aside;
mod beside;
mod check;
mod evict;
mod evictor;
mod failures;
mod faults;
mod heard;
mod leader;
mod ledger;
mod meddler;
mod minimise;
mod program;
mod recipe;
mod reclaim;
mod run;
mod setup;
mod takeover;
mod tangle;
mod wished;
mod work;
mod world;

pub use evictor::Evictor;
pub use ledger::StormLedger;
pub use meddler::{MakePolicy, Plugin};
pub use minimise::{Minimised, minimise};
pub use recipe::{Recipe, RecipeError, check as check_recipe};
pub use run::{Ended, Failure, Tally, replay, run, run_seeds, run_with};
pub use setup::{FullAction, Sabotage, StormSetup, TierSetup};
pub use work::{Demotion, DeviceRead, Eviction, Flight, Got, SpaceRates, TakenOut};
pub use world::*;
