//! Many simulations in one go: every combination of the values given, over one trace.

use crate::place::Placement;
use serde::Serialize;
use undercroft_base::Bytes;

use crate::memory_trace::{Becomes, MemoryTrace, Moved};
use crate::outcome::SimReport;
use crate::page_stream::PageStream;
use crate::setup::{Initial, Memory, Setup, SetupError, SimTier};
use crate::simulate;

/// Version of the results' JSON.
pub const SCHEMA_VERSION: u32 = 1;

/// Values that are varied; each list holds at least one value. Everything else is as in `base`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// Settings that are not varied.
    pub base: Setup,
    /// DRAM.
    pub memory: Vec<Memory>,
    /// Bytes of a page.
    pub page_bytes: Vec<u64>,
    /// Policies and bounds.
    pub reclaim: Vec<String>,
    /// Prefetch policies.
    pub prefetch: Vec<String>,
    /// Hierarchies of tiers.
    pub tiers: Vec<Vec<SimTier>>,
    /// Placement policies.
    pub placement: Vec<Placement>,
}

/// Results of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Results {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Always true: nothing here was measured on a device.
    pub simulated: bool,
    /// The trace.
    pub trace: String,
    /// Its references.
    pub references: u64,
    /// Its clients.
    pub clients: Vec<String>,
    /// Outcomes of each combination: page size, tiers, prefetch, reclaim, placement, memory, the
    /// last fastest.
    pub outcomes: Vec<SimReport>,
}

/// How far a sweep is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// References replayed in all simulations so far.
    pub references: u64,
    /// References to replay in all.
    pub references_total: u64,
}

impl Sweep {
    /// A simulation.
    pub fn single(setup: Setup) -> Sweep {
        Sweep {
            memory: vec![setup.memory],
            page_bytes: vec![setup.page_bytes],
            reclaim: vec![setup.reclaim.clone()],
            prefetch: vec![setup.prefetch.clone()],
            tiers: vec![setup.tiers.clone()],
            placement: vec![setup.placement.clone()],
            base: setup,
        }
    }

    /// How many simulations it is.
    pub fn count(&self) -> usize {
        [
            self.memory.len(),
            self.page_bytes.len(),
            self.reclaim.len(),
            self.prefetch.len(),
            self.tiers.len(),
            self.placement.len(),
        ]
        .iter()
        .product()
    }

    /// Every combination, in the order of [`Results::outcomes`].
    pub fn setups(&self) -> Vec<Setup> {
        let mut setups: Vec<Setup> = Vec::with_capacity(self.count());
        for page_bytes in &self.page_bytes {
            for tiers in &self.tiers {
                for prefetch in &self.prefetch {
                    for reclaim in &self.reclaim {
                        for placement in &self.placement {
                            setups.extend(self.memory.iter().map(|memory| Setup {
                                memory: *memory,
                                page_bytes: *page_bytes,
                                reclaim: reclaim.clone(),
                                prefetch: prefetch.clone(),
                                tiers: tiers.clone(),
                                placement: placement.clone(),
                                ..self.base.clone()
                            }));
                        }
                    }
                }
            }
        }
        setups
    }

    /// Runs all of them. Every setup is checked before the first runs, so that a wrong one costs no
    /// time.
    ///
    /// Errors: an impossible setup, an empty trace, tiers that fill up.
    pub fn run(
        &self,
        trace: &MemoryTrace,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Results, SetupError> {
        let setups = self.setups();
        let references = trace.references();
        if references == 0 {
            return Err(SetupError::EmptyTrace(trace.name.clone()));
        }
        for setup in &setups {
            setup.check()?;
            if setup.page_bytes < trace.granule_bytes {
                return Err(SetupError::option(
                    "--page-size",
                    &setup.page_bytes.to_string(),
                    format!(
                        "the trace has addresses in steps of {}",
                        Bytes(trace.granule_bytes)
                    ),
                    "use pages at least as large",
                ));
            }
        }
        let mut so_far = Progress {
            references: 0,
            references_total: references * setups.len() as u64,
        };
        let mut streams: Vec<PageStream> = Vec::new();
        let mut built_for = 0;
        let mut outcomes = Vec::with_capacity(setups.len());
        for setup in &setups {
            if built_for != setup.page_bytes {
                streams = streams_of(trace, setup.page_bytes)?;
                built_for = setup.page_bytes;
            }
            let outcome = simulate(&streams, setup, &mut |done| {
                so_far.references += done;
                progress(so_far);
            })?;
            outcomes.push(with_replays(outcome, &streams, setup)?);
        }
        Ok(Results {
            schema_version: SCHEMA_VERSION,
            simulated: true,
            trace: trace.name.clone(),
            references,
            clients: trace.clients.iter().map(|(name, _)| name.clone()).collect(),
            outcomes,
        })
    }
}

/// Replays under each limit of the estimated curve, if there is one and one client.
fn with_replays(
    mut outcome: SimReport,
    streams: &[PageStream],
    setup: &Setup,
) -> Result<SimReport, SetupError> {
    if let [client] = &mut outcome.clients[..]
        && let Some(points) = &mut client.mrc
    {
        for point in points {
            let other = Setup {
                memory: Memory::Pages(point.memory_pages),
                curve: false,
                ..setup.clone()
            };
            let replayed = simulate(streams, &other, &mut |_| ())?;
            point.swap_ins_replayed = Some(match setup.initial {
                Initial::Zero => replayed.misses - replayed.first_touches,
                Initial::Stored => replayed.misses,
            });
        }
    }
    Ok(outcome)
}

/// The trace as pages of one size.
pub fn streams_of(trace: &MemoryTrace, page_bytes: u64) -> Result<Vec<PageStream>, SetupError> {
    let mut moved = trace.moved.iter();
    let streams: Result<Vec<_>, _> = trace
        .clients
        .iter()
        .map(|(name, references)| {
            let moved = moved.next().map_or(&[][..], Vec::as_slice);
            if page_bytes == trace.granule_bytes {
                return PageStream::build_moved(name, references, moved, page_bytes);
            }
            // A granule that leaves does not take the rest of its page along.
            let whole = |moved: &&Moved| {
                use Becomes::{Ahead, Found, Returned, Shared, Written};
                let arrives = matches!(moved.what, Found | Returned | Shared | Written | Ahead);
                arrives || !moved.what.is_of_a_page()
            };
            let kept: Vec<Moved> = moved.iter().filter(whole).copied().collect();
            PageStream::build_moved(name, references, &kept, page_bytes)
        })
        .collect();
    streams.map_err(|error| {
        SetupError::option(
            "--page-size",
            &page_bytes.to_string(),
            error.to_string(),
            "",
        )
    })
}
