//! A file or block device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use undercroft_base::{Bytes, PageSize, Slot, Tier};
use undercroft_sys::mapping::SharedMemory;

use super::{Kind, Opened, PRICE, SHAPE, Setting, TBW, TierSpec, paths};
use crate::file::{Backing, FACTS, FileMeter, FileTier, Room, VERSION};
use crate::made::{Below, Handed, IN_MEMORY, MadeTier, OpenError, With};
use crate::shape::Shape;

pub(super) static KIND: Kind = Kind {
    facts: FACTS,
    version: Some(VERSION),
    syntax: "file:PATH[,size=SIZE][,compress=yes|no][,shape=DEVICE][,price=DOLLARS][,tbw=SIZE]",
    example: "file:/var/swap,size=20G",
    meaning: "A new file, a block device, or a directory to make a nameless file in. Nothing of it \
              outlives the run.",
    settings: &[
        Setting {
            name: "size=SIZE",
            default: "all of a block device; for a file, what the disk leaves",
            meaning: "most bytes it may take",
        },
        Setting {
            name: "compress=yes|no",
            default: COMPRESS_TEXT,
            meaning: "several compressed pages in one block, where they are short enough; of at most \
                      4 TiB",
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

/// Whether pages are compressed unless the user says.
const COMPRESS: bool = false;
const COMPRESS_TEXT: &str = if COMPRESS { "yes" } else { "no" };

/// Keeps pages in what is below as `spec` says.
fn below(spec: &TierSpec, page: PageSize, below: Backing) -> Backing {
    let below = below.of_pages(page);
    below.packing(spec.compress.unwrap_or(COMPRESS))
}

fn open(spec: &TierSpec, page: PageSize, _: Bytes) -> Result<Opened, OpenError> {
    let path = spec.path.as_deref().unwrap_or_else(|| "".as_ref());
    let below = below(
        spec,
        page,
        Backing::open(path, spec.size).map_err(OpenError::of)?,
    );
    let table = FileTier::table_bytes(&below);
    let memory = SharedMemory::create("uc-slot-table", table)?;
    Ok((memory, Box::new(below)))
}

fn inherit(
    spec: &TierSpec,
    page: PageSize,
    file: Option<Handed<OwnedFd>>,
) -> Result<Box<dyn Below>, OpenError> {
    let (fd, name, bytes) = file.ok_or_else(|| paths::not_inherited(spec))?;
    let inherited = Backing::inherit(fd, name, bytes).map_err(OpenError::of)?;
    Ok(Box::new(below(spec, page, inherited)))
}

impl Below for Backing {
    fn handed(&self) -> Option<Handed<BorrowedFd<'_>>> {
        Some((self.as_fd(), self.name().to_owned(), self.bytes()))
    }

    fn room(&self, table: BorrowedFd<'_>) -> io::Result<Option<Room>> {
        if self.is_block_device() {
            return Ok(None);
        }
        Room::over(table, self.bytes(), self.page()).map(Some)
    }

    fn warnings(&self) -> Vec<&'static str> {
        if self.is_in_memory() {
            vec![IN_MEMORY]
        } else if !self.is_direct() {
            vec![
                "the file system of a tier refuses O_DIRECT, so the kernel keeps pages in its cache \
                 again, outside of the limit; choose another (--tier file:PATH, or UNDERCROFT_DIR)",
            ]
        } else {
            vec![]
        }
    }

    fn make(self: Box<Self>, with: With<'_>) -> Result<Box<dyn MadeTier>, OpenError> {
        let make = if with.again {
            FileTier::recover
        } else {
            FileTier::new
        };
        let made = make(*self, with.memory, with.key).map_err(OpenError::of)?;
        Ok(Box::new(made.with_bell(with.bell)))
    }
}

impl MadeTier for FileTier {
    fn for_each_slot(&self, visit: &mut dyn FnMut(Slot)) {
        FileTier::for_each_slot(self, visit);
    }

    fn file_meter(&self) -> Option<FileMeter> {
        Some(self.meter())
    }

    fn finish(self: Box<Self>, shape: Option<Shape>, waiting: usize) -> Box<dyn Tier> {
        let tier = self.write_behind(waiting);
        Box::new(match shape {
            Some(shape) => tier.shaped(shape),
            None => tier,
        })
    }
}
