//! Other tools' traces, as streams of touches: valgrind's lackey and CSV.

pub mod csv;
pub mod lackey;

use std::io::{self, BufRead};

/// Longest line of a text trace.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Why a text trace cannot be imported; names line and byte.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The text cannot be read.
    #[error("line {line}, byte {offset}: cannot be read: {source}")]
    Io {
        /// From 1.
        line: u64,
        /// Where the line begins.
        offset: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// The text ends inside a line: it was cut, or its writer was killed. The line may lack
    /// anything.
    #[error("line {line}, byte {offset}: the text ends inside this line: it is truncated")]
    Cut {
        /// From 1.
        line: u64,
        /// Where the line begins.
        offset: u64,
    },
    /// A line that is not of the format.
    #[error("line {line}, byte {offset}: {why}: \"{text}\"")]
    Line {
        /// From 1.
        line: u64,
        /// Where the line begins.
        offset: u64,
        /// The reason.
        why: String,
        /// Its first characters.
        text: String,
    },
}

/// Lines of a text, counted, without allocation for each.
struct Lines<R> {
    input: R,
    line: Vec<u8>,
    number: u64,
    begin: u64,
    end: u64,
}

impl<R: BufRead> Lines<R> {
    fn new(input: R) -> Lines<R> {
        Lines {
            input,
            line: Vec::new(),
            number: 0,
            begin: 0,
            end: 0,
        }
    }

    /// Reads the next line into `self.line`, without its end. False at the end of the text. Errors:
    /// a last line without an end, because a number there may lack digits.
    fn advance(&mut self) -> Result<bool, ImportError> {
        self.line.clear();
        self.begin = self.end;
        self.number += 1;
        loop {
            let available = match self.input.fill_buf() {
                Ok(available) => available,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => {
                    return Err(ImportError::Io {
                        line: self.number,
                        offset: self.begin,
                        source,
                    });
                }
            };
            if available.is_empty() {
                return if self.end <= self.begin {
                    Ok(false)
                } else {
                    Err(ImportError::Cut {
                        line: self.number,
                        offset: self.begin,
                    })
                };
            }
            let found = available.iter().position(|byte| *byte == b'\n');
            let part = &available[..found.unwrap_or(available.len())];
            self.line.extend(part);
            let used = part.len() + usize::from(found.is_some());
            self.input.consume(used);
            self.end += used as u64;
            if found.is_some() {
                if self.line.last() == Some(&b'\r') {
                    self.line.pop();
                }
                return Ok(true);
            }
            if self.line.len() > LINE_BYTES_MAX {
                return Err(self.wrong("the line is longer than 64 KiB; this is no text trace"));
            }
        }
    }

    fn wrong(&self, why: impl Into<String>) -> ImportError {
        ImportError::Line {
            line: self.number,
            offset: self.begin,
            why: why.into(),
            text: String::from_utf8_lossy(&self.line[..self.line.len().min(60)])
                .escape_debug()
                .to_string(),
        }
    }
}
