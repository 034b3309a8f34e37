//! Whether the devices can serve one more run beside those that are here. `undercroft-qos` decides,
//! as in the simulator: docs/design/0035.
//!
//! The last tier is the device, the first is the buffer if it is another. A tier is as fast as its
//! `shape=` says, or as it was measured (`undercroft tiers --measure`). Load is weighed where both
//! are known. A grant of the buffer is a run's own, so the buffer has room for every run.

use undercroft_base::Nanos;
use undercroft_qos::{Asks, Could, Devices, LatencyBound, Load, Service, admit_one, place};
use undercroft_sys::fdpass::FDS_MAX;
use undercroft_tier::profile::Profile;
use undercroft_tier::shape::ShapeName;

use crate::config::{Budget, Class};

/// Time of a page-in besides its read: it is verified and installed, and a thread is woken.
const PATH: Nanos = Nanos(10_000);

/// The devices of all runs; `None`: it is not known how fast they are.
pub(crate) fn devices(tiers: &[Budget]) -> Option<Devices> {
    let (first, last) = (tiers.first()?, tiers.last()?);
    if last.spec.facts().charged_to_limit && last.spec.shape.is_none() {
        return None; // each has memory of its own
    }
    let device = service(last)?;
    let buffer = match tiers.len() {
        1 => None,
        _ => Some((service(first)?, u64::MAX)),
    };
    Some(Devices { device, buffer })
}

/// The tiers, counted from 0, whose device is emulated: all clients share it.
pub(crate) fn emulated(tiers: &[Budget]) -> Vec<u8> {
    let all = (0u8..).zip(tiers);
    let emulated = all.filter(|(_, tier)| tier.spec.shape.is_some());
    emulated.map(|(at, _)| at).take(FDS_MAX).collect()
}

fn service(tier: &Budget) -> Option<Service> {
    match (tier.spec.shape, &tier.profile) {
        (Some(shape), _) => Some(as_modelled(shape)),
        (None, Some(profile)) => Some(as_measured(profile)),
        (None, None) => None,
    }
}

/// How much longer a read takes beside a write is not measured.
fn as_measured(profile: &Profile) -> Service {
    let nanos = |seconds: f64| Nanos((seconds * 1e9) as u64);
    let cpus = || std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    Service {
        path: PATH,
        read: nanos(profile.read_seconds.p50),
        write: nanos(profile.write_seconds.p50),
        beside: 1.0,
        // Each CPU reads memory for itself.
        channels: profile.channels.unwrap_or_else(cpus),
    }
}

fn as_modelled(shape: ShapeName) -> Service {
    let profile = shape.profile();
    let nanos = |picos: u64| Nanos(picos / 1000);
    Service {
        path: PATH,
        read: nanos(profile.read.time(4096).0),
        write: nanos(profile.write.time(4096).0),
        beside: profile.read_beside_write,
        channels: profile.channels,
    }
}

/// Demands of a run of a class.
///
/// * `page_ins`: each second, as measured; `None`: not yet. Each lets a page leave. What the class
///   declares is kept for it, whether it uses it now or not.
pub(crate) fn asks(class: &Class, page_ins: Option<f64>) -> Asks {
    let by_bound = |bound: LatencyBound| Load::of_bound(bound.limit);
    let declared = class.demand.map(f64::from);
    let most = |a: f64| declared.map_or(a, |b| a.max(b));
    let load = match page_ins.map(most).or(declared) {
        Some(rate) => Load {
            reads: rate,
            writes: rate,
        },
        None => class.latency.map(by_bound).unwrap_or_default(),
    };
    Asks {
        bound: class.latency,
        load: load.sane(),
        pages: 0,
    }
}

/// Why a run of a class is refused; `None`: it is not.
pub(crate) fn refuses(
    here: &[Asks],
    class: &Class,
    name: &str,
    devices: &Devices,
) -> Option<String> {
    let new = asks(class, None);
    let could = admit_one(here, new, devices).err()?;
    if place(here, devices).is_err() {
        return Some(format!(
            "the {} run(s) that are here need more than the devices give already, so class {name} \
             would have no share of them: end some, or give faster tiers",
            here.len()
        ));
    }
    let (runs, rate) = (here.len(), new.load.reads);
    let what = match class.latency {
        Some(bound) => format!("the latency bound {bound} of class {name} cannot be kept"),
        None => format!("the bounds of others would be broken by class {name}"),
    };
    let fix = match (could, class.latency) {
        (Could::Limit(limit), Some(bound)) => {
            format!("{} could be kept", bound.suggest(limit))
        }
        (Could::Limit(_), None) => "give a faster tier".to_owned(),
        (Could::Part(part), _) => format!("{:.0} could be served", rate * part),
    };
    Some(format!(
        "{what} beside {runs} run(s), with {rate:.0} page-ins a second: {fix}; or set `demand` of the \
         class to what it needs"
    ))
}
