//! Bodies of answers in JSON that are no part of the report.

use schemars::JsonSchema;
use serde::Serialize;
use undercroft_proto::report::{MissRatioCurve, Snapshot, TierSnapshot};

/// The running clients, as `status --json` gives them.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Clients<'a> {
    /// Version of the format of answers.
    pub(crate) schema_version: u32,
    /// In order of their process ids.
    pub(crate) clients: &'a [Snapshot],
}

/// Cost of one client at other limits.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Curve<'a> {
    /// Version of the format of answers.
    pub(crate) schema_version: u32,
    /// Process id of the keeper.
    pub(crate) pid: u32,
    /// Null without a limit, or while no page has left memory.
    pub(crate) mrc: Option<&'a MissRatioCurve>,
}

/// Tiers of clients.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Tiers<'a> {
    /// Version of the format of answers.
    pub(crate) schema_version: u32,
    /// Tiers of a client are in order of their numbers.
    pub(crate) tiers: Vec<ClientTier<'a>>,
}

/// A tier of one client.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ClientTier<'a> {
    /// Process id of the keeper.
    pub(crate) pid: u32,
    /// 1 for the fastest.
    pub(crate) number: usize,
    #[serde(flatten)]
    pub(crate) tier: &'a TierSnapshot,
}

/// The change was made, or is under way.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Done {
    /// Version of the format of answers.
    pub(crate) schema_version: u32,
    /// Process id of the keeper.
    pub(crate) pid: u32,
    /// True.
    pub(crate) done: bool,
}
