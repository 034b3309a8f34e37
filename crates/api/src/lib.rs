//! Views for operators: a REST API, metrics for Prometheus and a web page, over HTTP/1.1.
//!
//! [`Server::start`] serves until it is dropped. What it shows comes from a [`Source`]; [`Live`] is
//! the one of the running clients of this user. Limits and reasons: docs/design/0029.
//!
//! Absent: TLS, users, CORS, connections that stay. Over TCP nothing can be changed: the socket of
//! a loopback port does not say which user calls. A [`Token`] keeps other users from reading. A
//! Unix socket is of its user alone.

mod answer;
mod bodies;
mod connections;
mod http;
mod listen;
mod metrics;
mod openapi;
mod routes;
mod server;
mod shared;
mod source;
mod token;

pub use listen::Listen;
pub use server::Server;
pub use shared::Rights;
pub use source::{Change, Live, NotChanged, Source};
pub use token::Token;
