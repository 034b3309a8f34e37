//! Answers: status, type and bytes. Errors are JSON with what, why and the fix.

use schemars::JsonSchema;
use serde::Serialize;

/// An answer before it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) body: Vec<u8>,
    /// The methods that a path has, of a 405.
    pub(crate) allow: Option<&'static str>,
    /// Sources that the page may load from.
    pub(crate) security_policy: Option<String>,
}

/// Why a request was refused.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Error<'a> {
    /// The request that did not work.
    what: &'a str,
    /// The reason.
    why: &'a str,
    /// A way out.
    fix: &'a str,
}

impl Answer {
    pub(crate) fn new(content_type: &'static str, body: impl Into<Vec<u8>>) -> Answer {
        Answer {
            status: 200,
            content_type,
            body: body.into(),
            allow: None,
            security_policy: None,
        }
    }

    pub(crate) fn json<T: Serialize>(value: &T) -> Answer {
        match serde_json::to_vec(value) {
            Ok(body) => Answer::new("application/json", body),
            Err(error) => {
                let why = error.to_string();
                Answer::error(500, "the answer cannot be written", &why, "report this")
            }
        }
    }

    pub(crate) fn error(status: u16, what: &str, why: &str, fix: &str) -> Answer {
        let body = serde_json::to_vec(&Error { what, why, fix }).unwrap_or_default();
        Answer {
            status,
            ..Answer::new("application/json", body)
        }
    }

    /// The bytes on the wire.
    ///
    /// * `head`: without the body.
    pub(crate) fn bytes(&self, head: bool) -> Vec<u8> {
        let mut text = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
             X-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n",
            self.status,
            reason(self.status),
            self.content_type,
            self.body.len()
        );
        if self.status == 401 {
            text.push_str("WWW-Authenticate: Basic realm=\"undercroft\"\r\n");
        }
        if let Some(allow) = self.allow {
            text.push_str(&format!("Allow: {allow}\r\n"));
        }
        let policy = self.security_policy.as_deref();
        let policy = policy.unwrap_or("default-src 'none'; frame-ancestors 'none'");
        text.push_str(&format!("Content-Security-Policy: {policy}\r\n\r\n"));
        let mut bytes = text.into_bytes();
        if !head {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        202 => "Accepted",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        421 => "Misdirected Request",
        422 => "Unprocessable Content",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    }
}
