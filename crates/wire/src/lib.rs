//! The protocol between the shim inside a client and the manager; both compile it.
//!
//! `no_std`, plain data, no system call. [`protocol`] has the messages and the command page.
//! [`parse`] has the manager's side of the messages. [`command`] has what each side does to the
//! page's words, and in which order.

#![no_std]

pub mod command;
pub mod parse;
pub mod protocol;
