//! Clients of one daemon and the control of their bounds, by messages alone.

use std::collections::BTreeMap;

use undercroft_base::{Bytes, Nanos};
use undercroft_proto::grant::{
    Bound, Figures, Goes, Hello, Latencies, PageIns, ToKeeper, Turn, VERSION,
};
use undercroft_qos::tail::bucket;

use super::*;
use crate::config::{Class, Config, DEFAULT_CLASS, Divide};
use crate::members::{Members, Said};

/// The answers of a client.
#[derive(Clone, Copy)]
struct Fake {
    /// Its bound; `None`: it has none, and pages in.
    bound: Option<&'static str>,
    /// Microseconds of a page-in while its pages are at the device, and in the buffer.
    micros: (u64, u64),
    /// Whether it answers at all.
    answers: bool,
}

const BUSY: Fake = Fake {
    bound: None,
    micros: (90, 10),
    answers: true,
};

/// Page-ins of a client that has a bound and had none.
fn none(bound: Bound) -> PageIns {
    PageIns {
        bound,
        all: Latencies::default(),
        device: Latencies::default(),
        over: 0,
    }
}

struct World {
    members: Members,
    fakes: BTreeMap<u64, Fake>,
    turns: BTreeMap<u64, Turn>,
    swap_ins: u64,
    now: Duration,
}

impl World {
    fn new(tiers: &[&str], fakes: &[Fake]) -> World {
        let budget = |spec: &&str| Budget {
            spec: spec.parse().expect("a tier"),
            sizes: None,
            profile: None,
        };
        let class = Class {
            weight: 1,
            memory_min: Bytes(4 << 20),
            memory_max: Bytes(1 << 30),
            latency: None,
            demand: None,
            cpus: None,
            realtime: true,
            moves: None,
            policy: None,
        };
        let config = Config {
            memory: Bytes(1 << 30),
            divide: Divide::Weights,
            tiers: tiers.iter().map(budget).collect(),
            classes: [(DEFAULT_CLASS.to_owned(), class)].into(),
        };
        let mut world = World {
            members: Members::new(config, BTreeSet::new()),
            fakes: BTreeMap::new(),
            turns: BTreeMap::new(),
            swap_ins: 0,
            now: Duration::ZERO,
        };
        for (id, fake) in (0..).zip(fakes) {
            world.fakes.insert(id, *fake);
            let hello = Hello {
                version: VERSION,
                class: DEFAULT_CLASS.to_owned(),
                command: "program".to_owned(),
                memory_max: Some(16 << 20),
                claim: None,
            };
            world.members.hello(id, id as u32, hello);
            world.run(1);
        }
        world
    }

    fn figures(&mut self, id: u64) -> Figures {
        let fake = self.fakes[&id];
        self.swap_ins += 1000;
        let in_buffer = self
            .turns
            .get(&id)
            .is_some_and(|turn| turn.goes == Goes::ToBuffer);
        let micros = if in_buffer {
            fake.micros.1
        } else {
            fake.micros.0
        };
        let at = bucket(Nanos(micros * 1000)) as u16;
        let page_ins = fake.bound.map(|bound| {
            let bound = Bound(bound.parse().expect("a bound"));
            let all = Latencies::try_from(vec![(at, 1000)]).expect("latencies");
            PageIns {
                bound,
                over: u64::from(Nanos(micros * 1000) > bound.0.limit) * 1000,
                device: if in_buffer {
                    Latencies::default()
                } else {
                    all.clone()
                },
                all,
            }
        });
        Figures {
            dram: 8 << 20,
            limit: Some(16 << 20),
            swap_ins: self.swap_ins,
            page_ins,
            ..Figures::default()
        }
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds * 20 {
            self.now += Duration::from_millis(50);
            self.members.tick(self.now);
            for (id, said) in self.members.said() {
                let Said::Message(message) = said else {
                    panic!("{said:?}");
                };
                match message {
                    ToKeeper::Tell if self.fakes[&id].answers => {
                        let figures = self.figures(id);
                        self.members.figures(id, figures, &[]);
                    }
                    ToKeeper::Keep { memory } => self.members.kept(id, memory, None),
                    ToKeeper::Turn(turn) => drop(self.turns.insert(id, turn)),
                    _ => {}
                }
            }
        }
    }

    fn goes(&self, id: u64) -> Goes {
        self.turns[&id].goes
    }

    /// Windows that a client kept and missed, by the status.
    fn windows(&self, id: u64) -> (u64, u64) {
        let status = self.members.status(1);
        let latency = status.clients[id as usize].latency.clone();
        let latency = latency.expect("a bound");
        (latency.windows_kept, latency.windows_missed)
    }
}

const NVM_AND_SSD: [&str; 2] = ["nvm:/a,size=64M", "file:/b,size=64M"];

fn bounded(bound: &'static str, at_device: u64) -> Fake {
    Fake {
        bound: Some(bound),
        micros: (at_device, 10),
        answers: true,
    }
}

#[test]
fn clients_that_the_device_cannot_serve_go_to_the_buffer_and_the_others_stay() {
    let clients = [
        bounded("p99=1000us", 400),
        bounded("p99=500us", 400),
        bounded("p99=300us", 400),
        BUSY,
    ];
    let mut world = World::new(&NVM_AND_SSD, &clients);
    world.run(6);
    let goes: Vec<Goes> = (0..4).map(|id| world.goes(id)).collect();
    let buffer_for_the_last = [
        Goes::ToDevice,
        Goes::ToDevice,
        Goes::ToBuffer,
        Goes::AsPlaced,
    ];
    assert_eq!(goes, buffer_for_the_last);
    for id in 0..2 {
        let (kept, missed) = world.windows(id);
        assert!(kept >= 6 && missed == 0, "{id}: {kept}, {missed}");
    }
    let (kept, missed) = world.windows(2);
    assert!(kept >= 4 && missed <= 2, "{kept}, {missed}");
    // The three that use the device share its queue.
    let batches: Vec<u32> = [0, 1, 3].map(|id| world.turns[&id].batch).to_vec();
    assert!(batches.iter().all(|batch| *batch == batches[0]));
    assert!(batches[0] * 3 <= 1024, "{batches:?}");
}

/// With nothing above the device, all that helps is a short queue: of the client without a bound,
/// too.
#[test]
fn a_client_without_a_bound_writes_less_at_a_time_beside_one_that_misses_its_bound() {
    let clients = [bounded("p99=300us", 2000), BUSY];
    let mut world = World::new(&["file:/b,size=64M"], &clients);
    world.run(20);
    assert_eq!(
        world.turns[&1],
        Turn {
            batch: 1,
            goes: Goes::AsPlaced,
        }
    );
    // Alone again, it is told nothing: what it heard last holds for some seconds.
    world.members.gone(0);
    world.turns.clear();
    world.run(4);
    assert!(world.turns.is_empty());
}

#[test]
fn a_bound_that_changes_begins_anew_and_a_client_that_is_silent_holds_no_window() {
    let clients = [bounded("p99=500us", 400), bounded("p99=300us", 100), BUSY];
    let mut world = World::new(&NVM_AND_SSD, &clients);
    world.run(3);
    world.fakes.entry(1).and_modify(|fake| fake.answers = false);
    let before = world.windows(0).0;
    world.run(4);
    assert!(before >= 2 && world.windows(0).0 >= before + 3);
    let mut other = world.fakes[&0];
    other.bound = Some("p99=300us");
    world.fakes.insert(0, other);
    world.run(4);
    assert_eq!(world.goes(0), Goes::ToBuffer);
    let (kept, missed) = world.windows(0);
    assert!((1..=2).contains(&missed) && kept >= 1, "{kept}, {missed}");
    other.bound = None;
    world.fakes.insert(0, other);
    world.run(4);
    assert!(world.members.status(1).clients[0].latency.is_none());
}

/// A manager that is late has told nothing: its bound and what was decided for it stay.
#[test]
fn a_manager_that_does_not_answer_keeps_its_place() {
    let mut bounds = Bounds::new(&[Budget {
        spec: "file:/b,size=64M".parse().expect("a tier"),
        sizes: None,
        profile: None,
    }])
    .expect("a device");
    let bound = Bound("p99=300us".parse().expect("a bound"));
    bounds.note(7, Some(&none(bound)));
    bounds.heard(7);
    assert!(bounds.has(7) && bounds.are_any());
    // Places are used again.
    bounds.note(8, Some(&none(bound)));
    bounds.leave(7);
    bounds.note(9, Some(&none(bound)));
    assert_eq!(bounds.places.values().copied().collect::<Vec<_>>(), [1, 0]);
    let lies = PageIns {
        over: u64::MAX,
        ..none(bound)
    };
    bounds.note(9, Some(&lies));
    assert!(bounds.begins(Duration::from_secs(1), true));
    let nothing = BTreeMap::new;
    assert!(!bounds.ends(Duration::from_secs(1), &[], nothing));
    bounds.leave(8);
    bounds.heard(9);
    assert!(bounds.ends(Duration::from_secs(1), &[], nothing));
}
