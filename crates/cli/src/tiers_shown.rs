//! `undercroft tiers show`: what the tiers of running programs are like and hold.

use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_keeper::wanted::Wanted;
use undercroft_proto::report::{SCHEMA_VERSION, Snapshot, TierSnapshot, command_line};

use crate::{drain, live, measure, show};
use undercroft_terminal::Failure;

#[derive(Serialize)]
struct Shown<'a> {
    schema_version: u32,
    clients: Vec<Client<'a>>,
}

/// The tiers of one run, with the fields of `status --json`.
#[derive(Serialize)]
struct Client<'a> {
    pid: u32,
    command: &'a [String],
    arguments: u64,
    placement: &'a str,
    tiers: &'a [TierSnapshot],
}

impl<'a> Client<'a> {
    fn of(snapshot: &'a Snapshot) -> Client<'a> {
        Client {
            pid: snapshot.pid,
            command: &snapshot.command,
            arguments: snapshot.arguments,
            placement: &snapshot.policies.placement,
            tiers: &snapshot.tiers,
        }
    }
}

/// Prints the tiers of all runs, or of one.
///
/// Errors: there is no such run.
pub(crate) fn print(wanted: Option<&Wanted>, as_json: bool) -> Result<u8, Failure> {
    let snapshots = live::snapshots()?;
    let clients: Vec<Client<'_>> = match wanted {
        Some(wanted) => {
            vec![Client::of(live::one_of(&snapshots, wanted)?)]
        }
        None => snapshots.iter().map(Client::of).collect(),
    };
    if as_json {
        let schema_version = SCHEMA_VERSION;
        show::json(&Shown {
            schema_version,
            clients,
        })?;
        return Ok(0);
    }
    if clients.is_empty() {
        show::line("Nothing runs under undercroft now.")?;
    }
    for client in &clients {
        show::line(text(client).trim_end())?;
    }
    Ok(0)
}

const HEAD: [&str; 8] = [
    "", "tier", "rank", "a load", "holds", "takes", "$/GiB", "worn",
];

fn text(client: &Client<'_>) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(client.tiers.iter().enumerate().map(row));
    let width = |column: usize| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let command = command_line(client.command, client.arguments);
    let mut text = format!("{}  {command}\n", client.pid);
    for row in &rows {
        // Names to the left, figures to the right.
        let mut line = format!("  {:<1$}  {2:<3$}", row[0], widths[0], row[1], widths[1]);
        for (field, width) in row.iter().zip(&widths).skip(2) {
            line.push_str(&format!("  {field:>width$}"));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    for (at, tier) in client.tiers.iter().enumerate() {
        if let Some(of) = &tier.profile {
            text.push_str(&format!("  tier {}: {}\n", at + 1, measure::words(of)));
        }
        if let Some(of) = &tier.figures.drain {
            text.push_str(&format!("  tier {}: {}\n", at + 1, drain::progress(of)));
        }
    }
    text
}

fn row((at, tier): (usize, &TierSnapshot)) -> [String; 8] {
    let none = || "-".to_owned();
    let price = tier.figures.cost.as_ref().map(|cost| cost.dollars_per_gib);
    let worn = tier.figures.wear.as_ref().map(|wear| wear.tbw_part);
    [
        (at + 1).to_string(),
        tier.figures.title(),
        tier.rank.map_or_else(none, |rank| rank.to_string()),
        Nanos((tier.load_seconds * 1e9) as u64).to_string(),
        Bytes(tier.logical_bytes).to_string(),
        Bytes(tier.held_bytes).to_string(),
        price.map_or_else(none, |dollars| dollars.to_string()),
        worn.map_or_else(none, |part| format!("{:.4}%", part * 100.0)),
    ]
}
