//! The lab's workload program as a small binary; see `undercroft_lab::touch`.

use std::process::ExitCode;

fn main() -> ExitCode {
    undercroft_lab::touch::main(std::env::args().skip(1))
}
