//! The output of `status`, as text and as JSON.

use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_keeper::wanted::Wanted;
use undercroft_proto::report::{SCHEMA_VERSION, Snapshot, bound_summary};

use crate::{curve, live};
use undercroft_terminal::Failure;
pub(crate) use undercroft_terminal::{colours, json, line};

/// How `undercroft status` shows runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusForm {
    /// A few lines a run.
    Text,
    /// Costs that other limits would have had.
    Curve,
    /// How long it waits for pages, in the format of the kernel's pressure files.
    Pressure,
    /// All of it.
    Json,
}

/// `undercroft status`, or that of one run alone.
pub(crate) fn status(
    snapshots: &[Snapshot],
    wanted: Option<&Wanted>,
    form: StatusForm,
) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Status<'a> {
        schema_version: u32,
        clients: Vec<&'a Snapshot>,
    }
    let snapshots: Vec<_> = match wanted {
        Some(wanted) => vec![live::one_of(snapshots, wanted)?],
        None => snapshots.iter().collect(),
    };
    if form == StatusForm::Json {
        json(&Status {
            schema_version: SCHEMA_VERSION,
            clients: snapshots,
        })?;
        return Ok(0);
    }
    if snapshots.is_empty() {
        line("Nothing runs under undercroft now.")?;
    }
    for snapshot in snapshots {
        let text = match form {
            StatusForm::Curve => curve::table(snapshot),
            StatusForm::Pressure if wanted.is_some() => snapshot.pressure_line(),
            StatusForm::Pressure => {
                let command = snapshot.command_line();
                format!("{}  {command}\n{}", snapshot.pid, snapshot.pressure_line())
            }
            StatusForm::Text | StatusForm::Json => client(snapshot),
        };
        line(text.trim_end())?;
    }
    Ok(0)
}

fn client(snapshot: &Snapshot) -> String {
    let limit = snapshot
        .memory_max_bytes
        .map_or("no limit".to_owned(), |max| format!("limit {}", Bytes(max)));
    let mut text = format!("{}  {}\n", snapshot.pid, snapshot.command_line());
    text.push_str(&format!(
        "  {}{}up {}{}{}\n",
        (snapshot.name.as_ref()).map_or(String::new(), |name| format!("name {name}; ")),
        (snapshot.uid).map_or(String::new(), |user| format!("user {user}; ")),
        Nanos((snapshot.uptime_seconds * 1e9) as u64),
        (snapshot.class.as_ref()).map_or(String::new(), |class| format!("; class {class}")),
        if snapshot.paused {
            "; paused: no page leaves, and the limit is not kept"
        } else {
            ""
        }
    ));
    text.push_str(&format!(
        "  memory {}, {} at most; {} of it resident\n  DRAM {} ({limit})\n",
        Bytes(snapshot.memory_bytes),
        Bytes(snapshot.memory_bytes_peak),
        Bytes(snapshot.resident_bytes),
        Bytes(snapshot.dram_bytes)
    ));
    if let Some(guest) = &snapshot.guest {
        text.push_str(&format!("  {}\n", guest.line()));
    }
    if snapshot.takeovers.count > 0 {
        text.push_str(&format!("  managers: {}\n", snapshot.takeovers));
    }
    if let Some(ages) = &snapshot.ages {
        text.push_str(&format!("  {ages}\n"));
    }
    for (at, tier) in snapshot.tiers.iter().enumerate() {
        let ratio = tier.figures.ratio_text();
        text.push_str(&format!(
            "  tier {}, {}: logical {}, stored {}, ratio {ratio}\n",
            at + 1,
            tier.figures.title(),
            Bytes(tier.logical_bytes),
            Bytes(tier.stored_bytes)
        ));
        if let Some(drain) = &tier.figures.drain {
            text.push_str(&format!("    {}\n", crate::drain::progress(drain)));
        }
    }
    if let Some(cost) = &snapshot.cost {
        text.push_str(&format!("  cost {cost}\n"));
    }
    if let Some(bound) = &snapshot.latency_bound {
        text.push_str(&format!("  bound {}\n", bound_summary(bound)));
    }
    text.push_str(&format!(
        "  now {:.0} faults/s, {:.0} pages in/s, {:.0} pages out/s; {} faults so far\n",
        snapshot.rates.faults_per_second,
        snapshot.rates.swapped_in_per_second,
        snapshot.rates.swapped_out_per_second,
        snapshot.faults.total
    ));
    text
}
