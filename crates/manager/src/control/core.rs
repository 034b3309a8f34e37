//! A process dumps core: its pages are brought in, and the run is paused until it has ended.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::thread::Builder;

use undercroft_proto::messages::Answered;
use undercroft_sys::procfs;

use super::Control;
use crate::gauges::Hold;
use crate::space::bring_home::bring_home;
use crate::space::process::Process;

impl Control {
    /// Has a thread bring the pages of process `pid` in, and tell `peer` when they are.
    ///
    /// Errors: why not, at once.
    pub(super) fn begin_core(&mut self, pid: u32, peer: &File) -> Result<(), String> {
        let process = self.shared.processes.of_pid(pid);
        let process = process.ok_or_else(|| format!("process {pid} is not of this run"))?;
        if self.shared.books.record.is_some() {
            return Err("a trace is recorded (--trace), and a trace has one limit".to_owned());
        }
        if !procfs::is_dumping_core(pid) {
            return Err(format!("process {pid} dumps no core"));
        }
        let mut peer = peer.try_clone().map_err(|error| error.to_string())?;
        let (shared, of) = (self.shared.clone(), process.clone());
        let thread = Builder::new().name("uc-core".into());
        self.hold(Hold::Core, true);
        self.parting.dumping.push(process);
        let started = thread.spawn(move || {
            let answer = match bring_home(&shared, &of) {
                Ok(()) => Answered::Yes,
                Err(pages) => Answered::Refused(format!("{pages} pages could not be brought in")),
            };
            if let Ok(bytes) = serde_json::to_vec(&answer) {
                let _ = peer.write_all(&bytes);
            }
        });
        started.map_err(|error| format!("no thread for it: {error}"))?;
        Ok(())
    }

    /// Ends the pause once the processes have ended.
    pub(super) fn note_cores(&mut self) {
        if self.parting.dumping.is_empty() {
            return;
        }
        let lives = |process: &Arc<Process>| process.is_alive();
        self.parting.dumping.retain(lives);
        if self.parting.dumping.is_empty() {
            self.hold(Hold::Core, false);
        }
    }
}
