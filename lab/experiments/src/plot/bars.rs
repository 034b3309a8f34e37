//! Grouped bars: a group for each case, a bar for each rig. Panels are stacked by number of
//! threads. Latencies are on a log axis.

use super::{Canvas, Drawn, WIDTH, colour};
use crate::results::{Results, median};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const PANEL_HEIGHT: u32 = 460;
const HEAD: u32 = 96;

/// The content of a chart: a metric and, optionally, two more as a whisker.
struct Kind {
    name: &'static str,
    title: &'static str,
    axis: &'static str,
    metric: &'static str,
    whisker: Option<(&'static str, &'static str)>,
    scale: f64,
    log: bool,
}

const KINDS: &[Kind] = &[
    Kind {
        name: "latency",
        title: "latency of one operation: mean (bar and number), p50 to p99 (whisker)",
        axis: "microseconds (log)",
        metric: "mean_ns",
        whisker: Some(("p50_ns", "p99_ns")),
        scale: 1e-3,
        log: true,
    },
    Kind {
        name: "read-latency",
        title: "latency of reads: mean (bar and number), p50 to p99 (whisker)",
        axis: "microseconds (log)",
        metric: "read_mean_ns",
        whisker: Some(("read_p50_ns", "read_p99_ns")),
        scale: 1e-3,
        log: true,
    },
    Kind {
        name: "update-latency",
        title: "latency of updates: mean (bar and number), p50 to p99 (whisker)",
        axis: "microseconds (log)",
        metric: "update_mean_ns",
        whisker: Some(("update_p50_ns", "update_p99_ns")),
        scale: 1e-3,
        log: true,
    },
    Kind {
        name: "throughput",
        title: "throughput",
        axis: "operations per second (log)",
        metric: "ops_per_second",
        whisker: None,
        scale: 1.0,
        log: true,
    },
    Kind {
        name: "seconds",
        title: "run time",
        axis: "seconds",
        metric: "wall_seconds",
        whisker: None,
        scale: 1.0,
        log: false,
    },
    Kind {
        name: "idle-cpu",
        title: "processor time used while the client sleeps",
        axis: "percent of one core",
        metric: "cpu_percent",
        whisker: None,
        scale: 1.0,
        log: false,
    },
    Kind {
        name: "metadata",
        title: "metadata",
        axis: "bytes per managed page",
        metric: "bytes_per_page",
        whisker: None,
        scale: 1.0,
        log: false,
    },
];

/// A chart, ready to draw.
pub(crate) struct Chart {
    pub(crate) name: String,
    title: String,
    subtitle: String,
    axis: &'static str,
    log: bool,
    panels: Vec<Panel>,
    rigs: Vec<String>,
}

struct Panel {
    title: String,
    groups: Vec<(String, Vec<Option<Bar>>)>,
}

impl Panel {
    /// The lowest value above 0, and the highest; whiskers included.
    fn range(&self) -> (f64, f64) {
        let bars = || {
            self.groups
                .iter()
                .flat_map(|(_, bars)| bars.iter().flatten())
        };
        let tops = bars().map(|bar| {
            bar.whisker
                .map_or(bar.value, |(_, high)| high.max(bar.value))
        });
        let top = tops.fold(0.0, f64::max).max(1e-6);
        let lows = bars().map(|bar| bar.whisker.map_or(bar.value, |(low, _)| low.min(bar.value)));
        let low = lows.filter(|low| *low > 0.0).fold(top, f64::min);
        (low, top)
    }
}

#[derive(Clone, Copy)]
struct Bar {
    value: f64,
    whisker: Option<(f64, f64)>,
}

impl Chart {
    pub(crate) fn height(&self) -> u32 {
        HEAD + PANEL_HEIGHT * self.panels.len() as u32
    }
}

/// The charts for which `results` has values.
pub(crate) fn charts(results: &Results) -> Vec<Chart> {
    KINDS
        .iter()
        .filter_map(|kind| chart(results, kind))
        .collect()
}

fn chart(results: &Results, kind: &Kind) -> Option<Chart> {
    let rigs = results.rig_names();
    let mut panels: Vec<Panel> = Vec::new();
    for case in results.cases() {
        let bars: Vec<Option<Bar>> = rigs
            .iter()
            .map(|rig| {
                let of = |metric| median(&results.values(rig, &case, metric)) * kind.scale;
                let whisker = kind.whisker.map(|(low, high)| (of(low), of(high)));
                let whisker = whisker.filter(|(low, high)| low.is_finite() && high.is_finite());
                Some(Bar {
                    value: of(kind.metric),
                    whisker,
                })
                .filter(|bar| bar.value.is_finite() && bar.value >= 0.0)
            })
            .collect();
        if bars.iter().all(Option::is_none) {
            continue;
        }
        let (label, title) = split_case(&case);
        match panels.iter_mut().find(|panel| panel.title == title) {
            Some(panel) => panel.groups.push((label, bars)),
            None => panels.push(Panel {
                title,
                groups: vec![(label, bars)],
            }),
        }
    }
    (!panels.is_empty()).then(|| Chart {
        name: kind.name.to_owned(),
        title: format!("{}: {}", results.experiment, kind.title),
        subtitle: format!(
            "{}, {}, median of the rounds",
            results.machine.kernel,
            &results.date[..10.min(results.date.len())]
        ),
        axis: kind.axis,
        log: kind.log,
        panels,
        rigs,
    })
}

/// `random read 2t` -> (`random read`, `2 threads`).
fn split_case(case: &str) -> (String, String) {
    let split = case.rsplit_once(' ').and_then(|(label, last)| {
        let threads: u32 = last.strip_suffix('t')?.parse().ok()?;
        Some((
            label.to_owned(),
            if threads == 1 {
                "1 thread".to_owned()
            } else {
                format!("{threads} threads")
            },
        ))
    });
    split.unwrap_or((case.to_owned(), String::new()))
}

/// Draws the chart. Errors: those of the back end.
pub(crate) fn draw(chart: &Chart, root: &Canvas<'_>) -> Drawn<()> {
    root.fill(&WHITE)?;
    let text = |size: i32| ("sans-serif", size).into_font();
    root.draw(&Text::new(chart.title.clone(), (24, 16), text(26)))?;
    root.draw(&Text::new(
        chart.subtitle.clone(),
        (24, 54),
        text(17).color(&RGBColor(90, 90, 90)),
    ))?;
    legend(chart, root)?;
    let (_, body) = root.split_vertically(HEAD);
    let areas = body.split_evenly((chart.panels.len(), 1));
    chart
        .panels
        .iter()
        .zip(&areas)
        .try_for_each(|(panel, area)| draw_panel(chart, panel, area))
}

fn legend(chart: &Chart, root: &Canvas<'_>) -> Drawn<()> {
    let widths: Vec<i32> = chart
        .rigs
        .iter()
        .map(|rig| 44 + 10 * rig.len() as i32)
        .collect();
    let mut x = WIDTH as i32 - 24 - widths.iter().sum::<i32>();
    for (rig, width) in chart.rigs.iter().zip(widths) {
        root.draw(&Rectangle::new(
            [(x, 56), (x + 16, 72)],
            colour(rig).filled(),
        ))?;
        root.draw(&Text::new(
            rig.clone(),
            (x + 22, 55),
            ("sans-serif", 17).into_font(),
        ))?;
        x += width;
    }
    Ok(())
}

fn draw_panel(chart: &Chart, panel: &Panel, area: &Canvas<'_>) -> Drawn<()> {
    let (low, top) = panel.range();
    let (width, height) = area.dim_in_pixel();
    let frame = Frame {
        left: 104,
        right: width as i32 - 24,
        top: 40,
        bottom: height as i32 - 52,
        axis: Axis::over(low, top, chart.log),
    };
    frame.draw(area, chart.axis)?;
    if !panel.title.is_empty() {
        area.draw(&Text::new(
            panel.title.clone(),
            (frame.left, 12),
            ("sans-serif", 19).into_font(),
        ))?;
    }
    let group_width = f64::from(frame.right - frame.left) / panel.groups.len() as f64;
    for (number, (label, bars)) in panel.groups.iter().enumerate() {
        let start = f64::from(frame.left) + number as f64 * group_width;
        let middle = ((start + group_width / 2.0) as i32, frame.bottom + 22);
        area.draw(&Text::new(label.clone(), middle, centred(area, 17)))?;
        let bar_width = (group_width * 0.86 / bars.len() as f64).min(70.0);
        let first = start + (group_width - bar_width * bars.len() as f64) / 2.0;
        for (index, (bar, rig)) in bars.iter().zip(&chart.rigs).enumerate() {
            if let Some(bar) = bar {
                let x = first + bar_width * index as f64;
                frame.draw_bar(area, bar, colour(rig), x, bar_width)?;
            }
        }
    }
    Ok(())
}

/// Text whose top is in the middle of its place.
fn centred(area: &Canvas<'_>, size: i32) -> TextStyle<'static> {
    ("sans-serif", size)
        .into_font()
        .into_text_style(area)
        .pos(Pos::new(HPos::Center, VPos::Top))
}

/// A value axis: linear from 0, or logarithmic between whole or half decades.
struct Axis {
    low: f64,
    high: f64,
    log: bool,
}

impl Axis {
    fn over(low: f64, high: f64, log: bool) -> Axis {
        if log {
            Axis {
                low: 10f64.powf((low * 0.8).log10().floor()),
                high: high * 1.5,
                log,
            }
        } else {
            Axis {
                low: 0.0,
                high: high * 1.15,
                log,
            }
        }
    }

    /// Place of `value` between 0 (bottom) and 1 (top).
    fn place(&self, value: f64) -> f64 {
        let place = if self.log {
            (value.max(self.low) / self.low).log10() / (self.high / self.low).log10()
        } else {
            value / self.high
        };
        place.clamp(0.0, 1.0)
    }

    /// (value, is labelled)
    fn ticks(&self) -> Vec<(f64, bool)> {
        if self.log {
            let decades = self.low.log10().round() as i32..=self.high.log10().floor() as i32;
            let ticks = decades.flat_map(|decade| {
                (1..10).map(move |digit| (f64::from(digit) * 10f64.powi(decade), digit == 1))
            });
            return ticks.filter(|(value, _)| *value <= self.high).collect();
        }
        let rough = self.high / 5.0;
        let unit = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|factor| factor * unit)
            .into_iter()
            .find(|step| *step >= rough);
        let step = step.unwrap_or(unit * 10.0);
        (0..)
            .map(|number| f64::from(number) * step)
            .take_while(|value| *value <= self.high)
            .map(|value| (value, true))
            .collect()
    }
}

/// The plot area of a panel in pixels.
struct Frame {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
    axis: Axis,
}

impl Frame {
    /// Draws one bar from `x` on, with its whisker, and its value if there is room for it.
    fn draw_bar(
        &self,
        area: &Canvas<'_>,
        bar: &Bar,
        colour: RGBColor,
        x: f64,
        width: f64,
    ) -> Drawn<()> {
        let corners = [
            (x as i32 + 1, self.y(bar.value)),
            ((x + width) as i32 - 1, self.bottom),
        ];
        area.draw(&Rectangle::new(corners, colour.filled()))?;
        let middle = (x + width / 2.0) as i32;
        if let Some((low, high)) = bar.whisker {
            for (a, b) in [
                ((middle, self.y(low)), (middle, self.y(high))),
                ((middle - 5, self.y(low)), (middle + 5, self.y(low))),
                ((middle - 5, self.y(high)), (middle + 5, self.y(high))),
            ] {
                area.draw(&PathElement::new([a, b], BLACK.stroke_width(2)))?;
            }
        }
        if width >= 26.0 {
            let place = (middle, self.bottom + 4);
            area.draw(&Text::new(axis_number(bar.value), place, centred(area, 13)))?;
        }
        Ok(())
    }

    fn y(&self, value: f64) -> i32 {
        self.bottom - (self.axis.place(value) * f64::from(self.bottom - self.top)) as i32
    }

    fn draw(&self, area: &Canvas<'_>, title: &str) -> Drawn<()> {
        for (value, labelled) in self.axis.ticks() {
            let y = self.y(value);
            let line = RGBColor(
                if labelled { 190 } else { 232 },
                if labelled { 190 } else { 232 },
                if labelled { 190 } else { 232 },
            );
            area.draw(&PathElement::new([(self.left, y), (self.right, y)], line))?;
            if labelled {
                let style = ("sans-serif", 16)
                    .into_font()
                    .into_text_style(area)
                    .pos(Pos::new(HPos::Right, VPos::Center));
                area.draw(&Text::new(axis_number(value), (self.left - 8, y), style))?;
            }
        }
        area.draw(&PathElement::new(
            [
                (self.left, self.top),
                (self.left, self.bottom),
                (self.right, self.bottom),
            ],
            BLACK,
        ))?;
        let style = ("sans-serif", 16)
            .into_font()
            .transform(FontTransform::Rotate270)
            .into_text_style(area);
        let style = style.pos(Pos::new(HPos::Center, VPos::Top));
        area.draw(&Text::new(
            title.to_owned(),
            (14, (self.top + self.bottom) / 2),
            style,
        ))?;
        Ok(())
    }
}

/// A number without noise: 0.05, 3.2, 120, 45k, 1.2M.
pub(crate) fn axis_number(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.1 => 2,
        _ => 3,
    };
    let text = format!("{scaled:.digits$}");
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_number_is_short() {
        let cases = [
            (0.0, "0"),
            (0.05, "0.05"),
            (3.25, "3.25"),
            (10.0, "10"),
            (120.0, "120"),
            (45_000.0, "45k"),
            (1.2e6, "1.2M"),
        ];
        cases
            .iter()
            .for_each(|(value, text)| assert_eq!(axis_number(*value), *text));
    }
}
