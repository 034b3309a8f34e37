//! The ratios of one experiment against their targets: one line for each comparison, a log axis,
//! must and aim marked.

use super::bars::axis_number;
use super::{Canvas, Drawn, WIDTH};
use crate::results::{Better, Comparison, Results};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const LEFT: i32 = 620;
const TOP: i32 = 110;
const LINE: i32 = 46;
const GOOD: RGBColor = RGBColor(0, 114, 178);
const BAD: RGBColor = RGBColor(213, 94, 0);

/// The grid lines that may be drawn.
const GRID: [f64; 12] = [
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0,
];

/// The horizontal axis: logarithmic, wide enough for every ratio, its range and its targets.
struct Axis {
    low: f64,
    high: f64,
    right: i32,
}

impl Axis {
    fn over(rows: &[&Comparison]) -> Axis {
        let marks = rows.iter().flat_map(|row| {
            let target = row.target;
            [
                Some(row.ratio),
                Some(row.ratio_range[0]),
                Some(row.ratio_range[1]),
                target.map(|t| t.must),
                target.and_then(|t| t.aim),
            ]
        });
        let marks: Vec<f64> = marks
            .flatten()
            .filter(|mark| mark.is_finite() && *mark > 0.0)
            .chain([1.0])
            .collect();
        Axis {
            low: marks.iter().copied().fold(1.0, f64::min) * 0.8,
            high: marks.iter().copied().fold(1.0, f64::max) * 1.25,
            right: WIDTH as i32 - 40,
        }
    }

    fn x(&self, value: f64) -> i32 {
        let place =
            (value.clamp(self.low, self.high) / self.low).ln() / (self.high / self.low).ln();
        LEFT + (place * f64::from(self.right - LEFT)) as i32
    }
}

fn text(size: i32) -> FontDesc<'static> {
    ("sans-serif", size).into_font()
}

fn placed(root: &Canvas<'_>, size: i32, across: HPos, down: VPos) -> TextStyle<'static> {
    text(size).into_text_style(root).pos(Pos::new(across, down))
}

/// Draws `rows` (all with a target). Errors: those of the back end.
pub(crate) fn draw(rows: &[&Comparison], results: &Results, root: &Canvas<'_>) -> Drawn<()> {
    root.fill(&WHITE)?;
    let title = format!(
        "{}: ratio to the baseline of the same run",
        results.experiment
    );
    root.draw(&Text::new(title, (24, 16), text(26)))?;
    let explain = "dot: ratio of medians, line: range of rounds, | must be reached, : aim, orange: not reached";
    let grey = text(17).color(&RGBColor(90, 90, 90));
    root.draw(&Text::new(explain, (24, 54), grey))?;
    let axis = Axis::over(rows);
    draw_grid(&axis, TOP + LINE * rows.len() as i32, root)?;
    for (number, row) in rows.iter().enumerate() {
        let y = TOP + LINE * number as i32 + LINE / 2;
        draw_label(row, y, root)?;
        draw_marks(row, &axis, y, root)?;
    }
    Ok(())
}

fn draw_grid(axis: &Axis, bottom: i32, root: &Canvas<'_>) -> Drawn<()> {
    for value in GRID {
        if value < axis.low || value > axis.high {
            continue;
        }
        let x = axis.x(value);
        let shade = if value == 1.0 { 0.6 } else { 0.15 };
        let line = [(x, TOP - 8), (x, bottom)];
        root.draw(&PathElement::new(line, BLACK.mix(shade)))?;
        let style = placed(root, 16, HPos::Center, VPos::Top);
        root.draw(&Text::new(axis_number(value), (x, bottom + 8), style))?;
    }
    let style = placed(root, 17, HPos::Center, VPos::Top);
    let middle = ((LEFT + axis.right) / 2, bottom + 32);
    root.draw(&Text::new("ratio (log)", middle, style))?;
    Ok(())
}

/// Left of the axis: what is compared, and its ratio.
fn draw_label(row: &Comparison, y: i32, root: &Canvas<'_>) -> Drawn<()> {
    let name = format!(
        "{}, {}: {} / {}",
        row.case, row.metric, row.subject, row.baseline
    );
    let style = placed(root, 17, HPos::Right, VPos::Center);
    root.draw(&Text::new(name, (LEFT - 16, y - 8), style))?;
    let direction = match row.better {
        Better::Lower => "lower is better",
        Better::Higher => "higher is better",
    };
    let ratio = format!("{} ({direction})", axis_number(row.ratio));
    let style = placed(root, 13, HPos::Right, VPos::Center).color(&RGBColor(110, 110, 110));
    root.draw(&Text::new(ratio, (LEFT - 16, y + 11), style))?;
    Ok(())
}

/// On the axis: the ratio, its range and its targets.
fn draw_marks(row: &Comparison, axis: &Axis, y: i32, root: &Canvas<'_>) -> Drawn<()> {
    let paint = match row.must_reached {
        Some(false) => BAD,
        _ => GOOD,
    };
    let [from, to] = row.ratio_range.map(|ratio| axis.x(ratio));
    root.draw(&PathElement::new(
        [(from, y), (to, y)],
        paint.stroke_width(3),
    ))?;
    root.draw(&Circle::new((axis.x(row.ratio), y), 7, paint.filled()))?;
    let Some(target) = row.target else {
        return Ok(());
    };
    let must = axis.x(target.must);
    root.draw(&PathElement::new(
        [(must, y - 15), (must, y + 15)],
        BLACK.stroke_width(3),
    ))?;
    let Some(aim) = target.aim.map(|aim| axis.x(aim)) else {
        return Ok(());
    };
    for step in 0..4 {
        let top = y - 15 + step * 8;
        root.draw(&PathElement::new(
            [(aim, top), (aim, top + 4)],
            BLACK.stroke_width(2),
        ))?;
    }
    Ok(())
}
