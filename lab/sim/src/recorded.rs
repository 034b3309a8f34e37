//! The settings of a recorded live run, read from its trace.

use undercroft_base::Bytes;
use undercroft_trace::Header;

use crate::place::Placement;
use crate::setup;

/// The options of the recorded run that a replay can take over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// `--memory-max`, without the room of pages that waited to be written (`--write-behind`).
    pub limit: Bytes,
    /// `--policy`; it can be simulated.
    pub policy: String,
    /// `--prefetch`; it can be simulated.
    pub prefetch: String,
    /// `--placement`; it can be simulated.
    pub placement: Placement,
}

/// The placement of traces that do not name one: there was no other.
const PLACEMENT_BEFORE: &str = "waterfall";

impl Recorded {
    /// From a trace's header. `None` if it is not of a live run, or its source does not follow
    /// docs/formats/trace.md.
    pub fn of(header: &Header) -> Option<Recorded> {
        let (_, options) = header.source.split_once(" run, ")?;
        let value = |option: &str| {
            let mut words = options.split(' ').skip_while(|word| *word != option);
            words.nth(1)
        };
        let limit: i64 = value("--memory-max")?.parse().ok()?;
        let waiting: i64 = match value("--write-behind") {
            Some(bytes) => bytes.parse().ok()?,
            None => 0,
        };
        let limit = limit.checked_sub(waiting).filter(|_| waiting >= 0)?;
        let policy = setup::reclaim(value("--policy")?).ok()?;
        let prefetch = setup::prefetch(value("--prefetch").unwrap_or("none")).ok()?;
        let placement = value("--placement").unwrap_or(PLACEMENT_BEFORE);
        (header.live && header.movements && limit > 0).then_some(Recorded {
            limit: Bytes(limit as u64),
            policy,
            prefetch,
            placement: placement.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_run_says_its_limit_and_policies_and_nothing_else_does() {
        let of = |movements, source: &str| {
            Recorded::of(&Header {
                live: true,
                movements,
                source: source.to_owned(),
                ..Header::default()
            })
        };
        let good =
            "undercroft 0.1.0 run, --memory-max 33554432 --policy active_inactive --prefetch none";
        let recorded = of(true, good).unwrap();
        assert_eq!(recorded.limit, Bytes(32 << 20));
        assert_eq!(recorded.policy, "active_inactive");
        assert_eq!(recorded.prefetch, "none");
        assert_eq!(
            recorded.placement.to_string(),
            "waterfall",
            "as before there was another"
        );
        let worth = of(true, &format!("{good} --placement worth")).unwrap();
        assert_eq!(worth.placement.to_string(), "worth");
        assert_eq!(of(false, good), None);
        let waiting = of(true, &format!("{good} --write-behind 524288")).unwrap();
        assert_eq!(waiting.limit, Bytes((32 << 20) - (512 << 10)));
        for bad in [
            "",
            "valgrind-3.19.0 lackey, cache 1048576,16,64,fetch",
            "undercroft 0.1.0 run, --policy clock",
            "undercroft 0.1.0 run, --memory-max 0 --policy clock",
            "undercroft 0.1.0 run, --memory-max -1 --policy clock",
            "undercroft 0.1.0 run, --memory-max 18446744073709551615 --policy clock",
            "undercroft 0.1.0 run, --memory-max 4096 --policy of_tomorrow",
            "undercroft 0.1.0 run, --memory-max 4096 --policy",
            "undercroft 0.1.0 run, --memory-max 4096 --policy clock --prefetch of_tomorrow",
            "undercroft 0.1.0 run, --memory-max 4096 --policy clock --placement of_tomorrow",
            "undercroft 0.1.0 run, --memory-max 4096 --policy clock --write-behind 4096",
            "undercroft 0.1.0 run, --memory-max 4096 --policy clock --write-behind -1",
            "undercroft 0.1.0 run, --memory-max 4096 --policy clock --write-behind x",
        ] {
            assert_eq!(of(true, bad), None, "{bad}");
        }
    }
}
