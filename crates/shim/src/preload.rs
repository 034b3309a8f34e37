//! The shim's entry in the `LD_PRELOAD` of the next image. A loader that cannot load a preload says
//! so on the program's standard error. So where it could not, the entry is left out.
//!
//! Nothing here allocates or writes to memory that is shared: a child of vfork calls it.

use undercroft_wire::protocol::{BY_PLATFORM, SHIM_LINK};

use crate::image::{HERE, Kind, Target, descriptor_will_be_free, open};
use crate::library::bytes_of;
use crate::mapping::Mapping;
use crate::raw::{EMFILE, PAGE, call3, close, nr};

/// A null-terminated array of C strings.
pub(crate) type Environment = *const *const u8;

const VARIABLE: &[u8] = b"LD_PRELOAD=";

/// Longest path of the shim that is asked for. That of its socket is shorter.
const SHIM_MAX: usize = 256;

/// A changed environment of this size is on the stack, which may be small. A larger one is mapped.
const ROOM: usize = 2048;

/// An environment with the shim's entry.
struct Entry {
    environment: Environment,
    /// Variables in all, and the one that the loader takes: the last of that name.
    count: usize,
    at: usize,
    /// The variable up to the entry, the directory of the shim, and what follows the entry.
    before: &'static [u8],
    directory: &'static [u8],
    after: &'static [u8],
    /// The shim is named by the platform, and so fits programs of both kinds.
    by_platform: bool,
}

/// The fate of the entry.
#[derive(PartialEq, Eq)]
enum Fate {
    Keep,
    Drop,
    /// The loader finds a stub in its place.
    ByPlatform,
}

/// Calls `start` with the environment, or with a changed one if the loader of `target` could not
/// load the shim.
///
/// # Safety
/// All strings stay as they are meanwhile.
pub(crate) unsafe fn start_with(
    environment: Environment,
    target: &Target,
    start: &mut dyn FnMut(Environment) -> i32,
) -> i32 {
    // SAFETY: the caller's promise.
    let Some(entry) = (unsafe { Entry::find(environment) }) else {
        return start(environment);
    };
    // SAFETY: the caller's promise.
    match unsafe { entry.fate(target) } {
        Fate::Keep => start(environment),
        // SAFETY: the caller's promise.
        fate => unsafe { entry.start_changed(&fate, start) },
    }
}

impl Entry {
    /// # Safety
    /// All strings stay as they are meanwhile.
    unsafe fn find(environment: Environment) -> Option<Entry> {
        if environment.is_null() {
            return None;
        }
        let (mut count, mut found) = (0, None);
        loop {
            // SAFETY: the array goes on up to its null.
            let variable = unsafe { environment.wrapping_add(count).read() };
            if variable.is_null() {
                break;
            }
            // SAFETY: a C string.
            if unsafe { begins_with(variable, VARIABLE) } {
                found = Some((count, variable));
            }
            count += 1;
        }
        let (at, variable) = found?;
        // SAFETY: a C string that stays as it is meanwhile.
        let variable = unsafe { bytes_of(variable) };
        let (mut begin, value) = (VARIABLE.len(), &variable[VARIABLE.len()..]);
        for part in value.split(|byte| is_separator(*byte)) {
            let end = begin + part.len();
            if let Some((directory, by_platform)) = directory_of(part) {
                return Some(Entry {
                    environment,
                    count,
                    at,
                    before: &variable[..begin],
                    directory,
                    after: &variable[end..],
                    by_platform,
                });
            }
            begin = end + 1;
        }
        None
    }

    /// # Safety
    /// The target's strings stay as they are meanwhile.
    unsafe fn fate(&self, target: &Target) -> Fate {
        if !self.can_be_opened() {
            return Fate::Drop;
        }
        // SAFETY: a C string that stays as it is meanwhile.
        let search = unsafe { crate::library::variable(b"PATH=") };
        // SAFETY: the caller's promise.
        match unsafe { target.kind(search) } {
            Kind::Narrow if !self.by_platform => Fate::ByPlatform,
            Kind::Own | Kind::Narrow => Fate::Keep,
            Kind::Foreign => Fate::Drop,
        }
    }

    /// Whether the next image's loader can open the shim: its path leads there from this root, and
    /// a descriptor will be free.
    fn can_be_opened(&self) -> bool {
        let mut path = [0u8; SHIM_MAX];
        let name_at = self.directory.len();
        let end = name_at + SHIM_LINK.len();
        if end >= SHIM_MAX {
            return true;
        }
        path[..name_at].copy_from_slice(self.directory);
        path[name_at..end].copy_from_slice(SHIM_LINK.as_bytes());
        // SAFETY: a C string: the last byte is still 0.
        match unsafe { open(HERE, path.as_ptr()) } {
            EMFILE => descriptor_will_be_free(),
            file if file < 0 => false,
            file => {
                close(file as usize);
                true
            }
        }
    }

    /// # Safety
    /// All strings stay as they are meanwhile.
    #[inline(never)]
    unsafe fn start_changed(&self, fate: &Fate, start: &mut dyn FnMut(Environment) -> i32) -> i32 {
        let bytes = self.changed_bytes();
        if bytes <= ROOM {
            let mut room = [0u64; ROOM / size_of::<u64>()];
            // SAFETY: the room is large enough, and aligned.
            return start(unsafe { self.change(fate, room.as_mut_ptr().cast()) });
        }
        let Some(room) = Mapping::private(bytes.next_multiple_of(PAGE)) else {
            return start(self.environment);
        };
        // SAFETY: as above.
        let result = start(unsafe { self.change(fate, room.start as *mut u8) });
        // A child of vfork that starts an image never comes here, and its parent keeps the room.
        // SAFETY: nothing refers to it any more.
        unsafe { call3(nr::MUNMAP, room.start, room.bytes, 0) };
        result
    }

    /// Room for the changed environment: its array, then the text of the variable.
    fn changed_bytes(&self) -> usize {
        let array = (self.count + 1) * size_of::<usize>();
        let entry = self.directory.len() + BY_PLATFORM.len() + 1 + SHIM_LINK.len();
        array + self.before.len() + entry + self.after.len() + 1
    }

    /// # Safety
    /// `room` is writable for [`Entry::changed_bytes`], and aligned.
    unsafe fn change(&self, fate: &Fate, room: *mut u8) -> Environment {
        let array = room.cast::<*const u8>();
        let text = room.wrapping_add((self.count + 1) * size_of::<usize>());
        let (mut before, mut after) = (self.before, self.after);
        let entry: [&[u8]; 4] = match fate {
            Fate::ByPlatform => [
                self.directory,
                BY_PLATFORM.as_bytes(),
                b"/",
                SHIM_LINK.as_bytes(),
            ],
            _ => [b""; 4],
        };
        if *fate == Fate::Drop {
            // With the separator that it brought.
            match before {
                VARIABLE => after = after.get(1..).unwrap_or_default(),
                _ => before = &before[..before.len() - 1],
            }
        }
        let is_empty = *fate == Fate::Drop && before == VARIABLE && after.is_empty();
        let [a, b, c, d] = entry;
        let mut end = text;
        for part in [before, a, b, c, d, after, b"\0"] {
            // SAFETY: room for all parts (the caller's promise); no part is in it.
            unsafe { core::ptr::copy_nonoverlapping(part.as_ptr(), end, part.len()) };
            end = end.wrapping_add(part.len());
        }
        let mut to = array;
        for at in 0..=self.count {
            // SAFETY: the array goes on up to its null.
            let variable = unsafe { self.environment.wrapping_add(at).read() };
            if at == self.at && is_empty {
                continue;
            }
            // SAFETY: room for as many as there were.
            unsafe { to.write(if at == self.at { text } else { variable }) };
            to = to.wrapping_add(1);
        }
        array
    }
}

/// As loaders split the variable.
fn is_separator(byte: u8) -> bool {
    byte == b':' || byte.is_ascii_whitespace()
}

/// The directory, up to its slash, of a shim of that path, and whether the path goes by the
/// platform. `None`: it is no shim.
fn directory_of(part: &'static [u8]) -> Option<(&'static [u8], bool)> {
    let directory = part.strip_suffix(SHIM_LINK.as_bytes())?;
    let above = directory.strip_suffix(b"/")?;
    match above.strip_suffix(BY_PLATFORM.as_bytes()) {
        Some(run) if run.ends_with(b"/") => Some((run, true)),
        _ => Some((directory, false)),
    }
}

/// # Safety
/// `string` is a C string.
unsafe fn begins_with(string: *const u8, prefix: &[u8]) -> bool {
    let differs = |(at, byte): (usize, &u8)| {
        // SAFETY: the bytes before it were those of the prefix, so none was its end.
        unsafe { string.wrapping_add(at).read() != *byte }
    };
    !prefix.iter().enumerate().any(differs)
}
