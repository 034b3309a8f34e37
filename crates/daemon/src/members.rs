//! Who has how much, and what is to be said to whom. No I/O: it sees messages and the time.
//!
//! Memory is never given twice. A client counts for the largest of: the limit that it keeps to, the
//! one that it was asked to keep to, and what it still uses after its limit was lowered. What is
//! left is given to clients that wait to be admitted, then to those that shall have more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use undercroft_base::{Bytes, Nanos};
use undercroft_proto::grant::{
    ADMISSION_MAX, BudgetStatus, COMMAND_BYTES_MAX, Claim, DaemonStatus, Figures, Goes, Grant,
    Hello, MemberStatus, Refusal, StorageFigures, ToKeeper, UNKNOWN, VERSION,
};
use undercroft_proto::options::PluginFile;
use undercroft_qos::shares::{self, Waits, Want};

use crate::bounds::Bounds;
use crate::config::{Budget, Class, Config, DEFAULT_CLASS, GRANT_MIN};
use crate::load;
use crate::member::{Member, status_of};
use crate::storage::Storage;
use crate::store::{self, BYTES_MAX};

/// How often a client is asked for its figures: while memory moves, while it faults, and while it
/// does not.
const TELL: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_secs(1),
    Duration::from_secs(4),
];

/// Time between two divisions of memory by curves.
const BALANCE: Duration = Duration::from_secs(6);

/// A client that has waited this long is given what there is, if it is enough.
const PATIENCE: Duration = Duration::from_millis(700);
/// And is refused after this.
const PATIENCE_MAX: Duration = Duration::from_secs(15);
/// While others still give what they were asked for, it is refused after this.
const PATIENCE_AT_WORK: Duration = ADMISSION_MAX;

/// How long the clients of an earlier daemon have to come back before new ones are admitted.
const CLAIMS: Duration = Duration::from_secs(4);

/// A client that has refused a limit is asked again after this.
const REFUSED: Duration = Duration::from_secs(10);

// A run that waits for it sees the next answer.
const _: () = assert!(REFUSED.as_secs() < PATIENCE_MAX.as_secs());

/// Clients that wait at once, and most points of a curve.
const WAITING_MAX: usize = 256;
const POINTS_MAX: usize = 64;

/// Words to a client, or the end of its connection.
#[derive(Debug)]
pub(crate) enum Said {
    /// A message.
    Message(ToKeeper),
    /// A message, and then the end of the connection.
    Last(ToKeeper),
    /// The client broke the rules.
    End(&'static str),
}

/// A client that waits to be admitted.
struct Waiting {
    id: u64,
    pid: u32,
    hello: Hello,
    class: Class,
    most: Bytes,
    since: Duration,
    target: Option<Bytes>,
}

/// All clients. `id` is the number of a connection.
pub(crate) struct Members {
    config: Config,
    now: Duration,
    members: BTreeMap<u64, Member>,
    waiting: VecDeque<Waiting>,
    /// Keepers that an earlier daemon had admitted, and that have not come back.
    expected: BTreeSet<u32>,
    refused: u64,
    moves: u64,
    /// Clients have come or gone since memory was divided.
    stirred: bool,
    balanced_at: Duration,
    /// The latency bounds of clients; `None`: they have no device in common.
    bounds: Option<Bounds>,
    storage: Storage,
    said: Vec<(u64, Said)>,
}

impl Members {
    /// The keepers that have memory, or had it and are expected.
    pub(crate) fn pids(&self) -> BTreeSet<u32> {
        let here = self.members.values().map(|member| member.pid);
        // 0: it is outside of this pid namespace.
        let here = here.filter(|pid| *pid != 0);
        here.chain(self.expected.iter().copied()).collect()
    }

    /// * `expected`: keepers that an earlier daemon had admitted.
    pub(crate) fn new(config: Config, expected: BTreeSet<u32>) -> Members {
        Members {
            bounds: Bounds::new(&config.tiers),
            storage: Storage::new(&config.tiers),
            config,
            now: Duration::ZERO,
            members: BTreeMap::new(),
            waiting: VecDeque::new(),
            expected,
            refused: 0,
            moves: 0,
            stirred: false,
            balanced_at: Duration::ZERO,
            said: Vec::new(),
        }
    }

    /// The tiers of the configuration.
    pub(crate) fn tiers(&self) -> &[Budget] {
        &self.config.tiers
    }

    /// The clients that were admitted, by connection.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, &Member)> {
        self.members.iter().map(|(id, member)| (*id, member))
    }

    /// Takes what is to be said since the last call.
    pub(crate) fn said(&mut self) -> Vec<(u64, Said)> {
        std::mem::take(&mut self.said)
    }

    fn say(&mut self, id: u64, message: ToKeeper) {
        self.said.push((id, Said::Message(message)));
    }

    /// Ends a connection, and forgets its client.
    fn end(&mut self, id: u64, why: &'static str) {
        self.said.push((id, Said::End(why)));
        self.gone(id);
    }

    fn refuse(&mut self, id: u64, why: String, could: Option<u64>) {
        self.refused += 1;
        let refusal = Refusal { why, could };
        self.said.push((id, Said::Last(ToKeeper::Refused(refusal))));
    }

    /// Whether a bound is kept by the control here.
    pub(crate) fn keeps_bounds(&self) -> bool {
        self.bounds.as_ref().is_some_and(Bounds::are_any)
    }

    /// Whether memory or storage is on its way from one client to another, or to one soon.
    pub(crate) fn is_busy(&self) -> bool {
        let is_settled = |it: &Member| it.is_settled() && it.storage_is_settled();
        !self.waiting.is_empty() || !self.members.values().all(is_settled)
    }

    fn held(&self) -> u64 {
        self.members.values().map(Member::held).sum()
    }

    fn free(&self) -> u64 {
        self.config.memory.0.saturating_sub(self.held())
    }

    /// A keeper's first message.
    ///
    /// * `pid`: its process, as the kernel gives it.
    pub(crate) fn hello(&mut self, id: u64, pid: u32, hello: Hello) {
        if self.members.contains_key(&id) || self.waiting.iter().any(|it| it.id == id) {
            return self.end(id, "it says hello twice");
        }
        if hello.version != VERSION {
            let why = format!(
                "it speaks version {} of the messages, and this daemon version {VERSION}: \
                 start the daemon of the same undercroft",
                hello.version
            );
            return self.refuse(id, why, None);
        }
        if hello.command.len() > COMMAND_BYTES_MAX {
            return self.end(id, "its command line is not cut");
        }
        let found = self.config.classes.get(&hello.class).cloned();
        if let Some(claim) = hello.claim.clone() {
            let class = found.unwrap_or_else(|| self.config.classes[DEFAULT_CLASS].clone());
            return self.claim(id, pid, hello, &claim, class);
        }
        let Some(class) = found else {
            let names: Vec<&str> = self.config.classes.keys().map(String::as_str).collect();
            let why = format!(
                "no class is named {}; there are {}",
                hello.class,
                names.join(", ")
            );
            return self.refuse(id, why, None);
        };
        if let Err(short) = (self.storage).could_admit(&self.members, self.waiting.len()) {
            return self.refuse(id, short.why, Some(short.left));
        }
        if let Some(why) = self.load_is_too_much(&class, &hello.class) {
            return self.refuse(id, why, None);
        }
        if self.waiting.len() >= WAITING_MAX {
            return self.refuse(id, "too many runs wait already; try again".to_owned(), None);
        }
        let most = most(&class, &hello);
        if most < GRANT_MIN {
            let why = format!("{most} is too little; give --memory-max {GRANT_MIN} at least");
            return self.refuse(id, why, None);
        }
        let since = self.now;
        self.waiting.push_back(Waiting {
            id,
            pid,
            hello,
            class,
            most,
            since,
            target: None,
        });
        self.stirred = true;
    }

    /// A client of an earlier daemon keeps what it has, whatever the configuration says now.
    fn claim(&mut self, id: u64, pid: u32, hello: Hello, claim: &Claim, class: Class) {
        self.expected.remove(&pid);
        let storage = store::claimed(&self.config.tiers, &claim.storage);
        let most = most(&class, &hello).max(GRANT_MIN);
        let limit = Bytes(claim.memory.min(BYTES_MAX));
        let member = Member {
            storage,
            claimed: true,
            // It may not have come down to its limit yet. Its figures tell.
            ceiling: limit.max(self.config.memory),
            figures: Figures {
                dram: UNKNOWN,
                ..Figures::default()
            },
            ..Member::new(pid, hello, class, (limit, most), self.now)
        };
        // It has its devices and its policy.
        let grant = Grant {
            devices: Vec::new(),
            policy: None,
            ..self.grant(&member)
        };
        self.say(id, ToKeeper::Granted(grant));
        self.members.insert(id, member);
        self.stirred = true;
    }

    /// Why the devices cannot serve one more client of a class, if it is known how fast they are.
    fn load_is_too_much(&self, class: &Class, name: &str) -> Option<String> {
        let devices = load::devices(&self.config.tiers)?;
        let here = self.members.values();
        let here = here.map(|it| load::asks(&it.class, it.page_ins));
        let waiting = self.waiting.iter().map(|it| load::asks(&it.class, None));
        let here: Vec<_> = here.chain(waiting).collect();
        load::refuses(&here, class, name, &devices)
    }

    /// The policy file of a client's class.
    pub(crate) fn policy_of(&self, id: u64) -> Option<Arc<PluginFile>> {
        self.members.get(&id)?.class.policy.clone()
    }

    fn grant(&self, member: &Member) -> Grant {
        Grant {
            class: member.class_name.clone(),
            memory: member.limit.0,
            memory_most: member.most.0,
            tiers: self
                .config
                .tiers
                .iter()
                .map(|it| it.spec.to_string())
                .collect(),
            storage: member.quotas(),
            devices: load::emulated(&self.config.tiers),
            latency: member.class.latency.as_ref().map(ToString::to_string),
            cpus: member.class.cpus.as_ref().map(ToString::to_string),
            realtime: member.class.realtime,
            moves: member.class.moves.map(|moves| moves.0),
            policy: member.class.policy.as_ref().map(|of| of.file.clone()),
        }
    }

    /// A client's figures, and those of its storage.
    pub(crate) fn figures(&mut self, id: u64, figures: Figures, stored: &[StorageFigures]) {
        let now = self.now;
        let Some(member) = self.members.get_mut(&id) else {
            return self.end(id, "it has figures and was not admitted");
        };
        if member.told.take().is_none() {
            return self.end(id, "it was not asked for figures");
        }
        if let Err(why) = member.note_storage(stored, now) {
            return self.end(id, why);
        }
        let is_still = figures.swap_ins == member.figures.swap_ins;
        // One that fills its memory pages in soon, and within a moment none does.
        let rests = is_still
            && figures.dram == member.figures.dram
            && now.saturating_sub(member.heard) >= TELL[1];
        if let Some(curve) = &figures.curve
            && curve.points.len() <= POINTS_MAX
        {
            let waits = |(limit, stall): &(u64, f64)| Waits {
                limit: Bytes(*limit),
                stall: *stall,
            };
            let points = curve.points.iter().map(waits).collect();
            member.curves.note(points, curve.seconds, nanos(now));
        }
        member.measure(&figures, now);
        // A manager that did not answer may have paged in, and has told nothing.
        let answers = figures.dram != UNKNOWN;
        member.pages_in = !is_still || !answers;
        if let Some(bounds) = &mut self.bounds {
            bounds.heard(id);
            if answers {
                bounds.note(id, figures.page_ins.as_ref());
            }
        }
        member.heard = now;
        member.figures = figures;
        if member.asked.is_none() {
            // Its user may have set another one.
            let limit = member.figures.limit.unwrap_or(u64::MAX);
            let limit = Bytes(limit.min(BYTES_MAX));
            if limit != member.limit {
                (member.limit, member.ceiling) = (limit, member.ceiling.max(limit));
                self.stirred = true;
            }
        }
        if member.asked.is_none() {
            // Above its limit, a client only gets smaller.
            let uses = member.ceiling.min(Bytes(member.figures.dram));
            member.ceiling = member.limit.max(uses);
        }
        let is_settled = member.is_settled() && member.storage_is_settled();
        let pause = match (is_settled, rests && !member.storage_grows()) {
            (false, _) => TELL[0],
            (true, false) => TELL[1],
            (true, true) => TELL[2],
        };
        member.next_tell = now + pause;
    }

    /// Half of what a quota left a client is full.
    pub(crate) fn fills(&mut self, id: u64, stored: &[StorageFigures]) {
        let now = self.now;
        let member = self.members.get_mut(&id);
        let noted = member.map_or(Err("it fills storage and was not admitted"), |member| {
            member.next_tell = now;
            member.note_storage(stored, now)
        });
        if let Err(why) = noted {
            self.end(id, why);
        }
    }

    /// A client's answer to `Quotas`.
    pub(crate) fn kept_quotas(&mut self, id: u64, stored: &[StorageFigures]) {
        let now = self.now;
        let member = self.members.get_mut(&id);
        let kept = member.map_or(Err("it keeps to quotas and was not admitted"), |member| {
            member.next_tell = now;
            member.kept_quotas(stored)
        });
        if let Err(why) = kept {
            self.end(id, why);
        }
    }

    /// A client's answer to `Keep`.
    pub(crate) fn kept(&mut self, id: u64, memory: u64, refused: Option<&str>) {
        let now = self.now;
        let Some(member) = self.members.get_mut(&id) else {
            return self.end(id, "it keeps to a limit and was not admitted");
        };
        if member.asked != Some(Bytes(memory)) {
            return self.end(id, "it was not asked to keep to this limit");
        }
        member.asked = None;
        if refused.is_some() {
            // Its figures say which limit is in force.
            member.limit = member.limit.max(Bytes(memory));
            member.refused_until = now + REFUSED;
            self.stirred = true;
        } else {
            self.moves += 1;
            if memory < member.limit.0 {
                // Its figures are older than this. It may have come up to its limit since.
                let uses = member.ceiling.0.min(member.figures.dram);
                member.figures.dram = member.limit.0.max(uses);
                member.ceiling = Bytes(member.figures.dram);
            }
            member.limit = Bytes(memory);
        }
        member.ceiling = member.ceiling.max(member.limit);
        member.next_tell = now;
    }

    /// A connection has ended.
    pub(crate) fn gone(&mut self, id: u64) {
        let was = self.members.remove(&id).is_some();
        if let Some(bounds) = &mut self.bounds {
            bounds.leave(id);
        }
        self.waiting.retain(|waiting| waiting.id != id);
        self.stirred |= was;
    }

    /// Does what is due at this time since the daemon's start.
    pub(crate) fn tick(&mut self, now: Duration) {
        self.now = now;
        self.ask_for_figures();
        self.end_windows();
        let first = self.waiting.front().map(|waiting| waiting.id);
        (self.storage).plan(&mut self.members, self.stirred, first);
        self.plan();
        self.shrink();
        self.admit();
        self.grow();
        self.ask_for_quotas();
    }

    fn ask_for_quotas(&mut self) {
        let may_raise = !self.awaits_claims();
        for (id, quotas) in self.storage.ask(&mut self.members, may_raise) {
            self.say(id, ToKeeper::Quotas(quotas));
        }
    }

    fn ask_for_figures(&mut self) {
        let now = self.now;
        let bounds = self.bounds.as_mut().filter(|bounds| bounds.are_any());
        let mut with_bounds = BTreeSet::new();
        if let Some(bounds) = bounds {
            let has = |(id, _): &(&u64, &Member)| bounds.has(**id);
            let has: Vec<_> = self.members.iter().filter(has).collect();
            let is_active = has.iter().any(|(_, member)| member.pages_in);
            with_bounds = has.into_iter().map(|(id, _)| *id).collect();
            if !bounds.begins(now, is_active) {
                with_bounds.clear();
            }
        }
        for (id, member) in &mut self.members {
            let is_due = now >= member.next_tell || with_bounds.contains(id);
            if member.told.is_none() && is_due {
                member.told = Some(now);
                self.said.push((*id, Said::Message(ToKeeper::Tell)));
            }
        }
    }

    /// Ends the window of the latency bounds, if it is time, and tells all clients that page in how
    /// to turn their knobs.
    fn end_windows(&mut self) {
        let Some(bounds) = &mut self.bounds else {
            return;
        };
        let asks = || {
            let each = self.members.iter();
            each.map(|(id, it)| (*id, load::asks(&it.class, it.page_ins)))
                .collect()
        };
        if !bounds.ends(self.now, &self.config.tiers, asks) {
            return;
        }
        let at_device = self.at_device();
        let Some(bounds) = &self.bounds else {
            return;
        };
        for (id, member) in &self.members {
            if member.pages_in || bounds.has(*id) {
                let turn = ToKeeper::Turn(bounds.turn(*id, at_device));
                self.said.push((*id, Said::Message(turn)));
            }
        }
    }

    /// Clients that page in and whose pages go to the device, or may.
    fn at_device(&self) -> u32 {
        let Some(bounds) = &self.bounds else {
            return 0;
        };
        let members = self.members.iter().filter(|(_, member)| member.pages_in);
        let there = members.filter(|(id, _)| bounds.turn(**id, 1).goes != Goes::ToBuffer);
        there.count() as u32
    }

    /// Divides memory anew, if clients have come or gone, or curves say that it pays.
    fn plan(&mut self) {
        let by_curves = self.now >= self.balanced_at + BALANCE;
        if !self.stirred && !by_curves {
            return;
        }
        let stirred = std::mem::take(&mut self.stirred);
        self.balanced_at = self.now;
        let (divide, now, memory) = (self.config.divide, self.now, self.config.memory);
        let members = self.members.values();
        let mut wants: Vec<Want> = members.map(|it| it.want(divide, now)).collect();
        let count = wants.len();
        wants.extend(self.waiting.front().map(|it| Want {
            weight: it.class.weight,
            least: it.class.memory_min.min(it.most),
            most: it.most,
            enough: it.most,
            waits: false,
            curve: Vec::new(),
        }));
        let limits: Vec<Bytes> = self.members.values().map(|it| it.limit).collect();
        let mut targets = shares::targets(memory, &wants, &limits, stirred);
        if targets.is_err() && wants.len() > count {
            let newcomer = wants.pop().map_or(Bytes(0), |want| want.least);
            if self.unprotected() < newcomer {
                self.refuse_first();
            } else {
                // Clients that have refused to have less may do so soon.
                self.stirred = true;
            }
            targets = shares::targets(memory, &wants, &limits, stirred);
        }
        // Clients of an earlier daemon may have been promised more than there is.
        let targets = targets.unwrap_or_else(|_| {
            wants.iter_mut().for_each(|want| want.least = Bytes(0));
            shares::targets(memory, &wants, &limits, stirred).unwrap_or_default()
        });
        let Some(targets) = targets else {
            return;
        };
        for (member, target) in self.members.values_mut().zip(&targets) {
            member.target = *target;
        }
        if let Some(first) = self.waiting.front_mut() {
            first.target = targets.last().copied();
        }
    }

    /// The rest of the memory for the protection of one more client.
    fn unprotected(&self) -> Bytes {
        let protected = self.members.values().map(Member::protection);
        shares::unprotected(self.config.memory, protected)
    }

    /// The protection of the first that waits does not fit.
    fn refuse_first(&mut self) {
        let Some(first) = self.waiting.pop_front() else {
            return;
        };
        let (memory, could) = (self.config.memory, self.unprotected());
        let why = format!(
            "class {} protects {} for each client, and other clients have {} of {memory} protected",
            first.hello.class,
            first.class.memory_min,
            Bytes(memory.0.saturating_sub(could.0))
        );
        self.refuse(first.id, why, Some(could.0));
        self.stirred = true;
    }

    /// Asks clients that shall have less. What they leave is given once they have left it.
    fn shrink(&mut self) {
        let (now, urgent) = (self.now, !self.waiting.is_empty());
        for (id, member) in &mut self.members {
            let is_open = member.asked.is_none() && now >= member.refused_until;
            if is_open && shares::gives(member.limit, member.target, urgent) {
                (member.asked, member.lacks) = (Some(member.target), false);
                let memory = member.target.0;
                self.said
                    .push((*id, Said::Message(ToKeeper::Keep { memory })));
            }
        }
    }

    /// Clients of an earlier daemon have memory, and have not claimed it yet.
    fn awaits_claims(&self) -> bool {
        !self.expected.is_empty() && self.now < CLAIMS
    }

    /// Admits clients that wait, in their order.
    fn admit(&mut self) {
        if self.awaits_claims() {
            return;
        }
        let free = Bytes(self.free());
        let Some(first) = self.waiting.front() else {
            return;
        };
        let waited = self.now.saturating_sub(first.since);
        let patience = if self.members.values().any(Member::is_at_work) {
            PATIENCE_AT_WORK
        } else {
            PATIENCE_MAX
        };
        if let Err(short) = self.storage.can_admit(&self.members) {
            if waited >= patience {
                self.refuse_waiting(short.why, short.left);
            }
            return;
        }
        let least = first.class.memory_min.min(first.most).max(GRANT_MIN);
        let target = first.target.unwrap_or(first.most).max(least);
        if free < target && !(waited >= PATIENCE && free >= least) {
            if waited >= patience {
                self.refuse_for_memory(free);
            }
            return;
        }
        let memory = free.min(target);
        let Some(first) = self.waiting.pop_front() else {
            return;
        };
        // Clients of an earlier daemon have claimed since it asked.
        if let Some(why) = self.load_is_too_much(&first.class, &first.hello.class) {
            self.stirred = true;
            return self.refuse(first.id, why, None);
        }
        let (pid, class) = (first.pid, first.class);
        let member = Member {
            next_tell: self.now + TELL[1],
            target,
            lacks: memory < target,
            storage: store::granted(&self.config.tiers),
            // It begins now, so all that it tells is its own.
            counted: Some((self.now, 0)),
            stalled: Some(0.0),
            ..Member::new(pid, first.hello, class, (memory, first.most), self.now)
        };
        self.say(first.id, ToKeeper::Granted(self.grant(&member)));
        self.members.insert(first.id, member);
        self.stirred = true;
    }

    /// The first that waits has waited too long.
    fn refuse_for_memory(&mut self, free: Bytes) {
        let (held, memory) = (Bytes(self.held()), self.config.memory);
        let why = format!("no memory is free: other clients hold {held} of {memory}");
        self.refuse_waiting(why, free.0);
    }

    fn refuse_waiting(&mut self, why: String, could: u64) {
        if let Some(first) = self.waiting.pop_front() {
            self.refuse(first.id, why, Some(could));
            self.stirred = true;
        }
    }

    /// Gives what is free to clients that shall have more. Those that wait come first.
    fn grow(&mut self) {
        if !self.waiting.is_empty() || self.awaits_claims() {
            return;
        }
        let mut free = self.free();
        for (id, member) in &mut self.members {
            let wanted = member.target.0.saturating_sub(member.limit.0);
            let more = wanted.min(free);
            let is_rest = member.lacks && wanted > 0 && more == wanted;
            if member.asked.is_none()
                && self.now >= member.refused_until
                && (more >= shares::STEP_MIN.0 || is_rest)
            {
                let memory = member.limit.0 + more;
                free -= more;
                member.lacks = more < wanted;
                member.asked = Some(Bytes(memory));
                self.said
                    .push((*id, Said::Message(ToKeeper::Keep { memory })));
            }
        }
    }

    /// For a user. `pid` is that of the daemon.
    pub(crate) fn status(&self, pid: u32) -> DaemonStatus {
        let budgets = self.config.tiers.iter().filter(|it| it.sizes.is_some());
        let given = self.storage.given(&self.members).into_iter();
        let budget = |(budget, (granted, used)): (&Budget, (u64, u64))| BudgetStatus {
            spec: budget.spec.to_string(),
            size_bytes: budget.sizes.map_or(0, |(whole, _)| whole.0),
            granted_bytes: granted,
            used_bytes: used,
        };
        DaemonStatus {
            schema_version: 1,
            pid,
            uptime_seconds: self.now.as_secs_f64(),
            memory_bytes: self.config.memory.0,
            held_bytes: self.held(),
            free_bytes: self.free(),
            tiers: budgets.zip(given).map(budget).collect(),
            clients: {
                let at_device = self.at_device();
                let each = self.members.iter().map(|(id, member)| MemberStatus {
                    latency: (self.bounds.as_ref()).and_then(|of| of.status(*id, at_device)),
                    ..status_of(member)
                });
                each.collect()
            },
            waiting: self.waiting.len(),
            refused: self.refused,
            moves: self.moves,
        }
    }
}

fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// The most that a client may ever have.
fn most(class: &Class, hello: &Hello) -> Bytes {
    class
        .memory_max
        .min(Bytes(hello.memory_max.unwrap_or(u64::MAX)))
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
