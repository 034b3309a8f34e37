//! How long the program waits for pages: as the kernel's pressure files give it, and for the policy
//! file.

use undercroft_base::Nanos;

use super::Control;
use crate::sync::lock;

impl Control {
    /// Takes the averages. Called at each round of the control thread.
    pub(super) fn note_stall(&mut self) {
        let waited = lock(&self.shared.gauges.fault_latency).some_waited();
        let now = Nanos(self.shared.elapsed().as_nanos() as u64);
        self.bounds.pressure.note(now, waited);
        if let Some(advice) = self.shared.books.advice() {
            advice.note_waited(waited);
        }
    }
}
