//! Policy files: read, checked before anything starts, and made a plugin of in the manager.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod template;

use std::path::Path;

use undercroft_plugin::{Desk, MODULE_BYTES_MAX};
use undercroft_proto::options::PluginFile;
use undercroft_terminal::{Failure, status};

/// Makes a plugin of a file's bytes. Errors: why it is none, for the user.
#[cfg(feature = "wasm")]
pub(crate) fn read(module: &[u8]) -> Result<Desk, String> {
    let mut host = undercroft_plugin::Host::default();
    let plugin = undercroft_plugin_wasm::Plugin::read(module, &mut host);
    let plugin = plugin.map_err(|refusal| refusal.to_string())?;
    Ok(Desk::with_host(Box::new(plugin), host))
}

/// As above, without an interpreter. A manager of such a build may have taken over a run.
#[cfg(not(feature = "wasm"))]
pub(crate) fn read(_module: &[u8]) -> Result<Desk, String> {
    Err(NO_INTERPRETER.to_owned())
}

const NO_INTERPRETER: &str = "this build of undercroft has no interpreter of policy files";

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
    if !cfg!(feature = "wasm") {
        return Err(Failure::new(
            status::USAGE,
            format!("{} cannot be used", path.display()),
            NO_INTERPRETER,
            "build it with one: cargo build --release --features wasm",
        ));
    }
    let plugin = PluginFile::read(path).map_err(|error| refused(path, error.to_string()))?;
    read(&plugin.module).map_err(|why| refused(path, why))?;
    Ok(plugin)
}

const _: () = assert!(PluginFile::BYTES_MAX == MODULE_BYTES_MAX);
