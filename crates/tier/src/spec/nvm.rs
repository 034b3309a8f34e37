//! Mapped memory that is not DRAM.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use undercroft_base::{Bytes, PageSize, Slot, Tier};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::nvm::MappedAs;

use super::{Kind, Opened, PRICE, SHAPE, Setting, TBW, TierSpec, paths};
use crate::made::{Below, Handed, IN_MEMORY, MadeTier, OpenError, With};
use crate::nvm::{FACTS, NvmBacking, NvmTier, VERSION};
use crate::shape::{Shape, Shaped};

pub(super) static KIND: Kind = Kind {
    facts: FACTS,
    version: Some(VERSION),
    syntax: "nvm:PATH,size=SIZE[,shape=DEVICE][,price=DOLLARS][,tbw=SIZE]",
    example: "nvm:/mnt/pmem,size=8G",
    meaning: "Mapped memory that is not DRAM: a DAX device, a new file, or a directory to make a \
              nameless file in. A file that is not on a DAX file system only stands for it, and \
              counts as emulated. Nothing of it outlives the run.",
    settings: &[
        Setting {
            name: "size=SIZE",
            default: "all of a device; a file needs it",
            meaning: "bytes it takes, all of them at the start",
        },
        SHAPE,
        PRICE,
        TBW,
    ],
    parse: paths::parse,
    head: paths::head,
    identity: paths::head,
    open,
    inherit,
};

fn open(spec: &TierSpec, page: PageSize, _: Bytes) -> Result<Opened, OpenError> {
    let path = spec.path.as_deref().unwrap_or_else(|| "".as_ref());
    let below = NvmBacking::open(path, spec.size)
        .map_err(OpenError::of)?
        .of_pages(page);
    let table = NvmTier::table_bytes(&below);
    let memory = SharedMemory::create("uc-slot-table", table)?;
    Ok((memory, Box::new(below)))
}

fn inherit(
    spec: &TierSpec,
    page: PageSize,
    file: Option<Handed<OwnedFd>>,
) -> Result<Box<dyn Below>, OpenError> {
    let (fd, name, bytes) = file.ok_or_else(|| paths::not_inherited(spec))?;
    Ok(Box::new(
        NvmBacking::inherit(fd, name, bytes).of_pages(page),
    ))
}

impl Below for NvmBacking {
    fn handed(&self) -> Option<Handed<BorrowedFd<'_>>> {
        Some((self.as_fd(), self.name().to_owned(), self.bytes()))
    }

    fn warnings(&self) -> Vec<&'static str> {
        self.is_in_memory()
            .then_some(IN_MEMORY)
            .into_iter()
            .collect()
    }

    fn make(self: Box<Self>, with: With<'_>) -> Result<Box<dyn MadeTier>, OpenError> {
        let make = if with.again {
            NvmTier::recover
        } else {
            NvmTier::new
        };
        let made = make(*self, with.memory, with.key);
        Ok(Box::new(made.map_err(OpenError::of)?))
    }
}

impl MadeTier for NvmTier {
    fn for_each_slot(&self, visit: &mut dyn FnMut(Slot)) {
        NvmTier::for_each_slot(self, visit);
    }

    fn mapping(&self) -> Option<MappedAs> {
        Some(self.mapped_as())
    }

    fn finish(self: Box<Self>, shape: Option<Shape>, _: usize) -> Box<dyn Tier> {
        match shape {
            Some(shape) => Box::new(Shaped::new(*self, shape)),
            None => self,
        }
    }
}
