//! Whether children of the caller are in its own pid namespace.

use crate::raw::{call3, nr};

/// Longest name of a namespace, such as `pid:[4026531836]`.
const NAME: usize = 64;

/// False after `unshare(CLONE_NEWPID)`: the next child is process 1 of another namespace, and all
/// there end with it. True if it cannot be told. Cost: two system calls.
pub(crate) fn children_are_in_it() -> bool {
    let (mut own, mut childrens) = ([0; NAME], [0; NAME]);
    match name_of(c"/proc/self/ns/pid", &mut own) {
        None => true,
        // A namespace without a process has no name.
        found => {
            name_of(c"/proc/self/ns/pid_for_children", &mut childrens) == found && own == childrens
        }
    }
}

/// Where a link leads; its length.
fn name_of(link: &core::ffi::CStr, name: &mut [u8; NAME]) -> Option<usize> {
    let (link, at) = (link.as_ptr() as usize, name.as_mut_ptr() as usize);
    // SAFETY: a text that ends, and room that lives.
    let length = unsafe { call3(nr::READLINK, link, at, NAME) };
    usize::try_from(length).ok()
}
