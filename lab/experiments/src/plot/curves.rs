//! Curves over one axis: a line for each, with its name at the side. Used for miss ratios.

use super::{COLOURS, Canvas, Drawn, picture};
use anyhow::bail;
use plotters::prelude::*;
use std::path::Path;

const HEIGHT: u32 = 900;

/// A picture of curves. Both axes are linear and start at 0.
#[derive(Clone, Debug)]
pub struct Curves {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    /// Name and unit of the horizontal axis.
    pub x_label: String,
    /// Name and unit of the vertical axis.
    pub y_label: String,
    /// The curves; at least one.
    pub curves: Vec<Curve>,
}

/// A curve.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// Its points, left to right.
    pub points: Vec<(f64, f64)>,
}

/// Draws `curves` into `path`. Errors: the name does not end in .svg; the file cannot be written.
pub fn draw_curves(curves: &Curves, path: &Path) -> anyhow::Result<()> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => picture(path, HEIGHT, |root| draw(curves, root)),
        _ => bail!("the name does not end in .svg"),
    }
}

fn draw(curves: &Curves, root: &Canvas<'_>) -> Drawn<()> {
    root.fill(&WHITE)?;
    let text = |size: i32| ("sans-serif", size).into_font();
    root.draw(&Text::new(curves.title.clone(), (24, 16), text(26)))?;
    let grey = text(17).color(&RGBColor(90, 90, 90));
    root.draw(&Text::new(curves.subtitle.clone(), (24, 54), grey))?;
    let points = || curves.curves.iter().flat_map(|curve| &curve.points);
    let most = |values: &mut dyn Iterator<Item = f64>| {
        let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        if most > 0.0 { most } else { 1.0 }
    };
    let x_max = most(&mut points().map(|(x, _)| *x));
    let y_max = most(&mut points().map(|(_, y)| *y));
    let mut chart = ChartBuilder::on(root)
        .margin(24)
        .margin_top(100)
        .x_label_area_size(60)
        .y_label_area_size(90)
        .build_cartesian_2d(0.0..x_max, 0.0..y_max * 1.02)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .x_desc(&curves.x_label)
        .y_desc(&curves.y_label)
        .axis_desc_style(text(18))
        .label_style(text(16))
        .draw()?;
    for (curve, colour) in curves.curves.iter().zip(COLOURS.iter().cycle()) {
        let line = LineSeries::new(curve.points.iter().copied(), colour.stroke_width(3));
        let colour = *colour;
        chart
            .draw_series(line)?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.2))
        .label_font(text(17))
        .legend_area_size(32)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_drawn_as_svg_and_as_nothing_else() {
        let directory = tempfile::tempdir().expect("a directory");
        let curves = Curves {
            title: "title & more".to_owned(),
            subtitle: String::new(),
            x_label: "x".to_owned(),
            y_label: "y".to_owned(),
            curves: vec![
                Curve {
                    name: "one".to_owned(),
                    points: vec![(0.0, 1.0), (50.0, 0.5), (100.0, 0.1)],
                },
                Curve {
                    name: "nothing".to_owned(),
                    points: Vec::new(),
                },
            ],
        };
        let path = directory.path().join("a.svg");
        draw_curves(&curves, &path).expect("it is drawn");
        assert!(path.metadata().expect("a file").len() > 1000);
        assert!(draw_curves(&curves, &directory.path().join("a.png")).is_err());
        assert!(draw_curves(&curves, Path::new("/nowhere/a.svg")).is_err());
    }
}
