//! Numbers as text, for tables and pictures.

/// A value for a table: four significant digits at most.
pub(crate) fn number(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let digits = (3 - value.abs().log10().floor() as i32).clamp(0, 9);
    let text = format!("{value:.*}", digits as usize);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Bytes in MiB, without the unit.
pub(super) fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// A value with a fitting unit, chosen by the metric's suffix.
pub(super) fn human(metric: &str, value: f64) -> String {
    let scaled = |units: [(&str, f64); 3]| {
        let (unit, divisor) = units
            .into_iter()
            .rev()
            .find(|(_, divisor)| value >= *divisor)
            .unwrap_or(units[0]);
        format!("{} {unit}", significant(value / divisor))
    };
    if metric.ends_with("_ns") {
        scaled([("ns", 1.0), ("us", 1e3), ("ms", 1e6)])
    } else if metric.ends_with("_per_second") {
        scaled([("/s", 1.0), ("k/s", 1e3), ("M/s", 1e6)])
    } else {
        format!("{}", significant(value))
    }
}

/// Three significant digits.
fn significant(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10f64.powi(2 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits_at_most() {
        for (value, text) in [
            (0.0, "0"),
            (12345.6, "12346"),
            (58.9, "58.9"),
            (0.012345, "0.01235"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
