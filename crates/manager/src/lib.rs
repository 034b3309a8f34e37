//! The manager of a run: it serves the faults of one client, and keeps it to its limit. The keeper
//! (`undercroft-keeper`) starts it and outlives it.
//!
//! # Threads
//!
//! - `uc-fault-N`: one a CPU, at most 8, bound to it. It serves faults while client threads fault
//!   on its CPU; one is always active (`cpus/`).
//! - `uc-evict`: one, on CPUs where no client thread faults, if there is one. `uc-access` scans
//!   Accessed bits there, and `uc-migrate` moves pages between tiers in the background.
//! - `uc-layout-N`: one a CPU, at most 8, real-time priority 2. The kernel tells it of new mappings
//!   (perf), and it registers them before the program uses them. It waits for no lock of the books.
//!   `uc-arrivals` (priority 1) brings the books up to date.
//! - control, the first thread: handshakes, exits, pressure, discovery, status. It has priority 1
//!   until the client is managed.
//! - `uc-guard` (priority 1): moves threads of the manager that get no CPU. It takes no lock.
//! - `uc-plugin` (`--policy FILE.wasm`): runs the user's policy when no other thread wants the CPU.
//!   For a while, one of this name checks a file (`undercroft set PID policy=`).
//!   It takes no lock.
//! - `uc-strays`: looks for processes of the program that are not managed.
//! - `uc-given-back` (`undercroft vm`): hears what the guest gives back of its memory.
//! - For a while: `uc-add` (`tiers add`), `uc-core` (`undercroft core`), `uc-give-way` (memory for
//!   a userfaultfd of the program's own), `uc-trace` (`--trace`). In the keeper: `uc-grant` (a
//!   daemon).
//! - A client thread that alone faults is bound to its CPU (`cpus/pin.rs`). Each process has
//!   an agent, `uc-agent`, a process on the evictor's CPUs: all signals blocked, filtered.
//!
//! A class of the daemon may keep all of these on some CPUs, and without real-time priority.
//!
//! # Locks, in order
//!
//! `Books::storing`, then `layout` of a space, then `Process::order`, then `engine`.
//!
//! - `layout` is an RwLock, one a space. Two kinds of thread hold those of several spaces at once:
//!   the evictor, for reading, in order of space; and the fault thread that reads a FORK event,
//!   which has the parent's, and takes the new child's that no other thread knows yet.
//! - `Process::order` is a Mutex: the layout events that are held back.
//! - Guest memory has a Mutex between `layout` and `engine`, [`space::guest::Guest::stays`].
//! - `engine` is a Mutex. With it held, no thread does I/O or waits for another thread.
//! - `Books::storing` is an RwLock. The evictor holds it for reading during a batch, and from the
//!   choice of a demotion to its end. `uc-migrate` locks it for writing and releases it at once,
//!   with no lock held. Drains have a Mutex before `engine`.
//! - The estimator's lock (`books/curve.rs`) is taken before `engine`, and by no fault thread.
//! - A tier's lock comes after `layout`, and is never held together with the engine's: slots to
//!   free are taken out of the engine first.
//! - The list of processes is locked for moments only, and then no lock is taken but those of the
//!   queues by which fault threads hear of processes (`Processes::tell`).
//!
//! What follows:
//!
//! - The kernel acknowledges a layout event inside `read`, and `layout` is written then and read
//!   while pages are installed. So no page is installed between an event's acknowledgement and its
//!   bookkeeping.
//! - A change of many pages is made a few chunks at a time, with `engine` unlocked in between; with
//!   `--trace` in one piece. A move or a fork holds `layout` of its space to the end: some 15 us a
//!   chunk. That of a fork child is held until its books are complete.
//! - `pagemap` of an address space is believed only while no event is unread
//!   (`Process::event_pending`): while a move is unread, the pages would be counted twice.
//! - A page number with its address is checked again whenever a lock was released in between
//!   (`is_at`). So are the pages of a plan (`validate`), if a load was upset meanwhile (`Upsets`).

mod advice;
mod books;
pub mod control;
mod cpus;
mod evict;
mod fault;
mod gauges;
mod log;
mod migrate;
mod record;
mod signals;
mod space;
mod sync;
