//! The policy file that users have set while the program runs, with the values of its parameters:
//! a successor of the manager goes on with it. A memfd that the keeper makes.
//!
//! ```text
//! page 0   word 0: 0 if nothing was set; else twice the length of the text, plus its place
//! page 1.. two places for a text: JSON, the file or null
//! ```
//! The place that is not true is written, and one store makes it true: the manager may die at any
//! time.

use std::io;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use undercroft_base::BASE_PAGE_BYTES;
use undercroft_sys::mapping::SharedMemory;

use crate::options::PluginFile;

/// Two digits a byte of the file, and room for its path and its parameters.
const PLACE_BYTES: usize = 2 * PluginFile::BYTES_MAX + (64 << 10);

/// Memory for it; sparse, so only what is used takes memory.
pub fn fresh() -> io::Result<SharedMemory> {
    SharedMemory::create("uc-policy", BASE_PAGE_BYTES + 2 * PLACE_BYTES)
}

/// A manager's view of that memory.
pub struct Kept(Mutex<SharedMemory>);

impl Kept {
    /// Over the memory that [`fresh`] made. Errors: it is of another size.
    pub fn over(memory: SharedMemory) -> io::Result<Kept> {
        if memory.len() < BASE_PAGE_BYTES + 2 * PLACE_BYTES {
            return Err(io::Error::other(
                "the memory of the policy file was cut off",
            ));
        }
        Ok(Kept(Mutex::new(memory)))
    }

    /// Keeps the file, or that there is none. Errors: it is too long, and nothing has changed.
    pub fn write(&self, plugin: Option<&PluginFile>) -> io::Result<()> {
        let text = serde_json::to_vec(&plugin)?;
        if text.len() > PLACE_BYTES {
            return Err(io::Error::other("the policy file is too large to be kept"));
        }
        let memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = 1 - (memory.words()[0].load(Ordering::Acquire) & 1);
        memory.bytes_in(BASE_PAGE_BYTES + place as usize * PLACE_BYTES, &text);
        memory.words()[0].store((text.len() as u64) << 1 | place, Ordering::Release);
        Ok(())
    }

    /// The file that was set last, or that there is none. `None`: nothing was set.
    pub fn read(&self) -> Option<Option<PluginFile>> {
        let memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = memory.words()[0].load(Ordering::Acquire);
        let length = (found >> 1) as usize;
        if length == 0 || length > PLACE_BYTES {
            return None;
        }
        let mut text = vec![0; length];
        let place = (found & 1) as usize;
        memory.bytes_out(BASE_PAGE_BYTES + place * PLACE_BYTES, &mut text);
        serde_json::from_slice(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_successor_finds_the_last_file_that_was_kept_whole() {
        let memory = fresh().expect("memory");
        let again = || {
            let fd = memory.as_fd().try_clone_to_owned().expect("a descriptor");
            Kept::over(SharedMemory::from_fd(fd).expect("the same")).expect("whole")
        };
        assert_eq!(again().read(), None);
        let file = |bytes: usize| PluginFile {
            file: "/a \"b\".wasm".to_owned(),
            module: vec![0xa5; bytes],
            parameters: BTreeMap::from([("behind".to_owned(), -1)]),
        };
        let largest = file(PluginFile::BYTES_MAX);
        for kept in [Some(&file(3)), None, Some(&largest), Some(&file(4))] {
            again().write(kept).expect("room");
            assert_eq!(again().read(), Some(kept.cloned()));
        }
        assert!(
            again()
                .write(Some(&file(2 * PluginFile::BYTES_MAX)))
                .is_err()
        );
        assert_eq!(again().read(), Some(Some(file(4))), "nothing has changed");
    }
}
