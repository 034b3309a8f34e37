//! A Redis or Valkey cluster.

use std::os::fd::OwnedFd;

use undercroft_base::{Bytes, PageSize, Tier};
use undercroft_sys::mapping::SharedMemory;
use undercroft_tier_redis::spec::{RemoteSpec, SettingError};
use undercroft_tier_redis::{Claimed, FACTS, RemoteTier};

use super::words::{SpecError, Words};
use super::{Kind, Opened, PRICE, Setting, TierSpec, base_pages_only};
use crate::made::{Below, Handed, MadeTier, OpenError, With};
use crate::shape::Shape;

pub(super) static KIND: Kind = Kind {
    facts: FACTS,
    version: None,
    syntax: "redis:HOST:PORT[,HOST:PORT]...[,size=SIZE][,prefix=NAME][,user=NAME]\
             [,password-file=PATH][,tls=PATH|system][,cert=PATH,key=PATH][,leftover=discard]\
             [,price=DOLLARS]",
    example: "redis:10.0.0.1:6379,10.0.0.2:6379,size=20G",
    meaning: "A Redis or Valkey cluster: each page compressed, on two masters. Its machines see \
              the program's memory in clear. Nothing of it outlives the run.",
    settings: &[
        Setting {
            name: "size=SIZE",
            default: "4G",
            meaning: "most bytes in the cluster, both copies counted",
        },
        Setting {
            name: "prefix=NAME",
            default: "uc",
            meaning: "first part of all keys; each run needs its own",
        },
        Setting {
            name: "user=NAME",
            default: "the default user",
            meaning: "user of the cluster's access list",
        },
        Setting {
            name: "password-file=PATH",
            default: "no password",
            meaning: "its first line is the password",
        },
        Setting {
            name: "tls=PATH|system",
            default: "not encrypted",
            meaning: "encrypts; trusts the authorities in the file, or the system's",
        },
        Setting {
            name: "cert=PATH,key=PATH",
            default: "none",
            meaning: "the certificate that the cluster asks for, and its key",
        },
        Setting {
            name: "leftover=discard",
            default: "refuse",
            meaning: "deletes what a run left that was not heard of for a minute",
        },
        PRICE,
    ],
    parse,
    head: |spec| cluster(spec).map_or_else(String::new, ToString::to_string),
    identity: |spec| cluster(spec).map_or_else(String::new, RemoteSpec::identity),
    open,
    inherit,
};

fn cluster(spec: &TierSpec) -> Option<&RemoteSpec> {
    spec.cluster.as_deref()
}

fn parse(kind: &'static Kind, words: Words<'_>) -> Result<TierSpec, SpecError> {
    let mut spec = TierSpec::of(kind);
    let mut own = Vec::new();
    for (key, value) in words.settings {
        if !spec.rate(key, value)? {
            own.push((key, value));
        }
    }
    let cluster = RemoteSpec::parse(words.first, &own).map_err(|error| match error {
        SettingError::NoNode => kind.missing("node"),
        SettingError::Unknown(key) => kind.unknown_key(&key),
        SettingError::Twice(key) => {
            let kind = kind.facts.kind;
            SpecError::Twice { kind, key }
        }
        SettingError::Value(key, why) => SpecError::Value { key, why },
    })?;
    spec.cluster = Some(Box::new(cluster));
    Ok(spec)
}

fn open(spec: &TierSpec, page: PageSize, _: Bytes) -> Result<Opened, OpenError> {
    base_pages_only(spec, page)?;
    let mut below = below(spec)?;
    let memory = SharedMemory::create("uc-slot-table", RemoteTier::table_bytes(below.spec.size))?;
    below.claimed = Some(Claimed::new(&below.spec, &memory).map_err(OpenError::of)?);
    Ok((memory, Box::new(below)))
}

fn inherit(
    spec: &TierSpec,
    page: PageSize,
    _: Option<Handed<OwnedFd>>,
) -> Result<Box<dyn Below>, OpenError> {
    base_pages_only(spec, page)?;
    Ok(Box::new(below(spec)?))
}

fn below(spec: &TierSpec) -> Result<Cluster, OpenError> {
    let missing = || OpenError::NotInherited(spec.to_string());
    Ok(Cluster {
        spec: cluster(spec).ok_or_else(missing)?.clone(),
        claimed: None,
    })
}

/// Nodes that have the copies.
#[derive(Debug)]
struct Cluster {
    spec: RemoteSpec,
    /// Stays with the process that made it.
    claimed: Option<Claimed>,
}

impl Below for Cluster {
    fn warnings(&self) -> Vec<&'static str> {
        self.claimed
            .as_ref()
            .map_or_else(Vec::new, Claimed::warnings)
    }

    fn make(self: Box<Self>, with: With<'_>) -> Result<Box<dyn MadeTier>, OpenError> {
        let Cluster { spec, claimed } = *self;
        if with.again {
            return Err(OpenError::NotTakenOver(spec.to_string()));
        }
        let made = RemoteTier::new(&spec, with.memory, claimed, with.key);
        Ok(Box::new(made.map_err(OpenError::of)?))
    }
}

impl MadeTier for RemoteTier {
    fn finish(self: Box<Self>, _: Option<Shape>, _: usize) -> Box<dyn Tier> {
        self
    }
}
