//! The program. Its threads touch pages, it changes its address space, and the kernel raises
//! events.

use std::collections::HashMap;

use undercroft_base::{PageState, SpaceId, ThreadId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Fault};
use undercroft_model::{NotInstalled, Touch, oracle::Expect};

use super::world::{Doing, Intake, LayoutEvent, Message, Thread, World, Zap};

/// The first begins with the lowest page that the kernel allows.
const ARENAS: [u64; 4] = [16, 1500, 2900, 1 << 24];
const ARENA_PAGES: u64 = 700;
/// Where the first ends.
pub(super) const LOWEST_END: VirtPage = VirtPage(ARENAS[0] + ARENA_PAGES);
const MAPPED_MAX: usize = 500;
const PROCS_MAX: usize = 4;

impl World {
    /// A new thread of the process.
    pub fn add_thread(&mut self, proc: usize) -> usize {
        self.threads.push(Thread {
            proc,
            doing: Doing::Running,
            cursor: VirtPage(ARENAS[0]),
            stride: 1,
        });
        self.threads.len() - 1
    }

    /// A thread touches the page now; it may stop in a fault.
    pub fn access(&mut self, thread: usize, page: VirtPage, write: bool) {
        let proc = self.threads[thread].proc;
        let mm = self.procs[proc].mm;
        let expected = self.oracle.expect(mm, page);
        let content = match (write, expected) {
            (false, _) => None,
            // Sometimes the same bytes again: clean, though written.
            (true, Expect::Reads(same)) if !self.plain && self.random.chance(1, 8) => Some(same),
            (true, _) => Some(self.new_content()),
        };
        self.accesses += 1;
        self.operations += u64::from(!self.calm);
        self.touched.push((mm, page));
        if content.is_some() && self.waits_to_copy(thread, page) {
            self.threads[thread].doing = Doing::Stopped { page, write };
            return;
        }
        match self.memory.touch(mm, page, content) {
            Touch::Done(found) => {
                assert_eq!(
                    Expect::Reads(found),
                    expected,
                    "WRONG BYTES: p{proc} page {}",
                    page.0
                );
                if let Some(content) = content {
                    self.oracle.write(mm, page, content);
                }
            }
            Touch::Fault => {
                self.threads[thread].doing = Doing::Stopped { page, write };
                let message = Message {
                    page,
                    write,
                    thread,
                };
                self.procs[proc].messages.push_back(message);
            }
            Touch::Segv => {}
            Touch::Poisoned => assert_eq!(
                expected,
                Expect::Error,
                "an error without damage: p{proc} page {}",
                page.0
            ),
        }
    }

    /// A write to a protected page that a fork relative shares asks for its copy first. True: there
    /// is no room for the copy.
    fn waits_to_copy(&mut self, thread: usize, page: VirtPage) -> bool {
        let proc = self.threads[thread].proc;
        let (mm, space) = (self.procs[proc].mm, self.procs[proc].space);
        if self.is_down() || !self.memory.is_shared(mm, page) || self.random.chance(1, 4) {
            return false;
        }
        let run = VirtRange::new(page, page.plus(1 + self.random.below(6)));
        let shared: Vec<bool> = run.pages().map(|p| self.memory.is_shared(mm, p)).collect();
        let relatives = self.relatives(space);
        let fault = Fault {
            space,
            page,
            write: true,
            thread: ThreadId(thread as u32),
            urgent: false,
        };
        let answer = self
            .engine
            .faults()
            .copy_on_write(fault, &shared, &relatives);
        self.log(|| format!("copy p{proc} {} {shared:?} -> {answer:?}", page.0));
        self.kick_evictor();
        self.saw(match answer {
            Ok(1) => "copied for a write",
            Ok(_) => "copied for a write: a run",
            Err(_) => "waits for room to copy",
        });
        answer.is_err()
    }

    /// All other spaces, as if all were relatives. A wrong guess costs room, never a byte.
    pub fn relatives(&self, space: SpaceId) -> Vec<SpaceId> {
        let others = self.procs.iter().filter(|p| p.alive && p.space != space);
        others.map(|p| p.space).collect()
    }

    /// Lets one thread that can run touch one page. False when none can run.
    pub fn program_step(&mut self) -> bool {
        let can_run = |thread: &usize| {
            let thread = &self.threads[*thread];
            thread.doing == Doing::Running && self.procs[thread.proc].alive
        };
        let able: Vec<usize> = (0..self.threads.len()).filter(can_run).collect();
        if able.is_empty() {
            return false;
        }
        let thread = able[self.random.index(able.len())];
        let mm = self.procs[self.threads[thread].proc].mm;
        let next = &self.threads[thread];
        let mut page = VirtPage(next.cursor.0.saturating_add_signed(next.stride));
        if self.random.chance(1, 12) || self.memory.advice(mm, page).is_none() {
            match self.a_page(mm) {
                Some(random) => page = random,
                None => return false,
            }
            let strides = [0, 1, 1, 1, -1, 2, 5];
            self.threads[thread].stride = strides[self.random.index(strides.len())];
        }
        self.threads[thread].cursor = page;
        let write = self.random.chance(3, 5);
        self.access(thread, page, write);
        true
    }

    fn a_page(&mut self, mm: undercroft_model::Mm) -> Option<VirtPage> {
        let mapped = self.memory.mapped(mm);
        let at = self.random.index(mapped);
        self.memory.pages(mm).nth(at).map(|(page, _)| page)
    }

    /// A random run of mapped pages that are all registered, or all not.
    fn a_range(&mut self, mm: undercroft_model::Mm, most: u64) -> Option<(VirtRange, bool)> {
        let start = self.a_page(mm)?;
        let registered = self.memory.advice(mm, start)?.registered;
        let mut end = start.plus(1);
        let most = 1 + self.random.below(most);
        while end.0 - start.0 < most
            && self.memory.advice(mm, end).map(|a| a.registered) == Some(registered)
        {
            end = end.plus(1);
        }
        Some((VirtRange::new(start, end), registered))
    }

    /// Maps `range`, and the manager finds and registers it: memory that a program has at attach.
    pub fn map_attached(&mut self, proc: usize, range: VirtRange) {
        let mm = self.procs[proc].mm;
        self.memory.map(mm, range);
        self.oracle.zero_range(mm, range);
        self.attach(proc, range);
    }

    /// The manager finds the mapping and registers it.
    pub fn attach(&mut self, proc: usize, range: VirtRange) {
        let (mm, space) = (self.procs[proc].mm, self.procs[proc].space);
        self.memory.advise(mm, range, |a| a.registered = true);
        self.engine.layout().attached(space, range);
        for page in range.pages() {
            if self.memory.is_present(mm, page) {
                if self.memory.is_shared(mm, page) {
                    let relatives = self.relatives(space);
                    if self
                        .engine
                        .discovery()
                        .found_shared(space, page, &relatives)
                    {
                        self.saw("found shared");
                        continue;
                    }
                }
                self.engine
                    .discovery()
                    .found_resident(space, VirtRange::new(page, page.plus(1)));
                if self.engine.books().entry(space, page).state != PageState::Resident {
                    self.procs[proc].unmanaged_ok = true; // the ledger is full
                }
            }
        }
        self.log(|| format!("attach p{proc} {}..{}", range.start.0, range.end.0));
    }

    /// As [`World::attach`], for a random mapping that is not registered yet.
    pub fn attach_some(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        let mm = self.procs[proc].mm;
        if self.busy_with_layout(proc) {
            return;
        }
        if let Some((range, false)) = self.a_range(mm, 200) {
            self.attach(proc, range);
        }
    }

    fn busy_with_layout(&self, proc: usize) -> bool {
        !self.procs[proc].events.is_empty() || self.procs[proc].zap.is_some()
    }

    pub(super) fn free_place(&mut self, count: u64) -> VirtPage {
        if count <= 16 && self.random.chance(1, 2) {
            // Alone in its chunk of the ledger, so that the chunk is often given back and used
            // again.
            return VirtPage((1 << 20) + 512 * self.random.below(24) + self.random.below(4));
        }
        let arena = ARENAS[self.random.index(ARENAS.len())];
        VirtPage(arena + self.random.below(ARENA_PAGES - count))
    }

    /// The program starts one layout change.
    pub fn layout_step(&mut self) {
        let Some(proc) = self.a_proc() else {
            if self.is_down() {
                return;
            }
            let proc = self.spawn();
            for _ in 0..self.setup.program_threads {
                self.add_thread(proc);
            }
            return;
        };
        if !self.procs[proc].events.is_empty() {
            return;
        }
        let mm = self.procs[proc].mm;
        let alive = self.procs.iter().filter(|proc| proc.alive).count();
        if self.procs[proc].zap.is_some() {
            // While a zap is pending, only forks are modelled: in a real program, other changes
            // would race with the zap.
            if alive < PROCS_MAX && self.random.chance(1, 10) {
                self.procs[proc].unmanaged_ok = true;
                self.begin_fork(proc);
            }
            return;
        }
        match self.random.below(20) {
            0..6 => self.map_some(proc),
            6..11 => {
                if let Some((range, registered)) = self.a_range(mm, 150) {
                    self.begin_remove(proc, range, registered);
                }
            }
            11..13 => {
                if let Some((range, registered)) = self.a_range(mm, 100) {
                    let over = self.random.chance(1, 3);
                    self.begin_unmap(proc, range, registered, over);
                }
            }
            13..16 => {
                if let Some((range, registered)) = self.a_range(mm, 120) {
                    let to = self.free_place(range.count().0);
                    let keep_old = self.random.chance(1, 3);
                    self.begin_remap(proc, range, registered, to, keep_old);
                }
            }
            16 => {
                if let Some((range, _)) = self.a_range(mm, 40) {
                    let (wipe, dont) = (self.random.chance(1, 3), self.random.chance(1, 4));
                    self.memory.advise(mm, range, |advice| {
                        advice.wipe_on_fork = wipe;
                        advice.dont_fork = dont && !wipe;
                    });
                }
            }
            17..19 => {
                if alive < PROCS_MAX {
                    self.begin_fork(proc);
                }
            }
            _ => {
                if alive > 1 || self.random.chance(1, 4) {
                    self.exit(proc);
                }
            }
        }
    }

    fn map_some(&mut self, proc: usize) {
        let mm = self.procs[proc].mm;
        if self.memory.mapped(mm) > MAPPED_MAX {
            return;
        }
        let most = if self.random.chance(1, 2) { 150 } else { 12 };
        let count = 1 + self.random.below(most);
        let start = self.free_place(count);
        let range = VirtRange::new(start, start.plus(count));
        if range
            .pages()
            .any(|page| self.memory.advice(mm, page).is_some())
        {
            return;
        }
        self.log(|| format!("map p{proc} {}..{}", range.start.0, range.end.0));
        self.memory.map(mm, range);
        self.oracle.zero_range(mm, range);
        match self.random.below(3) {
            0 if self.is_down() => {}
            0 => self.attach(proc, range),
            // A registered mapping that grew in place: no event tells the engine.
            1 => self.memory.advise(mm, range, |a| a.registered = true),
            _ => {}
        }
    }

    fn send(&mut self, proc: usize, event: LayoutEvent) {
        self.log(|| format!("kernel p{proc} {event:?}"));
        self.memory.begin_change(self.procs[proc].mm);
        self.procs[proc].events.push_back(event);
    }

    /// The program drops contents. If the range is registered, the kernel sends the event first.
    pub fn begin_remove(&mut self, proc: usize, range: VirtRange, registered: bool) {
        let mm = self.procs[proc].mm;
        if registered {
            self.send(proc, LayoutEvent::Remove(range))
        } else {
            self.memory.zap(mm, range);
            self.oracle.zero_range(mm, range);
        }
    }

    /// The program unmaps a range. `over`: something else is mapped there at once, unregistered.
    pub fn begin_unmap(&mut self, proc: usize, range: VirtRange, registered: bool, over: bool) {
        let mm = self.procs[proc].mm;
        self.memory.unmap(mm, range);
        self.oracle.zero_range(mm, range);
        if registered {
            self.send(proc, LayoutEvent::Unmap(range));
        }
        if over {
            self.memory.map(mm, range);
        }
    }

    /// The program moves a mapping.
    pub fn begin_remap(
        &mut self,
        proc: usize,
        from: VirtRange,
        registered: bool,
        to: VirtPage,
        keep_old: bool,
    ) {
        let mm = self.procs[proc].mm;
        let new = VirtRange::new(to, to.plus(from.count().0));
        if !new.intersect(from).is_empty() {
            return;
        }
        let mut mapped = new.pages().filter_map(|page| self.memory.advice(mm, page));
        if mapped.any(|advice| advice.registered) && (!registered || self.random.chance(1, 2)) {
            // The kernel reports the overwritten place first (and for a move of unregistered memory
            // only that).
            self.send(proc, LayoutEvent::Unmap(new));
        }
        self.memory.remap(mm, from, to, keep_old);
        self.oracle.remap(mm, from, to);
        if registered {
            self.send(proc, LayoutEvent::Remap { from, to, keep_old });
        }
    }

    /// The program forks.
    pub fn begin_fork(&mut self, proc: usize) {
        let mm = self.procs[proc].mm;
        let child = self.memory.fork(mm);
        self.oracle.fork(mm, child);
        let (mut wiped, mut dropped) = (Vec::new(), Vec::new());
        for (page, advice) in self.memory.pages(mm) {
            let one = VirtRange::new(page, page.plus(1));
            if advice.dont_fork {
                dropped.push(one);
            } else if advice.wipe_on_fork {
                wiped.push(one);
            }
        }
        for range in wiped.iter().chain(&dropped) {
            self.oracle.zero_range(child, *range);
        }
        let event = LayoutEvent::Fork {
            child,
            wiped,
            dropped,
        };
        self.send(proc, event);
    }

    /// The fault threads read one event of one process.
    pub fn event_step(&mut self) -> bool {
        let waiting: Vec<usize> = (0..self.procs.len())
            .filter(|at| !self.procs[*at].events.is_empty())
            .collect();
        if waiting.is_empty() {
            return false;
        }
        let proc = waiting[self.random.index(waiting.len())];
        self.read_event(proc);
        true
    }

    /// Reads one event, which acknowledges it, and applies it.
    pub fn read_event(&mut self, proc: usize) {
        let mm = self.procs[proc].mm;
        let event = self.procs[proc].events.pop_front().expect("an event");
        self.memory.end_change(mm);
        self.log(|| format!("event p{proc} {event:?}"));
        self.saw(match event {
            LayoutEvent::Remove(_) => "event: remove",
            LayoutEvent::Unmap(_) => "event: unmap",
            LayoutEvent::Remap { .. } => "event: remap",
            LayoutEvent::Fork { .. } => "event: fork",
        });
        if let LayoutEvent::Remove(range) = event {
            let mut saved = Vec::new();
            for page in range.pages() {
                if self.memory.is_absent(mm, page) {
                    self.oracle.zero(mm, page)
                } else {
                    saved.push((page, self.oracle.expect(mm, page)))
                }
            }
            self.procs[proc].zap = Some(Zap { range, saved });
        }
        self.procs[proc].intake = Some(Intake {
            event,
            target_cleared: false,
        });
        self.apply_intake(proc);
    }

    /// Applies the event that was read last. A successor may repeat this, from any point where the
    /// first try ended.
    pub(super) fn apply_intake(&mut self, proc: usize) {
        let space = self.procs[proc].space;
        let Some(intake) = self.procs[proc].intake.clone() else {
            return;
        };
        match intake.event {
            LayoutEvent::Remove(range) => {
                let effect = self.engine.layout().removed(space, range);
                self.effect(effect);
                self.procs[proc].intake = None;
                self.wake_range(proc, range);
            }
            LayoutEvent::Unmap(range) => {
                let effect = self.engine.layout().unmapped(space, range);
                self.effect(effect);
                self.procs[proc].intake = None;
                self.wake_range(proc, range);
            }
            LayoutEvent::Remap { from, to, keep_old } => {
                let new = VirtRange::new(to, to.plus(from.count().0));
                if !intake.target_cleared {
                    let effect = self.engine.layout().unmapped(space, new);
                    self.effect(effect);
                    if let Some(intake) = &mut self.procs[proc].intake {
                        intake.target_cleared = true;
                    }
                }
                match self.engine.layout().remap_rest(space, from, to) {
                    Ok(effect) => self.effect(effect),
                    Err(_) => {
                        self.saw("ledger full at remap");
                        self.cancel_batches();
                        self.refuse_moved(proc, from, to);
                    }
                }
                self.procs[proc].intake = None;
                if keep_old {
                    self.engine.layout().attached(space, from);
                }
                self.wake_range(proc, from);
                self.wake_range(proc, new);
            }
            LayoutEvent::Fork {
                child,
                wiped,
                dropped,
            } => self.apply_fork(proc, child, &wiped, dropped),
        }
    }

    fn apply_fork(
        &mut self,
        proc: usize,
        child: undercroft_model::Mm,
        wiped: &[VirtRange],
        dropped: Vec<VirtRange>,
    ) {
        let space = self.procs[proc].space;
        let Ok(child_space) = self.engine.forks().begin_fork(space) else {
            self.saw("no number for a fork child");
            self.log(|| "no number: the child ends".to_owned());
            self.procs[proc].intake = None;
            self.memory.exit(child);
            self.oracle.exit(child);
            return;
        };
        let mut no_room = Vec::new();
        for part in self.engine.books().parts(space, EVERYTHING) {
            let inherited = (self.engine.forks()).inherit_range(space, child_space, part, wiped);
            match inherited {
                Ok(effect) => self.effect(effect),
                Err(_) => no_room.push(part),
            }
        }
        self.engine.forks().end_fork(space, child_space);
        for range in wiped {
            self.engine.layout().removed(child_space, *range);
        }
        let mut short = self.procs[proc].short;
        for part in &no_room {
            self.saw("ledger full at fork");
            self.engine.layout().removed(child_space, *part);
            for range in self.engine.books().away(space, *part) {
                range
                    .pages()
                    .for_each(|page| short |= !self.refuse(child, page));
            }
        }
        for range in dropped {
            let effect = self.engine.layout().unmapped(child_space, range);
            self.effect(effect);
        }
        // Known from here on. If the manager dies earlier, a successor forks the child anew and
        // forgets this one.
        self.procs[proc].intake = None;
        let unmanaged_ok = self.procs[proc].unmanaged_ok || !no_room.is_empty();
        let child = self.adopt(child, child_space);
        self.procs[child].unmanaged_ok = unmanaged_ok;
        self.procs[child].short = short;
        for _ in 0..self.setup.program_threads / 2 {
            self.add_thread(child);
        }
    }

    /// The ledger has no room for what is left of a mapping that moved.
    fn refuse_moved(&mut self, proc: usize, from: VirtRange, to: VirtPage) {
        let (mm, space) = (self.procs[proc].mm, self.procs[proc].space);
        self.procs[proc].unmanaged_ok = true;
        let away = self.engine.books().away(space, from);
        for page in away.into_iter().flat_map(VirtRange::pages) {
            let page = to.plus(page.0 - from.start.0);
            if !self.refuse(mm, page) {
                self.procs[proc].short = true;
            }
        }
        // Last: a successor that moves the mapping again must find them.
        let effect = self.engine.layout().removed(space, from);
        self.effect(effect);
    }

    /// The ledger has no room for a page: if it is missing, a touch of it fails. False if the
    /// kernel does not allow that now.
    fn refuse(&mut self, mm: undercroft_model::Mm, page: VirtPage) -> bool {
        let refused = self.memory.poison(mm, page);
        if refused.is_ok() {
            self.saw("refused for want of room: poisoned");
            self.oracle.damage(mm, page);
        }
        matches!(
            refused,
            Ok(()) | Err(NotInstalled::Exists | NotInstalled::NotMapped)
        )
    }

    /// The kernel drops the pages that a REMOVE event announced.
    pub fn zap_step(&mut self) -> bool {
        let Some(proc) = (0..self.procs.len()).find(|at| self.procs[*at].zap.is_some()) else {
            return false;
        };
        let mm = self.procs[proc].mm;
        if !self.procs[proc].events.is_empty() {
            return false; // a fork event is unread: keep the order simple
        }
        let Zap { range, saved } = self.procs[proc].zap.take().expect("a zap");
        self.log(|| format!("zap p{proc} {}..{}", range.start.0, range.end.0));
        let before: HashMap<VirtPage, Expect> = saved.iter().copied().collect();
        let space = self.procs[proc].space;
        let lost = |page: &VirtPage| {
            let entry = self.engine.books().entry(space, *page);
            entry.state == PageState::Lost
        };
        let lost: Vec<VirtPage> = range.pages().filter(lost).collect();
        let is_lost = |page| lost.contains(&page);
        for page in range.pages() {
            let has = self.oracle.expect(mm, page);
            let since = before.get(&page) != Some(&has);
            let in_hand = |content| self.holding.values().any(|held| *held == content);
            let entry = self.engine.books().entry(space, page);
            let loads = |content| {
                entry.state == PageState::Loading && self.copy_of(&entry) == Some(content)
            };
            match has {
                _ if self.memory.is_absent(mm, page) => {}
                // Pages that were lost since stay lost: the manager does not hear of the zap. It
                // knows nothing of pages that were refused for want of room.
                Expect::Error if since && is_lost(page) => {}
                // No manager publishes that load. The successor has its copy still.
                Expect::Reads(content) if since && loads(content) && self.down_for.is_some() => {}
                // Put back or loaded, and not published, so a successor may do it again.
                Expect::Reads(content) if since && (loads(content) || in_hand(content)) => {
                    self.oracle.zero_or(mm, page, content);
                }
                _ => self.oracle.zero(mm, page),
            }
        }
        for (page, had) in saved {
            // The page was dropped in between. Its contents at the acknowledgement must not come
            // back.
            if self.memory.is_absent(mm, page) && self.oracle.expect(mm, page) == had {
                self.oracle.zero(mm, page);
            }
        }
        self.memory.zap(mm, range);
        true
    }

    /// The process ends.
    pub fn exit(&mut self, proc: usize) {
        self.log(|| format!("exit p{proc}"));
        let (mm, space) = (self.procs[proc].mm, self.procs[proc].space);
        let intake = self.procs[proc].intake.take().map(|intake| intake.event);
        let unread = std::mem::take(&mut self.procs[proc].events);
        for event in intake.into_iter().chain(unread) {
            if let LayoutEvent::Fork { child, .. } = event {
                self.memory.exit(child);
                self.oracle.exit(child);
            }
        }
        self.procs[proc].zap = None;
        self.procs[proc].alive = false;
        self.procs[proc].messages.clear();
        self.memory.exit(mm);
        self.oracle.exit(mm);
        self.holding.retain(|(owner, _), _| *owner != space);
        self.commands.retain(|(owner, ..)| *owner != space);
        // Its threads are gone. Their numbers are reused in other processes.
        let other = (0..self.procs.len()).find(|at| self.procs[*at].alive);
        match other {
            Some(other) => {
                for thread in &mut self.threads {
                    if thread.proc == proc {
                        thread.proc = other;
                        thread.doing = Doing::Running;
                    }
                }
                let keep = 3 * self.setup.program_threads;
                if self.threads.len() > keep {
                    let stay = |thread: &Thread| thread.doing != Doing::Running;
                    let mut spare = self.threads.len() - keep;
                    // Messages name threads only for the prefetcher: renumbering is harmless.
                    self.threads.retain(|thread| {
                        let go = spare > 0 && !stay(thread);
                        spare -= usize::from(go);
                        !go
                    });
                }
            }
            None => self.threads.clear(),
        }
        if !self.is_down() {
            let heirs = self.relatives(space);
            self.engine.forks().bequeath(space, EVERYTHING, &heirs);
            let effect = self.engine.layout().remove_space(space);
            self.effect(effect);
        }
    }

    /// Counts the pages of fork children whose sharing was broken.
    pub fn own_frames(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        self.own_frames_of(proc);
    }

    /// As [`World::own_frames`], for one process.
    pub fn own_frames_of(&mut self, proc: usize) {
        let (mm, space) = (self.procs[proc].mm, self.procs[proc].space);
        for range in self.engine.books().inherited(space, EVERYTHING) {
            for page in range.pages() {
                if self.memory.is_present(mm, page) && !self.memory.is_shared(mm, page) {
                    self.engine.forks().own_frame(space, page);
                    self.saw("frame of its own");
                }
            }
        }
    }

    /// The manager locks or unlocks pages.
    pub fn lock_some(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        let (mm, space) = (self.procs[proc].mm, self.procs[proc].space);
        let on = self.random.chance(1, 3);
        let most = if on { 6 } else { 300 };
        if let Some((range, true)) = self.a_range(mm, most) {
            self.log(|| format!("lock p{proc} {}..{} {on}", range.start.0, range.end.0));
            self.engine.layout().lock(space, range, on);
        }
    }

    /// A device pins or releases pages.
    fn pin_some(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        let mm = self.procs[proc].mm;
        let on = self.random.chance(1, 3);
        let most = if on { 6 } else { 300 };
        if let Some((range, _)) = self.a_range(mm, most) {
            for page in range.pages() {
                self.memory.pin(mm, page, on);
            }
        }
    }

    /// As [`World::pin_some`], or the kernel is short of memory.
    pub(super) fn pin_or_swap_some(&mut self) {
        if !self.setup.kernel_swap || self.random.chance(1, 4) {
            return self.pin_some();
        }
        let Some(proc) = self.a_proc() else { return };
        let mm = self.procs[proc].mm;
        let Some((range, _)) = self.a_range(mm, 100) else {
            return;
        };
        for page in range.pages() {
            if self.memory.swap_out(mm, page) {
                self.saw("kernel swap: swapped out");
            }
        }
    }

    /// A guard page comes and goes: the kernel drops a present page without an event.
    pub fn guard_some(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        if self.busy_with_layout(proc) {
            return;
        }
        let mm = self.procs[proc].mm;
        if let Some(page) = self.a_page(mm)
            && self.memory.is_present(mm, page)
        {
            self.log(|| format!("guard p{proc} {}", page.0));
            self.memory.zap(mm, VirtRange::new(page, page.plus(1)));
            self.oracle.zero(mm, page);
        }
    }

    /// A kernel-mode fault with a signal pending sends its message again.
    pub fn repeat_message(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        let mm = self.procs[proc].mm;
        if let Some(page) = self.a_page(mm) {
            let message = Message {
                page,
                write: false,
                thread: 0,
            };
            self.procs[proc].messages.push_back(message);
        }
    }

    /// The limit changes.
    pub fn change_limit(&mut self) {
        let usual = self.setup.limit_pages;
        let pages = match self.random.below(4) {
            0 => usual / 2 + self.random.below(usual),
            1 => usual / 4 + 1,
            _ => usual,
        };
        self.log(|| format!("limit {pages}"));
        let asked = self.setup.limit(pages);
        self.evictor.asked = None;
        if asked < self.engine.books().limit() && self.random.chance(1, 2) {
            self.saw("a lower limit is approached");
            self.evictor.asked = Some(asked);
        } else {
            self.engine.set_limit(asked);
        }
    }
}
