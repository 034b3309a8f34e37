//! Safe functions for every system call that the other crates need and `std` lacks. All `unsafe` of
//! the manager is here.
//!
//! Level 1. errno becomes an enum by meaning here; no crate above sees a number.

pub mod access;
pub mod arena;
pub mod cgroup;
pub mod fdpass;
pub mod futex;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod handover;
pub mod held;
pub mod huge_pages;
pub mod image;
pub mod inherit;
pub mod interrupts;
pub mod lent;
pub mod mapping;
pub mod maps;
pub mod memory;
pub mod nvm;
pub mod object;
pub mod page_locks;
pub mod pagemap;
pub mod probe;
pub mod process;
pub mod procfs;
pub mod restrict;
pub mod ring;
pub mod sealed;
pub mod sideband;
pub mod signal;
pub mod title;
pub mod uffd;
pub mod uffd_source;

mod ioctl;
mod object_view;
mod uffd_object;
