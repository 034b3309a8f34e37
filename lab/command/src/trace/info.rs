//! `undercroft-lab trace info`: shows a trace as text, JSON and a plot.

use serde::Serialize;
use undercroft_base::Bytes;
use undercroft_references::analyse::AccessCounts;
use undercroft_references::pages::PageTraceError;
use undercroft_references::{Analysis, ReuseDistances, Sampling};
use undercroft_trace::format::VERSION;
use undercroft_trace::{Header, Movement, Totals};

use super::args::InfoArgs;
use super::files::{bad_trace, reader};
use super::progress;
use undercroft_terminal as show;
use undercroft_terminal::{Failure, command_line, status};

const SCHEMA_VERSION: u32 = 1;
/// Default page: 4 KiB.
const PAGE_SHIFT: u8 = 12;
/// Shares of the footprint whose miss ratios are shown, in percent.
const SHARES: [u64; 9] = [1, 2, 5, 10, 20, 40, 60, 80, 100];
/// Points of the plot and of the JSON's curve.
const POINTS: u64 = 200;
/// Characters of the longest bar of the histogram.
const BAR: f64 = 40.0;

#[derive(Serialize)]
struct Info {
    schema_version: u32,
    trace: String,
    format_version: u16,
    file_bytes: u64,
    bytes_per_reference: f64,
    source: String,
    command: Vec<String>,
    filtered: bool,
    synthetic: bool,
    live: bool,
    granularity_bytes: u64,
    time_unit: String,
    time_first: u64,
    time_last: u64,
    time_end: u64,
    page_bytes: u64,
    references: References,
    /// Movements of pages without a reference; absent if the trace does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    movements: Option<Movements>,
    reads_per_write: Option<f64>,
    footprint: Footprint,
    clients: Vec<ClientInfo>,
    sampled: bool,
    sample_rate: f64,
    first_touches: f64,
    reuse_distances: Vec<Octave>,
    miss_ratio_curve: Vec<Point>,
    miss_ratio_at_shares: Vec<Point>,
}

#[derive(Serialize)]
struct References {
    total: u64,
    instructions: u64,
    reads: u64,
    writes: u64,
}

impl References {
    fn of(counts: AccessCounts) -> References {
        References {
            total: counts.total(),
            instructions: counts.instructions,
            reads: counts.reads,
            writes: counts.writes,
        }
    }
}

/// Pages that came or left without a reference. No curve counts them.
#[derive(Serialize)]
struct Movements {
    evicted: u64,
    /// Evicted pages that had not been written since they came.
    evicted_clean: u64,
    found: u64,
    /// Pages that were in memory in frames of fork relatives; absent if the trace does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    shared: Option<u64>,
    brought_along: u64,
    returned: u64,
    dropped: u64,
    /// Pages found used in memory, once a scan; absent if there were no scans.
    #[serde(skip_serializing_if = "Option::is_none")]
    accessed: Option<u64>,
    /// Entries on pages that may not leave, for good or while their process does not run, and on
    /// pages that may leave again; absent if none is ever recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    locked: Option<u64>,
    /// Forks of clients that have pages; absent if the trace does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    forks: Option<u64>,
    /// Clients that ended; absent if the trace does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<u64>,
}

impl Movements {
    fn of(totals: &Totals, header: &Header) -> Movements {
        Movements {
            evicted: totals.moved(Movement::Evicted),
            evicted_clean: totals.moved(Movement::Clean),
            found: totals.moved(Movement::Found),
            shared: header.forks.then(|| totals.moved(Movement::Shared)),
            brought_along: totals.moved(Movement::Ahead),
            returned: totals.moved(Movement::Returned),
            dropped: totals.moved(Movement::Dropped),
            accessed: header.accesses.then(|| totals.moved(Movement::Accessed)),
            locked: header.locks.then(|| totals.moved(Movement::Locked)),
            forks: header.forks.then(|| totals.moved(Movement::Forked)),
            ended: header.forks.then(|| totals.moved(Movement::Ended)),
        }
    }
}

#[derive(Serialize)]
struct Footprint {
    pages: u64,
    bytes: u64,
    written_pages: u64,
    written_bytes: u64,
}

impl Footprint {
    fn of(analysis: &Analysis, page_bytes: u64) -> Footprint {
        let (pages, written) = (analysis.footprint_pages(), analysis.written_pages());
        Footprint {
            pages,
            bytes: pages.saturating_mul(page_bytes),
            written_pages: written,
            written_bytes: written.saturating_mul(page_bytes),
        }
    }
}

#[derive(Serialize)]
struct ClientInfo {
    name: String,
    references: References,
    pages: u64,
    pages_written: u64,
}

impl ClientInfo {
    fn each(header: &Header, analysis: &Analysis) -> Vec<ClientInfo> {
        let clients = header.clients.iter().zip(analysis.clients());
        clients
            .map(|(name, counts)| ClientInfo {
                name: name.clone(),
                references: References::of(counts.accesses),
                pages: counts.pages,
                pages_written: counts.pages_written,
            })
            .collect()
    }
}

/// Distances from `pages_from` up to `pages_to`, which is not included.
#[derive(Serialize)]
struct Octave {
    pages_from: u64,
    pages_to: u64,
    references: f64,
}

impl Octave {
    fn each(distances: &ReuseDistances) -> Vec<Octave> {
        let octaves = distances.histogram().into_iter();
        octaves
            .map(|(from, references)| Octave {
                pages_from: from,
                pages_to: (2 * from).max(1),
                references,
            })
            .collect()
    }
}

#[derive(Serialize)]
struct Point {
    pages: u64,
    bytes: u64,
    footprint_share: f64,
    miss_ratio: f64,
}

/// Shows one trace.
pub(super) fn info(args: &InfoArgs) -> Result<(), Failure> {
    let (mut reader, file_bytes) = reader(&args.trace)?;
    let header = reader.header().clone();
    let page_shift = match args.page_size {
        Some(size) => size.0.trailing_zeros() as u8,
        None => PAGE_SHIFT.max(header.granularity),
    };
    let bar = progress(file_bytes);
    bar.set_message("reading");
    let sampling = args.sample.unwrap_or(Sampling::Exact);
    let analysis = Analysis::read(&mut reader, page_shift, sampling, |offset| {
        bar.set_position(offset)
    });
    bar.finish_and_clear();
    let analysis = analysis.map_err(|error| match error {
        PageTraceError::Trace(error) => bad_trace(&args.trace, &error),
        error => Failure::new(
            status::USAGE,
            format!(
                "cannot count {} in pages of {}",
                args.trace.display(),
                Bytes(1 << page_shift)
            ),
            error.to_string(),
            "give another --page-size",
        ),
    })?;
    let totals = reader.totals().copied().unwrap_or_default();
    let info = collect(
        &args.trace.display().to_string(),
        &header,
        &analysis,
        reader.offset(),
        &totals,
    );
    if let Some(path) = &args.plot {
        plot(&info, path)?;
    }
    if args.json {
        show::json(&info)
    } else {
        show::line(text(&info).trim_end())
    }
}

fn collect(
    trace: &str,
    header: &Header,
    analysis: &Analysis,
    file_bytes: u64,
    totals: &Totals,
) -> Info {
    let page_bytes = 1u64 << analysis.page_shift();
    let pages = analysis.footprint_pages();
    let accesses = analysis.accesses();
    let distances = analysis.distances();
    let curve = distances.curve();
    let point = |size: u64, miss_ratio: f64| Point {
        pages: size,
        bytes: size.saturating_mul(page_bytes),
        footprint_share: size as f64 / pages.max(1) as f64,
        miss_ratio,
    };
    let shares = SHARES.iter().map(|share| (pages * share).div_ceil(100));
    let (time_first, time_last) = analysis.times().unwrap_or_default();
    Info {
        schema_version: SCHEMA_VERSION,
        trace: trace.to_owned(),
        format_version: VERSION,
        file_bytes,
        bytes_per_reference: file_bytes as f64 / accesses.total().max(1) as f64,
        source: header.source.clone(),
        command: header.command.clone(),
        filtered: header.filtered,
        synthetic: header.synthetic,
        live: header.live,
        granularity_bytes: header.granule_bytes(),
        time_unit: header.time_unit.to_string(),
        time_first,
        time_last,
        time_end: totals.time_end,
        page_bytes,
        references: References::of(accesses),
        movements: header.movements.then(|| Movements::of(totals, header)),
        reads_per_write: accesses.reads_per_write(),
        footprint: Footprint::of(analysis, page_bytes),
        clients: ClientInfo::each(header, analysis),
        sampled: distances.is_sampled(),
        sample_rate: distances.rate(),
        first_touches: distances.first_touches(),
        reuse_distances: Octave::each(distances),
        miss_ratio_curve: curve
            .points(pages, POINTS)
            .into_iter()
            .map(|(size, ratio)| point(size, ratio))
            .collect(),
        miss_ratio_at_shares: shares
            .map(|size| point(size, curve.miss_ratio(size)))
            .collect(),
    }
}

fn text(info: &Info) -> String {
    let mut text = format!("{}\n", info.trace);
    for (name, value) in rows(info) {
        text.push_str(&format!("  {name:<14} {value}\n"));
    }
    // A live trace has room for more address spaces than came.
    let seen = info.clients.iter().filter(|c| c.references.total > 0);
    if seen.clone().count() > 1 {
        text.push_str("\nclients\n");
        for client in seen {
            text.push_str(&format!(
                "  {:<14} {} references, {} writes, {} pages\n",
                client.name, client.references.total, client.references.writes, client.pages
            ));
        }
    }
    let estimated = if info.sampled {
        format!(
            ", estimated from {:.2} % of the pages",
            100.0 * info.sample_rate
        )
    } else {
        String::new()
    };
    text.push_str(&format!("\nreuse distance in pages{estimated}\n"));
    reuse_bars(info, &mut text);
    text.push_str(&format!(
        "\nmiss ratio of LRU{estimated}\n  {:>10} {:>12} {:>12}\n",
        "footprint", "memory", "miss ratio"
    ));
    for (share, point) in SHARES.iter().zip(&info.miss_ratio_at_shares) {
        text.push_str(&format!(
            "  {share:>8} % {:>12} {:>12.5}\n",
            Bytes(point.bytes).to_string(),
            point.miss_ratio
        ));
    }
    text
}

type Rows = Vec<(&'static str, String)>;

/// Rows of the trace's facts and counts.
fn rows(info: &Info) -> Rows {
    let mut rows = vec![("made by", info.source.clone())];
    if !info.command.is_empty() {
        rows.push(("command", command_line(&info.command, 0)));
    }
    rows.push(("kind", kind(info).to_owned()));
    let granule = match info.granularity_bytes {
        1 => "bytes".to_owned(),
        bytes => format!("multiples of {}", Bytes(bytes)),
    };
    rows.push(("addresses", granule));
    rows.push(("time", format!("{} {}", info.time_end, info.time_unit)));
    let references = &info.references;
    rows.push((
        if info.live { "faults" } else { "references" },
        format!(
            "{}: {} instruction reads, {} reads, {} writes",
            references.total, references.instructions, references.reads, references.writes
        ),
    ));
    if let Some(moved) = &info.movements {
        movement_rows(moved, &mut rows);
    }
    rows.push(("reads:writes", ratio(info.reads_per_write)));
    let footprint = &info.footprint;
    let pages = format!(
        "{} in {} pages of {}; {} of them written",
        Bytes(footprint.bytes),
        footprint.pages,
        Bytes(info.page_bytes),
        footprint.written_pages
    );
    rows.push(("footprint", pages));
    let file = format!(
        "{}, {:.2} bytes a reference",
        Bytes(info.file_bytes),
        info.bytes_per_reference
    );
    rows.push(("file", file));
    rows
}

fn kind(info: &Info) -> &'static str {
    match (info.filtered, info.synthetic, info.live) {
        (_, true, _) => "made by a generator",
        (_, _, true) if info.movements.is_some() => {
            "page faults and evictions that a live manager saw"
        }
        (_, _, true) => "page faults that a live manager saw",
        (true, ..) => "what reached memory behind a cache",
        _ => "every reference",
    }
}

fn movement_rows(moved: &Movements, rows: &mut Rows) {
    let evictions = format!("{}, {} of them clean", moved.evicted, moved.evicted_clean);
    rows.push(("evictions", evictions));
    let others = format!(
        "{} found in memory, {} prefetched, {} returned, {} dropped",
        moved.found, moved.brought_along, moved.returned, moved.dropped
    );
    rows.push(("other pages", others));
    if let Some(accessed) = moved.accessed {
        let uses = format!("{accessed}: pages whose Accessed bit was set, at each scan");
        rows.push(("uses in memory", uses));
    }
    if let Some(locked) = moved.locked {
        rows.push((
            "locked",
            format!("{locked} entries on pages that may not leave, or may again"),
        ));
    }
    if let (Some(forks), Some(ended), Some(shared)) = (moved.forks, moved.ended, moved.shared) {
        let processes =
            format!("{forks} forked, {ended} ended; {shared} pages shared when first found");
        rows.push(("processes", processes));
    }
}

/// A bar for each octave of reuse distances, and one for first touches.
fn reuse_bars(info: &Info, text: &mut String) {
    let most = info.reuse_distances.iter().map(|octave| octave.references);
    let most = most.fold(info.first_touches, f64::max).max(1.0);
    let total = info.references.total.max(1) as f64;
    let mut bar = |label: String, count: f64| {
        let width = (BAR * count / most).round() as usize;
        let share = 100.0 * count / total;
        text.push_str(&format!(
            "  {label:>19}  {share:>6.2} %  {}\n",
            "#".repeat(width)
        ));
    };
    for octave in &info.reuse_distances {
        let label = match octave.pages_to - octave.pages_from {
            1 => format!("{}", octave.pages_from),
            _ => format!("{} to {}", octave.pages_from, octave.pages_to - 1),
        };
        bar(label, octave.references);
    }
    bar("first touch".to_owned(), info.first_touches);
}

/// In the paper's form: `7.16 : 1` or `1 : 5.13`.
fn ratio(reads_per_write: Option<f64>) -> String {
    match reads_per_write {
        None => "no writes".to_owned(),
        Some(ratio) if ratio >= 1.0 => format!("{ratio:.2} : 1"),
        Some(ratio) if ratio > 0.0 => format!("1 : {:.2}", 1.0 / ratio),
        Some(_) => "no reads".to_owned(),
    }
}

fn plot(info: &Info, path: &std::path::Path) -> Result<(), Failure> {
    let estimated = if info.sampled { ", sampled" } else { "" };
    let curve = undercroft_experiments::Curves {
        title: format!("Miss ratio of LRU by memory, {}", info.trace),
        subtitle: format!(
            "{} references, footprint {} in pages of {}{estimated}; first touches miss",
            info.references.total,
            Bytes(info.footprint.bytes),
            Bytes(info.page_bytes)
        ),
        x_label: "memory, % of the footprint".to_owned(),
        y_label: "miss ratio".to_owned(),
        curves: vec![undercroft_experiments::Curve {
            name: "LRU".to_owned(),
            points: info
                .miss_ratio_curve
                .iter()
                .map(|point| (100.0 * point.footprint_share, point.miss_ratio))
                .collect(),
        }],
    };
    undercroft_experiments::draw_curves(&curve, path).map_err(|error| {
        Failure::new(
            status::FAILED,
            format!("cannot draw {}", path.display()),
            format!("{error:#}"),
            "give a .svg file in a directory that can be written",
        )
    })
}
