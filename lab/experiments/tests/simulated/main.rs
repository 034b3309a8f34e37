//! The simulated experiments at small sizes. They only compute.

mod hybridswap;
mod nvswap;
mod pcm;

use undercroft_experiments::RunOptions;
use undercroft_experiments::results::Results;

/// Runs an experiment at its small size. Returns the folder of its results, and what is in there.
fn run(name: &str) -> (tempfile::TempDir, Results) {
    let out = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let options = RunOptions {
        out: out.path().to_owned(),
        small: true,
        touch_command: Some(vec![env!("CARGO_BIN_EXE_undercroft-touch").into()]),
        ..RunOptions::default()
    };
    undercroft_experiments::run(name, &options).expect(name);
    let results = Results::read(&out.path().join("results.json")).expect("results.json parses");
    (out, results)
}
