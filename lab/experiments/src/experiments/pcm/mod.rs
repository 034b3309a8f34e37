//! Experiments of the PCM-swap paper, simulated: its table and figures over our traces, with the
//! model's assumptions.

mod causes;
mod clock_w;
mod energy;
#[cfg(test)]
mod files;
mod laps;
mod load;
mod page_size;
mod pairs;
mod read_ahead;
mod recipes;
mod record;
mod study;
mod table;
mod walkers;

pub(super) use clock_w::run as fig5;
pub(super) use energy::run as fig6;
pub(super) use page_size::{fig2, fig3};
pub(super) use read_ahead::run as fig4;
pub(super) use record::run as traces;
pub(super) use table::run as table1;
