//! Reads the output of `valgrind --tool=lackey --trace-mem=yes`.
//!
//! Lines are `I  addr,size`, ` L addr,size`, ` S addr,size` and ` M addr,size`.
//!
//! A modify is a read and then a write. Lines of valgrind's own (`==pid== ...`) are skipped.
//! Anything else is an error: the program's output would otherwise be read as a trace. Lackey
//! reports no threads, processes or times. So thread and client are 0, and time counts the touches.

use std::io::BufRead;

use super::{ImportError, Lines};
use crate::touch::Touch;
use undercroft_trace::Access;

/// The touches of a lackey log, in order.
pub struct Lackey<R> {
    lines: Lines<R>,
    /// The write of a modify whose read was already returned.
    pending: Option<Touch>,
    time: u64,
    failed: bool,
}

impl<R: BufRead> Lackey<R> {
    /// Begins to read. A `BufReader` with a buffer of 64 KiB or more serves well.
    pub fn new(input: R) -> Lackey<R> {
        Lackey {
            lines: Lines::new(input),
            pending: None,
            time: 0,
            failed: false,
        }
    }

    /// Touches returned so far: the time of the next one.
    pub fn touches(&self) -> u64 {
        self.time
    }

    fn advance(&mut self) -> Result<Option<Touch>, ImportError> {
        loop {
            if !self.lines.advance()? {
                return Ok(None);
            }
            let line = self.lines.line.as_slice();
            let (access, modify, rest) = match line {
                [b'I', b' ', b' ', rest @ ..] => (Access::Instruction, false, rest),
                [b' ', b'L', b' ', rest @ ..] => (Access::Read, false, rest),
                [b' ', b'S', b' ', rest @ ..] => (Access::Write, false, rest),
                [b' ', b'M', b' ', rest @ ..] => (Access::Read, true, rest),
                [] | [b'=', b'=', ..] | [b'-', b'-', ..] => continue,
                _ => return Err(self.lines.wrong("not a line of lackey's")),
            };
            let (address, bytes) = numbers(rest).ok_or_else(|| {
                self.lines
                    .wrong("not `address,size` in hexadecimal and decimal")
            })?;
            let touch = Touch {
                time: self.time,
                address,
                bytes,
                access,
                client: 0,
                thread: 0,
            };
            self.time += 1;
            if modify {
                self.pending = Some(Touch {
                    time: self.time,
                    access: Access::Write,
                    ..touch
                });
                self.time += 1;
            }
            return Ok(Some(touch));
        }
    }
}

impl<R: BufRead> Iterator for Lackey<R> {
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

/// `hexadecimal,decimal`, nothing before, between or after.
fn numbers(text: &[u8]) -> Option<(u64, u32)> {
    let comma = text.iter().position(|byte| *byte == b',')?;
    let (address, size) = (&text[..comma], &text[comma + 1..]);
    if address.is_empty() || address.len() > 16 || size.is_empty() || size.len() > 6 {
        return None;
    }
    let mut number = 0u64;
    for byte in address {
        number = number << 4 | u64::from((*byte as char).to_digit(16)?);
    }
    let mut bytes = 0u32;
    for byte in size {
        bytes = bytes * 10 + (*byte as char).to_digit(10)?;
    }
    (bytes > 0).then_some((number, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Result<Touch, ImportError>> {
        Lackey::new(text.as_bytes()).collect()
    }

    #[test]
    fn lines_of_every_kind_become_touches() {
        let text = "==7== Lackey, an example Valgrind tool\n\nI  04001000,3\n L 1ffeffe7e0,8\n S \
                    1ffeffe7d8,4\n M 0421c7cc,16\n==7== bye\n";
        let got: Vec<(u64, u64, u32, Access)> = read(text)
            .into_iter()
            .map(|touch| touch.expect("a good line"))
            .map(|touch| (touch.time, touch.address, touch.bytes, touch.access))
            .collect();
        assert_eq!(
            got,
            [
                (0, 0x0400_1000, 3, Access::Instruction),
                (1, 0x1f_feff_e7e0, 8, Access::Read),
                (2, 0x1f_feff_e7d8, 4, Access::Write),
                (3, 0x0421_c7cc, 16, Access::Read),
                (4, 0x0421_c7cc, 16, Access::Write),
            ]
        );
    }

    #[test]
    fn lines_that_are_not_lackeys_are_refused_with_line_and_byte() {
        for bad in [
            "hello",
            " X 1,2",
            " L 12",
            " L ,8",
            " L 1g,8",
            " L 12,8 ",
            " L 12,",
            " L 12,0",
            " L 12345678901234567,1",
            "I 12,3",
            " L 12,8x",
            "\u{7f}ELF",
        ] {
            let mut results = read(&format!("I  04001000,3\n{bad}\n L 1,1\n"));
            let error = results
                .pop()
                .expect("two results")
                .expect_err(bad)
                .to_string();
            assert!(error.contains("line 2, byte 14"), "{bad}: {error}");
            assert_eq!(results.len(), 1);
        }
        let cut = read(" L 1,8\n L 2,1").pop().expect("a result");
        assert!(matches!(cut, Err(ImportError::Cut { line: 2, offset: 7 })));
        let endless = "x".repeat(1 << 20);
        assert!(read(&endless)[0].is_err());
    }
}
