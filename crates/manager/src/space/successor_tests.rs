//! Memory of a process as a successor meets it: what it registers and wakes before it has looked at
//! the mappings.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{PageSize, VirtPage, VirtRange};
use undercroft_model::content::Content;
use undercroft_model::memory::Touch;
use undercroft_sys::mapping::PageBuf;
use undercroft_sys::procfs::Vma;
use undercroft_sys::uffd::MessageBuf;

use super::discover::{note_fences, register_ground};
use super::model::{ModelMemory, agent};
use super::port::{Space, Wake};
use super::process::Process;
use super::shared::Shared;
use crate::fault::model_tests::{options, shared, this_process};

/// A process that has this memory, and the mappings of this one.
fn process(shared: &Shared, memory: Arc<ModelMemory>) -> Process {
    let space = shared.books.engine().layout().add_space();
    let row = shared.books.row(space);
    let process = Process::new(space, memory, VirtPage(1), None, None, row);
    let _ = process.identity.set(this_process());
    process
}

/// The kernel refuses a registration that reaches over a mapping which cannot be managed. So those
/// are known before the first discovery.
#[test]
fn what_a_successor_registers_early_reaches_over_no_mapping_of_a_file() {
    let here = PageBuf::new(4, PageSize::Base).expect("private anonymous memory");
    let start = VirtPage::of(here.as_ptr() as u64);
    let range = VirtRange::new(start, start.plus(4));
    let shared = shared(options("ram"));
    let process = process(&shared, Arc::new(ModelMemory::new(range)));
    assert!(process.agent.set(agent(&shared, &process)).is_ok());
    let mut text = String::new();
    note_fences(&shared, &process, &mut text);
    let ground = process.ground.around(range).expect("no fence is in it");
    assert_ne!(ground, process.all_pages, "no mapping of a file is known");
    let others = text.lines().filter_map(Vma::parse);
    let mut others = others.filter(|vma| !vma.is_private_anonymous());
    let over = others.find(|vma| !vma.range.intersect(ground).is_empty());
    assert!(over.is_none(), "{ground:?} reaches over {over:?}");
}

/// Messages that come within ten seconds, until there is one.
fn messages(memory: &ModelMemory) -> usize {
    let (mut buffer, since) = (MessageBuf::default(), Instant::now());
    while since.elapsed() < Duration::from_secs(10) {
        let found = memory.events(&mut buffer).expect("messages").len();
        if found > 0 {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    0
}

/// Before Linux 6.16 the kernel refuses each request that begins below `vm.mmap_min_addr`, whatever
/// else is in its range.
#[test]
fn nothing_is_woken_or_registered_below_the_lowest_page() {
    let lowest = VirtPage(32);
    let range = VirtRange::new(lowest, lowest.plus(4));
    let memory = Arc::new(ModelMemory::new(range));
    memory.lowest.store(lowest.0, Ordering::Relaxed);
    let process = process(&shared(options("ram")), memory.clone());
    memory.unregister(range).expect("the model does");
    let fence = VirtRange::new(range.end.plus(8), range.end.plus(9));
    process.ground.fence(fence);
    let ground = register_ground(&process, VirtRange::one(lowest.plus(1)));
    assert_eq!(ground, Some(VirtRange::new(lowest, fence.start)));
    assert!(range.pages().all(|page| memory.is_registered(page)));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| memory.touch(lowest, None, 0));
        assert_eq!(messages(&memory), 1);
        process.memory.wake(process.all_pages);
        let again = messages(&memory);
        let page = VirtRange::one(lowest);
        memory.zero(page, Wake::Now).expect("it is missing");
        assert_eq!(again, 1, "it was woken, and has faulted again");
        let read = thread.join().expect("it ends");
        assert_eq!(read, Touch::Done(Content::ZERO));
    });
}
