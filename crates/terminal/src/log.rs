//! Lines of a log on standard error: sentences for people, or objects of JSON for programs.

use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::Failure;

/// Form of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// A sentence for people.
    #[default]
    Text,
    /// An object of JSON, for programs.
    Json,
}

/// A time of day in milliseconds, always three digits of them, so that lines are alike.
pub fn log_time(now: OffsetDateTime) -> String {
    let millis = now.millisecond();
    let seconds = now.replace_nanosecond(0).unwrap_or(now);
    let text = seconds.format(&Rfc3339).unwrap_or_default();
    // 2026-11-30T02:51:41, then the zone.
    match text.split_at_checked(19) {
        Some((time, zone)) => format!("{time}.{millis:03}{zone}"),
        None => text,
    }
}

/// An event as an object, with its time, without the end of the line.
pub fn log_object(event: &impl Serialize, now: OffsetDateTime) -> String {
    #[derive(Serialize)]
    struct Line<'a, E> {
        time: &'a str,
        #[serde(flatten)]
        event: &'a E,
    }
    let time = &log_time(now);
    serde_json::to_string(&Line { time, event }).unwrap_or_default()
}

/// A refusal as an object, without the end of the line.
pub fn log_failure(failure: &Failure) -> String {
    log_object(failure, OffsetDateTime::now_utc())
}

/// A message that belongs to no run yet, with the end of its line.
pub fn log_message(format: LogFormat, text: &str) -> String {
    #[derive(Serialize)]
    struct Message<'a> {
        event: &'a str,
        text: &'a str,
    }
    let event = "message";
    match format {
        LogFormat::Text => format!("undercroft: {text}\n"),
        LogFormat::Json => {
            let message = Message { event, text };
            log_object(&message, OffsetDateTime::now_utc()) + "\n"
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn time_always_has_three_digits_of_milliseconds() {
        let of = |micros| log_time((UNIX_EPOCH + Duration::from_micros(micros)).into());
        assert_eq!(of(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(of(61_500_999), "1970-01-01T00:01:01.500Z");
        assert_eq!(of(7_000), "1970-01-01T00:00:00.007Z");
    }
}
