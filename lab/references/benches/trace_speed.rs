//! How fast traces are made, written, read and analysed, and how large they are: `cargo
//! bench -p undercroft-references --bench trace_speed -- [REFS]`.

use std::hint::black_box;
use std::time::Instant;

use undercroft_references::{Analysis, Generator, PageTrace, Sampling};
use undercroft_trace::{Reference, TraceReader, TraceWriter};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    // Cargo adds `--bench`, but not when it tests: then a small size is enough.
    let is_test = words.iter().all(|word| word != "--bench");
    let refs: u64 = match words.iter().find(|word| *word != "--bench") {
        _ if is_test => 20_000,
        Some(refs) => refs.parse()?,
        None => 10_000_000,
    };
    heading();
    for pattern in [
        "sequential:pages=10000",
        "zipf:pages=100000,theta=0.99,writes=0.3",
        "uniform:pages=1e6,page=64",
        "scan_hot:pages=100000,writes=0.5",
    ] {
        let generator = Generator::new(format!("{pattern},refs={refs}").parse()?);
        let header = generator.header();
        let page_shift = header.granularity;
        let rate = |begin: Instant| refs as f64 / begin.elapsed().as_secs_f64() / 1e6;
        let begin = Instant::now();
        let references: Vec<Reference> = generator.collect();
        let generate = rate(begin);

        let begin = Instant::now();
        let mut writer = TraceWriter::new(Vec::new(), header)?;
        for reference in &references {
            writer.write(*reference)?;
        }
        let (_, bytes) = writer.finish(0)?;
        let write = rate(begin);

        let begin = Instant::now();
        let mut reader = TraceReader::new(bytes.as_slice())?;
        let mut block = Vec::new();
        while reader.next_block(&mut block)? {
            black_box(&block);
            block.clear();
        }
        let read = rate(begin);

        let begin = Instant::now();
        black_box(PageTrace::read(
            TraceReader::new(bytes.as_slice())?,
            page_shift,
            false,
        )?);
        let pages = rate(begin);

        let mut analyse = [0.0; 2];
        for (rate_of, sampling) in analyse
            .iter_mut()
            .zip([Sampling::Exact, Sampling::Rate(0.01)])
        {
            let begin = Instant::now();
            let mut reader = TraceReader::new(bytes.as_slice())?;
            black_box(Analysis::read(&mut reader, page_shift, sampling, |_| ())?);
            *rate_of = rate(begin);
        }
        println!(
            "{pattern:<42} {generate:>8.1} {write:>8.1} {read:>8.1} {pages:>8.1} {:>8.1} {:>8.1} {:>8.2}",
            analyse[0],
            analyse[1],
            bytes.len() as f64 / refs as f64
        );
    }
    Ok(())
}

fn heading() {
    println!(
        "{:<42} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "M references/s:", "generate", "write", "read", "pages", "analyse", "1%", "B/ref"
    );
}
