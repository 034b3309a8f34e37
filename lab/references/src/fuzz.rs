//! The promises that must hold for hostile text. The fuzz target checks them, and a test checks
//! them over mutated text.

use crate::import::ImportError;
use crate::import::csv::Csv;
use crate::import::lackey::Lackey;
use crate::touch::Touch;

/// Reads `bytes` as text to import, in both formats, each up to its first error. Panics when an
/// error names a place behind the end. Returns how many accesses were read.
pub fn imports(bytes: &[u8]) -> u64 {
    let csv = match Csv::new(bytes) {
        Ok(csv) => read_touches(bytes, csv),
        Err(error) => read_touches(bytes, std::iter::once(Err(error))),
    };
    read_touches(bytes, Lackey::new(bytes)) + csv
}

fn read_touches(bytes: &[u8], touches: impl Iterator<Item = Result<Touch, ImportError>>) -> u64 {
    let mut read = 0;
    for touch in touches {
        match touch {
            Ok(_) => read += 1,
            Err(error) => {
                let (ImportError::Io { offset, .. }
                | ImportError::Cut { offset, .. }
                | ImportError::Line { offset, .. }) = &error;
                assert!(*offset <= bytes.len() as u64, "{error}: behind the end");
                return read;
            }
        }
    }
    read
}
