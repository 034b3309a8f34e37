//! How long the machine kept a CPU from every thread while a test measured. A bound of time or of
//! growth holds on the CPUs that a test is given.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::{build, skip};

/// Watches each CPU at the highest priority, until `longest`.
#[derive(Debug)]
pub struct Stalls(Child);

impl Stalls {
    /// Begins to watch.
    pub fn watch() -> Stalls {
        let child = Command::new(build("stalls"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Stalls(child.expect("the program that watches"))
    }

    /// Ends. Returns the longest time for which any CPU was taken away; zero where the priority is
    /// refused, which a line says.
    pub fn longest(mut self) -> Duration {
        drop(self.0.stdin.take());
        let output = self.0.wait_with_output().expect("its output");
        if output.status.code() == Some(77) {
            skip("stalls of the machine are not known: no real-time priority");
            return Duration::ZERO;
        }
        let text = String::from_utf8_lossy(&output.stdout);
        Duration::from_micros(text.trim().parse().expect("a number of microseconds"))
    }
}
