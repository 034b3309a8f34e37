//! The kernel's pool of pages of 2 MiB. An administrator sets its size (`vm.nr_hugepages`); memory
//! of large pages comes from there and from nowhere else.

use std::fs;
use std::io;
use std::path::Path;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// The pool, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugePages {
    /// As the administrator set it.
    pub pages: u64,
    /// Pages that anybody can have now. Those that mappings have reserved are left out; those that
    /// the kernel may make beyond the pool (`vm.nr_overcommit_hugepages`) are in it.
    pub available: u64,
}

impl HugePages {
    /// The pool of now. Errors: this kernel has none.
    pub fn now() -> io::Result<HugePages> {
        HugePages::below(Path::new(POOL))
    }

    fn below(folder: &Path) -> io::Result<HugePages> {
        let number = |name: &str| {
            let text = fs::read_to_string(folder.join(name))?;
            let number = text.trim().parse::<u64>();
            number.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        };
        let free = number("free_hugepages")?.saturating_sub(number("resv_hugepages")?);
        let more = number("nr_overcommit_hugepages")?;
        Ok(HugePages {
            pages: number("nr_hugepages")?,
            available: free + more.saturating_sub(number("surplus_hugepages")?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_is_not_available_and_what_may_be_made_is() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, number) in [
            ("nr_hugepages", 20),
            ("free_hugepages", 9),
            ("resv_hugepages", 4),
            ("nr_overcommit_hugepages", 3),
            ("surplus_hugepages", 1),
        ] {
            fs::write(folder.path().join(name), format!("{number}\n")).expect("a file");
        }
        let pool = HugePages::below(folder.path()).expect("a pool");
        let expected = HugePages {
            pages: 20,
            available: 7,
        };
        assert_eq!(pool, expected);
        assert!(HugePages::below(Path::new("/proc/none")).is_err());
    }
}
