//! Compressed memory.

use std::os::fd::OwnedFd;

use undercroft_base::{Bytes, PageSize, Slot, Tier};
use undercroft_sys::mapping::SharedMemory;

use super::words::{SpecError, Words};
use super::{Kind, Opened, SHAPE, Setting, TierSpec};
use crate::made::{Below, Handed, MadeTier, OpenError, With};
use crate::ram::{Compressor, FACTS, RamPool, Shards, VERSION};
use crate::shape::{Shape, Shaped};

pub(super) static KIND: Kind = Kind {
    facts: FACTS,
    version: Some(VERSION),
    syntax: "ram[,lz4|zstd][,max=SIZE|PERCENT][,shape=DEVICE][,price=DOLLARS]",
    example: "ram,zstd,max=64M",
    meaning: "Compressed memory. It counts towards --memory-max. Pages of one repeated word cost \
              nothing.",
    settings: &[
        Setting {
            name: "lz4|zstd",
            default: "lz4",
            meaning: "compressor: lz4 is faster, zstd smaller",
        },
        Setting {
            name: "max=SIZE|PERCENT",
            default: "50% above another tier, 95% alone",
            meaning: "most memory it may hold; a percentage is of --memory-max",
        },
        SHAPE,
        Setting {
            name: "price=DOLLARS",
            default: "what --memory-price says",
            meaning: "price of a GiB, if it stands for memory that is not DRAM",
        },
    ],
    parse,
    head: |spec| format!("ram,{}", spec.compressor),
    identity: |spec| spec.compressor.to_string(),
    open,
    inherit,
};

fn parse(kind: &'static Kind, words: Words<'_>) -> Result<TierSpec, SpecError> {
    if let Some(path) = words.first {
        return Err(SpecError::PathUnwanted(path.to_owned()));
    }
    let mut spec = TierSpec::of(kind);
    let mut compressor = None;
    for (key, value) in words.settings {
        if spec.set(key, value)? {
            continue;
        }
        let (Ok(named), None) = (key.parse::<Compressor>(), value) else {
            return Err(kind.unknown_key(key));
        };
        if compressor.replace(named).is_some() {
            let (kind, key) = (kind.facts.kind, key.to_owned());
            return Err(SpecError::Twice { kind, key });
        }
    }
    spec.compressor = compressor.unwrap_or_default();
    Ok(spec)
}

fn open(spec: &TierSpec, page: PageSize, pool: Bytes) -> Result<Opened, OpenError> {
    let reserve = Shards::reserve_for(pool).0 as usize;
    let memory = SharedMemory::create("uc-ram-tier", reserve)?;
    Ok((memory, inherit(spec, page, None)?))
}

fn inherit(
    spec: &TierSpec,
    page: PageSize,
    _: Option<Handed<OwnedFd>>,
) -> Result<Box<dyn Below>, OpenError> {
    Ok(Box::new(Pool(spec.compressor, page)))
}

/// Nothing is below a pool: its memory has all.
#[derive(Debug)]
struct Pool(Compressor, PageSize);

impl Below for Pool {
    fn make(self: Box<Self>, with: With<'_>) -> Result<Box<dyn MadeTier>, OpenError> {
        let fits = with.memory.len() as u64 <= RamPool::reserve_for(Bytes(u64::MAX)).0;
        if !fits {
            let made = Shards::make(&with.memory, self.0, with.pool, with.key, with.again);
            let made = made.map_err(OpenError::of)?;
            return Ok(Box::new(made.of_pages(self.1, with.again)));
        }
        let make = if with.again {
            RamPool::recover
        } else {
            RamPool::new
        };
        let made = make(with.memory, self.0, with.pool, with.key).map_err(OpenError::of)?;
        // One that is recovered knows the size.
        Ok(Box::new(if with.again {
            made
        } else {
            made.of_pages(self.1)
        }))
    }
}

impl MadeTier for Shards {
    fn for_each_slot(&self, visit: &mut dyn FnMut(Slot)) {
        Shards::for_each_slot(self, visit);
    }

    fn finish(self: Box<Self>, shape: Option<Shape>, _: usize) -> Box<dyn Tier> {
        match shape {
            Some(shape) => Box::new(Shaped::new(*self, shape)),
            None => self,
        }
    }
}

impl MadeTier for RamPool {
    fn for_each_slot(&self, visit: &mut dyn FnMut(Slot)) {
        RamPool::for_each_slot(self, visit);
    }

    fn finish(self: Box<Self>, shape: Option<Shape>, _: usize) -> Box<dyn Tier> {
        match shape {
            Some(shape) => Box::new(Shaped::new(*self, shape)),
            None => self,
        }
    }
}
