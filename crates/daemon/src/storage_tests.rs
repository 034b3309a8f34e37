//! Runs that grow, shrink, obey late or never, lie, die and come back to another daemon, beside an
//! oracle of the storage that they may take.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use undercroft_base::Bytes;
use undercroft_proto::grant::{
    Claim, Figures, Hello, SLAB_BYTES, StorageClaim, StorageFigures, ToKeeper, VERSION,
};
use undercroft_seeded::Random;

use crate::config::{Budget, Class, Config, DEFAULT_CLASS, Divide};
use crate::members::{Members, Said};

/// In slabs of 1 MiB.
const WHOLE: u64 = 256;
const GRANT: u64 = 32;

fn config(whole: u64) -> Config {
    let class = |weight| Class {
        weight,
        memory_min: Bytes(4 << 20),
        memory_max: Bytes(64 << 20),
        latency: None,
        demand: None,
        cpus: None,
        realtime: true,
        moves: None,
        policy: None,
    };
    let tier = |spec: String, sizes| Budget {
        spec: spec.parse().expect("a tier"),
        sizes,
        profile: None,
    };
    let sizes = |whole: u64, each: u64| Some((Bytes(whole * SLAB_BYTES), Bytes(each * SLAB_BYTES)));
    Config {
        memory: Bytes(2 << 30),
        divide: Divide::Weights,
        tiers: vec![
            tier("ram".to_owned(), None),
            tier("nvm:/n,size=5M".to_owned(), sizes(100, 5)),
            tier(format!("file:/f,size={whole}M"), sizes(whole, GRANT)),
        ],
        classes: [(DEFAULT_CLASS, class(1)), ("web", class(3))]
            .map(|(name, class)| (name.to_owned(), class))
            .into(),
    }
}

/// A run with one file that grows, as far as the daemon sees one. Sizes are in slabs.
#[derive(Default)]
struct Growing {
    pid: u32,
    class: &'static str,
    tiers: Vec<String>,
    memory: u64,
    /// 0: it was not admitted.
    quota: u64,
    held: u64,
    used: u64,
    wants: u64,
    /// The run says so when this much is in use.
    mark: u64,
    /// Its fixed tier was removed.
    has_removed: bool,
    inbox: VecDeque<ToKeeper>,
    refused: Option<String>,
    ended: Option<&'static str>,
}

impl Growing {
    fn figures(&self) -> Vec<StorageFigures> {
        let bytes = |slabs: u64| slabs * SLAB_BYTES;
        let fixed = if self.has_removed { 0 } else { bytes(5) };
        vec![
            StorageFigures {
                quota: fixed,
                held: fixed,
                used: fixed,
            },
            StorageFigures {
                quota: bytes(self.quota),
                held: bytes(self.held),
                used: bytes(self.used),
            },
        ]
    }

    /// Half-way between what is in use and the quota.
    fn set_mark(&mut self) {
        self.mark = self.used + (self.quota.saturating_sub(self.used) / 2).max(1);
    }

    /// Room that it may take without asking.
    fn may(&self) -> u64 {
        self.quota.max(self.held)
    }

    /// Pages come and go, `by` slabs at most.
    fn lives(&mut self, by: u64) {
        if self.used < self.wants {
            self.used = (self.used + by)
                .min(self.wants)
                .min(self.quota.max(self.used));
        } else {
            self.used = self.used.saturating_sub(by).max(self.wants);
        }
        // Slabs that are half empty stay, unless they are wanted back.
        let least = if self.held > self.quota { 0 } else { by };
        let held = self.held.saturating_sub(by).max(self.used);
        self.held = held.max(self.used + least).min(self.may());
    }

    fn hello(&self, claims: bool) -> Hello {
        let claim = |(tier, figures): (&String, StorageFigures)| StorageClaim {
            tier: tier.clone(),
            figures,
        };
        Hello {
            version: VERSION,
            class: self.class.to_owned(),
            command: "program".to_owned(),
            memory_max: None,
            claim: claims.then(|| Claim {
                memory: self.memory,
                storage: self.tiers[1..]
                    .iter()
                    .zip(self.figures())
                    .map(claim)
                    .collect(),
                devices: Vec::new(),
            }),
        }
    }
}

struct World {
    members: Members,
    whole: u64,
    runs: BTreeMap<u64, Growing>,
    next: u64,
    now: Duration,
    /// Runs that have to come back to a new daemon.
    away: Vec<Growing>,
}

impl World {
    fn new(whole: u64) -> World {
        World {
            members: Members::new(config(whole), BTreeSet::new()),
            whole,
            runs: BTreeMap::new(),
            next: 1,
            now: Duration::ZERO,
            away: Vec::new(),
        }
    }

    fn join(&mut self, class: &'static str, wants: u64) -> u64 {
        let run = Growing {
            class,
            wants,
            ..Growing::default()
        };
        self.connect(run)
    }

    fn connect(&mut self, mut run: Growing) -> u64 {
        let id = self.next;
        self.next += 1;
        if run.pid == 0 {
            run.pid = id as u32;
        }
        self.members.hello(id, run.pid, run.hello(run.quota > 0));
        self.runs.insert(id, run);
        id
    }

    fn tick(&mut self, by: u64) {
        self.now += Duration::from_millis(by);
        self.members.tick(self.now);
        for (id, said) in self.members.said() {
            let Some(run) = self.runs.get_mut(&id) else {
                continue;
            };
            match said {
                Said::Message(message) => run.inbox.push_back(message),
                Said::Last(ToKeeper::Refused(refusal)) => run.refused = Some(refusal.why),
                Said::Last(other) => panic!("{other:?}"),
                Said::End(why) => run.ended = Some(why),
            }
        }
        self.check();
    }

    /// Checks that what all may take, and what the daemon counts, is never more than there is.
    fn check(&self) {
        let alive = self.runs.values().filter(|run| run.ended.is_none());
        let may: u64 = alive.chain(&self.away).map(Growing::may).sum();
        assert!(may <= self.whole, "{may} of {}", self.whole);
        let status = self.members.status(1);
        let file = status
            .tiers
            .iter()
            .find(|tier| tier.spec.starts_with("file"));
        let given = file.map_or(0, |tier| tier.granted_bytes / SLAB_BYTES);
        assert!(given <= self.whole, "{given} of {} are given", self.whole);
        if self.away.is_empty() {
            assert!(given >= may, "{given} are given, and {may} may be taken");
        }
    }

    /// Pages of a run come and go.
    fn live(&mut self, id: u64, by: u64) {
        let run = self.run(id);
        run.lives(by);
        if run.quota > 0 && run.ended.is_none() && run.used >= run.mark {
            run.set_mark();
            let figures = run.figures();
            self.members.fills(id, &figures);
        }
    }

    /// A run does what it was told first. `answers`: or its answer is lost.
    fn act(&mut self, id: u64, answers: bool) {
        let Some(run) = self.runs.get_mut(&id) else {
            return;
        };
        match run.inbox.pop_front() {
            Some(ToKeeper::Granted(grant)) => {
                assert_eq!(grant.storage.len(), 2, "of tiers with a budget");
                run.memory = grant.memory;
                if run.quota == 0 {
                    assert_eq!(grant.storage[0], 5 * SLAB_BYTES);
                    assert!(grant.storage[1] >= GRANT * SLAB_BYTES, "{grant:?}");
                    (run.quota, run.tiers) = (grant.storage[1] / SLAB_BYTES, grant.tiers);
                }
            }
            Some(ToKeeper::Tell) if answers => {
                let client = Figures {
                    limit: Some(run.memory),
                    ..Figures::default()
                };
                self.members.figures(id, client, &run.figures());
            }
            Some(ToKeeper::Quotas(quotas)) => {
                let granted = GRANT.min(run.quota);
                run.quota = quotas[1] / SLAB_BYTES;
                run.set_mark();
                assert!(
                    run.quota >= granted,
                    "{quotas:?}: what was granted is protected"
                );
                if answers {
                    self.members.kept_quotas(id, &run.figures());
                }
            }
            Some(ToKeeper::Keep { memory }) if answers => {
                run.memory = memory;
                self.members.kept(id, memory, None);
            }
            Some(_) | None => {}
        }
        self.check();
    }

    fn calm(&mut self, seconds: u64) {
        for _ in 0..seconds * 50 {
            self.tick(20);
            for id in self.ids() {
                (0..4).for_each(|_| self.act(id, true));
                self.live(id, 1);
            }
            self.check();
        }
    }

    fn ids(&self) -> Vec<u64> {
        self.runs.keys().copied().collect()
    }

    fn run(&mut self, id: u64) -> &mut Growing {
        self.runs.get_mut(&id).expect("a run")
    }

    fn leave(&mut self, id: u64) {
        self.runs.remove(&id);
        self.members.gone(id);
    }

    /// The daemon dies, and another one begins. What was not done yet is never done.
    fn restart(&mut self, config: Config) {
        let runs = std::mem::take(&mut self.runs);
        let expected = runs.values().filter(|run| run.quota > 0);
        let expected = expected.chain(&self.away).map(|run| run.pid).collect();
        self.members = Members::new(config, expected);
        self.now = Duration::ZERO;
        for (_, mut run) in runs {
            run.inbox.clear();
            if run.quota > 0 && run.ended.is_none() {
                self.away.push(run);
            }
        }
    }

    /// A run that is away comes back.
    fn come_back(&mut self, at: usize) {
        let run = self.away.swap_remove(at);
        self.connect(run);
    }
}

#[test]
fn storage_is_never_given_twice_whatever_runs_do() {
    let (mut admitted, mut refused, mut grown, mut lowered) = (0, 0, 0, 0);
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let mut world = World::new(GRANT * (2 + random.below(12)));
        for _ in 0..900 {
            let ids = world.ids();
            let any = (!ids.is_empty()).then(|| ids[random.index(ids.len())]);
            match (random.below(40), any) {
                (0 | 1, _) if world.away.is_empty() => {
                    let class = ["default", "web"][random.index(2)];
                    world.join(class, random.below(world.whole));
                }
                (2, Some(id)) if ids.len() > 3 => world.leave(id),
                (3, Some(id)) => world.run(id).wants = random.below(300),
                (4, _) if random.below(6) == 0 => {
                    for id in ids {
                        // Some have done what they were told, and their answer is lost.
                        (0..random.below(3)).for_each(|_| world.act(id, false));
                    }
                    world.restart(config(world.whole));
                }
                (5..9, _) if !world.away.is_empty() => {
                    let at = random.index(world.away.len());
                    world.come_back(at);
                }
                (9..18, _) => {
                    let longest = [100, 100, 2000][random.index(3)];
                    let longest = if world.away.is_empty() { longest } else { 20 };
                    world.tick(1 + random.below(longest));
                }
                (18..26, Some(id)) => world.live(id, 1 + random.below(12)),
                (_, Some(id)) => world.act(id, random.below(30) != 0),
                (_, None) => {}
            }
            for run in world.runs.values() {
                assert_eq!(run.ended, None);
                grown += u64::from(run.quota > GRANT);
                lowered += u64::from(run.held > run.quota);
            }
        }
        while !world.away.is_empty() {
            world.come_back(0);
        }
        // A minute is the longest wait.
        let answered = |run: &Growing| run.quota > 0 || run.refused.is_some();
        for _ in 0..4 {
            world.calm(20);
            if world.runs.values().all(answered) {
                break;
            }
        }
        let runs = || world.runs.values();
        assert!(runs().all(answered), "each has an answer");
        admitted += runs().filter(|run| run.quota > 0).count();
        refused += runs().filter(|run| run.refused.is_some()).count();
    }
    println!("{admitted} admitted, {refused} refused, {grown} looks grown, {lowered} lowered");
    assert!(admitted > 100 && refused > 50 && grown > 1000 && lowered > 500);
}

#[test]
fn a_run_that_needs_more_gets_what_others_do_not_use_and_gives_it_back() {
    let mut world = World::new(WHOLE);
    let (first, idle) = (world.join("default", 10), world.join("default", 0));
    world.calm(2);
    assert!(world.run(first).quota >= 100 && world.run(idle).quota >= 100);
    world.run(first).wants = 220;
    for _ in 0..1000 {
        world.calm(1);
        let run = world.run(first);
        if run.used == 220 {
            break;
        }
        assert!(run.used < run.quota, "{} are full", run.quota);
    }
    assert_eq!(world.run(first).used, 220);
    // 36 slabs are left, and a new run needs 32.
    let new = world.join("default", 0);
    world.calm(2);
    assert_eq!(
        world.run(new).quota,
        0,
        "the first one has 220, and the idle one is granted 32"
    );
    world.calm(15);
    let why = world.run(new).refused.clone().expect("a refusal");
    assert!(why.contains("use what they were lent"), "{why}");
    world.leave(new);
    world.run(first).wants = 40;
    world.calm(20);
    let new = world.join("web", 0);
    world.calm(1);
    assert!(
        world.run(new).quota >= GRANT,
        "what was lent and is free comes back"
    );
    // None needs more than it has: quotas rest.
    world.calm(10);
    let quotas = |world: &World| world.runs.values().map(|run| run.quota).collect::<Vec<_>>();
    let before = quotas(&world);
    world.calm(30);
    assert_eq!(quotas(&world), before);
}

#[test]
fn runs_that_grow_share_by_weight_what_none_needs() {
    let mut world = World::new(WHOLE);
    let (one, three) = (world.join("default", 0), world.join("web", 0));
    let idle = world.join("web", 0);
    world.calm(2);
    // Each needs its grant, and all share the other 160.
    let quotas = |world: &mut World| [one, three, idle].map(|id| world.run(id).quota);
    assert_eq!(quotas(&mut world), [GRANT + 22, GRANT + 68, GRANT + 68]);
    // Two use more than half of their grants: it is theirs, and they grow into it.
    (world.run(one).wants, world.run(three).wants) = (45, 45);
    world.calm(10);
    let found = quotas(&mut world);
    let free = [found[0] - 45, found[1] - 45];
    assert!(found[2] == GRANT && free[1] > 2 * free[0], "{found:?}");
    world.run(one).wants = WHOLE;
    world.run(three).wants = WHOLE;
    world.calm(120);
    let (one, three) = (world.run(one).used, world.run(three).used);
    assert!(one + three >= WHOLE - GRANT - 8, "{one} and {three}");
    assert!(one.min(three) > GRANT, "{one} and {three}");
}

#[test]
fn a_run_that_never_answers_keeps_what_it_may_have_and_no_more() {
    let mut world = World::new(WHOLE);
    let silent = world.join("default", 0);
    world.tick(20);
    world.act(silent, true);
    for _ in 0..50 {
        world.tick(100);
    }
    // It was told to take everything, and may do so.
    assert_eq!(world.run(silent).quota, GRANT);
    let other = world.join("default", 200);
    for _ in 0..3200 {
        world.tick(20);
        (0..4).for_each(|_| world.act(other, true));
    }
    let refused = world.run(other).refused.as_ref();
    assert!(refused.is_some(), "it may have all of it by now");
    world.leave(silent);
    let third = world.join("default", 200);
    world.calm(30);
    assert_eq!(world.run(third).used, 200);
}

#[test]
fn a_run_that_lies_is_ended_or_harms_only_itself() {
    type Lie = fn(&Growing) -> Vec<StorageFigures>;
    let lies: [(Lie, bool); 5] = [
        (|run| run.figures()[1..].to_vec(), true),
        (|_| Vec::new(), true),
        (
            |run| {
                let mut more = run.figures();
                more[1].quota += SLAB_BYTES;
                more
            },
            true,
        ),
        (
            |run| {
                let mut more = run.figures();
                (more[1].held, more[1].used) = (u64::MAX, u64::MAX);
                more
            },
            false,
        ),
        (
            |run| {
                let mut more = run.figures();
                more[1].used = u64::MAX;
                more
            },
            false,
        ),
    ];
    for (at, (lie, ends)) in lies.into_iter().enumerate() {
        let mut world = World::new(WHOLE);
        let (good, liar) = (world.join("default", 100), world.join("default", 20));
        world.calm(2);
        // It is asked for less when another comes.
        world.join("default", 0);
        let mut asked = false;
        for _ in 0..100 {
            world.tick(20);
            world.act(good, true);
            while let Some(message) = world.run(liar).inbox.pop_front() {
                if let ToKeeper::Quotas(quotas) = message {
                    world.run(liar).quota = quotas[1] / SLAB_BYTES;
                    let told = lie(&world.runs[&liar]);
                    world.members.kept_quotas(liar, &told);
                    asked = true;
                }
            }
        }
        assert!(asked, "lie {at}");
        assert_eq!(world.run(liar).ended.is_some(), ends, "lie {at}");
        world.leave(liar);
        world.calm(10);
        assert_eq!(world.run(good).used, 100, "lie {at}");
    }
    // Answers to what was not asked.
    let mut world = World::new(WHOLE);
    let liar = world.join("default", 0);
    world.calm(2);
    let figures = world.run(liar).figures();
    world.members.kept_quotas(liar, &figures);
    world.tick(20);
    assert!(world.run(liar).ended.is_some());
    world.members.kept_quotas(99, &figures);
}

#[test]
fn a_removed_tier_is_given_back_and_its_run_goes_on() {
    let mut world = World::new(WHOLE);
    let run = world.join("default", 50);
    world.calm(2);
    let fixed = |world: &World| world.members.status(1).tiers[0].granted_bytes / SLAB_BYTES;
    assert_eq!(fixed(&world), 5);
    world.run(run).has_removed = true;
    world.calm(6);
    assert_eq!(fixed(&world), 0);
    world.run(run).wants = 200;
    world.calm(30);
    assert_eq!(world.run(run).used, 200);
    // It claims what is left of it.
    world.restart(config(WHOLE));
    world.come_back(0);
    world.calm(2);
    assert_eq!(fixed(&world), 0);
}

/// Tiers of the next daemon are in another order, one is larger, and one is gone.
#[test]
fn claims_count_for_the_tiers_of_the_same_directories() {
    let mut world = World::new(WHOLE);
    let _ = world.join("default", 100);
    world.calm(20);
    let mut other = config(2 * WHOLE);
    other.tiers.swap(1, 2);
    other.tiers[2].spec = "nvm:/elsewhere,size=5M".parse().expect("a tier");
    world.restart(other);
    world.come_back(0);
    world.tick(20);
    let given = |world: &World| {
        let tiers = world.members.status(1).tiers;
        tiers
            .iter()
            .map(|tier| tier.granted_bytes / SLAB_BYTES)
            .collect::<Vec<_>>()
    };
    let quota = world.runs.values().next().expect("a run").quota;
    assert_eq!(given(&world), [quota, 0]);
    let mut shrunk = config(64);
    shrunk.tiers.remove(1);
    world.restart(shrunk);
    world.come_back(0);
    world.members.tick(Duration::from_millis(20));
    assert_eq!(
        world.members.status(1).tiers[0].granted_bytes / SLAB_BYTES,
        quota
    );
    let asked = world
        .members
        .said()
        .into_iter()
        .find_map(|(_, said)| match said {
            Said::Message(ToKeeper::Quotas(quotas)) => Some(quotas),
            _ => None,
        });
    // It has 100 slabs in use: more than there is now, and it keeps them.
    let asked = asked.expect("it is asked for what it does not use");
    assert!((100..120).contains(&(asked[1] / SLAB_BYTES)), "{asked:?}");
}
