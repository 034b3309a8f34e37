//! Who is admitted, and whose pages go to the buffer, for all clients of one device and one buffer:
//! demand against capacity (NVSwap §V, Eq. 2), by the order of Algorithm 1.
//!
//! All clients are put on the device. While the tail of its reads beside their load breaks the
//! smallest bound among them, that client goes to the buffer, with all its pages: a percentile is
//! that of the slowest, so a part of them would not do. The set is refused if the buffer has no
//! room, or is too slow. Control aims below a limit, so what is promised here is as far below.

use undercroft_base::Nanos;

use crate::bound::LatencyBound;
use crate::control::GOAL_PERCENT;
use crate::load::{Load, Service};

/// Demands of a client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asks {
    /// Its bound, if it has one.
    pub bound: Option<LatencyBound>,
    /// Measured, or declared, or [`Load::of_bound`].
    pub load: Load,
    /// Its pages that may be out of memory at once.
    pub pages: u64,
}

/// Where pages go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Devices {
    /// The last tier.
    pub device: Service,
    /// The first tier and the pages that it can hold, if it is another.
    pub buffer: Option<(Service, u64)>,
}

/// Why a set of clients is refused: of the first client whose bound breaks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Broken {
    /// Its place in the set.
    pub client: usize,
}

/// The most that could be kept for another client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Could {
    /// This limit, for the same percentile.
    Limit(Nanos),
    /// No limit: this part of its load could be served. Others' bounds break with more.
    Part(f64),
}

/// The largest limit that a bound may have.
const LIMIT_MAX: Nanos = Nanos(60_000_000_000);

/// Steps of a search for what could be kept: a 30th of a percent of the range.
const STEPS: u32 = 40;

/// Whether all bounds of a set can be kept. Returns for each client whether it uses the buffer.
/// O(n log n + n * channels).
///
/// Errors: the client whose bound breaks. Of clients without bounds, any load is taken: nothing is
/// promised to them.
pub fn place(set: &[Asks], devices: &Devices) -> Result<Vec<bool>, Broken> {
    let mut order: Vec<(LatencyBound, usize)> = Vec::new();
    for (at, asks) in set.iter().enumerate() {
        order.extend(asks.bound.map(|bound| (bound, at)));
    }
    order.sort_by_key(|(bound, at)| (bound.limit, *at));
    let mut buffered = vec![false; set.len()];
    let mut load = set
        .iter()
        .fold(Load::default(), |sum, of| sum + of.load.sane());
    let (mut inside, mut pages) = (Load::default(), 0u64);
    for (bound, at) in &order {
        if keeps(*bound, &devices.device, load) {
            break; // the larger bounds are kept, too
        }
        let own = set[*at].load.sane();
        (load, inside) = (load - own, inside + own);
        pages = pages.saturating_add(set[*at].pages);
        buffered[*at] = true;
        let fits = devices.buffer.is_some_and(|(_, room)| pages <= room);
        if !fits {
            return Err(Broken { client: *at });
        }
    }
    let Some((buffer, _)) = &devices.buffer else {
        return Ok(buffered);
    };
    let inner = order.iter().filter(|(_, at)| buffered[*at]);
    for (bound, at) in inner {
        if !keeps(*bound, buffer, inside) {
            return Err(Broken { client: *at });
        }
    }
    Ok(buffered)
}

/// Whether one more client can be admitted: all bounds are kept with it. Returns for each of
/// `here`, and then for `new`, whether it uses the buffer. A client without a bound is refused only
/// if the others' bounds break by it.
///
/// Errors: what could be kept instead.
pub fn admit_one(here: &[Asks], new: Asks, devices: &Devices) -> Result<Vec<bool>, Could> {
    let mut set = here.to_vec();
    let last = set.len();
    set.push(new);
    match place(&set, devices) {
        Ok(buffered) => return Ok(buffered),
        // What was promised is broken already. That is no reason to refuse one that adds nothing.
        Err(_) if new.bound.is_none() && place(here, devices).is_err() => {
            return Ok(vec![false; set.len()]);
        }
        Err(_) => {}
    }
    if let Some(bound) = new.bound {
        let mut keeps = |limit: u64| {
            set[last].bound = Some(bound.with_limit(Nanos(limit)));
            place(&set, devices).is_ok()
        };
        if keeps(LIMIT_MAX.0) {
            let (mut low, mut high) = (bound.limit.0, LIMIT_MAX.0);
            for _ in 0..STEPS {
                let middle = low + (high - low) / 2;
                if keeps(middle) {
                    high = middle;
                } else {
                    low = middle;
                }
            }
            return Err(Could::Limit(Nanos(high)));
        }
        set[last].bound = Some(bound.with_limit(LIMIT_MAX));
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..STEPS {
        let middle = (low + high) / 2.0;
        set[last].load = new.load.times(middle);
        if place(&set, devices).is_ok() {
            low = middle;
        } else {
            high = middle;
        }
    }
    Err(Could::Part(low))
}

fn keeps(bound: LatencyBound, service: &Service, load: Load) -> bool {
    let goal = bound.limit.0 * GOAL_PERCENT / 100;
    let tail = service.tail(bound.percentile, load);
    tail.is_some_and(|tail| tail.0 <= goal)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: Devices = Devices {
        device: Service {
            path: Nanos(0),
            read: Nanos(90_000),
            write: Nanos(640_000),
            beside: 2.0,
            channels: 9,
        },
        buffer: Some((
            Service {
                path: Nanos(0),
                read: Nanos(1_000),
                write: Nanos(2_000),
                beside: 1.0,
                channels: 1,
            },
            1_000,
        )),
    };

    fn asks(bound: &str, reads: f64, writes: f64, pages: u64) -> Asks {
        Asks {
            bound: (!bound.is_empty()).then(|| bound.parse().expect("a bound")),
            load: Load { reads, writes },
            pages,
        }
    }

    #[test]
    fn the_smallest_bounds_get_the_buffer_and_only_those_that_need_it() {
        let set = [
            asks("p99=1ms", 1_000.0, 500.0, 900),
            asks("p99=50us", 1_000.0, 0.0, 900),
            asks("", 1_000.0, 500.0, 9_000),
        ];
        assert_eq!(place(&set, &DEVICES), Ok(vec![false, true, false]));
        let two = [set[1], set[1]];
        assert_eq!(place(&two, &DEVICES), Err(Broken { client: 1 }));
        let without = Devices {
            buffer: None,
            ..DEVICES
        };
        assert_eq!(place(&set, &without), Err(Broken { client: 1 }));
        assert_eq!(place(&set[..1], &without), Ok(vec![false]));
    }

    #[test]
    fn a_refusal_says_what_could_be_kept() {
        let here = [asks("p99=50us", 1_000.0, 500.0, 900)];
        let new = asks("p99=100us", 1_000.0, 500.0, 900);
        let Err(Could::Limit(limit)) = admit_one(&here, new, &DEVICES) else {
            panic!("the buffer has no room for both");
        };
        assert_eq!(limit.0 / 1000, 200, "180 us, and a tenth less is the aim");
        let again = new.bound.map(|bound| bound.with_limit(limit));
        let again = Asks {
            bound: again,
            ..new
        };
        assert_eq!(admit_one(&here, again, &DEVICES), Ok(vec![true, false]));
        // 60,000 reads beside a write are 10.8 channels: no limit helps.
        let here = [asks("p99=1ms", 1_000.0, 500.0, 9_000)];
        for bound in ["p99=2ms", ""] {
            let new = asks(bound, 60_000.0, 500.0, 9_000);
            let Err(Could::Part(part)) = admit_one(&here, new, &DEVICES) else {
                panic!("{bound}: the device is overloaded");
            };
            assert!((0.3..0.8).contains(&part), "{part}");
            let less = Asks {
                load: new.load.times(part),
                ..new
            };
            assert!(admit_one(&here, less, &DEVICES).is_ok());
        }
    }

    #[test]
    fn who_has_no_bound_is_admitted_where_nothing_is_promised() {
        let flood = asks("", 1e9, 1e9, u64::MAX);
        assert_eq!(admit_one(&[flood], flood, &DEVICES), Ok(vec![false; 2]));
        let broken = [asks("p99=50us", 1_000.0, 0.0, 9_000)];
        assert_eq!(admit_one(&broken, flood, &DEVICES), Ok(vec![false; 2]));
        let hostile = asks("p99=1ms", f64::NAN, f64::INFINITY, 1);
        assert_eq!(admit_one(&[], hostile, &DEVICES), Ok(vec![false]));
    }
}
