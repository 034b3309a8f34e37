//! The inside of the run's guest, as its plugin asks about it: addresses by the guest's page
//! tables, and registers at a fault. Nothing of it is looked at for a plugin that does not ask.

use std::sync::Arc;

use undercroft_base::BASE_PAGE_BYTES;
use undercroft_plugin::{Desk, Guest, GuestMemory};
use undercroft_sys::access::vcpu::VirtualCpus;
use undercroft_sys::object::MemoryObject;

use crate::space::shared::Shared;

/// The memory of a guest, by its descriptor: no page of it is loaded or mapped, and no lock of ours
/// is taken. A hole reads as zeros, so zeros say nothing.
struct Image(Arc<MemoryObject>);

impl GuestMemory for Image {
    fn pages(&self) -> u64 {
        self.0.bytes().pages_floor().0
    }

    fn read(&self, page: u64, from: usize, words: &mut [u64]) -> bool {
        let at = page * BASE_PAGE_BYTES as u64 + from as u64 * 8;
        self.0.read_words(at, words).is_ok() && words.iter().any(|word| *word != 0)
    }
}

/// Lets the plugin ask about the guest, as soon as the run has one.
pub(super) fn show(desk: &mut Desk, shared: &Shared) {
    if desk.lacks_guest()
        && let (Some(object), Some(space)) = (&shared.guest, shared.inside.space.get())
    {
        let each = object.page_size().base_pages();
        desk.show_guest(Guest::new(*space, Box::new(Image(object.clone())), each));
    }
}

/// Has fault threads look at registers of the guest's virtual CPUs.
pub(super) fn look_at_registers(shared: &Shared) {
    if shared.guest.is_none() || shared.inside.cpus.get().is_some() {
        return;
    }
    match VirtualCpus::open() {
        Ok(cpus) => _ = shared.inside.cpus.set(cpus),
        Err(why) => crate::log::warn(&format!(
            "the policy file hears of no instruction or page table of the guest: {why}"
        )),
    }
}
