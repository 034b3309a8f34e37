//! `undercroft-lab trace`: records, imports, generates, shows and prints traces of references.

pub(crate) mod args;
mod files;
mod info;
mod record;

use std::io::{BufReader, BufWriter, IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use undercroft_base::Bytes;
use undercroft_references::import::{ImportError, csv, csv::Csv, lackey::Lackey};
use undercroft_references::{Generator, Recorder, Touch};
use undercroft_trace::Totals;
use undercroft_trace::{Header, TimeUnit, TraceWriter, WriteError};

use args::{CatArgs, FormatArg, GenerateArgs, ImportArgs, TraceCommand};
use files::{Output, cannot_write};
use undercroft_terminal::{Failure, status};

/// Bytes read at once from other tools.
const TEXT_BUFFER_BYTES: usize = 1 << 20;
/// References between two updates of the progress bar.
const PROGRESS_EVERY: u64 = 1 << 16;

/// Runs one trace command.
pub(crate) fn trace(command: TraceCommand) -> Result<u8, Failure> {
    match command {
        TraceCommand::Record(args) => return record::record(&args),
        TraceCommand::Import(args) => import(&args)?,
        TraceCommand::Generate(args) => generate(&args)?,
        TraceCommand::Info(args) => info::info(&args)?,
        TraceCommand::Cat(args) => cat(&args)?,
    }
    Ok(0)
}

/// Progress on standard error: a bar if the end is known, otherwise a count; nothing without a
/// terminal.
fn progress(total: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match total {
        Some(total) => (
            ProgressBar::new(total),
            "{msg} [{bar:30}] {percent}%  {eta} left",
        ),
        None => (ProgressBar::no_length(), "{msg}  {elapsed}"),
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// log2 of `--granularity`; 0 if it is not given.
fn granularity(size: Option<Bytes>) -> u8 {
    size.map_or(0, |size| size.0.trailing_zeros() as u8)
}

/// Prints, on standard error, what a new trace holds.
fn written(path: &Path, totals: &Totals, bytes: Option<u64>) {
    let references = totals.references();
    let size = bytes.map_or(String::new(), |bytes| {
        let each = bytes as f64 / references.max(1) as f64;
        format!(" in {} ({each:.2} bytes each)", Bytes(bytes))
    });
    eprintln!(
        "undercroft-lab: {}: {references} references{size}: {} instruction reads, {} reads, {} writes",
        path.display(),
        totals.instructions,
        totals.reads,
        totals.writes
    );
}

fn generate(args: &GenerateArgs) -> Result<(), Failure> {
    let mut generator = Generator::new(args.spec.clone());
    let time_end = generator.time_end();
    let bar = progress(Some(generator.left()));
    bar.set_message("generating");
    let fail = |error: WriteError| cannot_write(&args.out, error);
    let mut writer = TraceWriter::new(Output::new(&args.out)?, generator.header()).map_err(fail)?;
    for (made, reference) in generator.by_ref().enumerate() {
        writer.write(reference).map_err(fail)?;
        if (made as u64).is_multiple_of(PROGRESS_EVERY) {
            bar.set_position(made as u64);
        }
    }
    let (totals, output) = writer.finish(time_end).map_err(fail)?;
    bar.finish_and_clear();
    written(&args.out, &totals, output.keep()?);
    Ok(())
}

fn import(args: &ImportArgs) -> Result<(), Failure> {
    let (input, bytes) = files::open(&args.input)?;
    let bar = progress(bytes);
    bar.set_message("importing");
    let input = BufReader::with_capacity(TEXT_BUFFER_BYTES, bar.wrap_read(input));
    let name = match args.format {
        FormatArg::Lackey => "valgrind lackey",
        FormatArg::Csv => "CSV",
    };
    let cache = args.cache.spec();
    let header = Header {
        granularity: granularity(args.granularity),
        clients: (0..args.clients)
            .map(|client| format!("client{client}"))
            .collect(),
        source: match &cache {
            None => format!("imported from {name}"),
            Some(cache) => format!("imported from {name}, cache {cache}"),
        },
        ..Header::default()
    };
    let begin = |header: Header| -> Result<Recorder<Output>, Failure> {
        Recorder::new(Output::new(&args.out)?, header, cache)
            .map_err(|error| cannot_write(&args.out, error))
    };
    let (recorder, time_end) = match args.format {
        FormatArg::Lackey => {
            let mut recorder = begin(header)?;
            let end = take(args, Lackey::new(input), &mut recorder)?;
            (recorder, end)
        }
        FormatArg::Csv => {
            let rows = Csv::new(input).map_err(|error| bad_text(&args.input, &error))?;
            let time_unit = if rows.has_time() {
                args.time_unit.into()
            } else {
                TimeUnit::References
            };
            let mut recorder = begin(Header {
                time_unit,
                ..header
            })?;
            let end = take(args, rows, &mut recorder)?;
            (recorder, end)
        }
    };
    let (totals, output) = recorder
        .finish(time_end)
        .map_err(|error| cannot_write(&args.out, error))?;
    bar.finish_and_clear();
    written(&args.out, &totals, output.keep()?);
    Ok(())
}

/// Records all of `touches`. Returns the time of the last.
fn take(
    args: &ImportArgs,
    touches: impl Iterator<Item = Result<Touch, ImportError>>,
    recorder: &mut Recorder<Output>,
) -> Result<u64, Failure> {
    let mut last = 0;
    for touch in touches {
        let touch = touch.map_err(|error| bad_text(&args.input, &error))?;
        last = touch.time;
        if touch.client >= args.clients {
            return Err(Failure::new(
                status::FAILED,
                format!("cannot import {}", args.input.display()),
                format!(
                    "it names client {}, and --clients is {}",
                    touch.client, args.clients
                ),
                "give --clients one more than the largest number in the client column",
            ));
        }
        recorder
            .touch(touch)
            .map_err(|error| cannot_write(&args.out, error))?;
    }
    Ok(last)
}

fn bad_text(path: &Path, error: &ImportError) -> Failure {
    Failure::new(
        status::FAILED,
        format!("cannot import {}", path.display()),
        error.to_string(),
        "check --format, and that nothing else was written into the file; see `undercroft-lab trace import --help`",
    )
}

fn cat(args: &CatArgs) -> Result<(), Failure> {
    let (mut reader, _) = files::reader(&args.trace)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut print = |text: &str| match writeln!(out, "{text}") {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(cannot_write(Path::new("standard output"), error)),
    };
    if !print(csv::HEADER)? {
        return Ok(());
    }
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut block = Vec::new();
    while left > 0 {
        block.clear();
        let more = reader.next_events(&mut block);
        if !more.map_err(|error| files::bad_trace(&args.trace, &error))? {
            break;
        }
        block.retain(|event| args.movements || event.reference().is_some());
        for event in block.iter().take(left.min(block.len() as u64) as usize) {
            if !print(&csv::row(event))? {
                return Ok(());
            }
        }
        left = left.saturating_sub(block.len() as u64);
    }
    match out.flush() {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(cannot_write(Path::new("standard output"), error))
        }
        _ => Ok(()),
    }
}
