//! Clients that come, obey slowly, refuse, lie and go, beside an oracle of the memory in use.

use undercroft_proto::grant::CurveFigures;
use undercroft_seeded::Random;

use super::*;
use crate::config::Divide;
use crate::member::FILLS_MAX;

const MIB: u64 = 1 << 20;

fn class(weight: u32, least: u64, most: u64) -> Class {
    Class {
        weight,
        memory_min: Bytes(least * MIB),
        memory_max: Bytes(most * MIB),
        latency: None,
        demand: None,
        cpus: None,
        realtime: true,
        moves: None,
        policy: None,
    }
}

fn config(memory: u64) -> Config {
    let classes = [
        (DEFAULT_CLASS, class(1, 4, memory)),
        ("web", class(3, 32, memory)),
        ("small", class(1, 4, 24)),
    ];
    let classes = classes.map(|(name, class)| (name.to_owned(), class));
    Config {
        memory: Bytes(memory * MIB),
        divide: Divide::Auto,
        tiers: Vec::new(),
        classes: classes.into_iter().collect(),
    }
}

fn hello(class: &str) -> Hello {
    Hello {
        version: VERSION,
        class: class.to_owned(),
        command: "program".to_owned(),
        memory_max: None,
        claim: None,
    }
}

/// A run, as far as the daemon sees one.
#[derive(Default)]
struct Fake {
    limit: Option<u64>,
    dram: u64,
    /// The faults that it would have with no memory, in seconds a second.
    appetite: f64,
    inbox: VecDeque<ToKeeper>,
    refusal: Option<Refusal>,
    is_over: bool,
}

impl Fake {
    /// Memory that it uses and may use.
    fn uses(&self) -> u64 {
        self.limit.unwrap_or(0).max(self.dram)
    }

    fn figures(&self) -> Figures {
        let points = (1..=16).map(|at| {
            let limit = at * 16 * MIB;
            (limit, self.appetite * (1.0 - at as f64 / 16.0))
        });
        Figures {
            dram: self.dram,
            limit: self.limit,
            stall_seconds: 0.0,
            swap_ins: 0,
            page_ins: None,
            curve: (self.appetite > 0.0).then(|| CurveFigures {
                seconds: 10.0,
                points: points.collect(),
            }),
        }
    }
}

struct World {
    members: Members,
    fakes: BTreeMap<u64, Fake>,
    next: u64,
    now: Duration,
}

impl World {
    fn new(memory: u64) -> World {
        World {
            members: Members::new(config(memory), BTreeSet::new()),
            fakes: BTreeMap::new(),
            next: 0,
            now: Duration::ZERO,
        }
    }

    fn join(&mut self, hello: Hello) -> u64 {
        let id = self.next;
        self.next += 1;
        self.fakes.insert(id, Fake::default());
        self.members.hello(id, id as u32, hello);
        id
    }

    fn leave(&mut self, id: u64) {
        self.fakes.remove(&id);
        self.members.gone(id);
    }

    fn tick(&mut self, by: u64) {
        self.now += Duration::from_millis(by);
        self.members.tick(self.now);
        for (id, said) in self.members.said() {
            let Some(fake) = self.fakes.get_mut(&id) else {
                continue;
            };
            match said {
                Said::Message(message) => fake.inbox.push_back(message),
                Said::Last(ToKeeper::Refused(refusal)) => fake.refusal = Some(refusal),
                Said::Last(other) => panic!("{other:?}"),
                Said::End(why) => {
                    println!("{id}: {why}");
                    fake.is_over = true;
                }
            }
        }
        self.fakes.retain(|_, fake| !fake.is_over);
    }

    /// Client `id` does what it was told first.
    ///
    /// * `obeys`: or refuses.
    fn act(&mut self, id: u64, obeys: bool) {
        let Some(fake) = self.fakes.get_mut(&id) else {
            return;
        };
        match fake.inbox.pop_front() {
            Some(ToKeeper::Granted(grant)) => {
                assert!(grant.memory <= grant.memory_most);
                fake.limit = Some(grant.memory);
            }
            Some(ToKeeper::Tell) => self.members.figures(id, fake.figures(), &[]),
            Some(ToKeeper::Keep { memory }) if obeys => {
                fake.limit = Some(memory);
                self.members.kept(id, memory, None);
            }
            Some(ToKeeper::Keep { memory }) => self.members.kept(id, memory, Some("no")),
            Some(other) => panic!("{other:?}"),
            None => {
                // Pages leave, or are touched.
                let limit = fake.limit.unwrap_or(0);
                fake.dram = if fake.dram > limit {
                    limit.max(fake.dram.saturating_sub(5 * MIB))
                } else {
                    limit.min(fake.dram + 3 * MIB)
                };
            }
        }
    }

    fn used(&self) -> u64 {
        self.fakes.values().map(Fake::uses).sum()
    }

    /// All clients obey at once, for this long.
    fn calm(&mut self, seconds: u64) {
        for _ in 0..seconds * 50 {
            self.tick(20);
            let ids: Vec<u64> = self.fakes.keys().copied().collect();
            ids.iter().for_each(|id| self.act(*id, true));
            ids.iter().for_each(|id| self.act(*id, true));
            assert!(self.used() <= self.members.config.memory.0);
        }
    }

    fn limit(&self, id: u64) -> u64 {
        self.fakes[&id].limit.expect("it was admitted") / MIB
    }
}

#[test]
fn memory_is_never_given_twice_whatever_clients_do() {
    let mut random = Random::new(4);
    let (mut admitted, mut refused) = (0, 0);
    for _ in 0..60 {
        let mut world = World::new(64 + random.below(400));
        for _ in 0..600 {
            match random.below(20) {
                0 => {
                    let name = ["default", "web", "small"][random.index(3)];
                    let mut hello = hello(name);
                    let cap = (random.below(3) == 0).then(|| random.below(100) * MIB);
                    hello.memory_max = cap;
                    let id = world.join(hello);
                    if let Some(fake) = world.fakes.get_mut(&id) {
                        fake.appetite = [0.0, 0.1, 0.9][random.index(3)];
                    }
                }
                1 if world.fakes.len() > 2 => {
                    let ids: Vec<u64> = world.fakes.keys().copied().collect();
                    world.leave(ids[random.index(ids.len())]);
                }
                2..5 => {
                    let longest = [200, 200, 200, 4000][random.index(4)];
                    world.tick(1 + random.below(longest));
                }
                _ if !world.fakes.is_empty() => {
                    let ids: Vec<u64> = world.fakes.keys().copied().collect();
                    world.act(ids[random.index(ids.len())], random.below(8) != 0);
                }
                _ => {}
            }
            let memory = world.members.config.memory.0;
            assert!(world.used() <= memory, "{} of {memory}", world.used());
            let held = world.members.held();
            // A grant that was not taken yet is not used yet.
            assert!(held >= world.used() && held <= memory, "{held} of {memory}");
        }
        world.calm(20);
        assert_eq!(world.members.waiting.len(), 0, "each has an answer");
        admitted += world.fakes.values().filter(|it| it.limit.is_some()).count();
        refused += world
            .fakes
            .values()
            .filter(|it| it.refusal.is_some())
            .count();
    }
    assert!(admitted > 50 && refused > 20, "{admitted}, {refused}");
}

#[test]
fn a_new_client_has_its_share_within_a_second_and_protection_holds() {
    let mut world = World::new(256);
    let first = world.join(hello("default"));
    world.calm(5);
    assert_eq!(world.limit(first), 256, "all of it is its own");
    let web = world.join(hello("web"));
    world.calm(1);
    assert!(world.fakes[&web].limit.is_some(), "a second is enough");
    world.calm(5);
    let (a, b) = (world.limit(first), world.limit(web));
    // 4 and 32 are protected, and of the 220 that are left the second gets three parts of four.
    assert_eq!((a, b), (59, 197));
    // Seven more protect 32 MiB each: with the first one's 4 MiB that is all but 28.
    let more: Vec<u64> = (0..7).map(|_| world.join(hello("web"))).collect();
    world.calm(60);
    let refused: Vec<&Fake> = more.iter().map(|id| &world.fakes[id]).collect();
    let refused: Vec<_> = refused
        .iter()
        .filter_map(|fake| fake.refusal.as_ref())
        .collect();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].could, Some((256 - 7 * 32 - 4) * MIB));
    assert!(
        refused[0].why.contains("protects 32.0 MiB"),
        "{}",
        refused[0].why
    );
    world.leave(web);
    for id in more {
        let is_refused = world.fakes[&id].refusal.is_some();
        assert!(is_refused || world.limit(id) >= 32);
        world.leave(id);
    }
    world.calm(5);
    assert_eq!(world.limit(first), 256, "what others leave comes back");
}

/// A client is a little above its limit at the moment when another goes. That little is given to it
/// later, though it is no step of its own.
#[test]
fn a_client_has_all_that_another_leaves_also_in_two_parts() {
    let mut world = World::new(256);
    let first = world.join(hello("default"));
    world.calm(5);
    let web = world.join(hello("web"));
    while world.limit(first) == 256 {
        world.tick(20);
        world.act(first, true);
    }
    for _ in 0..100 {
        let fake = world.fakes.get_mut(&first).expect("a client");
        fake.dram = fake.limit.expect("a limit") + 300 * 1024;
        world.tick(20);
        world.act(first, true);
        world.act(web, true);
    }
    assert!(world.fakes[&web].limit.is_some(), "it was admitted");
    world.leave(web);
    world.calm(5);
    assert_eq!(world.fakes[&first].limit, Some(256 * MIB));
}

/// The others hold all, and refuse at first to have less. That is no reason to refuse a new one.
#[test]
fn a_new_client_waits_for_others_that_refuse_to_have_less() {
    let mut world = World::new(64);
    let others = [(); 3].map(|()| world.join(hello("default")));
    world.calm(20);
    let all: u64 = others.iter().map(|id| world.limit(*id)).sum();
    assert!(all > 64 - 4, "{all}");
    let new = world.join(hello("default"));
    for obeys in [false, true] {
        for _ in 0..5 * 50 {
            world.tick(20);
            others.iter().for_each(|id| world.act(*id, obeys));
            world.act(new, true);
            assert!(world.used() <= world.members.config.memory.0);
        }
        assert!(world.fakes[&new].refusal.is_none());
    }
    world.calm(8);
    assert!(world.limit(new) >= 12, "{}", world.limit(new));
}

/// A client on a slow disk takes 40 s to give what it was asked for: a new one waits for it. One
/// that never answers is waited for a minute, and no longer.
#[test]
fn a_new_client_waits_for_others_that_are_slow_and_no_longer_than_a_minute() {
    for (silent, has_answer) in [(40, true), (62, false)] {
        let mut world = World::new(64);
        let first = world.join(hello("default"));
        world.calm(20);
        let new = world.join(hello("default"));
        for _ in 0..silent * 50 {
            world.tick(20);
            world.act(new, true);
        }
        assert_eq!(
            world.fakes[&new].refusal.is_none(),
            has_answer,
            "{silent} s"
        );
        world.calm(10);
        assert_eq!(world.fakes[&new].limit.is_some(), has_answer, "{silent} s");
        assert!(world.limit(first) > 0);
    }
}

#[test]
fn memory_moves_to_the_client_that_waits_less_with_it() {
    let mut world = World::new(256);
    let ids = [world.join(hello("default")), world.join(hello("default"))];
    world.calm(3);
    for (id, appetite) in ids.iter().zip([0.05, 0.9]) {
        world.fakes.get_mut(id).expect("a client").appetite = appetite;
    }
    world.calm(120);
    let limits = ids.map(|id| world.limit(id));
    assert!(limits[1] > 200 && limits[0] >= 4, "{limits:?}");
    let moves = world.members.moves;
    world.calm(60);
    assert_eq!(world.members.moves, moves, "and then it rests");
}

#[test]
fn clients_of_an_earlier_daemon_keep_what_they_have_before_others_come() {
    let expected = BTreeSet::from([0, 1]);
    let mut world = World::new(100);
    world.members = Members::new(config(100), expected);
    let claim = |memory: u64| Hello {
        claim: Some(Claim {
            memory: memory * MIB,
            storage: Vec::new(),
            devices: Vec::new(),
        }),
        ..hello("no such class")
    };
    let first = world.join(claim(70));
    let new = world.join(hello("default"));
    world.tick(20);
    world.act(first, true);
    assert_eq!(world.limit(first), 70);
    for _ in 0..20 {
        world.tick(20);
    }
    assert!(world.fakes[&new].inbox.is_empty(), "one has not come back");
    let second = world.join(claim(60));
    world.tick(20);
    world.act(second, true);
    // 130 of 100: both give, and then the new one is admitted.
    for _ in 0..500 {
        world.tick(20);
        for id in [first, second, new] {
            world.act(id, true);
            world.act(id, true);
        }
    }
    assert!(world.used() <= 100 * MIB, "{}", world.used());
    assert!(world.limit(new) >= 20);
}

#[test]
fn memory_of_a_client_that_has_not_come_back_is_not_given_to_another() {
    let mut world = World::new(100);
    world.members = Members::new(config(100), BTreeSet::from([0, 1]));
    let first = world.join(Hello {
        claim: Some(Claim {
            memory: 30 * MIB,
            storage: Vec::new(),
            devices: Vec::new(),
        }),
        ..hello("default")
    });
    for _ in 0..20 {
        world.tick(20);
        world.act(first, true);
    }
    assert_eq!(world.limit(first), 30);
}

/// The earlier daemon had lowered its limit, and it has not come down yet.
#[test]
fn what_a_claiming_client_uses_is_not_given_before_its_figures_are_known() {
    let mut world = World::new(100);
    world.members = Members::new(config(100), BTreeSet::from([0]));
    let claim = Hello {
        claim: Some(Claim {
            memory: 10 * MIB,
            storage: Vec::new(),
            devices: Vec::new(),
        }),
        ..hello("default")
    };
    let first = world.join(claim);
    let new = world.join(hello("default"));
    for _ in 0..5 {
        world.tick(20);
        assert_eq!(world.members.status(1).free_bytes, 0);
        assert!(world.fakes[&new].inbox.is_empty());
    }
    let uses = Figures {
        dram: 60 * MIB,
        limit: Some(10 * MIB),
        ..Figures::default()
    };
    world.members.figures(first, uses, &[]);
    world.tick(20);
    assert_eq!(world.members.status(1).free_bytes, 40 * MIB);
}

#[test]
fn what_a_client_may_not_say_ends_it_and_harms_none() {
    let mut world = World::new(100);
    let good = world.join(hello("default"));
    world.calm(1);
    type Lie = fn(&mut Members, u64);
    let lies: [Lie; 5] = [
        |members, id| members.figures(id, Figures::default(), &[]),
        |members, id| members.kept(id, 1 << 40, None),
        |members, id| members.hello(id, 7, hello("default")),
        |members, id| {
            let mut long = hello("default");
            long.command = "x".repeat(COMMAND_BYTES_MAX + 1);
            members.gone(id);
            members.hello(id, 7, long);
        },
        |members, id| {
            let mut old = hello("default");
            old.version = 99;
            members.gone(id);
            members.hello(id, 7, old);
        },
    ];
    for (at, lie) in lies.into_iter().enumerate() {
        let id = world.join(hello("default"));
        lie(&mut world.members, id);
        world.tick(20);
        let ended = world
            .fakes
            .get(&id)
            .is_none_or(|fake| fake.refusal.is_some());
        assert!(ended, "lie {at}");
        world.leave(id);
    }
    let unknown = world.join(hello("wbe"));
    world.tick(20);
    let refusal = world.fakes[&unknown].refusal.as_ref().expect("a refusal");
    assert!(
        refusal.why.contains("default, small, web"),
        "{}",
        refusal.why
    );
    world.leave(unknown);
    // Figures that cannot be: memory stays with those that have it.
    let liar = world.join(hello("default"));
    world.calm(2);
    world.members.members.get_mut(&liar).expect("a client").told = Some(Duration::ZERO);
    let curve = CurveFigures {
        seconds: f64::NAN,
        points: vec![(0, f64::NAN); 1000],
    };
    let figures = Figures {
        dram: u64::MAX,
        limit: Some(u64::MAX),
        stall_seconds: f64::INFINITY,
        swap_ins: 1,
        page_ins: None,
        curve: Some(curve),
    };
    world.members.figures(liar, figures, &[]);
    world.tick(20);
    assert!(serde_json::to_string(&world.members.status(1)).is_ok());
    assert!(world.fakes[&good].limit.is_some());
}

/// An emulated SSD alone: 8,000 page-ins a second beside as many page-outs are all that a bound of
/// 300 us leaves.
#[test]
fn a_bound_that_the_load_of_others_breaks_is_refused_with_the_figure_that_can_be_kept() {
    let mut config = config(1024);
    config.tiers = vec![crate::config::Budget {
        spec: "file:/var/tmp,size=1G,shape=sata-ssd"
            .parse()
            .expect("a tier"),
        sizes: None,
        profile: None,
    }];
    let bounded = |bound: &str, demand: u32| Class {
        latency: Some(bound.parse().expect("a bound")),
        demand: Some(demand),
        ..class(1, 4, 64)
    };
    for (name, class) in [
        ("web", bounded("p99=300us", 2_000)),
        ("fast", bounded("p99=50us", 100)),
        (
            "hog",
            Class {
                demand: Some(50_000),
                ..class(1, 4, 64)
            },
        ),
    ] {
        config.classes.insert(name.to_owned(), class);
    }
    let mut members = Members::new(config, BTreeSet::new());
    let refusal = |members: &mut Members, id: u64, class: &str| {
        members.hello(id, 1, hello(class));
        members.said().into_iter().find_map(|(_, said)| match said {
            Said::Last(ToKeeper::Refused(refusal)) => Some(refusal.why),
            _ => None,
        })
    };
    let fast = refusal(&mut members, 1, "fast").expect("no SSD is so fast");
    assert!(fast.contains("p99=50us of class fast"), "{fast}");
    assert!(fast.contains("could be kept"), "{fast}");
    assert_eq!(
        refusal(&mut members, 2, "hog"),
        None,
        "nothing is promised yet"
    );
    let web = refusal(&mut members, 3, "web").expect("the hog takes it all");
    assert!(web.contains("beside 1 run"), "{web}");
    members.gone(2);
    let admitted = (4..20).take_while(|id| refusal(&mut members, *id, "web").is_none());
    let admitted = admitted.count();
    assert!((2..=5).contains(&admitted), "{admitted}");
    let hog = refusal(&mut members, 30, "hog").expect("bounds are promised");
    assert!(hog.contains("bounds of others"), "{hog}");
    assert_eq!(
        refusal(&mut members, 31, "small"),
        None,
        "it declares no load"
    );
}

/// A real file: nothing is known of it, or that one read at a time takes a millisecond.
#[test]
fn a_device_that_was_measured_is_weighed() {
    let both = r#"{"p50": 0.001, "p99": 0.002}"#;
    let slow = format!(
        r#"{{"name": "file:/var/tmp", "kind": "file", "emulated": false, "capacity_bytes": 1,
            "read_seconds": {both}, "write_seconds": {both}, "free_seconds": {both},
            "read_bytes_per_second": 1.0, "write_bytes_per_second": 1.0, "channels": 1,
            "measured_at": 1}}"#
    );
    let slow = serde_json::from_str(&slow).expect("a profile");
    for (profile, is_refused) in [(None, false), (Some(slow), true)] {
        let mut config = config(1024);
        config.tiers = vec![crate::config::Budget {
            spec: "file:/var/tmp,size=1G".parse().expect("a tier"),
            sizes: None,
            profile,
        }];
        let bounded = Class {
            latency: Some("p99=300us".parse().expect("a bound")),
            ..class(1, 4, 64)
        };
        config.classes.insert("fast".to_owned(), bounded);
        let mut members = Members::new(config, BTreeSet::new());
        members.hello(1, 1, hello("fast"));
        let refused = members.said().into_iter().find_map(|(_, said)| match said {
            Said::Last(ToKeeper::Refused(refusal)) => Some(refusal.why),
            _ => None,
        });
        assert_eq!(refused.is_some(), is_refused, "{refused:?}");
    }
}

/// A manager that is busy, or dead, has told nothing. What it counted before is no rate.
#[test]
fn a_manager_that_did_not_answer_says_nothing_of_its_load() {
    let first = |claimed: bool| {
        let mut members = Members::new(config(1024), BTreeSet::new());
        members.hello(1, 1, hello("small"));
        members.tick(Duration::ZERO);
        let member = members.members.get_mut(&1).expect("it is admitted");
        if claimed {
            (member.counted, member.stalled) = (None, None);
        }
        members
    };
    let known = |swap_ins: u64, stall_seconds: f64| Figures {
        dram: MIB,
        swap_ins,
        stall_seconds,
        ..Figures::default()
    };
    let unknown = Figures {
        dram: UNKNOWN,
        ..Figures::default()
    };
    for claimed in [false, true] {
        let mut members = first(claimed);
        let member = members.members.get_mut(&1).expect("it is here");
        let second = Duration::from_secs;
        if claimed {
            // It has run for long under another daemon.
            member.measure(&known(5_000_000, 900.0), second(1));
            assert_eq!((member.page_ins, member.waits), (None, false));
        } else {
            member.measure(&known(5_000_000, 0.0), second(1));
            assert_eq!(member.page_ins, Some(5_000_000.0), "its own first second");
        }
        member.heard = second(1);
        member.measure(&unknown, second(2));
        member.heard = second(2);
        member.measure(&known(5_000_600, 900.0), second(3));
        assert_eq!(member.page_ins, Some(300.0), "in two seconds");
    }
    let mut members = first(false);
    let member = members.members.get_mut(&1).expect("it is here");
    member.measure(&known(0, 0.0), Duration::from_secs(2));
    assert_eq!(member.page_ins, None, "it may still fill its memory");
    member.measure(&known(0, 0.0), FILLS_MAX);
    assert_eq!(member.page_ins, Some(0.0));
}
