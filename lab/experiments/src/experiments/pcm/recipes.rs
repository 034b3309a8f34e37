//! The four programs whose traces stand for the paper's: how their inputs are made, how they are
//! called, behind which cache.
//!
//! They were chosen for the kind of work, footprint and reads to writes (Table 1);
//! `bench/pcm-traces/README.md` lists the programs that were passed over. The two that write more
//! than they read need a cache that does not fetch a line it is about to overwrite (`validate`):
//! behind a cache that fetches, no trace writes more than it reads. Inputs are made from seeds, so
//! the references are the same wherever the program and its libraries are.

use anyhow::{Context, ensure};
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use undercroft_seeded::Random;

/// A row of the paper's Table 1.
pub(super) struct Paper {
    pub(super) name: &'static str,
    pub(super) memory_kib: u64,
    pub(super) instruction_reads: u64,
    pub(super) data_reads: u64,
    pub(super) data_writes: u64,
}

/// A program.
pub(super) struct Recipe {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) paper: Paper,
    /// The requirements: the program that must be installed, and its package.
    pub(super) needs: &'static str,
    pub(super) package: &'static str,
    /// Makes the inputs in an empty directory.
    pub(super) inputs: fn(&Path) -> anyhow::Result<()>,
    /// The command line, run in that directory.
    pub(super) command: fn() -> anyhow::Result<Vec<String>>,
    /// The input that is its standard input.
    pub(super) stdin: Option<&'static str>,
    pub(super) cache: &'static str,
    /// The trace that a small run generates instead.
    pub(super) small: &'static str,
}

/// The paper's Table 1.
pub(super) const XMMS: Paper = Paper {
    name: "xmms",
    memory_kib: 8050,
    instruction_reads: 65_048,
    data_reads: 125_649,
    data_writes: 978_242,
};
pub(super) const GQVIEW: Paper = Paper {
    name: "gqview",
    memory_kib: 7430,
    instruction_reads: 93_242,
    data_reads: 172_044,
    data_writes: 345_399,
};
pub(super) const FREECELL: Paper = Paper {
    name: "freecell",
    memory_kib: 10_080,
    instruction_reads: 114_233,
    data_reads: 315_902,
    data_writes: 60_040,
};
pub(super) const KGHOSTVIEW: Paper = Paper {
    name: "kghostview",
    memory_kib: 17_390,
    instruction_reads: 380_609,
    data_reads: 1_061_986,
    data_writes: 103_540,
};

/// Debian 12's name for its `convert`.
const IMAGEMAGICK: &str = "convert-im6.q16";

/// The cache of all four.
const CACHE: &str = "512K,16,64,validate";

pub(super) const RECIPES: [Recipe; 4] = [
    Recipe {
        name: "xmms-like",
        about: "ppmdraw draws a graph of 300 nodes and 2,300 lines into a picture of 960 x 720",
        paper: XMMS,
        needs: "ppmdraw",
        package: "netpbm",
        inputs: drawing,
        command: || Ok(words("ppmdraw -scriptfile=graph.draw page.ppm")),
        stdin: None,
        cache: CACHE,
        small: "zipf:page=512,pages=2000,refs=40000,writes=0.84,theta=0.9,seed=1",
    },
    Recipe {
        name: "gqview-like",
        about: "ImageMagick turns a photograph of 640 x 480 by a quarter",
        paper: GQVIEW,
        needs: IMAGEMAGICK,
        package: "imagemagick",
        inputs: photograph,
        command: || {
            Ok(words(&format!(
                "{IMAGEMAGICK} -limit thread 1 photo.jpg -rotate 90 null:"
            )))
        },
        stdin: None,
        cache: CACHE,
        small: "zipf:page=512,pages=2000,refs=40000,writes=0.57,theta=0.9,dirty=0.7,seed=2",
    },
    Recipe {
        name: "freecell-like",
        about: "aspell checks a text of 3,000 words and proposes corrections for one in fifty",
        paper: FREECELL,
        needs: "aspell",
        package: "aspell aspell-en",
        inputs: document,
        command: || Ok(words("aspell -d en_US -a")),
        stdin: Some("words"),
        cache: CACHE,
        small: "zipf:page=512,pages=2500,refs=40000,writes=0.122,theta=0.9,dirty=0.5,seed=3",
    },
    Recipe {
        name: "kghostview-like",
        about: "sqlite looks up rows of a mail index in random order",
        paper: KGHOSTVIEW,
        needs: "sqlite3",
        package: "sqlite3",
        inputs: index,
        command: || {
            Ok(vec![
                "sqlite3".to_owned(),
                "mail.db".to_owned(),
                ".read look.sql".to_owned(),
            ])
        },
        stdin: None,
        cache: CACHE,
        small: "zipf:page=512,pages=4000,refs=40000,writes=0.067,theta=0.7,dirty=0.3,seed=4",
    },
];

pub(super) fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// Runs a program that makes an input. Its standard input is a file.
pub(super) fn make(directory: &Path, command: &str, input: Option<&str>) -> anyhow::Result<()> {
    let mut parts = command.split(' ');
    let program = parts.next().unwrap_or_default();
    let input = match input {
        Some(name) => Stdio::from(std::fs::File::open(directory.join(name))?),
        None => Stdio::null(),
    };
    let output = Command::new(program)
        .args(parts)
        .current_dir(directory)
        .stdin(input)
        .output()
        .with_context(|| format!("run `{command}`; install {program}"))?;
    ensure!(
        output.status.success(),
        "`{command}` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

pub(super) fn word(random: &mut Random, least: u64, most: u64, letters: u64) -> String {
    (0..least + random.scaled(most - least + 1))
        .map(|_| char::from(b'a' + random.scaled(letters) as u8))
        .collect()
}

/// A white page, and the picture to draw: lines between nodes at random places, then the nodes with
/// their names.
fn drawing(directory: &Path) -> anyhow::Result<()> {
    const WIDTH: u64 = 960;
    const HEIGHT: u64 = 720;
    let mut page = format!("P6\n{WIDTH} {HEIGHT}\n255\n").into_bytes();
    page.resize(page.len() + (WIDTH * HEIGHT * 3) as usize, 255);
    std::fs::write(directory.join("page.ppm"), page)?;
    let mut random = Random::new(8);
    let nodes: Vec<(u64, u64)> = (0..300)
        .map(|_| {
            (
                20 + random.scaled(WIDTH - 40),
                20 + random.scaled(HEIGHT - 40),
            )
        })
        .collect();
    let mut text = String::new();
    for at in 0..2300 {
        let ((x, y), (to_x, to_y)) = (
            nodes[random.scaled(300) as usize],
            nodes[random.scaled(300) as usize],
        );
        if at % 50 == 0 {
            let colour = ["red", "green", "blue", "black", "orange", "purple"];
            writeln!(text, "setcolor {};", colour[at / 50 % colour.len()])?;
        }
        writeln!(text, "line {x} {y} {to_x} {to_y};")?;
    }
    for (at, (x, y)) in nodes.iter().enumerate() {
        writeln!(text, "circle {x} {y} 6;")?;
        writeln!(text, "text {} {} 9 0 \"n{at}\";", x + 8, y + 4)?;
    }
    Ok(std::fs::write(directory.join("graph.draw"), text)?)
}

/// The text that aspell checks: words of its own dictionary. Half of them come from a fixed tenth
/// of it, so they repeat more often. Every fiftieth word has two letters swapped.
fn document(directory: &Path) -> anyhow::Result<()> {
    let output = Command::new("aspell")
        .args(["-d", "en_US", "dump", "master"])
        .output()
        .context("run aspell; install it (Debian: apt-get install aspell aspell-en)")?;
    let mut known: Vec<&str> = std::str::from_utf8(&output.stdout)
        .unwrap_or_default()
        .lines()
        .filter(|word| word.len() > 3 && word.bytes().all(|byte| byte.is_ascii_lowercase()))
        .collect();
    known.sort_unstable();
    ensure!(
        known.len() > 10_000,
        "aspell has no dictionary en_US of some size; install it (Debian: apt-get install aspell-en)"
    );
    let mut random = Random::new(4);
    let mut text = String::new();
    for at in 0..3000 {
        let among = match random.scaled(2) {
            0 => known.len() / 10,
            _ => known.len(),
        };
        // Scattered over the dictionary, which is in the order of letters.
        let chosen = undercroft_seeded::finish(random.scaled(among as u64)) as usize % known.len();
        let mut word = known[chosen].as_bytes().to_vec();
        if at % 50 == 49 {
            let place = 1 + random.scaled(word.len() as u64 - 2) as usize;
            word.swap(place, place + 1);
        }
        text.push_str(&String::from_utf8_lossy(&word));
        text.push(if at % 10 == 9 { '\n' } else { ' ' });
    }
    Ok(std::fs::write(directory.join("words"), text)?)
}

/// A table of 18,000 letters, entered in random order, with an index of senders; and the queries.
fn index(directory: &Path) -> anyhow::Result<()> {
    const ROWS: u64 = 18_000;
    let mut random = Random::new(9);
    let senders: Vec<String> = (0..3000).map(|_| word(&mut random, 6, 12, 16)).collect();
    let mut order: Vec<u64> = (0..ROWS).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.scaled(at as u64 + 1) as usize);
    }
    let mut text = String::from(
        "create table mail(id integer primary key, sender text, subject text, note text);\n\
         create index sent on mail(sender);\nbegin;\n",
    );
    for id in order {
        let sender = &senders[random.scaled(3000) as usize];
        let (subject, note) = (
            word(&mut random, 20, 60, 16),
            word(&mut random, 200, 1200, 16),
        );
        writeln!(
            text,
            "insert into mail values({id},'{sender}','{subject}','{note}');"
        )?;
    }
    text.push_str("commit;\n");
    std::fs::write(directory.join("mail.sql"), text)?;
    // The query uses the C library's old rand() instead of a list of rows: reading a long list
    // would be half of the work.
    let text = "pragma mmap_size=100000000;\npragma synchronous=off;\npragma journal_mode=memory;\nbegin;\n\
         create temp table wanted as with recursive walk(at,seed) as (select 1,12345 union all \
         select at+1,(seed*1103515245+12345)%2147483648 from walk where at<7000) \
         select at,seed/65536%18000 as id from walk;\n\
         select sum(length(note)) from wanted cross join mail on mail.id=wanted.id;\n\
         update mail set note=note||'!' where id in (select id from wanted where at%180=0);\n\
         select sum(length(subject)) from wanted cross join mail on \
         mail.sender=(select sender from mail where id=wanted.id) where wanted.at<700;\ncommit;\n";
    std::fs::write(directory.join("look.sql"), text)?;
    make(directory, "sqlite3 mail.db", Some("mail.sql"))
}

/// Three waves and some noise for each colour, as a progressive JPEG.
fn photograph(directory: &Path) -> anyhow::Result<()> {
    const WIDTH: u32 = 640;
    const HEIGHT: u32 = 480;
    let mut random = Random::new(5);
    let waves: Vec<[f64; 3]> = (0..9)
        .map(|_| {
            [
                random.unit() * 0.05,
                random.unit() * 0.05,
                random.unit() * 6.3,
            ]
        })
        .collect();
    let mut picture = format!("P6\n{WIDTH} {HEIGHT}\n255\n").into_bytes();
    for y in 0..HEIGHT {
        for x in 0..WIDTH {
            for colour in waves.chunks_exact(3) {
                let each = colour.iter().map(|[across, down, from]| {
                    (across * f64::from(x) + down * f64::from(y) + from).sin()
                });
                let light = 128.0 + 35.0 * each.sum::<f64>() + random.scaled(12) as f64;
                picture.push(light.clamp(0.0, 255.0) as u8);
            }
        }
    }
    std::fs::write(directory.join("photo.ppm"), picture)?;
    make(
        directory,
        &format!("{IMAGEMAGICK} photo.ppm -interlace Plane -quality 90 photo.jpg"),
        None,
    )
}

#[cfg(test)]
mod tests {
    use super::super::walkers::WALKERS;
    use super::*;

    fn all() -> impl Iterator<Item = &'static Recipe> {
        static BOTH: [[Recipe; 4]; 2] = [RECIPES, WALKERS];
        BOTH.iter().flatten()
    }

    #[test]
    fn papers_table_gives_its_ratios() {
        for (recipe, reads, writes) in [
            (0, 1.0, 5.13),
            (1, 1.0, 1.30),
            (2, 7.16, 1.0),
            (3, 13.93, 1.0),
        ] {
            let paper = &RECIPES[recipe].paper;
            let ours =
                (paper.instruction_reads + paper.data_reads) as f64 / paper.data_writes as f64;
            assert!(
                (ours / (reads / writes) - 1.0).abs() < 0.01,
                "{}",
                paper.name
            );
        }
    }

    #[test]
    fn caches_and_small_traces_parse() {
        let names: std::collections::BTreeSet<&str> = all().map(|recipe| recipe.name).collect();
        assert_eq!(names.len(), 8, "a trace is kept under its name");
        for recipe in all() {
            assert!(
                recipe
                    .cache
                    .parse::<undercroft_references::CacheSpec>()
                    .is_ok()
            );
            assert!(recipe.small.parse::<undercroft_references::Spec>().is_ok());
        }
    }
}
