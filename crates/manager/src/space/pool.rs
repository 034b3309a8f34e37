//! The kernel's pool of huge pages has run out.

use std::time::Duration;

use undercroft_base::{Bytes, PageSize};

use crate::space::process::Process;
use crate::space::shared::Shared;

/// Pause of the thread that found it empty: another page leaves meanwhile.
const PAUSE: Duration = Duration::from_millis(1);

/// No huge page was free for a page of guest memory, which stays away. Until there are some again,
/// the guest is held to less than it has now: other pages leave, and theirs go back to the pool.
/// Then the thread, which faults again, finds one. Other memory is left to the kernel.
#[cold]
pub(crate) fn pool_is_empty(shared: &Shared, process: &Process) {
    if process.page_size() == PageSize::Base {
        return;
    }
    let gauges = &shared.gauges;
    let first = gauges.note_pool_short();
    let page = PageSize::Large.bytes() as u64;
    let allowed = {
        let mut engine = shared.books.engine();
        let used = engine.books().dram_used().0;
        let allowed = Bytes(used.saturating_sub(page)).min(gauges.pool_max());
        gauges.allow_pool(allowed);
        engine.approach_limit(gauges.limit_now());
        allowed
    };
    if first {
        let pages = gauges.memory_max().0.min(1 << 50) / page;
        crate::log::warn(&format!(
            "no huge page is free: the machine is held to {allowed} until there are some. Others use \
             the pool, or it is smaller than the limit; sysctl vm.nr_hugepages should be {pages} and \
             what others need"
        ));
    }
    shared.signals.kick_evictor();
    std::thread::sleep(PAUSE);
}
