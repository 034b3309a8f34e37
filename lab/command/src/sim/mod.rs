//! `undercroft-lab sim`: replays a trace through the engine over models of devices, and prints the
//! results.

pub(crate) mod args;
mod plots;

use std::fs;
use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use undercroft_sim::open::{OpenError, open};
use undercroft_sim::setup::{Latencies, Memory, Setup, SetupError, SimRoom, SimTier};
use undercroft_sim::table::{Style, bounds, csv, curves, table};
use undercroft_sim::{MemoryTrace, Results, Sweep};

use args::{FormatArg, SimArgs, TierChoice};
use undercroft_terminal as show;
use undercroft_terminal::{Failure, status};

/// Runs `undercroft-lab sim`.
pub(crate) fn sim(args: &SimArgs) -> Result<(), Failure> {
    let mut sweep = sweep(args);
    // Before the trace is read, so that a wrong option costs no time.
    for setup in sweep.setups() {
        setup.check().map_err(wrong_setup)?;
    }
    let Some(name) = &args.trace else {
        return Err(Failure::new(
            status::USAGE,
            "--trace is missing",
            "there is nothing to replay",
            "name a trace file, or generate one: --trace zipf:pages=10000,refs=1000000",
        ));
    };
    if let Some(out) = &args.out {
        fs::create_dir_all(out).map_err(|error| cannot_write(out, &error.to_string()))?;
    }
    let trace = open(name).map_err(|error| wrong_trace(name, &error))?;
    take_recorded_options(&mut sweep, args, &trace);
    if trace.tells_ahead() {
        eprintln!(
            "undercroft-lab: {name} was recorded with prefetch, and does not show the uses of prefetched \
             pages. So the result is only a guess; record it with --prefetch none for a close one"
        );
    }
    let bar = bar(trace.references() * sweep.count() as u64);
    let results = sweep.run(&trace, &mut |progress| {
        bar.set_position(progress.references)
    });
    bar.finish_and_clear();
    let results = results.map_err(wrong_setup)?;
    if let Some(out) = &args.out {
        write(&results, out)?;
    }
    let format = if args.json {
        FormatArg::Json
    } else {
        args.format
    };
    match format {
        FormatArg::Json => show::json(&results),
        FormatArg::Csv => show::line(csv(&results).trim_end()),
        FormatArg::Markdown => show::line(table(&results, Style::Markdown).trim_end()),
        FormatArg::Table => show::line(
            format!(
                "simulated: {}\n\n{}\n{}{}",
                results.trace,
                table(&results, Style::Plain),
                bounds(&results),
                curves(&results)
            )
            .trim_end(),
        ),
    }
}

fn sweep(args: &SimArgs) -> Sweep {
    let default = Setup::default();
    let base = Setup {
        initial: args.initial.into(),
        fault_touch: args.fault_touch.into(),
        room: args.room.unwrap_or(SimRoom::AfterPlan),
        reference_time: args.reference_time,
        software: args.software,
        context_switch: args.context_switch,
        curve: args.mrc,
        seed: args.seed,
        stall: args.stall_max.iter().map(|bound| bound.0).collect(),
        latency: Latencies {
            bounds: args.latency.clone(),
            window: args.latency_window,
            ..default.latency
        },
        ..default
    };
    let tiers = if args.tiers.is_empty() {
        vec![base.tiers.clone()]
    } else {
        hierarchies(&args.tiers)
    };
    Sweep {
        memory: or_else(&args.memory, base.memory),
        page_bytes: args.page_size.clone(),
        reclaim: or_else(&args.reclaim, base.reclaim.clone()),
        prefetch: or_else(&args.prefetch, base.prefetch.clone()),
        tiers,
        placement: or_else(&args.placement, base.placement.clone()),
        base,
    }
}

/// The values asked for, or else `default`.
fn or_else<T: Clone>(asked: &[T], default: T) -> Vec<T> {
    match asked {
        [] => vec![default],
        _ => asked.to_vec(),
    }
}

/// Sets the options that were not given, as in the recorded live run. If limit and policies are the
/// same, room is made as in that run.
fn take_recorded_options(sweep: &mut Sweep, args: &SimArgs, trace: &MemoryTrace) {
    let Some(run) = &trace.recorded else {
        return;
    };
    let (memory, reclaim) = (Memory::Bytes(run.limit), &run.policy);
    sweep.memory = or_else(&args.memory, memory);
    sweep.reclaim = or_else(&args.reclaim, reclaim.clone());
    sweep.prefetch = or_else(&args.prefetch, run.prefetch.clone());
    sweep.placement = or_else(&args.placement, run.placement.clone());
    let same = sweep.memory == [memory]
        && sweep.page_bytes == [trace.granule_bytes]
        && sweep.reclaim == [reclaim.as_str()]
        && sweep.prefetch == [run.prefetch.as_str()]
        && sweep.placement == [run.placement.clone()];
    if same && args.room.is_none() {
        sweep.base.room = SimRoom::Ahead;
    }
    if std::io::stderr().is_terminal() {
        let room = sweep.base.room;
        eprintln!(
            "undercroft-lab: recorded from a live run under {} with {reclaim} and {}; pages leave as \
             --room {room} says",
            run.limit, run.placement
        );
    }
}

/// Combines every choice at one place with every choice at the others.
fn hierarchies(choices: &[TierChoice]) -> Vec<Vec<SimTier>> {
    let mut all = vec![Vec::new()];
    for choice in choices {
        let longer = |above: &Vec<SimTier>| {
            let above = above.clone();
            choice.0.iter().map(move |tier| {
                let mut tiers = above.clone();
                tiers.push(tier.clone());
                tiers
            })
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

fn bar(total: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total);
    let style = "{spinner} simulating [{bar:30}] {human_pos} of {human_len} references, {per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn write(results: &Results, out: &Path) -> Result<(), Failure> {
    let json = serde_json::to_string_pretty(results)
        .map_err(|error| cannot_write(out, &error.to_string()))?;
    for (name, text) in [
        ("results.json", json + "\n"),
        ("results.csv", csv(results)),
        ("results.md", table(results, Style::Markdown)),
    ] {
        let path = out.join(name);
        fs::write(&path, text).map_err(|error| cannot_write(&path, &error.to_string()))?;
    }
    plots::draw(results, out).map_err(|why| cannot_write(out, &why))?;
    Ok(())
}

fn cannot_write(path: &Path, why: &str) -> Failure {
    Failure::new(
        status::FAILED,
        format!("cannot write {}", path.display()),
        why,
        "give a directory that can be written: --out DIR",
    )
}

fn wrong_trace(name: &str, error: &OpenError) -> Failure {
    let (status, fix) = match error {
        OpenError::Neither { .. } => (
            status::USAGE,
            "give an existing file, or a description as zipf:pages=10000,refs=1000000",
        ),
        OpenError::Io { .. } => (status::FAILED, "check the path and its permissions"),
        OpenError::Trace { .. } => (
            status::FAILED,
            "give a trace as `undercroft-lab trace` writes it; record or import it again",
        ),
    };
    Failure::new(
        status,
        format!("cannot replay --trace {name}"),
        error.to_string(),
        fix,
    )
}

fn wrong_setup(error: SetupError) -> Failure {
    match error {
        SetupError::Option {
            option,
            value,
            why,
            fix,
        } => Failure::new(
            status::USAGE,
            format!("{option} {value} cannot be simulated"),
            why,
            fix,
        ),
        SetupError::EmptyTrace(name) => Failure::new(
            status::FAILED,
            format!("--trace {name} holds no reference"),
            "there is nothing to replay",
            "record or generate a trace that has some",
        ),
        SetupError::TiersFull { references } => Failure::new(
            status::FAILED,
            "--tier: every tier is full",
            format!("after {references} references a page left memory and none had room"),
            "make one larger (size=), add one, or give more --memory",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_tiers_make_every_hierarchy() {
        let choice = |texts: &[&str]| {
            TierChoice(
                texts
                    .iter()
                    .map(|text| text.parse().expect("valid"))
                    .collect(),
            )
        };
        let all = hierarchies(&[choice(&["ram", "pcm"]), choice(&["nvme", "hdd-7200"])]);
        let names: Vec<String> = all
            .iter()
            .map(|tiers| {
                tiers
                    .iter()
                    .map(|tier| tier.name())
                    .collect::<Vec<_>>()
                    .join(">")
            })
            .collect();
        assert_eq!(
            names,
            ["ram>nvme", "ram>hdd-7200", "pcm>nvme", "pcm>hdd-7200"]
        );
    }
}
