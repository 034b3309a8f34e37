//! Makes traces of known patterns from a specification and its seeds; the same text gives the same
//! trace.

mod permutation;
mod spec;

pub use spec::{Part, Pattern, Spec, SpecError};

use permutation::Permutation;
use undercroft_seeded::{Random, Zipf, finish};
use undercroft_trace::{Access, Reference};
use undercroft_trace::{Header, TimeUnit};

/// The references of a specification, as an iterator that needs hardly any memory.
#[derive(Clone, Debug)]
pub struct Generator {
    walks: Vec<Walk>,
    spec: Spec,
    made: u64,
    left: u64,
    choice: Random,
}

impl Generator {
    /// Begins the trace of `spec`.
    pub fn new(spec: Spec) -> Generator {
        let mut first_page = 0;
        let mut walks = Vec::new();
        for part in &spec.parts {
            walks.push(Walk::new(*part, first_page));
            // A gap between two ranges, so that no read-ahead crosses it unnoticed.
            first_page += part.pages + 1024;
        }
        Generator {
            left: spec.parts.iter().map(|part| part.refs).sum(),
            choice: Random::new(finish(
                spec.parts
                    .iter()
                    .fold(0, |sum, part| finish(sum ^ part.seed)),
            )),
            walks,
            spec,
            made: 0,
        }
    }

    /// The header of a trace of these references: granules are pages, time is in nanoseconds, every
    /// part is a thread.
    pub fn header(&self) -> Header {
        let clients = self.spec.parts.iter().map(|part| part.client).max();
        Header {
            granularity: self.spec.page_shift,
            time_unit: TimeUnit::Nanoseconds,
            synthetic: true,
            clients: (0..=clients.unwrap_or(0))
                .map(|client| format!("client{client}"))
                .collect(),
            source: self.spec.to_string(),
            ..Header::default()
        }
    }

    /// Nanoseconds of the whole trace.
    pub fn time_end(&self) -> u64 {
        (self.made + self.left) * self.spec.gap
    }

    /// References still to come.
    pub fn left(&self) -> u64 {
        self.left
    }
}

impl Iterator for Generator {
    type Item = Reference;

    fn next(&mut self) -> Option<Reference> {
        if self.left == 0 {
            return None;
        }
        // Each pattern is picked in proportion to the references that it has left, so that all end
        // together.
        let mut pick = match self.walks.len() {
            1 => 0,
            _ => self.choice.scaled(self.left),
        };
        let thread = self
            .walks
            .iter()
            .position(|walk| {
                let left = walk.part.refs - walk.made;
                let here = pick < left;
                pick = pick.saturating_sub(left);
                here
            })
            .unwrap_or(0);
        let walk = &mut self.walks[thread];
        let (page, write) = walk.step();
        let time = self.made * self.spec.gap;
        self.made += 1;
        self.left -= 1;
        Some(Reference {
            time,
            address: page << self.spec.page_shift,
            access: if write { Access::Write } else { Access::Read },
            client: walk.part.client,
            thread: thread as u16,
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left as usize, Some(self.left as usize))
    }
}

/// A pattern in progress.
#[derive(Clone, Debug)]
struct Walk {
    part: Part,
    first_page: u64,
    made: u64,
    random: Random,
    zipf: Option<Zipf>,
    scatter: Permutation,
    /// Page of a strided walk, a lap or a scan; an object; first page of a phase's set.
    place: u64,
    /// First page of a lap.
    lap: u64,
}

impl Walk {
    fn new(part: Part, first_page: u64) -> Walk {
        let (items, theta) = match part.pattern {
            Pattern::Zipf { theta } => (part.pages, Some(theta)),
            Pattern::Objects { size, theta } => (part.pages / size, Some(theta)),
            _ => (part.pages, None),
        };
        let zipf = theta.map(|theta| Zipf::new(items, theta));
        Walk {
            first_page,
            made: 0,
            random: Random::new(part.seed),
            zipf,
            scatter: Permutation::new(items, finish(part.seed)),
            place: 0,
            lap: 0,
            part,
        }
    }

    /// The next page and whether it is written.
    fn step(&mut self) -> (u64, bool) {
        let page = self.page();
        self.made += 1;
        let part = &self.part;
        let write = part.writes > 0.0 && self.random.unit() < part.writes && {
            // Which pages are ever written depends on the page and the seed alone.
            let draw = finish(page ^ finish(part.seed)) >> 11;
            part.dirty >= 1.0 || (draw as f64) < part.dirty * (1u64 << 53) as f64
        };
        (self.first_page + page, write)
    }

    fn page(&mut self) -> u64 {
        let Part { pages, refs, .. } = self.part;
        match self.part.pattern {
            Pattern::Sequential => {
                (u128::from(self.made) * u128::from(pages) / u128::from(refs)) as u64
            }
            Pattern::Strided { stride } => {
                let page = self.place;
                self.place += stride;
                if self.place >= pages {
                    self.lap = (self.lap + 1) % stride;
                    self.place = self.lap;
                }
                page
            }
            Pattern::Loop => self.made % pages,
            Pattern::Uniform => self.random.scaled(pages),
            Pattern::Zipf { .. } => match &self.zipf {
                Some(zipf) => self.scatter.of(zipf.rank(&mut self.random).min(pages - 1)),
                None => 0,
            },
            Pattern::Objects { size, .. } => {
                let at = self.made % size;
                if let Some(zipf) = self.zipf.as_ref().filter(|_| at == 0) {
                    let items = pages / size;
                    self.place = self.scatter.of(zipf.rank(&mut self.random).min(items - 1));
                }
                self.place * size + at
            }
            Pattern::Shrink { step } => {
                let page = self.place;
                self.place += 1;
                if self.place >= pages {
                    self.lap = if self.lap + step < pages {
                        self.lap + step
                    } else {
                        0
                    };
                    self.place = self.lap;
                }
                page
            }
            Pattern::Phases { phases, set } => {
                let phase = |made: u64| u128::from(made) * u128::from(phases) / u128::from(refs);
                if self.made == 0 || phase(self.made) != phase(self.made - 1) {
                    self.place = self.random.scaled(pages - set + 1);
                }
                self.place + self.random.scaled(set)
            }
            Pattern::ScanHot { hot, share } => {
                if self.random.unit() < share {
                    return self.random.scaled(hot);
                }
                let page = hot + self.place;
                self.place = (self.place + 1) % (pages - hot);
                page
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(text: &str) -> Vec<u64> {
        let spec: Spec = text.parse().expect(text);
        Generator::new(spec)
            .map(|reference| reference.address >> 12)
            .collect()
    }

    #[test]
    fn patterns_walk_as_they_say() {
        assert_eq!(pages("sequential:pages=3,refs=6"), [0, 0, 1, 1, 2, 2]);
        assert_eq!(pages("loop:pages=3,refs=7"), [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(
            pages("strided:pages=6,stride=2,refs=8"),
            [0, 2, 4, 1, 3, 5, 0, 2]
        );
        let scan: Vec<u64> = pages("scan_hot:pages=10,hot=4,share=0.5,refs=1000")
            .into_iter()
            .filter(|page| *page >= 4)
            .take(7)
            .collect();
        assert_eq!(scan, [4, 5, 6, 7, 8, 9, 4]);
        assert_eq!(
            pages("shrink:pages=5,step=2,refs=11"),
            [0, 1, 2, 3, 4, 2, 3, 4, 4, 0, 1]
        );
        let objects = pages("objects:pages=100,size=5,refs=1000");
        for object in objects.chunks(5) {
            assert_eq!(object[0] % 5, 0);
            assert!(object.windows(2).all(|two| two[0] + 1 == two[1]));
        }
        let phases = pages("phases:pages=1000,phases=4,set=10,refs=400");
        for phase in phases.chunks(100) {
            let (low, high) = (phase.iter().min(), phase.iter().max());
            assert!(high.copied() < low.map(|low| low + 10));
        }
        assert!(
            pages("uniform:pages=10,refs=1000")
                .iter()
                .all(|page| *page < 10)
        );
    }

    #[test]
    fn same_text_gives_the_same_trace_and_another_seed_another() {
        let text = "zipf:pages=100,refs=1000,writes=0.5,seed=3+loop:pages=10,refs=500,client=1";
        let all = |text: &str| Generator::new(text.parse().expect(text)).collect::<Vec<_>>();
        assert_eq!(all(text), all(text));
        assert_ne!(all(text), all(&text.replace("seed=3", "seed=4")));
    }

    #[test]
    fn display_of_a_specification_parses_to_itself() {
        for text in [
            "zipf:pages=100,theta=1.2,writes=0.25,page=512",
            "sequential:gap=7+strided:stride=3+loop+uniform+phases+scan_hot:client=2,dirty=0.1",
            "objects:size=40,theta=0.5+shrink:step=7",
        ] {
            let spec: Spec = text.parse().expect(text);
            assert_eq!(spec.to_string().parse(), Ok(spec));
        }
    }

    #[test]
    fn mixture_has_the_references_of_its_parts_in_their_own_ranges() {
        let spec: Spec = "loop:pages=10,refs=300+uniform:pages=20,refs=700,client=1"
            .parse()
            .expect("a mixture");
        let generator = Generator::new(spec);
        assert_eq!(generator.header().clients.len(), 2);
        let references: Vec<Reference> = generator.collect();
        let of = |client| {
            references
                .iter()
                .filter(move |reference| reference.client == client)
        };
        assert_eq!((of(0).count(), of(1).count()), (300, 700));
        assert!(of(0).all(|reference| reference.address >> 12 < 10));
        assert!(of(1).all(|reference| (1034..1054).contains(&(reference.address >> 12))));
        // Neither waits for the other.
        assert!(
            references[..100]
                .iter()
                .any(|reference| reference.client == 1)
        );
        assert!(
            references[900..]
                .iter()
                .any(|reference| reference.client == 0)
        );
    }

    #[test]
    fn writes_keep_to_their_share_and_their_pages() {
        let spec: Spec = "uniform:pages=1000,refs=100000,writes=0.3,dirty=0.5"
            .parse()
            .expect("a pattern");
        let mut written = std::collections::BTreeSet::new();
        let mut writes = 0;
        for reference in Generator::new(spec).filter(|reference| reference.access.is_write()) {
            written.insert(reference.address);
            writes += 1;
        }
        assert!((14_000..16_000).contains(&writes), "{writes}");
        assert!((430..570).contains(&written.len()), "{}", written.len());
    }

    #[test]
    fn impossible_specifications_name_the_option() {
        for (text, word) in [
            ("", "no pattern"),
            ("zip:pages=1", "`zip`"),
            ("zipf:theta", "key=value"),
            ("zipf:stride=3", "stride"),
            ("zipf:theta=-1", "theta=-1"),
            ("zipf:theta=nan", "theta"),
            ("zipf:pages=0", "pages=0"),
            ("zipf:pages=1e30", "pages"),
            ("zipf:pages=2e12", "2^40"),
            ("zipf:refs=0", "refs"),
            ("zipf:seed=1,seed=2", "twice"),
            ("loop:writes=1.5", "writes"),
            ("loop:page=3000", "power of two"),
            ("loop:refs=1e19,gap=100", "refs"),
            ("sequential:pages=10,refs=5", "refs=5"),
            ("strided:pages=10,stride=11", "stride"),
            ("phases:pages=10,set=11", "set"),
            ("objects:pages=10,size=11", "size"),
            ("shrink:pages=10,step=0", "step"),
            ("phases:pages=10,refs=5,phases=6", "phases"),
            ("scan_hot:pages=10,hot=10", "hot"),
            ("loop+", "no pattern"),
            ("loop+loop:page=512", "first pattern"),
            ("loop:client=70000", "client"),
        ] {
            let error = text.parse::<Spec>().expect_err(text).to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
