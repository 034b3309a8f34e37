//! Panels two by two over named places: the figures of simulated experiments and of `scale`. Each
//! says where its values come from.

use super::{COLOURS, Canvas, Drawn};
use crate::results::{Figure, Panel, number};
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const HEAD: u32 = 90;
const PANEL_HEIGHT: u32 = 420;

/// Pixels of a figure.
pub(crate) fn height(figure: &Figure) -> u32 {
    HEAD + PANEL_HEIGHT * figure.panels.len().div_ceil(2).max(1) as u32
}

/// Draws `figure`. Errors: those of the back end.
/// * `origin`: where its values come from.
pub(crate) fn draw(figure: &Figure, origin: &str, root: &Canvas<'_>) -> Drawn<()> {
    root.fill(&WHITE)?;
    root.draw(&Text::new(figure.title.clone(), (24, 14), text(26)))?;
    let grey = text(17).color(&RGBColor(90, 90, 90));
    let axes = format!(
        "{origin}; across: {}; upwards: {}{}",
        figure.x_label,
        figure.y_label,
        if figure.log { " (log)" } else { "" }
    );
    root.draw(&Text::new(axes, (24, 50), grey))?;
    let (_, body) = root.split_vertically(HEAD);
    let columns = figure.panels.len().clamp(1, 2);
    let cells = body.split_evenly((figure.panels.len().div_ceil(2).max(1), columns));
    for (panel, cell) in figure.panels.iter().zip(&cells) {
        draw_panel(figure, panel, cell)?;
    }
    Ok(())
}

fn draw_panel(figure: &Figure, panel: &Panel, root: &Canvas<'_>) -> Drawn<()> {
    let values = || {
        let all = panel.series.iter().flat_map(|(_, values)| values.iter());
        all.copied().filter(|value| value.is_finite())
    };
    let most = values().fold(f64::MIN_POSITIVE, f64::max);
    let least = values().filter(|value| *value > 0.0).fold(most, f64::min);
    let places = panel.places.len().max(1) as f64;
    let mut builder = ChartBuilder::on(root);
    builder
        .margin(16)
        .x_label_area_size(36)
        .y_label_area_size(80)
        .caption(&panel.title, ("sans-serif", 20));
    if figure.log {
        // Bars, and many lines, leave room above them for the legend.
        let top = match panel.series.len() {
            _ if figure.bars => 12.0,
            0..=3 => 1.25,
            _ => 1.25 * (most / least).sqrt(),
        };
        let range = (least * 0.8..most * top).log_scale();
        fill(
            figure,
            panel,
            builder.build_cartesian_2d(0.0..places, range)?,
        )
    } else {
        let lowest = values().fold(0.0, f64::min);
        // Lines on both sides of zero leave room above them for the legend.
        let room = if lowest < 0.0 { 0.4 } else { 0.05 };
        let range = lowest * 1.05..most + (most - lowest) * room;
        fill(
            figure,
            panel,
            builder.build_cartesian_2d(0.0..places, range)?,
        )
    }
}

fn fill<'a, X, Y>(
    figure: &Figure,
    panel: &Panel,
    mut chart: ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
) -> Drawn<()>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .y_label_formatter(&|value| number(*value))
        .label_style(text(15))
        .draw()?;
    name_places(panel, &chart)?;
    let floor = chart.y_range().start;
    let count = panel.series.len().max(1) as f64;
    for (index, (name, values)) in panel.series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        // The eighth and later lines are thinner, so that no two look the same.
        let width = if index < COLOURS.len() { 3 } else { 1 };
        let drawn = if figure.bars {
            let bars = values.iter().enumerate().map(|(at, value)| {
                let left = at as f64 + 0.1 + 0.8 * index as f64 / count;
                let right = left + 0.76 / count;
                Rectangle::new([(left, floor), (right, *value)], colour.filled())
            });
            chart.draw_series(bars)?
        } else {
            let points = values
                .iter()
                .enumerate()
                .map(|(at, value)| (at as f64 + 0.5, *value));
            chart.draw_series(LineSeries::new(points, colour.stroke_width(width)))?
        };
        drawn.label(name).legend(move |(x, y)| {
            PathElement::new([(x, y), (x + 22, y)], colour.stroke_width(width))
        });
    }
    if panel.series.len() > 1 {
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.2))
            .label_font(text(15))
            .position(SeriesLabelPosition::UpperLeft)
            .draw()?;
    }
    Ok(())
}

/// The names of the places, below the axis.
fn name_places<'a, X, Y>(
    panel: &Panel,
    chart: &ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
) -> Drawn<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let area = chart.plotting_area();
    let floor = chart.y_range().start;
    let places = panel.places.iter().enumerate();
    for (at, place) in places.filter(|(_, place)| !place.is_empty()) {
        let (x, y) = area.map_coordinate(&(at as f64 + 0.5, floor));
        let style = text(15)
            .into_text_style(area)
            .pos(Pos::new(HPos::Center, VPos::Top));
        // The plotting area clips nothing, but its coordinates are those of the whole picture.
        let below = area.strip_coord_spec();
        let (left, top) = below.get_base_pixel();
        below.draw(&Text::new(place.clone(), (x - left, y - top + 8), style))?;
    }
    Ok(())
}

fn text(size: i32) -> FontDesc<'static> {
    ("sans-serif", size).into_font()
}
