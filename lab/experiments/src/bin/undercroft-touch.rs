//! The lab's workload program as a small binary; see `undercroft_experiments::touch`.

use std::process::ExitCode;

fn main() -> ExitCode {
    undercroft_experiments::touch::main(std::env::args().skip(1))
}
