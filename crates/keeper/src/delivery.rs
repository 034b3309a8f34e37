//! The report of `--report`. Its file is open from before the program starts: hours later it cannot
//! be refused. An older file keeps its bytes until there is a report to put in their place.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use undercroft_proto::options::ReportTo;
use undercroft_proto::report::Report;
use undercroft_sys::inherit;

/// The number of standard output.
const OUTPUT: i32 = 1;

/// The report cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write the report to {to}: {why}\n  fix: choose another --report FILE, or make its \
     directory writable"
)]
pub(super) struct NoReport {
    to: String,
    why: io::Error,
}

/// Where the report goes.
pub(super) struct Delivery {
    file: File,
    /// The file was made for the report, and has none yet.
    fresh: Option<PathBuf>,
    /// Bytes of the file that the report is to replace.
    replaces: bool,
    shown: String,
}

impl Delivery {
    /// Opens it. Call it while standard output is still that of the program.
    pub(super) fn open(to: &ReportTo) -> Result<Delivery, NoReport> {
        let shown = match to {
            ReportTo::Output => "standard output".to_owned(),
            ReportTo::File(path) => path.display().to_string(),
        };
        let opened = match to {
            // A file is not opened anew: the report comes behind what the program wrote.
            ReportTo::Output => inherit::copy_of(OUTPUT).map(|copy| (File::from(copy), None)),
            ReportTo::File(path) => open(path),
        };
        match opened {
            Ok((file, fresh)) => Ok(Delivery {
                replaces: matches!(to, ReportTo::File(_))
                    && file.metadata().is_ok_and(|of| of.is_file()),
                file,
                fresh,
                shown,
            }),
            Err(why) => Err(NoReport { to: shown, why }),
        }
    }

    /// Writes the report.
    pub(super) fn deliver(mut self, report: &Report) -> Result<(), NoReport> {
        let written = self.write(report);
        self.fresh = None;
        let to = self.shown.clone();
        written.map_err(|why| NoReport { to, why })
    }

    fn write(&mut self, report: &Report) -> io::Result<()> {
        let mut bytes = serde_json::to_vec_pretty(report)?;
        bytes.push(b'\n');
        if self.replaces {
            self.file.set_len(0)?;
        }
        self.file.write_all(&bytes)
    }
}

impl Drop for Delivery {
    /// A run that did not take place leaves no empty file.
    fn drop(&mut self) {
        if let Some(path) = &self.fresh {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Opens a file, and makes it if it is missing: then its path comes along.
fn open(path: &Path) -> io::Result<(File, Option<PathBuf>)> {
    let mut options = File::options();
    match options.write(true).create_new(true).open(path) {
        Ok(file) => Ok((file, Some(path.to_owned()))),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let file = File::options().write(true).open(path)?;
            Ok((file, None))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_a_report_is_not_left_and_an_older_one_is_kept() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let path = here.path().join("run.json");
        let open = |path: &Path| Delivery::open(&ReportTo::File(path.to_owned()));
        drop(open(&path).expect("it can be made"));
        assert!(!path.exists());
        std::fs::write(&path, "old").expect("write");
        drop(open(&path).expect("it can be written"));
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "old");
        let why = open(&here.path().join("none/run.json")).err();
        let why = why.expect("no directory").to_string();
        assert!(
            why.contains("none/run.json") && why.contains("--report"),
            "{why}"
        );
    }
}
