//! Comma-separated values: a first line with the columns' names, then a touch a line. `undercroft
//! trace cat` writes it.
//!
//! Columns, in any order: `address` (needed; decimal or 0x...), `access` (I, R, W; also lackey's L,
//! S, M; needed), `time`, `bytes`, `client`, `thread`. Without `time` the touches are counted.
//! Nothing is quoted, because nothing needs to be.

use std::io::BufRead;

use super::{ImportError, Lines};
use crate::touch::Touch;
use undercroft_trace::{Access, Event, Kind, Movement};

/// The first line of what [`row`] writes.
pub const HEADER: &str = "time,address,access,client,thread";

/// An entry as a line, without its end. Lines of movements are for people and scripts: they are
/// not imported.
pub fn row(event: &Event) -> String {
    let what = match event.kind {
        Kind::Access(Access::Instruction) => "I",
        Kind::Access(Access::Read) => "R",
        Kind::Access(Access::Write) => "W",
        Kind::Movement(Movement::Evicted) => "evicted",
        Kind::Movement(Movement::Found) => "found",
        Kind::Movement(Movement::Ahead) => "ahead",
        Kind::Movement(Movement::Returned) => "returned",
        Kind::Movement(Movement::Dropped) => "dropped",
        Kind::Movement(Movement::Clean) => "clean",
        Kind::Movement(Movement::Accessed) => "accessed",
        Kind::Movement(Movement::Locked) => "locked",
        Kind::Movement(Movement::Forked) => "forked",
        Kind::Movement(Movement::Ended) => "ended",
        Kind::Movement(Movement::Shared) => "shared",
    };
    format!(
        "{},{:#x},{what},{},{}",
        event.time, event.address, event.client, event.thread
    )
}

const NAMES: [&str; 6] = ["time", "address", "access", "client", "thread", "bytes"];
const TIME: usize = 0;
const ADDRESS: usize = 1;
const ACCESS: usize = 2;
const CLIENT: usize = 3;
const THREAD: usize = 4;
const BYTES: usize = 5;

/// The touches of a CSV trace, in order.
pub struct Csv<R> {
    lines: Lines<R>,
    /// For each column of the file, its place in `NAMES`.
    columns: Vec<usize>,
    time: u64,
    touches: u64,
    has_time: bool,
    pending: Option<Touch>,
    failed: bool,
}

impl<R: BufRead> Csv<R> {
    /// Reads the line of names. Errors: one is unknown, missing or there twice.
    pub fn new(input: R) -> Result<Csv<R>, ImportError> {
        let mut lines = Lines::new(input);
        lines.advance()?;
        let names = String::from_utf8_lossy(&lines.line).to_ascii_lowercase();
        let mut columns = Vec::new();
        for name in names.split(',').map(str::trim) {
            let column = NAMES
                .iter()
                .position(|known| *known == name)
                .ok_or_else(|| {
                    lines.wrong(format!(
                        "`{name}` is no column; the first line names them: {}",
                        NAMES.join(", ")
                    ))
                })?;
            if columns.contains(&column) {
                return Err(lines.wrong(format!("column `{name}` is there twice")));
            }
            columns.push(column);
        }
        for needed in [ADDRESS, ACCESS] {
            if !columns.contains(&needed) {
                return Err(lines.wrong(format!("there is no column `{}`", NAMES[needed])));
            }
        }
        Ok(Csv {
            lines,
            has_time: columns.contains(&TIME),
            columns,
            time: 0,
            touches: 0,
            pending: None,
            failed: false,
        })
    }

    /// Whether the file has times; else the touches are counted.
    pub fn has_time(&self) -> bool {
        self.has_time
    }

    /// The next line as a touch. A line of `M` is two, a read and a write: the second waits in
    /// `pending`.
    fn advance(&mut self) -> Result<Option<Touch>, ImportError> {
        loop {
            if !self.lines.advance()? {
                return Ok(None);
            }
            if !self.lines.line.is_empty() {
                break;
            }
        }
        let fields = self.fields()?;
        let (access, modify) = access_of(fields[ACCESS].unwrap_or_default()).ok_or_else(|| {
            self.lines
                .wrong("the access is not one of I, R, W, L, S, M")
        })?;
        let field = |column: usize, most: u64| self.number(column, fields[column], most);
        let time = field(TIME, u64::MAX)?.unwrap_or(self.touches);
        let touch = Touch {
            time,
            address: field(ADDRESS, u64::MAX)?.unwrap_or_default(),
            bytes: field(BYTES, 1 << 20)?.unwrap_or(1) as u32,
            access,
            client: field(CLIENT, u64::from(u16::MAX))?.unwrap_or_default() as u16,
            thread: field(THREAD, u64::from(u16::MAX))?.unwrap_or_default() as u16,
        };
        if time < self.time {
            return Err(self
                .lines
                .wrong(format!("time goes back, from {}", self.time)));
        }
        self.time = time;
        self.touches += 1;
        if modify {
            let step = u64::from(!self.has_time);
            self.touches += 1;
            self.pending = Some(Touch {
                time: time + step,
                access: Access::Write,
                ..touch
            });
        }
        Ok(Some(touch))
    }

    /// The line's values, by their place in `NAMES`. Errors: more or fewer than there are columns.
    fn fields(&self) -> Result<[Option<&str>; NAMES.len()], ImportError> {
        let text = std::str::from_utf8(&self.lines.line)
            .map_err(|_| self.lines.wrong("the line is not text"))?;
        let mut fields = [None; NAMES.len()];
        let mut count = 0;
        for field in text.split(',') {
            if let Some(column) = self.columns.get(count) {
                fields[*column] = Some(field.trim());
            }
            count += 1;
        }
        if count != self.columns.len() {
            let expected = self.columns.len();
            let why = format!("{count} values for {expected} columns");
            return Err(self.lines.wrong(why));
        }
        Ok(fields)
    }

    /// The number in a column, which is at most `most`; `None` if the file has no such column.
    fn number(
        &self,
        column: usize,
        text: Option<&str>,
        most: u64,
    ) -> Result<Option<u64>, ImportError> {
        let Some(text) = text else {
            return Ok(None);
        };
        match number(text).filter(|number| *number <= most) {
            Some(number) => Ok(Some(number)),
            None => {
                let name = NAMES[column];
                let why = format!("{name} `{text}` is not a number up to {most}");
                Err(self.lines.wrong(why))
            }
        }
    }
}

impl<R: BufRead> Iterator for Csv<R> {
    type Item = Result<Touch, ImportError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(touch) = self.pending.take() {
            return Some(Ok(touch));
        }
        if self.failed {
            return None;
        }
        let result = self.advance();
        self.failed = result.is_err();
        result.transpose()
    }
}

/// The first access that a letter stands for, and whether a write of the same bytes follows.
fn access_of(letter: &str) -> Option<(Access, bool)> {
    Some(match letter {
        "I" | "i" => (Access::Instruction, false),
        "R" | "r" | "L" => (Access::Read, false),
        "W" | "w" | "S" => (Access::Write, false),
        "M" => (Access::Read, true),
        _ => return None,
    })
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_in_any_order_and_missing_ones_have_defaults() {
        let text = "access,address\nR,0x1000\r\n\nM,4097\nW,9\n";
        let got: Vec<Touch> = Csv::new(text.as_bytes())
            .expect("a header")
            .map(|touch| touch.expect("a row"))
            .collect();
        let plain: Vec<(u64, u64, Access)> = got
            .iter()
            .map(|touch| (touch.time, touch.address, touch.access))
            .collect();
        assert_eq!(
            plain,
            [
                (0, 4096, Access::Read),
                (1, 4097, Access::Read),
                (2, 4097, Access::Write),
                (3, 9, Access::Write)
            ]
        );
        let row_text = format!("{HEADER}\n5,0xfff,I,3,4\n");
        let touch = Csv::new(row_text.as_bytes())
            .expect("a header")
            .next()
            .expect("one")
            .expect("a row");
        let reference = touch.references(0).next().expect("one");
        assert_eq!(row(&reference.into()), "5,0xfff,I,3,4");
    }

    #[test]
    fn bad_rows_and_headers_are_refused_with_their_line() {
        for (text, word) in [
            ("", "no column"),
            ("time,adress,access\n", "`adress`"),
            ("time,address\n", "`access`"),
            ("address,access,address\n", "twice"),
            ("address,access\n1\n", "line 2, byte 15: 1 values for 2"),
            ("address,access\n1,R,3\n", "3 values"),
            ("address,access\n1,Q\n", "access"),
            ("address,access\n-1,R\n", "address `-1`"),
            ("address,access,client\n1,R,70000\n", "client `70000`"),
            (
                "address,access,time\n1,R,5\n1,R,4\n",
                "line 3, byte 26: time goes back",
            ),
        ] {
            let error = match Csv::new(text.as_bytes()) {
                Err(error) => error.to_string(),
                Ok(rows) => rows.last().expect("a row").expect_err(text).to_string(),
            };
            assert!(error.contains(word), "{text:?}: {error}");
        }
    }
}
