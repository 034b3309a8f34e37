//! The command line that other processes see of this one (`ps`, `/proc/PID/cmdline`). It is read
//! from this process's memory, and all users may read it.

use std::io;

use crate::procfs;

/// Puts `title` in place of the arguments that this process was started with. They can no longer be
/// read then, here (`std::env::args`) or elsewhere: copy first what is needed. A title that is
/// longer than the arguments is cut at a blank, or where it must be.
///
/// Errors: /proc is not there, or not the kernel's.
pub fn set(title: &str) -> io::Result<()> {
    let stat = std::fs::read("/proc/self/stat")?;
    let address = |number| procfs::stat_field(&stat, number)?.parse::<usize>().ok();
    let (Some(start), Some(end)) = (address(48), address(49)) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    // One byte for the end of the title, and one for the mark.
    let Some(room) = end.checked_sub(start).and_then(|all| all.checked_sub(2)) else {
        return Ok(()); // no arguments, so there is nothing to hide
    };
    let title = fitting(title, room).as_bytes();
    // SAFETY: the kernel keeps the arguments at `start..end`, on the first thread's stack, for the
    // life of the process, writable. The C library and `std` have pointers there, no references:
    // from now on they read the title. Nothing of ours reads them at the same time.
    unsafe { std::ptr::write_bytes(start as *mut u8, 0, end - start) };
    // SAFETY: as above; the title is shorter than the room, and no part of it.
    unsafe { std::ptr::copy_nonoverlapping(title.as_ptr(), start as *mut u8, title.len()) };
    // The kernel takes a last byte that is not zero for the mark of a title: it then shows the text
    // up to the first zero, and no empty arguments behind it.
    // SAFETY: the last byte of the range above.
    unsafe { ((end - 1) as *mut u8).write(b'.') };
    Ok(())
}

/// The part of a title that has room.
fn fitting(title: &str, room: usize) -> &str {
    if title.len() <= room {
        return title;
    }
    let part = title.get(..room).unwrap_or_default();
    let blank = title.get(..=room).and_then(|longer| longer.rfind(' '));
    blank.map_or(part, |at| &title[..at]).trim_end_matches(':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_that_is_too_long_loses_its_last_words() {
        let title = "undercroft: keeper of 4711";
        for (room, shown) in [
            (100, title),
            (26, title),
            (25, "undercroft: keeper of"),
            (21, "undercroft: keeper of"),
            (18, "undercroft: keeper"),
            (17, "undercroft"),
            (4, "unde"),
            (0, ""),
        ] {
            assert_eq!(fitting(title, room), shown, "{room}");
        }
    }

    /// In the test's own process, whose arguments nothing reads any more.
    #[test]
    fn others_read_the_title_and_nothing_of_the_arguments() {
        let before = std::fs::read("/proc/self/cmdline").expect("/proc");
        assert!(before.len() > 12);
        for title in ["undercroft", "uc"] {
            set(title).expect("/proc");
            let seen = std::fs::read("/proc/self/cmdline").expect("/proc");
            assert_eq!(seen, [title.as_bytes(), b"\0"].concat());
        }
    }
}
