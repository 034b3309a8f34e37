//! Plots of a results file, as SVG and PNG: bars per case and rig, and the ratios against their
//! targets.
//!
//! Text uses the embedded DejaVu Sans (`assets/`, Bitstream Vera licence), so no font need be
//! installed.

mod bars;
mod curves;
mod panels;
mod ratios;

pub use curves::{Curve, Curves, draw_curves};

use crate::results::Results;
use anyhow::{Context, anyhow};
use plotters::prelude::*;
use std::path::Path;
use std::sync::OnceLock;

static FONT: &[u8] = include_bytes!("../../assets/DejaVuSans.ttf");
/// Pixels of a PNG to a point of the SVG would differ; both are drawn at this scale so that text is
/// sharp.
const WIDTH: u32 = 1600;

pub(crate) type Drawn<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Okabe-Ito, in the order series and curves without a name of their own take them.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
];

/// Okabe-Ito, readable by colour-blind people; ours are the two strongest.
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

/// Draws every plot of `results` into `out`. Files are named `NAME.svg` and `NAME.png`.
pub(crate) fn draw(results: &Results, out: &Path) -> anyhow::Result<()> {
    font()?;
    for chart in bars::charts(results) {
        both(
            out,
            &chart.name,
            chart.height(),
            |root| bars::draw(&chart, root),
            |root| bars::draw(&chart, root),
        )?;
    }
    let targets: Vec<_> = results
        .rows
        .iter()
        .filter(|row| row.target.is_some())
        .collect();
    for figure in results.simulated.iter().flat_map(|found| &found.figures) {
        both(
            out,
            &figure.name,
            panels::height(figure),
            |root| panels::draw(figure, root),
            |root| panels::draw(figure, root),
        )?;
    }
    if !targets.is_empty() {
        let height = 170 + 46 * targets.len() as u32;
        both(
            out,
            "targets",
            height,
            |root| ratios::draw(&targets, results, root),
            |root| ratios::draw(&targets, results, root),
        )?;
    }
    Ok(())
}

/// One picture on both back ends (a closure cannot be generic over them, hence twice).
fn both<'a>(
    out: &Path,
    name: &str,
    height: u32,
    svg: impl Fn(&DrawingArea<SVGBackend, plotters::coord::Shift>) -> Drawn<()> + 'a,
    png: impl Fn(&DrawingArea<BitMapBackend, plotters::coord::Shift>) -> Drawn<()> + 'a,
) -> anyhow::Result<()> {
    let size = (WIDTH, height);
    let path = out.join(format!("{name}.svg"));
    let root = SVGBackend::new(&path, size).into_drawing_area();
    svg(&root)
        .and_then(|()| Ok(root.present()?))
        .map_err(|error| anyhow!("{}: {error}", path.display()))?;
    let path = out.join(format!("{name}.png"));
    let root = BitMapBackend::new(&path, size).into_drawing_area();
    png(&root)
        .and_then(|()| Ok(root.present()?))
        .map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn font() -> anyhow::Result<()> {
    static DONE: OnceLock<bool> = OnceLock::new();
    let done = *DONE.get_or_init(|| {
        let register = plotters::style::register_font;
        register("sans-serif", FontStyle::Normal, FONT).is_ok()
            && register("sans-serif", FontStyle::Bold, FONT).is_ok()
    });
    done.then_some(())
        .context("the embedded font could not be read")
}
