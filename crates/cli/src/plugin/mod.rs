//! Policy files: read, checked before anything starts, and made a plugin of in the manager.

pub(crate) mod check;
pub(crate) mod template;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use undercroft_plugin::Desk;
use undercroft_proto::options::PluginFile;
use undercroft_terminal::{Failure, status};

/// A file of more bytes is refused; no more are read.
#[cfg(feature = "wasm")]
const BYTES_MAX: usize = undercroft_plugin_wasm::MODULE_BYTES_MAX;
#[cfg(not(feature = "wasm"))]
const BYTES_MAX: usize = 0;

/// Makes a plugin of a file's bytes. Errors: why it is none, for the user.
#[cfg(feature = "wasm")]
pub(crate) fn read(module: &[u8]) -> Result<Desk, String> {
    let mut host = undercroft_plugin::Host::default();
    let plugin = undercroft_plugin_wasm::Plugin::read(module, &mut host);
    let plugin = plugin.map_err(|refusal| refusal.to_string())?;
    Ok(Desk::with_host(Box::new(plugin), host))
}

/// As above, without an interpreter.
#[cfg(not(feature = "wasm"))]
pub(crate) fn read(_module: &[u8]) -> Result<Desk, String> {
    Err("this undercroft was built without the feature `wasm`".to_owned())
}

/// The failure of a file that is no policy.
fn refused(path: &Path, why: String) -> Failure {
    Failure::new(
        status::USAGE,
        format!("{} is no policy", path.display()),
        why,
        "docs/guide/policies.md says what a policy file must have",
    )
}

/// Reads a policy file, and checks it as far as that is possible before the program starts.
pub(crate) fn open(path: &Path) -> Result<PluginFile, Failure> {
    let module = bytes(path).map_err(|error| refused(path, error.to_string()))?;
    read(&module).map_err(|why| refused(path, why))?;
    Ok(PluginFile {
        file: path.display().to_string(),
        module,
    })
}

fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let most = BYTES_MAX as u64 + 1;
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
