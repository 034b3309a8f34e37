//! Another policy file, or another value of one of its parameters, while the program runs
//! (`undercroft set PID policy=FILE.wasm`, `policy.NAME=VALUE`). A thread checks the file before
//! anything changes. What was set is kept for a successor.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use undercroft_plugin::Desk;
use undercroft_proto::kept::Kept;
use undercroft_proto::messages::Ask;
use undercroft_proto::options::PluginFile;
use undercroft_sys::sealed;

use super::errand::Errand;
use crate::advice::{Advice, PLUGIN_THREAD};
use crate::evict::advised::{self, INTERPRETER_FAILED, ReadPlugin};
use crate::space::shared::Shared;

static CHANGES: Errand = Errand::new("another change of the policy is under way; ask again");

/// The means to change a run's policy file.
#[derive(Clone)]
pub(super) struct Policies {
    read: ReadPlugin,
    /// `None`: the run's keeper is too old to have the memory.
    kept: Option<Arc<Kept>>,
}

/// The plugin of a file, with the values that users gave to its parameters. Errors: why it is none.
pub(super) fn begun(plugin: &PluginFile, read: ReadPlugin) -> Result<Desk, String> {
    let mut desk = read(&plugin.module)?;
    for (name, value) in &plugin.parameters {
        desk.set(name, *value);
    }
    Ok(desk)
}

/// The bytes that came along. Errors: they may change while they are read, or are none.
fn received(mut along: Vec<OwnedFd>) -> Result<Vec<u8>, String> {
    let memfd = along.pop().ok_or("no file came along")?;
    sealed::read(memfd, PluginFile::BYTES_MAX).map_err(|why| why.to_string())
}

impl Policies {
    pub(super) fn new(read: ReadPlugin, kept: Option<Kept>) -> Policies {
        Policies {
            read,
            kept: kept.map(Arc::new),
        }
    }

    /// Has a thread make the change, and tell `peer`.
    ///
    /// * `along`: descriptors that came with the request.
    ///
    /// Errors: why not, at once.
    pub(super) fn begin(
        &self,
        shared: &Arc<Shared>,
        ask: Ask,
        along: Vec<OwnedFd>,
        peer: File,
    ) -> Result<(), (String, File)> {
        let (policies, of) = (self.clone(), shared.clone());
        // The name says that a panic in there is the policy's.
        CHANGES.begin(PLUGIN_THREAD, peer, move || {
            let done = catch_unwind(AssertUnwindSafe(|| policies.change(&of, ask, along)));
            done.unwrap_or_else(|_| Err(INTERPRETER_FAILED.to_owned()))
        })
    }

    fn change(&self, shared: &Arc<Shared>, ask: Ask, along: Vec<OwnedFd>) -> Result<(), String> {
        match ask {
            Ask::Policy { file: Some(file) } => {
                let plugin = PluginFile {
                    file,
                    module: received(along)?,
                    parameters: Default::default(),
                };
                self.replace(shared, &plugin)
            }
            Ask::Parameter { name, value } => self.set(shared, &name, value),
            _ => {
                self.keep(None)?;
                shared.books.advise(None);
                Ok(())
            }
        }
    }

    /// Has a file name pages from now on. The one before goes on if this one cannot.
    fn replace(&self, shared: &Arc<Shared>, plugin: &PluginFile) -> Result<(), String> {
        let desk = begun(plugin, self.read)?;
        let advice = Arc::new(Advice::new(&plugin.file));
        advice.show_parameters(desk.parameters());
        let started = advised::start(shared, &advice, move || Ok(desk));
        started.map_err(|why| format!("no thread for it: {why}"))?;
        self.keep(Some(plugin)).inspect_err(|_| advice.end())?;
        shared.books.advise(Some(advice));
        Ok(())
    }

    /// Gives a parameter another value.
    fn set(&self, shared: &Shared, name: &str, value: i64) -> Result<(), String> {
        let none = "the run has no policy file, so there is no parameter";
        let advice = shared.books.advice().ok_or(none)?;
        advice.check_parameter(name)?;
        let set = self.kept.as_ref().and_then(|kept| kept.read());
        let plugin = set.unwrap_or_else(|| shared.options.plugin.clone());
        let mut plugin = plugin.ok_or(none)?;
        plugin.parameters.insert(name.to_owned(), value);
        self.keep(Some(&plugin))?;
        advice.set_parameter(name, value)
    }

    /// Keeps the file for a successor.
    fn keep(&self, plugin: Option<&PluginFile>) -> Result<(), String> {
        let Some(kept) = &self.kept else {
            let why = "the run was started by an older undercroft, which cannot keep a file for \
                       the next manager; start the program anew";
            return Err(why.to_owned());
        };
        kept.write(plugin).map_err(|why| why.to_string())
    }
}
