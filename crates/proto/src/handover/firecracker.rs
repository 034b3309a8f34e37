//! The form of Firecracker (`PUT /snapshot/load`, `mem_backend` of type `Uffd`), as its main branch
//! had it in August 2026: one JSON array, and the userfaultfd with its first bytes.
//!
//! ```text
//! [{"base_host_virt_addr": 139942048309248, "size": 536870912, "offset": 0,
//!   "page_size": 4096, "page_size_kib": 4096}]
//! ```
//! Both sizes of a page are in bytes. The second is the older one, and may be missing.

use serde::Deserialize;
use undercroft_base::{BASE_PAGE_BYTES, Bytes};

use super::{Handover, REGIONS_MAX, Refused, Said, whole};

#[derive(Deserialize)]
struct Mapping {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    page_size_kib: Option<u64>,
}

/// As [`super::parse`], of this form.
pub(super) fn parse(bytes: &[u8], file: Bytes) -> Result<Option<Handover>, Refused> {
    let Some(mappings) = whole::<Vec<Mapping>>(bytes)? else {
        return Ok(None);
    };
    if mappings.len() > REGIONS_MAX {
        return Err(Refused::Count(mappings.len()));
    }
    let sizes = (mappings.iter()).flat_map(|of| [of.page_size, of.page_size_kib]);
    let base = BASE_PAGE_BYTES as u64;
    if let Some(other) = sizes.flatten().find(|size| *size != base) {
        return Err(Refused::PageSize(other));
    }
    let said = |of: &Mapping| Said {
        address: of.base_host_virt_addr,
        bytes: of.size,
        offset: of.offset,
    };
    let said: Vec<Said> = mappings.iter().map(said).collect();
    Handover::checked(&said, file).map(Some)
}

#[cfg(test)]
mod tests {
    use undercroft_base::{VirtPage, VirtRange};
    use undercroft_seeded::Random;

    use super::super::{MESSAGE_MAX, Order, Region, check, parse};
    use super::*;

    const FILE: Bytes = Bytes(1 << 20);

    fn mapping(address: u64, size: u64, offset: u64) -> String {
        format!(
            r#"{{"base_host_virt_addr": {address}, "size": {size}, "offset": {offset},
                "page_size": 4096, "page_size_kib": 4096}}"#
        )
    }

    fn parsed(mappings: &[String]) -> Result<Option<Handover>, Refused> {
        parse(format!("[{}]", mappings.join(",")).as_bytes(), FILE)
    }

    #[test]
    fn a_list_is_parsed_once_it_has_come_whole() {
        let low = mapping(0x7000_0000, 0x3000, 0);
        let high = mapping(0x1000_0000, 0x2000, 0x3000);
        let text = format!(" [{low},\n{high}] ");
        for end in 0..text.trim_end().len() {
            assert_eq!(parse(&text.as_bytes()[..end], FILE), Ok(None), "{end}");
        }
        let handover = parse(text.as_bytes(), FILE).expect("good").expect("whole");
        let region = |start, pages, at| Region {
            range: VirtRange::new(VirtPage(start), VirtPage(start + pages)),
            at,
        };
        assert_eq!(
            handover.regions(),
            [region(0x10000, 2, 3), region(0x70000, 3, 0)]
        );
        assert_eq!(handover.pages().0, 5);
        assert!(check(text.as_bytes()));
        let older = r#"[{"base_host_virt_addr":4096,"size":4096,"offset":0,"page_size_kib":4096}]"#;
        assert!(check(older.as_bytes()));
        let order = String::from_utf8(Order::bytes(&handover)).expect("a text");
        for end in 0..order.len() {
            assert_eq!(parse(&order.as_bytes()[..end], FILE), Ok(None), "{end}");
        }
        assert_eq!(parse(order.as_bytes(), FILE), Ok(Some(handover)));
        assert!(check(order.as_bytes()));
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_the_reason() {
        const AT: u64 = 0x7000_0000;
        for (mappings, why) in [
            (vec![], Refused::Count(0)),
            (vec![mapping(AT + 1, 4096, 0)], Refused::Unaligned(0)),
            (vec![mapping(AT, 4097, 0)], Refused::Unaligned(0)),
            (vec![mapping(AT, 4096, 1)], Refused::Unaligned(0)),
            (vec![mapping(AT, 0, 0)], Refused::Nowhere(0)),
            (vec![mapping(1 << 63, 4096, 0)], Refused::Nowhere(0)),
            (vec![mapping(4096, !4095, 0)], Refused::Nowhere(0)),
            (
                vec![mapping(AT, 8192, FILE.0 - 4096)],
                Refused::BeyondFile {
                    at: 0,
                    end: FILE.0 + 4096,
                    file: FILE.0,
                },
            ),
            (
                vec![mapping(AT, 4096, !4095)],
                Refused::BeyondFile {
                    at: 0,
                    end: u64::MAX,
                    file: FILE.0,
                },
            ),
            (
                vec![mapping(AT, 8192, 0), mapping(AT + 4096, 4096, 8192)],
                Refused::Overlap(AT + 4096),
            ),
            (
                vec![mapping(AT, 8192, 4096), mapping(2 * AT, 4096, 8192)],
                Refused::SameContents(8192),
            ),
            (
                (0..=REGIONS_MAX as u64)
                    .map(|at| mapping(at << 20, 4096, 0))
                    .collect(),
                Refused::Count(REGIONS_MAX + 1),
            ),
        ] {
            assert_eq!(parsed(&mappings), Err(why), "{mappings:?}");
        }
        let huge = mapping(AT, 1 << 21, 0).replace("4096}", "2097152}");
        assert_eq!(parsed(&[huge]), Err(Refused::PageSize(2 << 20)));
        let refused = |text: &str| parse(text.as_bytes(), FILE).expect_err(text);
        let other =
            r#"{"type":"handoff","version":1,"vmm_pid":7,"regions":[{"guest_phys_addr":0}]}"#;
        assert_eq!(refused(other), Refused::Proposed);
        assert_eq!(refused("\u{1}\0\0"), Refused::Binary);
        for text in ["{}", "x", "[1]", "[{}]", "[\"\"]", "[{\"size\":-1}]", "[}"] {
            assert!(matches!(refused(text), Refused::Unknown(_)), "{text}");
        }
        let twice = format!("[{0}][{0}]", mapping(AT, 4096, 0));
        assert_eq!(refused(&twice), Refused::More);
        let long = format!("[{}", " ".repeat(MESSAGE_MAX));
        assert_eq!(refused(&long), Refused::TooLong);
        let blank = " ".repeat(MESSAGE_MAX);
        assert!(matches!(refused(&blank), Refused::Unknown(_)));
    }

    /// Bytes change, and pieces are put in place of others.
    #[test]
    fn mutated_messages_keep_every_promise() {
        const PIECES: [&str; 8] = [
            "1e99",
            "-1",
            "null",
            "[]",
            "{}",
            "18446744073709551615",
            "0",
            "]",
        ];
        let mut random = Random::new(57);
        let (mut taken, mut refused) = (0, 0);
        for _ in 0..30_000 {
            let at = |pages: u64| 4096 * pages;
            let regions = (0..random.below(3)).map(|of| {
                let pages = 1 + random.below(4);
                mapping(
                    at(100 * of + random.below(90)),
                    at(pages),
                    at(20 * of + random.below(19)),
                )
            });
            let list: Vec<_> = regions.collect();
            let mut bytes = format!("[{}]", list.join(",")).into_bytes();
            for _ in 0..random.below(3) {
                let at = random.index(bytes.len());
                let to = (at + random.index(8)).min(bytes.len());
                match random.below(4) {
                    0 => bytes[at] ^= 1 << random.below(8),
                    1 => bytes[at] = b"0123456789"[random.index(10)],
                    2 => bytes.truncate(at + 1),
                    _ => drop(bytes.splice(at..to, PIECES[random.index(8)].bytes())),
                }
            }
            if check(&bytes) {
                taken += 1;
            } else {
                refused += 1;
            }
        }
        assert!(taken > 3_000 && refused > 3_000, "{taken}, {refused}");
    }
}
