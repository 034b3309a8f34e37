//! The file of a snapshot. The command line adds it for `vm --memory-file`, no user by `--tier`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageSize, Tier};
use undercroft_sys::mapping::SharedMemory;

use super::{Kind, Opened, TierSpec, base_pages_only, paths};
use crate::made::{Below, Handed, MadeTier, OpenError, With};
use crate::shape::Shape;
use crate::source::{FACTS, Source, SourceTier, VERSION};

pub(super) static KIND: Kind = Kind {
    facts: FACTS,
    version: Some(VERSION),
    syntax: "snapshot:PATH",
    example: "snapshot:/var/lib/vm/memory",
    meaning: "The memory in a snapshot of a virtual machine, which is only read. `undercroft vm \
              --memory-file PATH` has one; it is no tier for --tier.",
    settings: &[],
    parse: paths::parse,
    head: paths::head,
    identity: paths::head,
    open,
    inherit,
};

fn open(spec: &TierSpec, page: PageSize, _: Bytes) -> Result<Opened, OpenError> {
    base_pages_only(spec, page)?;
    let path = spec.path.as_deref().unwrap_or_else(|| "".as_ref());
    let source = Source::open(path).map_err(OpenError::of)?;
    // It needs none, and every tier has some.
    let memory = SharedMemory::create("uc-slot-table", BASE_PAGE_BYTES)?;
    Ok((memory, Box::new(source)))
}

fn inherit(
    spec: &TierSpec,
    page: PageSize,
    file: Option<Handed<OwnedFd>>,
) -> Result<Box<dyn Below>, OpenError> {
    base_pages_only(spec, page)?;
    let (fd, name, bytes) = file.ok_or_else(|| paths::not_inherited(spec))?;
    Ok(Box::new(Source::inherit(fd, name, bytes)))
}

impl Below for Source {
    fn handed(&self) -> Option<Handed<BorrowedFd<'_>>> {
        Some((self.as_fd(), self.name().to_owned(), self.bytes()))
    }

    fn make(self: Box<Self>, _: With<'_>) -> Result<Box<dyn MadeTier>, OpenError> {
        Ok(Box::new(SourceTier::new(*self)))
    }
}

impl MadeTier for SourceTier {
    fn finish(self: Box<Self>, _: Option<Shape>, _: usize) -> Box<dyn Tier> {
        self
    }
}
