//! The model's memory behind the port, for tests. Threads of a pretend program fault on it and
//! wait, as on a userfaultfd. Their messages come through a pipe, in the kernel's form.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::pipe::{PipeFlags, pipe_with};
use undercroft_base::{BASE_PAGE_BYTES, VirtPage, VirtRange};
use undercroft_engine::EvictItem;
use undercroft_model::content::Content;
use undercroft_model::memory::{Memory, Mm, MoveRefusal, NotInstalled, Touch};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::uffd::{MessageBuf, Messages, RegisterMode, Uffd, UffdError};
use undercroft_wire::command::{CommandWords, Word};

use super::agent::Agent;
use super::command::Commands;
use super::port::{Answered, Asked, Begun, Late, Read, Space, Taken, Took, Wake, WayOut};
use super::process::Process;
use super::shared::Shared;
use crate::sync::lock;

/// Message numbers of the kernel.
const FAULT: u64 = 0x12;
const REMOVE: u64 = 0x15;

/// A thread that waits longer has been forgotten.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// Calls for each slow one. A slow call takes four times as long as a removal does after its event.
const SLOW_CALL: u32 = 4;
const DELAY: Duration = Duration::from_micros(50);

/// An address space of the model.
pub(crate) struct ModelMemory {
    kernel: Mutex<Kernel>,
    changed: Condvar,
    mm: Mm,
    messages: Uffd,
    sender: OwnedFd,
    /// A mapping begins here: no call reaches over it.
    pub cut: AtomicU64,
    /// Each request that begins below this page is refused, as by kernels before Linux 6.16.
    pub lowest: AtomicU64,
    /// Pages that can be installed until a layout event comes.
    pub until_event: AtomicU64,
    /// How many of the next reads, and of the next poisonings, the kernel has no memory for.
    pub short_reads: AtomicU32,
    pub short_poisons: AtomicU32,
    /// Calls that install, and those of them that wake threads.
    pub calls: AtomicU32,
    pub waking_calls: AtomicU32,
    /// Pages that left for good by its own way out.
    pub left: AtomicU32,
    /// Calls of its way out, and of that of other memories that have the same list.
    pub steps: Arc<Mutex<Vec<&'static str>>>,
}

struct Kernel {
    memory: Memory,
    /// Where threads wait, by the number of their wait.
    waiting: BTreeMap<u64, VirtPage>,
    waits: u64,
    /// Messages that were not read yet: whether each is a layout event.
    pending: VecDeque<bool>,
    layout_events: u64,
    acknowledged: u64,
}

impl ModelMemory {
    /// Memory that is mapped and registered in `range`, and empty.
    pub(crate) fn new(range: VirtRange) -> ModelMemory {
        let mut memory = Memory::default();
        let mm = memory.add();
        memory.map(mm, range);
        memory.advise(mm, range, |advice| advice.registered = true);
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (messages, sender) = pipe_with(flags).expect("a pipe");
        ModelMemory {
            kernel: Mutex::new(Kernel {
                memory,
                waiting: BTreeMap::new(),
                waits: 0,
                pending: VecDeque::new(),
                layout_events: 0,
                acknowledged: 0,
            }),
            changed: Condvar::new(),
            mm,
            messages: Uffd::from(messages),
            sender,
            cut: AtomicU64::new(0),
            lowest: AtomicU64::new(0),
            until_event: AtomicU64::new(u64::MAX),
            short_reads: AtomicU32::new(0),
            short_poisons: AtomicU32::new(0),
            calls: AtomicU32::new(0),
            waking_calls: AtomicU32::new(0),
            left: AtomicU32::new(0),
            steps: Arc::default(),
        }
    }

    /// The bytes of the page, if it is in memory. This is no access of the program.
    pub(crate) fn peek(&self, page: VirtPage) -> Option<Content> {
        lock(&self.kernel).memory.peek(self.mm, page)
    }

    /// Whether a touch of the page, while it is missing, would wait for the manager.
    pub(crate) fn is_registered(&self, page: VirtPage) -> bool {
        let advice = lock(&self.kernel).memory.advice(self.mm, page);
        advice.is_some_and(|advice| advice.registered)
    }

    /// A thread of the program reads the page, or writes `write` to it. It waits where the page is
    /// missing.
    pub(crate) fn touch(&self, page: VirtPage, write: Option<Content>, thread: u32) -> Touch {
        let mut kernel = lock(&self.kernel);
        let since = Instant::now();
        while since.elapsed() < FORGOTTEN {
            match kernel.memory.touch(self.mm, page, write) {
                Touch::Fault => {}
                touched => return touched,
            }
            kernel.waits += 1;
            let wait = kernel.waits;
            kernel.waiting.insert(wait, page);
            let flags = u64::from(write.is_some());
            let message = [FAULT, flags, page.address(), u64::from(thread)];
            self.send(&mut kernel, message);
            let waits = |kernel: &mut Kernel| kernel.waiting.contains_key(&wait);
            let (woken, timeout) = self
                .changed
                .wait_timeout_while(kernel, FORGOTTEN, waits)
                .expect("no thread failed");
            assert!(!timeout.timed_out(), "a thread waits for {page:?} for ever");
            kernel = woken;
        }
        panic!("a thread faults on {page:?} again and again");
    }

    /// The program drops what it has in the range. Returns when that is done, which is after the
    /// event was read.
    pub(crate) fn discard(&self, range: VirtRange) {
        let mut kernel = lock(&self.kernel);
        kernel.memory.begin_change(self.mm);
        let message = [REMOVE, range.start.address(), range.end.address(), 0];
        self.send(&mut kernel, message);
        let event = kernel.layout_events;
        let unread = |kernel: &mut Kernel| kernel.acknowledged < event;
        let (mut kernel, timeout) = self
            .changed
            .wait_timeout_while(kernel, FORGOTTEN, unread)
            .expect("no thread failed");
        assert!(!timeout.timed_out(), "an event is not read");
        kernel.memory.end_change(self.mm);
        drop(kernel);
        // As in the kernel: a page that is installed now is dropped, and no event tells of it.
        std::thread::sleep(DELAY);
        lock(&self.kernel).memory.zap(self.mm, range);
    }

    /// The program begins to change its mappings, or has done so.
    pub(crate) fn changes(&self, begins: bool) {
        let mut kernel = lock(&self.kernel);
        if begins {
            kernel.memory.begin_change(self.mm);
        } else {
            kernel.memory.end_change(self.mm);
        }
    }

    /// UFFDIO_MOVE to where the manager reads it.
    pub(crate) fn move_out(&self, page: VirtPage) -> Result<Content, MoveRefusal> {
        lock(&self.kernel).memory.move_out(self.mm, page)
    }

    fn accepts(&self, range: VirtRange) -> Result<(), UffdError> {
        let accepted = range.start >= self.lowest();
        accepted.then_some(()).ok_or(UffdError::Invalid)
    }

    fn send(&self, kernel: &mut Kernel, message: [u64; 4]) {
        let is_event = message[0] != FAULT;
        kernel.pending.push_back(is_event);
        kernel.layout_events += u64::from(is_event);
        let bytes: Vec<u8> = message.iter().flat_map(|word| word.to_le_bytes()).collect();
        let sent = rustix::io::write(&self.sender, &bytes);
        assert_eq!(sent, Ok(bytes.len()), "room for a message");
    }

    fn put(
        &self,
        range: VirtRange,
        wake: Wake,
        content: impl Fn(usize) -> Content,
    ) -> Result<(), UffdError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call % SLOW_CALL == SLOW_CALL - 1 {
            std::thread::sleep(4 * DELAY);
        }
        let cut = VirtPage(self.cut.load(Ordering::Relaxed));
        if range.start < cut && cut < range.end {
            return Err(UffdError::NotMapped { done: 0 });
        }
        let mut kernel = lock(&self.kernel);
        for (at, page) in range.pages().enumerate() {
            let done = at as u64;
            let until_event = self.until_event.load(Ordering::Relaxed);
            if until_event == 0 {
                return Err(UffdError::LayoutChanging { done });
            }
            self.until_event.store(until_event - 1, Ordering::Relaxed);
            let put = kernel.memory.install(self.mm, page, content(at));
            put.map_err(|refusal| refused(refusal, done))?;
        }
        drop(kernel);
        if wake == Wake::Now {
            self.waking_calls.fetch_add(1, Ordering::Relaxed);
            self.wake(range);
        }
        Ok(())
    }
}

/// The agent that a dead manager knew.
pub(crate) fn agent(shared: &Shared, process: &Process) -> Agent {
    let page = SharedMemory::create("test", 4096).expect("a page");
    let (uffd, _) = pipe_with(PipeFlags::CLOEXEC).expect("a descriptor");
    let memory = ProcessMemory::open(std::process::id()).expect("own memory");
    let heirs = shared.books.legacy.heirs();
    let row = process.row.clone();
    let commands = Commands::new(page);
    commands.store(Word::Agent, 1, Ordering::Relaxed); // it runs
    Agent::again(
        commands,
        Uffd::from(uffd),
        memory,
        (None, None),
        &heirs[0].1,
        row,
    )
}

/// Takes one, if there is one.
fn takes_one(from: &AtomicU32) -> bool {
    from.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
        left.checked_sub(1)
    })
    .is_ok()
}

fn refused(refusal: NotInstalled, done: u64) -> UffdError {
    match refusal {
        NotInstalled::Exists => UffdError::Exists { done },
        NotInstalled::NotMapped => UffdError::NotMapped { done },
        NotInstalled::LayoutChanging => UffdError::LayoutChanging { done },
        NotInstalled::NoMemory => UffdError::NoMemory { done },
    }
}

impl AsFd for ModelMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.messages.as_fd()
    }
}

/// Pages leave at once: the model is never late.
impl WayOut for ModelMemory {
    fn begin(&self, _: &[EvictItem]) -> Begun {
        lock(&self.steps).push("begin");
        Begun::Yes(Asked::default())
    }

    fn wait(&self, asked: Asked) -> Answered {
        lock(&self.steps).push("wait");
        Answered::Done(asked)
    }

    fn take(&self, _: Answered, group: &[EvictItem], buffer: &mut [u8]) -> Took {
        lock(&self.steps).push("take");
        let (mut moved, mut refused) = (0, 0);
        for (at, item) in group.iter().enumerate() {
            match self.move_out(item.page) {
                Ok(content) => {
                    let place = &mut buffer[at * BASE_PAGE_BYTES..][..BASE_PAGE_BYTES];
                    place.copy_from_slice(&content.bytes());
                    moved |= 1 << at;
                }
                Err(MoveRefusal::Busy) => refused |= 1 << at,
                Err(_) => {}
            }
        }
        Took::Pages(Taken {
            moved,
            refused,
            kept: 0,
            read: Read::Yes,
        })
    }

    fn resume(&self, late: Late, _: Duration, _: &[EvictItem], _: &mut [u8]) -> Took {
        unreachable!("{late:?} of the model")
    }

    fn stay(&self, page: VirtPage, bytes: &[u8]) -> Result<(), UffdError> {
        self.install(page, bytes, Wake::Now)
    }

    fn left(&self, _: &[EvictItem], pages: u64) {
        self.left.fetch_add(pages.count_ones(), Ordering::Relaxed);
    }

    fn end(&self, _: &[EvictItem]) {}
}

impl Space for ModelMemory {
    fn way_out(&self) -> Option<&dyn WayOut> {
        Some(self)
    }

    fn register(&self, range: VirtRange, _: RegisterMode) -> Result<(), UffdError> {
        self.accepts(range)?;
        let mut kernel = lock(&self.kernel);
        (kernel.memory).advise(self.mm, range, |advice| advice.registered = true);
        Ok(())
    }

    fn unregister(&self, range: VirtRange) -> Result<(), UffdError> {
        let mut kernel = lock(&self.kernel);
        (kernel.memory).advise(self.mm, range, |advice| advice.registered = false);
        Ok(())
    }

    fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>> {
        let mut kernel = lock(&self.kernel);
        // The kernel needs memory for a fork's message only, so a read that finds none has it.
        if !kernel.pending.is_empty() && takes_one(&self.short_reads) {
            return Err(rustix::io::Errno::NOMEM.into());
        }
        let messages = self.messages.read_messages(buffer)?;
        let read = kernel.pending.drain(..messages.len());
        let events = read.filter(|is_event| *is_event).count() as u64;
        kernel.acknowledged += events;
        self.changed.notify_all();
        Ok(messages)
    }

    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), UffdError> {
        let range = VirtRange::new(at, at.plus((bytes.len() / BASE_PAGE_BYTES) as u64));
        let page = |at: usize| Content::of(&bytes[at * BASE_PAGE_BYTES..][..BASE_PAGE_BYTES]);
        self.put(range, wake, |at| page(at).expect("whole pages"))
    }

    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), UffdError> {
        self.put(range, wake, |_| Content::ZERO)
    }

    fn wake(&self, range: VirtRange) {
        if self.accepts(range).is_err() {
            return;
        }
        let waiting = &mut lock(&self.kernel).waiting;
        waiting.retain(|_, page| !range.contains(*page));
        self.changed.notify_all();
    }

    fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError> {
        assert!(range.is_empty() && !on, "the model has no write protection");
        if lock(&self.kernel).memory.is_changing(self.mm) {
            Err(UffdError::LayoutChanging { done: 0 })
        } else {
            Err(UffdError::Invalid)
        }
    }

    fn poison(&self, range: VirtRange) -> Result<(), UffdError> {
        if takes_one(&self.short_poisons) {
            return Err(UffdError::NoMemory { done: 0 });
        }
        for (done, page) in range.pages().enumerate() {
            let put = lock(&self.kernel).memory.poison(self.mm, page);
            put.map_err(|refusal| refused(refusal, done as u64))?;
        }
        Ok(())
    }

    fn is_gone(&self) -> bool {
        !lock(&self.kernel).memory.has(self.mm)
    }

    fn lowest(&self) -> VirtPage {
        VirtPage(self.lowest.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pages of the lowest addresses, of the middle and of the top: absent, there, poisoned.
    #[test]
    fn is_gone_of_a_live_space_leaves_every_page_as_it_was() {
        for start in [0, 16, 0x4_0000, 0x7_ffff_fffc] {
            let pages = VirtRange::new(VirtPage(start), VirtPage(start + 3));
            let model = ModelMemory::new(pages);
            let there = VirtPage(start + 1);
            model.zero(VirtRange::one(there), Wake::Now).expect("room");
            let poisoned = VirtPage(start + 2);
            model.poison(VirtRange::one(poisoned)).expect("room");
            assert!(!model.is_gone() && !model.is_event_pending());
            let mut kernel = lock(&model.kernel);
            let touch = |memory: &mut Memory, page| memory.touch(model.mm, page, None);
            assert!(kernel.memory.is_absent(model.mm, pages.start));
            assert_eq!(touch(&mut kernel.memory, pages.start), Touch::Fault);
            let zeros = Touch::Done(Content::ZERO);
            assert_eq!(touch(&mut kernel.memory, there), zeros);
            assert_eq!(touch(&mut kernel.memory, poisoned), Touch::Poisoned);
            kernel.memory.exit(model.mm);
            drop(kernel);
            assert!(model.is_gone());
        }
    }
}
