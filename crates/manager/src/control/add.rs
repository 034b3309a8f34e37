//! Another tier while the program runs (`undercroft tiers add`). A thread opens and measures it:
//! that may take a while, and the control thread keeps the limit meanwhile.

use std::fs::File;
use std::sync::Arc;

use undercroft_base::{Nanos, PageSize};
use undercroft_proto::tiers::pool_capacity;
use undercroft_tier::measure;
use undercroft_tier::open::OpenTier;
use undercroft_tier::profile;
use undercroft_tier::shape::read_time;
use undercroft_tier::spec::TierSpec;

use super::errand::Errand;
use super::resize::limit_pools_now;
use crate::books::tiers;
use crate::space::shared::Shared;

static ADDS: Errand = Errand::new("another tier is being added; ask again");

/// Has a thread add the tier, and tell `peer` when it is in use, or why it is not.
///
/// Errors: why not, at once.
pub(super) fn begin(shared: &Arc<Shared>, spec: &str, peer: File) -> Result<(), (String, File)> {
    let spec = match parsed(spec) {
        Ok(spec) => spec,
        Err(why) => return Err((why, peer)),
    };
    let of = shared.clone();
    ADDS.begin("uc-add", peer, move || add(&of, &spec))
}

/// The tier that a user describes. Error: it cannot be added.
fn parsed(text: &str) -> Result<TierSpec, String> {
    let spec: TierSpec = text.parse().map_err(|error| format!("{error}"))?;
    if spec.facts().remote {
        return Err(
            "a run that was started without a cluster may not use the network; start it with the \
             cluster as its tier"
                .to_owned(),
        );
    }
    match &spec.path {
        Some(path) if !path.is_absolute() => Err(format!("{} is no absolute path", path.display())),
        _ => Ok(spec),
    }
}

/// Opens, measures and uses a tier. Error: nothing is left of it.
fn add(shared: &Shared, spec: &TierSpec) -> Result<(), String> {
    shared.books.tiers.free_number()?;
    let is_pool = spec.facts().charged_to_limit;
    if is_pool && (shared.books.tiers.ranked()).any(|tier| tier.facts().charged_to_limit) {
        return Err("the run has compressed memory already; remove that first".to_owned());
    }
    let limit = shared.gauges.memory_max();
    // A pool may grow with the limit later, and if it becomes the last tier, up to this.
    let pool = pool_capacity(spec.max, limit.max(shared.options.memory_max), true);
    let page = shared.options.page_size;
    let mut opened = OpenTier::open(spec, page, pool).map_err(|error| error.to_string())?;
    let shape = opened.take_shape(spec);
    let key = &shared.books.key;
    let made = opened.make(pool, key).map_err(|error| error.to_string())?;
    // What a measurement writes to a pool would be DRAM that no limit knows of. Its pages are base
    // pages.
    let load = if is_pool || page != PageSize::Base {
        None
    } else {
        Some(measure::load_time(made.as_ref(), key).map_err(|error| error.to_string())?)
    };
    let profile = profile::known(spec).unwrap_or_default(); // damage was told at the start
    let metered = tiers::metered(made, shape, tiers::waiting_pages(limit, page)).of(spec, profile);
    shared.books.add(match load {
        Some(load) => {
            let more = spec.shape.map_or(0, |name| read_time(name).0);
            metered.measured(Nanos(load.0 + more))
        }
        None => metered,
    })?;
    limit_pools_now(shared);
    shared.signals.kick_evictor();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_cannot_take_on_its_way_is_refused_with_the_fix() {
        for (text, says) in [
            ("file:swap,size=1G", "no absolute path"),
            ("nvm:pmem,size=1G", "no absolute path"),
            ("", ""),
            ("floppy:/a", ""),
        ] {
            let refused = parsed(text).expect_err(text);
            assert!(refused.contains(says), "{text}: {refused}");
        }
        assert!(parsed("file:/var/swap,size=1G").is_ok());
        assert!(parsed("ram,zstd,max=8M").is_ok());
    }
}
