//! Code that kinds with a path have in common.

use super::words::{SpecError, Words};
use super::{Kind, TierSpec};
use crate::made::OpenError;

/// A path, and the settings that kinds share.
pub(super) fn parse(kind: &'static Kind, words: Words<'_>) -> Result<TierSpec, SpecError> {
    let path = words.first.filter(|path| !path.is_empty());
    let mut spec = TierSpec::of(kind);
    spec.path = Some(path.ok_or_else(|| kind.missing("path"))?.into());
    for (key, value) in words.settings {
        if !spec.set(key, value)? {
            return Err(kind.unknown_key(key));
        }
    }
    Ok(spec)
}

pub(super) fn head(spec: &TierSpec) -> String {
    let path = spec.path.as_deref().unwrap_or_else(|| "".as_ref());
    format!("{}:{}", spec.facts().kind, path.display())
}

/// A file is needed, and none was handed over.
pub(super) fn not_inherited(spec: &TierSpec) -> OpenError {
    OpenError::NotInherited(spec.to_string())
}
