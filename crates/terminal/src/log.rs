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

/// A time of day in milliseconds, as a log has it.
pub fn log_time(now: OffsetDateTime) -> String {
    let millis = u32::from(now.millisecond()) * 1_000_000;
    let now = now.replace_nanosecond(millis).unwrap_or(now);
    now.format(&Rfc3339).unwrap_or_default()
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
