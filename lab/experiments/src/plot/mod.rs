//! Plots of a results file, as SVG: bars per case and rig, and the ratios against their targets.
//!
//! The viewer draws text with its own sans-serif font; plotters only estimates its width.

mod bars;
mod curves;
mod panels;
mod ratios;

pub use curves::{Curve, Curves, draw_curves};

use crate::results::Results;
use anyhow::anyhow;
use plotters::prelude::*;
use std::path::Path;

const WIDTH: u32 = 1600;
/// Where the values of a figure of the experiment `scale` come from.
const SCALING: &str = "measured, but for lines named \"modelled\"";

/// A picture in the making.
pub(crate) type Canvas<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
pub(crate) type Drawn<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Okabe-Ito colours, in the order in which series and curves without a name of their own take
/// them.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
];

/// Okabe-Ito colours, readable by colour-blind people. Ours are the two strongest.
fn colour(rig: &str) -> RGBColor {
    match rig {
        "plain" => RGBColor(150, 150, 150),
        "zram" => RGBColor(230, 159, 0),
        "zswap" => RGBColor(204, 121, 167),
        "swapfile" => RGBColor(213, 94, 0),
        "undercroft-ram" => RGBColor(0, 114, 178),
        "undercroft-file" => RGBColor(0, 158, 115),
        "undercroft" => RGBColor(86, 180, 233),
        "fio" => RGBColor(80, 80, 80),
        _ => RGBColor(60, 60, 60),
    }
}

/// Draws every plot of `results` into `out`. Files are named `NAME.svg`.
pub(crate) fn draw(results: &Results, out: &Path) -> anyhow::Result<()> {
    let charts = match results.scaling {
        Some(_) => Vec::new(), // its figures show the same over threads
        None => bars::charts(results),
    };
    for chart in charts {
        let path = out.join(format!("{}.svg", chart.name));
        picture(&path, chart.height(), |root| bars::draw(&chart, root))?;
    }
    let simulated = results.simulated.iter().flat_map(|found| &found.figures);
    let scaling = results.scaling.iter().flat_map(|found| &found.figures);
    let simulated = simulated.map(|figure| (figure, "simulated"));
    let measured = results.figures.iter().map(|figure| (figure, "measured"));
    let scaling = scaling.map(|figure| (figure, SCALING));
    for (figure, origin) in simulated.chain(scaling).chain(measured) {
        let path = out.join(format!("{}.svg", figure.name));
        picture(&path, panels::height(figure), |root| {
            panels::draw(figure, origin, root)
        })?;
    }
    let targets: Vec<_> = results
        .rows
        .iter()
        .filter(|row| row.target.is_some())
        .collect();
    if !targets.is_empty() {
        let height = 170 + 46 * targets.len() as u32;
        picture(&out.join("targets.svg"), height, |root| {
            ratios::draw(&targets, results, root)
        })?;
    }
    Ok(())
}

/// Draws one picture into `path`.
fn picture(
    path: &Path,
    height: u32,
    draw: impl FnOnce(&Canvas<'_>) -> Drawn<()>,
) -> anyhow::Result<()> {
    let root = SVGBackend::new(path, (WIDTH, height)).into_drawing_area();
    draw(&root)
        .and_then(|()| Ok(root.present()?))
        .map_err(|error| anyhow!("{}: {error}", path.display()))
}
