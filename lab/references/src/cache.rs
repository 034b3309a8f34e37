//! A write-back last-level cache as a filter: touches go in, references that reach memory come out.
//! The traces of the PCM-swap paper were made in this way.
//!
//! There is one cache for instructions and data. All clients and threads share it. It is
//! set-associative, LRU and write-allocate. A miss emits a read of the line, as instruction or
//! data. A dirty line that is replaced emits a write of the line. That write has the time of the
//! touch that replaced the line, and the client and thread that wrote it last. Lines that are still
//! dirty when the program ends never reach memory, unless [`Cache::flush`] is called.
//!
//! Source: PCM swap §III-1 ("filter out memory references that are accessed directly from the CPU
//! cache memory and also reflect the write-back property"). The paper does not say what a store
//! that misses does. [`WriteMiss::Fetch`] reads the line first. Then no trace has more data writes
//! than reads, though two of the paper's four have. [`WriteMiss::Validate`] (no-fetch-on-write;
//! Jouppi 1993) reads nothing, and can give such a mix.

use std::fmt;
use std::str::FromStr;

use undercroft_base::Bytes;

use crate::touch::Touch;
use undercroft_trace::{Access, Reference};

/// Most ways of a set; each touch may look at all of them.
const WAYS_MAX: u32 = 64;

/// Action of a store that misses, before it writes into its new line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMiss {
    /// Reads the line from memory.
    Fetch,
    /// Reads nothing; the line's bytes are valid as they are written.
    Validate,
}

/// Size and shape of a cache. Text: `SIZE[,WAYS[,LINE[,fetch|validate]]]`, as in `8M,16,64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// Bytes it holds.
    pub size: Bytes,
    /// Lines of a set.
    pub ways: u32,
    /// log2 of the bytes of a line.
    pub line_shift: u8,
    /// Action of a store that misses.
    pub write_miss: WriteMiss,
}

/// Why a text is no cache; for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a cache: {why} (SIZE[,WAYS[,LINE[,fetch|validate]]], as in 8M,16,64)")]
pub struct CacheSpecError {
    text: String,
    why: String,
}

impl CacheSpec {
    /// Sets of the cache.
    pub fn sets(&self) -> u64 {
        (self.size.0 >> self.line_shift) / u64::from(self.ways)
    }
}

impl FromStr for CacheSpec {
    type Err = CacheSpecError;

    fn from_str(text: &str) -> Result<CacheSpec, CacheSpecError> {
        let error = |why: String| CacheSpecError {
            text: text.to_owned(),
            why,
        };
        let words: Vec<&str> = text.split(',').map(str::trim).collect();
        if words.len() > 4 {
            return Err(error("it has more than four parts".to_owned()));
        }
        let size: Bytes = words[0]
            .parse()
            .map_err(|why: undercroft_base::ParseUnitError| error(why.to_string()))?;
        let ways: u32 = match words.get(1) {
            None => 16,
            Some(word) => match word.parse() {
                Ok(ways) if (1..=WAYS_MAX).contains(&ways) => ways,
                _ => {
                    return Err(error(format!(
                        "`{word}` is not a number of ways from 1 to {WAYS_MAX}"
                    )));
                }
            },
        };
        let line: u64 = match words.get(2) {
            None => 64,
            Some(word) => match word.parse::<Bytes>() {
                Ok(line) if line.0.is_power_of_two() && (8..=4096).contains(&line.0) => line.0,
                _ => {
                    return Err(error(format!(
                        "`{word}` is not a line: a power of two from 8 to 4096 bytes"
                    )));
                }
            },
        };
        let write_miss = match words.get(3) {
            None | Some(&"fetch") => WriteMiss::Fetch,
            Some(&"validate") => WriteMiss::Validate,
            Some(word) => return Err(error(format!("`{word}` is neither fetch nor validate"))),
        };
        let set_bytes = line * u64::from(ways);
        if size.0 == 0 || !size.0.is_multiple_of(set_bytes) || size.0 > 1 << 32 {
            return Err(error(format!(
                "its size must be a multiple of ways x line, {set_bytes} bytes, and at most 4G"
            )));
        }
        Ok(CacheSpec {
            size,
            ways,
            line_shift: line.trailing_zeros() as u8,
            write_miss,
        })
    }
}

impl fmt::Display for CacheSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let write_miss = match self.write_miss {
            WriteMiss::Fetch => "fetch",
            WriteMiss::Validate => "validate",
        };
        write!(
            f,
            "{},{},{},{write_miss}",
            self.size.0,
            self.ways,
            1u64 << self.line_shift
        )
    }
}

/// A line that is in the cache.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    number: u64,
    client: u16,
    thread: u16,
    valid: bool,
    dirty: bool,
}

/// The cache's counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Lines touched.
    pub touches: u64,
    /// Lines touched that were not in the cache.
    pub misses: u64,
    /// Dirty lines written to memory.
    pub write_backs: u64,
}

/// The filter. Cost of a touch: a look at one set, most recently used first.
#[derive(Clone, Debug)]
pub struct Cache {
    spec: CacheSpec,
    sets: u64,
    /// `ways` lines a set, most recently used first.
    lines: Vec<Line>,
    counts: CacheCounts,
}

impl Cache {
    /// An empty cache. Memory: 16 bytes a line.
    pub fn new(spec: CacheSpec) -> Cache {
        let sets = spec.sets();
        Cache {
            spec,
            sets,
            lines: vec![Line::default(); (sets * u64::from(spec.ways)) as usize],
            counts: CacheCounts::default(),
        }
    }

    /// Its size and shape.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// The counts so far.
    pub fn counts(&self) -> &CacheCounts {
        &self.counts
    }

    /// Touches the cache. Calls `emit` for each reference that reaches memory, write-back before
    /// read.
    pub fn touch<E>(
        &mut self,
        touch: Touch,
        mut emit: impl FnMut(Reference) -> Result<(), E>,
    ) -> Result<(), E> {
        for number in touch.lines(self.spec.line_shift) {
            self.touch_line(number, &touch, &mut emit)?;
        }
        Ok(())
    }

    #[inline]
    fn touch_line<E>(
        &mut self,
        number: u64,
        touch: &Touch,
        emit: &mut impl FnMut(Reference) -> Result<(), E>,
    ) -> Result<(), E> {
        self.counts.touches += 1;
        let write = touch.access.is_write();
        let ways = self.spec.ways as usize;
        let begin = (number % self.sets) as usize * ways;
        let set = &mut self.lines[begin..begin + ways];
        let found = set
            .iter()
            .position(|line| line.valid && line.number == number && line.client == touch.client);
        let place = found.unwrap_or(ways - 1);
        set[..=place].rotate_right(1);
        let line = &mut set[0];
        let victim = *line;
        if found.is_none() {
            *line = Line {
                number,
                client: touch.client,
                thread: touch.thread,
                valid: true,
                dirty: false,
            };
        }
        if write {
            line.dirty = true;
            line.thread = touch.thread;
        }
        if found.is_some() {
            return Ok(());
        }
        self.counts.misses += 1;
        if victim.valid && victim.dirty {
            self.counts.write_backs += 1;
            emit(write_back(&victim, self.spec.line_shift, touch.time))?;
        }
        if write && self.spec.write_miss == WriteMiss::Validate {
            return Ok(());
        }
        emit(Reference {
            time: touch.time,
            address: number << self.spec.line_shift,
            access: match touch.access {
                Access::Instruction => Access::Instruction,
                Access::Read | Access::Write => Access::Read,
            },
            client: touch.client,
            thread: touch.thread,
        })
    }

    /// Writes back every dirty line at `time`, least recently used first within a set. All lines
    /// stay, clean.
    pub fn flush<E>(
        &mut self,
        time: u64,
        mut emit: impl FnMut(Reference) -> Result<(), E>,
    ) -> Result<(), E> {
        for set in self.lines.chunks_mut(self.spec.ways as usize) {
            for line in set.iter_mut().rev().filter(|line| line.valid && line.dirty) {
                line.dirty = false;
                self.counts.write_backs += 1;
                emit(write_back(line, self.spec.line_shift, time))?;
            }
        }
        Ok(())
    }
}

fn write_back(line: &Line, line_shift: u8, time: u64) -> Reference {
    Reference {
        time,
        address: line.number << line_shift,
        access: Access::Write,
        client: line.client,
        thread: line.thread,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use undercroft_seeded::Random;

    /// Touches `L12`, `S0`, `I3` (line numbers) of a cache. Returns the references it emits, as
    /// `R12 W0 I3`.
    fn check(spec: &str, touches: &str, expected: &str) {
        let mut cache = Cache::new(spec.parse().expect(spec));
        let mut out = Vec::new();
        for (time, word) in touches.split_whitespace().enumerate() {
            let line: u64 = word[1..].parse().expect("a line");
            let touch = Touch {
                time: time as u64,
                address: line * 64 + 60,
                bytes: 4,
                access: match &word[..1] {
                    "I" => Access::Instruction,
                    "L" => Access::Read,
                    _ => Access::Write,
                },
                client: 0,
                thread: 0,
            };
            let Ok(()) = cache.touch(touch, |reference| {
                let letter = ["I", "R", "W"][reference.access as usize];
                out.push(format!("{letter}{}", reference.address / 64));
                Ok::<(), Infallible>(())
            });
        }
        assert_eq!(out.join(" "), expected, "{spec}: {touches}");
    }

    #[test]
    fn misses_are_read_and_dirty_victims_written_back() {
        // One set of two ways.
        check("128,2,64", "L0 L1 L0 L2 L0 L1", "R0 R1 R2 R1");
        check("128,2,64", "S0 L1 L2", "R0 R1 W0 R2");
        check("128,2,64", "L0 S0 I1 L2 L0", "R0 I1 W0 R2 R0");
        // Written back once: the line that comes again is clean.
        check("128,2,64", "S0 L1 L2 L0 L1 L2", "R0 R1 W0 R2 R0 R1 R2");
        // Two sets: even and odd lines do not push each other out.
        check(
            "256,2,64",
            "S0 L1 L3 L5 L7 L2 L4",
            "R0 R1 R3 R5 R7 R2 W0 R4",
        );
        // A store that misses reads nothing.
        check("128,2,64,validate", "S0 S1 S2 L0", "W0 W1 R0");
    }

    #[test]
    fn touch_across_a_line_touches_both() {
        let mut cache = Cache::new("128,2,64".parse().expect("a cache"));
        let mut addresses = Vec::new();
        let touch = Touch {
            time: 0,
            address: 60,
            bytes: 8,
            access: Access::Read,
            client: 0,
            thread: 0,
        };
        let Ok(()) = cache.touch(touch, |reference| {
            addresses.push(reference.address);
            Ok::<(), Infallible>(())
        });
        assert_eq!(addresses, [0, 64]);
    }

    /// Against a model that keeps whole lists: every dirty line is written once, and none is lost.
    #[test]
    fn cache_agrees_with_a_plain_model() {
        let spec: CacheSpec = "4096,4,64".parse().expect("a cache");
        let mut cache = Cache::new(spec);
        let mut sets: Vec<Vec<(u64, bool)>> = vec![Vec::new(); 16];
        let mut random = Random::new(5);
        for time in 0..20_000 {
            let line = random.scaled(100).min(random.scaled(200));
            let write = random.scaled(3) == 0;
            let mut expected = Vec::new();
            let set = &mut sets[(line % 16) as usize];
            match set.iter().position(|(number, _)| *number == line) {
                Some(at) => {
                    let (_, dirty) = set.remove(at);
                    set.push((line, dirty || write));
                }
                None => {
                    if set.len() == 4 {
                        let (number, dirty) = set.remove(0);
                        expected.extend(dirty.then_some((number * 64, true)));
                    }
                    expected.push((line * 64, false));
                    set.push((line, write));
                }
            }
            let touch = Touch {
                time,
                address: line * 64,
                bytes: 1,
                access: if write { Access::Write } else { Access::Read },
                client: 0,
                thread: 0,
            };
            let mut got = Vec::new();
            let Ok(()) = cache.touch(touch, |reference| {
                got.push((reference.address, reference.access.is_write()));
                Ok::<(), Infallible>(())
            });
            assert_eq!(got, expected, "touch {time}");
        }
        let dirty = sets.iter().flatten().filter(|(_, dirty)| *dirty).count();
        let mut flushed = 0;
        let Ok(()) = cache.flush(0, |_| {
            flushed += 1;
            Ok::<(), Infallible>(())
        });
        assert_eq!(flushed, dirty);
    }

    #[test]
    fn clients_share_room_but_no_lines() {
        let mut cache = Cache::new("128,2,64".parse().expect("a cache"));
        let touch = |client, access| Touch {
            time: 0,
            address: 0,
            bytes: 1,
            access,
            client,
            thread: 9,
        };
        let mut out = Vec::new();
        for touch in [
            touch(0, Access::Write),
            touch(1, Access::Read),
            touch(2, Access::Read),
        ] {
            let Ok(()) = cache.touch(touch, |reference| {
                out.push((reference.client, reference.access));
                Ok::<(), Infallible>(())
            });
        }
        assert_eq!(
            out,
            [
                (0, Access::Read),
                (1, Access::Read),
                (0, Access::Write),
                (2, Access::Read)
            ]
        );
    }

    #[test]
    fn texts_of_caches_parse_or_say_why_not() {
        let spec: CacheSpec = "8M".parse().expect("a size");
        assert_eq!(
            (spec.sets(), spec.to_string().as_str()),
            (8192, "8388608,16,64,fetch")
        );
        assert_eq!(spec.to_string().parse(), Ok(spec));
        for (text, word) in [
            ("", "number"),
            ("0", "multiple"),
            ("8M,0", "ways"),
            ("8M,65", "ways"),
            ("8M,16,48", "power of two"),
            ("1000,2,64", "multiple"),
            ("8M,16,64,never", "neither"),
            ("8M,16,64,fetch,1", "four"),
            ("5G", "at most 4G"),
        ] {
            let error = text.parse::<CacheSpec>().expect_err(text).to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
