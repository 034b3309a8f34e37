//! The ratios of one experiment against their targets: one line a comparison, log axis, must and
//! aim marked.

use super::bars::axis_number;
use super::{Drawn, WIDTH};
use crate::results::{Better, Results, Row};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const LEFT: i32 = 620;
const TOP: i32 = 110;
const LINE: i32 = 46;
const GOOD: RGBColor = RGBColor(0, 114, 178);
const BAD: RGBColor = RGBColor(213, 94, 0);

/// Draws `rows` (all with a target). Errors: those of the back end.
pub(crate) fn draw<B: DrawingBackend>(
    rows: &[&Row],
    results: &Results,
    root: &DrawingArea<B, Shift>,
) -> Drawn<()>
where
    B::ErrorType: Sync + 'static,
{
    root.fill(&WHITE)?;
    let text = |size: i32| ("sans-serif", size).into_font();
    root.draw(&Text::new(
        format!(
            "{}: ratio to the baseline of the same run",
            results.experiment
        ),
        (24, 16),
        text(26),
    ))?;
    let explain = "dot: ratio of medians, line: range of rounds, | must be reached, : aim, orange: not reached";
    root.draw(&Text::new(
        explain,
        (24, 54),
        text(17).color(&RGBColor(90, 90, 90)),
    ))?;
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
    let low = marks.iter().copied().fold(1.0, f64::min) * 0.8;
    let high = marks.iter().copied().fold(1.0, f64::max) * 1.25;
    let right = WIDTH as i32 - 40;
    let x = |value: f64| {
        let place = (value.clamp(low, high) / low).ln() / (high / low).ln();
        LEFT + (place * f64::from(right - LEFT)) as i32
    };
    let bottom = TOP + LINE * rows.len() as i32;
    for value in [
        0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0,
    ] {
        if value < low || value > high {
            continue;
        }
        let line = if value == 1.0 {
            BLACK.mix(0.6)
        } else {
            BLACK.mix(0.15)
        };
        root.draw(&PathElement::new(
            [(x(value), TOP - 8), (x(value), bottom)],
            line,
        ))?;
        let style = text(16)
            .into_text_style(root)
            .pos(Pos::new(HPos::Center, VPos::Top));
        root.draw(&Text::new(
            axis_number(value),
            (x(value), bottom + 8),
            style,
        ))?;
    }
    let centre = text(17)
        .into_text_style(root)
        .pos(Pos::new(HPos::Center, VPos::Top));
    root.draw(&Text::new(
        "ratio (log)",
        ((LEFT + right) / 2, bottom + 32),
        centre,
    ))?;
    for (number, row) in rows.iter().enumerate() {
        let y = TOP + LINE * number as i32 + LINE / 2;
        let direction = if row.better == Better::Lower {
            "lower is better"
        } else {
            "higher is better"
        };
        let label = text(17)
            .into_text_style(root)
            .pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(
            format!(
                "{}, {}: {} / {}",
                row.case, row.metric, row.subject, row.baseline
            ),
            (LEFT - 16, y - 8),
            label,
        ))?;
        let small = text(13)
            .color(&RGBColor(110, 110, 110))
            .into_text_style(root)
            .pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new(
            format!("{} ({direction})", axis_number(row.ratio)),
            (LEFT - 16, y + 11),
            small,
        ))?;
        let paint = if row.must_reached == Some(false) {
            BAD
        } else {
            GOOD
        };
        let [from, to] = row.ratio_range;
        root.draw(&PathElement::new(
            [(x(from), y), (x(to), y)],
            paint.stroke_width(3),
        ))?;
        root.draw(&Circle::new((x(row.ratio), y), 7, paint.filled()))?;
        if let Some(target) = row.target {
            root.draw(&PathElement::new(
                [(x(target.must), y - 15), (x(target.must), y + 15)],
                BLACK.stroke_width(3),
            ))?;
            if let Some(aim) = target.aim {
                for step in 0..4 {
                    let top = y - 15 + step * 8;
                    root.draw(&PathElement::new(
                        [(x(aim), top), (x(aim), top + 4)],
                        BLACK.stroke_width(2),
                    ))?;
                }
            }
        }
    }
    Ok(())
}
