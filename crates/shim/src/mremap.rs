//! Stands in for mremap: if the kernel refuses a move only because of us, carries it out piece by
//! piece.
//!
//! The kernel moves within one mapping only. A mapping that grew while it was managed may be in two
//! pieces, which a plain kernel would have merged: they differ in nothing but their userfaultfd. If
//! the pieces differ in anything else, the refusal is the program's own affair. Needs Linux 6.11 or
//! newer (PROCMAP_QUERY). Raw system calls bypass this.

use core::mem::size_of;

use crate::raw::{EFAULT, EINVAL, PAGE, call3, call6, close, fail, nr};
use crate::view;

pub(crate) const MAYMOVE: usize = 1;
pub(crate) const FIXED: usize = 2;
const DONTUNMAP: usize = 4;

/// Most pieces of one move. With more, the kernel's refusal stands.
const PIECES_MAX: usize = 64;

/// Attempts at one move. Mappings are registered meanwhile, and so fall into pieces or become one.
const TRIES: u32 = 16;

/// `PROCMAP_QUERY`.
const PROCMAP_QUERY: usize = 0xC068_6611;
/// In the answer: `r`, `w`, `x`, shared.
const PERMISSIONS: u64 = 0xf;

/// `struct procmap_query`, without asking for a name.
#[repr(C)]
#[derive(Clone, Copy)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    sizes: [u32; 2],
    addresses: [u64; 2],
}

const _: () = assert!(size_of::<Query>() == 104);

/// A move in pieces: the end of each, and the target of all.
struct Pieces {
    old: usize,
    ends: [usize; PIECES_MAX],
    count: usize,
    new: usize,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(
    old: usize,
    old_bytes: usize,
    new_bytes: usize,
    flags: i32,
    target: usize,
) -> isize {
    let flags = flags as u32 as usize;
    if view::has_machine() && is_machine(old) {
        return fail(EINVAL);
    }
    for _ in 0..TRIES {
        // SAFETY: the program's own call, passed on.
        let result = unsafe { call6(nr::MREMAP, old, old_bytes, new_bytes, flags, target, 0) };
        if result != EFAULT || flags & MAYMOVE == 0 || flags & !(MAYMOVE | FIXED | DONTUNMAP) != 0 {
            return fail(result);
        }
        let (Some(old_bytes), Some(new_bytes)) = (whole(old_bytes), whole(new_bytes)) else {
            return fail(result);
        };
        match pieces(old, old_bytes.min(new_bytes)) {
            None => return fail(result),
            Some((_, 1)) => continue, // by now it is one
            Some(found) => {
                // SAFETY: as the program asked.
                let result =
                    unsafe { in_pieces(old, (old_bytes, new_bytes), found, flags, target) };
                if result != EFAULT {
                    return fail(result);
                }
            }
        }
    }
    fail(EFAULT)
}

/// Moves the old range piece by piece. Returns the new address, or an error; then all is as before.
///
/// # Safety
/// The old range is the program's to move, and so is `target` with `FIXED`.
unsafe fn in_pieces(
    old: usize,
    (old_bytes, new_bytes): (usize, usize),
    (ends, count): ([usize; PIECES_MAX], usize),
    flags: usize,
    target: usize,
) -> isize {
    let moved = old_bytes.min(new_bytes);
    let new = match flags & FIXED {
        // SAFETY: a fresh mapping at an address the kernel chooses: PROT_NONE, private, anonymous,
        // no reserve.
        0 => unsafe { call6(nr::MMAP, 0, new_bytes, 0, 0x4022, usize::MAX, 0) },
        _ => target as isize,
    };
    if new < 0 && new > -(PAGE as isize) {
        return new;
    }
    let pieces = Pieces {
        old,
        ends,
        count,
        new: new as usize,
    };
    // SAFETY: as the program asked: its mapping goes to `new`, and what was there goes away.
    let result = unsafe { pieces.carry_out(new_bytes, flags) };
    let (rest, rest_bytes) = match result {
        ..0 if flags & FIXED == 0 => (new as usize, new_bytes),
        0.. => (old + moved, old_bytes - moved),
        _ => (0, 0),
    };
    if rest_bytes > 0 {
        // SAFETY: this unmaps our own reservation, or what the program asked to cut off.
        unsafe { call3(nr::MUNMAP, rest, rest_bytes, 0) };
    }
    if result < 0 { result } else { new }
}

/// Bytes rounded up to whole pages. `None` for 0 bytes, or too many.
pub(crate) fn whole(bytes: usize) -> Option<usize> {
    let whole = bytes.checked_add(PAGE - 1)? & !(PAGE - 1);
    (whole > 0).then_some(whole)
}

/// The ends of the mappings that `bytes` from `old` on lie in: one, or several side by side, of
/// private anonymous memory with the same permissions.
fn pieces(old: usize, bytes: usize) -> Option<([usize; PIECES_MAX], usize)> {
    let end = old.checked_add(bytes)?;
    let file = open_maps()?;
    let (mut ends, mut count, mut at) = ([0; PIECES_MAX], 0, old);
    let mut permissions = None;
    while at < end && count < PIECES_MAX {
        let Some(query) = mapping_at(file, at) else {
            break;
        };
        let is = query.vma_flags & PERMISSIONS;
        if query.inode != 0 || is & 8 != 0 || *permissions.get_or_insert(is) != is {
            break;
        }
        at = query.end as usize;
        ends[count] = at.min(end);
        count += 1;
    }
    close(file);
    (at >= end).then_some((ends, count))
}

/// The mappings of this process.
fn open_maps() -> Option<usize> {
    // SAFETY: a path that lives for ever; O_RDONLY | O_CLOEXEC.
    let file = unsafe { call3(nr::OPEN, c"/proc/self/maps".as_ptr() as usize, 0o2000000, 0) };
    usize::try_from(file).ok()
}

/// The mapping at an address. `None`: there is none, or the kernel cannot be asked.
fn mapping_at(maps: usize, address: usize) -> Option<Query> {
    let mut query = Query {
        size: size_of::<Query>() as u64,
        flags: 0,
        address: address as u64,
        start: 0,
        end: 0,
        vma_flags: 0,
        page_size: 0,
        offset: 0,
        inode: 0,
        device: [0; 2],
        sizes: [0; 2],
        addresses: [0; 2],
    };
    let query_at = core::ptr::from_mut(&mut query) as usize;
    // SAFETY: `query` is live and of the size the request names.
    let asked = unsafe { call3(nr::IOCTL, maps, PROCMAP_QUERY, query_at) };
    // SAFETY: live; volatile because the kernel wrote behind the compiler's back.
    (asked >= 0).then(|| unsafe { core::ptr::read_volatile(&query) })
}

/// Whether memory of the run's machine is mapped at an address.
fn is_machine(address: usize) -> bool {
    let Some(maps) = open_maps() else {
        return false;
    };
    let mapping = mapping_at(maps, address);
    close(maps);
    mapping.is_some_and(|of| view::is_machine_of(of.inode, of.device))
}

impl Pieces {
    /// Moves all pieces; the last one takes the rest of `new_bytes`. On a refusal the pieces before
    /// it move back, and the kernel's answer is returned.
    ///
    /// # Safety
    /// The old range and the new one are the program's to move.
    unsafe fn carry_out(&self, new_bytes: usize, flags: usize) -> isize {
        let mut from = self.old;
        for at in 0..self.count {
            let offset = from - self.old;
            let bytes = self.ends[at] - from;
            let grown = if at + 1 == self.count {
                new_bytes - offset
            } else {
                bytes
            };
            let way = MAYMOVE | FIXED | flags & DONTUNMAP;
            // SAFETY: the caller's promise.
            let moved = unsafe { call6(nr::MREMAP, from, bytes, grown, way, self.new + offset, 0) };
            if moved < 0 && moved > -(PAGE as isize) {
                // SAFETY: as they came.
                unsafe { self.go_back(at) };
                return moved;
            }
            from = self.ends[at];
        }
        0
    }

    /// Moves the first `count` pieces back.
    ///
    /// # Safety
    /// They have moved, and nothing has taken their places.
    unsafe fn go_back(&self, count: usize) {
        let mut to = self.old;
        for end in &self.ends[..count] {
            let (bytes, from) = (end - to, self.new + (to - self.old));
            // SAFETY: the caller's promise.
            unsafe { call6(nr::MREMAP, from, bytes, bytes, MAYMOVE | FIXED, to, 0) };
            to = *end;
        }
    }
}
