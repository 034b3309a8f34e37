//! Opens traces for reading, and writes new ones so that a failure leaves no half trace under their
//! name.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use undercroft_trace::{TraceError, TraceReader};

use undercroft_terminal::{Failure, status};

/// Name of standard input or output.
const STANDARD: &str = "-";

/// The bytes of `path`, and how many there are if that is known.
pub(super) fn open(path: &Path) -> Result<(Box<dyn Read>, Option<u64>), Failure> {
    if path.as_os_str() == STANDARD {
        return Ok((Box::new(io::stdin().lock()), None));
    }
    let cannot = |error: io::Error| {
        Failure::new(
            status::FAILED,
            format!("cannot read {}", path.display()),
            error.to_string(),
            "give a file that exists and can be read, or - for standard input",
        )
    };
    let file = File::open(path).map_err(cannot)?;
    let metadata = file.metadata().map_err(cannot)?;
    if metadata.is_dir() {
        return Err(cannot(io::ErrorKind::IsADirectory.into()));
    }
    let bytes = metadata.is_file().then_some(metadata.len());
    Ok((Box::new(file), bytes))
}

/// A trace from a file or from standard input.
pub(super) type Reader = TraceReader<Box<dyn Read>>;

/// The trace at `path` with its header read, and its length if that is known.
pub(super) fn reader(path: &Path) -> Result<(Reader, Option<u64>), Failure> {
    let (input, bytes) = open(path)?;
    let reader = TraceReader::new(input).map_err(|error| bad_trace(path, &error))?;
    Ok((reader, bytes))
}

/// The failure of a trace that cannot be read.
pub(super) fn bad_trace(path: &Path, error: &TraceError) -> Failure {
    let fix = match error {
        TraceError::Io { .. } => "check the disk or pipe it comes from",
        TraceError::NotATrace { .. } => {
            "give a file written by `undercroft-lab trace`; `undercroft-lab trace import` reads \
             other tools' traces"
        }
        TraceError::Version { .. } => {
            "read it with the version of undercroft that wrote it, or make it again"
        }
        TraceError::Earlier { .. } => "record the run again with `undercroft run --trace`",
        TraceError::Truncated { .. } => {
            "record or copy it again; the recorder must be left to end by itself"
        }
        TraceError::Checksum { .. } | TraceError::Corrupt { .. } => {
            "take another copy, or make it again"
        }
    };
    Failure::new(
        status::FAILED,
        format!("cannot read the trace {}", path.display()),
        error.to_string(),
        fix,
    )
}

/// A file being written: a temporary one beside it until it is complete.
pub(super) enum Output {
    /// Gets its name when it is complete.
    File {
        /// Where the bytes are now.
        file: NamedTempFile,
        /// The name it gets.
        path: PathBuf,
    },
    /// Standard output, or a file that is not regular: written directly.
    Stream {
        /// Where the bytes go.
        stream: Box<dyn Write>,
        /// Its name.
        path: PathBuf,
    },
}

impl Output {
    /// Begins a file. Errors: its directory cannot be written.
    pub(super) fn new(path: &Path) -> Result<Output, Failure> {
        let path = path.to_owned();
        if path.as_os_str() == STANDARD {
            let stream = Box::new(io::stdout());
            return Ok(Output::Stream { stream, path });
        }
        let metadata = fs::metadata(&path);
        if metadata.as_ref().is_ok_and(|metadata| metadata.is_dir()) {
            return Err(cannot_write(&path, "it is a directory"));
        }
        if metadata.is_ok_and(|metadata| !metadata.is_file()) {
            let file = File::options().write(true).open(&path);
            let stream = Box::new(file.map_err(|error| cannot_write(&path, error))?);
            return Ok(Output::Stream { stream, path });
        }
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let file = tempfile::Builder::new()
            .prefix(".undercroft-trace-")
            .permissions(fs::Permissions::from_mode(0o666)) // less the umask
            .tempfile_in(directory)
            .map_err(|error| cannot_write(&path, error))?;
        Ok(Output::File { file, path })
    }

    /// Gives the complete file its name. Returns its length if it is a file.
    pub(super) fn keep(self) -> Result<Option<u64>, Failure> {
        match self {
            Output::File { file, path } => {
                let file = file
                    .persist(&path)
                    .map_err(|error| cannot_write(&path, error.error))?;
                Ok(file.metadata().ok().map(|metadata| metadata.len()))
            }
            Output::Stream { mut stream, path } => {
                stream.flush().map_err(|error| cannot_write(&path, error))?;
                Ok(None)
            }
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Output::File { file, .. } => file.write(bytes),
            Output::Stream { stream, .. } => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Output::File { file, .. } => file.flush(),
            Output::Stream { stream, .. } => stream.flush(),
        }
    }
}

/// The failure of a file that cannot be written.
pub(super) fn cannot_write(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::new(
        status::FAILED,
        format!("cannot write {}", path.display()),
        why.to_string(),
        "give a file in a directory that can be written and has room",
    )
}
