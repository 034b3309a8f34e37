//! Four programs that go through their memory mostly in order: the same mixes and sizes as the four
//! of `recipes.rs`, but small pages gain little. They are kept for comparison.

use super::recipes::{FREECELL, GQVIEW, KGHOSTVIEW, Recipe, XMMS, make, word, words};
use anyhow::{Context, ensure};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use undercroft_seeded::Random;

pub(super) const WALKERS: [Recipe; 4] = [
    Recipe {
        name: "zstd-loops",
        about: "zstd unpacks five minutes of music made of loops, window of 4 MB",
        paper: XMMS,
        needs: "zstd",
        package: "zstd",
        inputs: loops,
        command: || Ok(words("zstd -dc loops.wav.zst")),
        stdin: None,
        cache: "2M,16,64,validate",
        small: "zipf:page=512,pages=2000,refs=40000,writes=0.84,theta=0.9,seed=1",
    },
    Recipe {
        name: "zstd-text",
        about: "zstd unpacks a text, window of 8 MB",
        paper: GQVIEW,
        needs: "zstd",
        package: "zstd",
        inputs: text,
        command: || Ok(words("zstd -dc text.zst")),
        stdin: None,
        cache: "1536K,12,64,validate",
        small: "zipf:page=512,pages=2000,refs=40000,writes=0.57,theta=0.9,dirty=0.7,seed=2",
    },
    Recipe {
        name: "cc1",
        about: "the C compiler proper on a generated program",
        paper: FREECELL,
        needs: "gcc",
        package: "gcc",
        inputs: program,
        command: || {
            let mut command = vec![compiler()?];
            command.extend(words("-quiet -O1 gen.c -o gen.s"));
            Ok(command)
        },
        stdin: None,
        cache: "64K,16,64",
        small: "zipf:page=512,pages=2500,refs=40000,writes=0.122,theta=0.9,dirty=0.5,seed=3",
    },
    Recipe {
        name: "sqlite-scan",
        about: "sqlite goes through a mapped table four times and keeps an extract in memory",
        paper: KGHOSTVIEW,
        needs: "sqlite3",
        package: "sqlite3",
        inputs: database,
        command: || {
            Ok(vec![
                "sqlite3".to_owned(),
                "table.db".to_owned(),
                ".read query.sql".to_owned(),
            ])
        },
        stdin: None,
        cache: "512K,16,64",
        small: "scan_hot:page=512,pages=4000,refs=40000,writes=0.067,dirty=0.3,seed=4",
    },
];

/// The compiler proper: `gcc` only calls it, and valgrind follows one program.
fn compiler() -> anyhow::Result<String> {
    let output = Command::new("gcc")
        .arg("-print-prog-name=cc1")
        .output()
        .context("run gcc; install it (Debian: apt-get install gcc)")?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        Path::new(&path).is_absolute(),
        "gcc does not say where its cc1 is (`{path}`); install a whole gcc"
    );
    Ok(path)
}

/// Eight loops of half a second, 16-bit stereo, each played one to three times, for five minutes.
fn loops(directory: &Path) -> anyhow::Result<()> {
    const LOOP_BYTES: usize = 88_200;
    let mut random = Random::new(7);
    let loops: Vec<Vec<u8>> = (0..8)
        .map(|_| {
            let byte = |at: usize, random: &mut Random| match at % 4 {
                3 => 0,
                _ => random.scaled(256) as u8,
            };
            (0..LOOP_BYTES).map(|at| byte(at, &mut random)).collect()
        })
        .collect();
    let file = std::fs::File::create(directory.join("loops.wav"))?;
    let mut file = std::io::BufWriter::new(file);
    let mut bytes = 0;
    while bytes < 50_000_000 {
        let chosen = random.scaled(8) as usize;
        for _ in 0..1 + random.scaled(3) {
            file.write_all(&loops[chosen])?;
            bytes += LOOP_BYTES;
        }
    }
    file.flush()?;
    drop(file);
    make(
        directory,
        "zstd -q -19 --zstd=wlog=22 --no-check -k -f loops.wav",
        None,
    )
}

/// Lines of twelve words from a vocabulary of 4,000.
fn text(directory: &Path) -> anyhow::Result<()> {
    let mut random = Random::new(1);
    let vocabulary: Vec<String> = (0..4000).map(|_| word(&mut random, 2, 9, 26)).collect();
    let mut text = String::new();
    for _ in 0..60_000 {
        for at in 0..12 {
            text.push_str(&vocabulary[random.scaled(4000) as usize]);
            text.push(if at == 11 { '\n' } else { ' ' });
        }
    }
    std::fs::write(directory.join("text"), text)?;
    make(directory, "zstd -q -19 --no-check -k -f text", None)
}

/// Functions with loops, branches and calls.
fn program(directory: &Path) -> anyhow::Result<()> {
    let mut random = Random::new(1);
    let mut text =
        String::from("struct n{struct n*l,*r;long k,v;double d[4];};\nextern void sink(long);\n");
    for at in 0..4u64 {
        writeln!(
            text,
            "long f{at}(struct n*p,long a,long b){{long s={at};for(long i=0;i<a;i++){{s+=p->k*b+i%{};if(s&{})p=p->l;\
             else p=p->r;switch(s%7){{case 0:s^=b;break;case 1:sink(s);break;case 3:s+=f{}(p,a-1,b);break;\
             default:s-=p->v;}}p->d[i&3]+=s*{:.3};}}return s;}}",
            3 + random.scaled(97),
            1 + random.scaled(7),
            at.saturating_sub(1),
            random.unit()
        )?;
    }
    Ok(std::fs::write(directory.join("gen.c"), text)?)
}

/// A table of 13,000 long rows, 14 MB, and the queries.
fn database(directory: &Path) -> anyhow::Result<()> {
    let mut random = Random::new(3);
    let mut text =
        String::from("create table t(id integer primary key,k int,g int,s text);\nbegin;\n");
    for at in 0..13_000 {
        let (k, g) = (random.scaled(1_000_000), random.scaled(200));
        let s = word(&mut random, 500, 1300, 8);
        writeln!(text, "insert into t values({at},{k},{g},'{s}');")?;
    }
    text.push_str("commit;\n");
    std::fs::write(directory.join("table.sql"), text)?;
    std::fs::write(
        directory.join("query.sql"),
        "pragma mmap_size=40000000;\n\
         pragma temp_store=memory;\n\
         select max(s||k) from t;\n\
         create temp table r as select id,g,substr(s,1,150) as h from t;\n\
         select max(s||g) from t where k>100000;\n\
         select max(k||s) from t where g between 10 and 190;\n\
         select g,count(*),max(h) from r group by g order by 2 desc limit 5;\n\
         select max(s||id) from t;\n",
    )?;
    make(directory, "sqlite3 table.db", Some("table.sql"))
}
