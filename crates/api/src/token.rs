//! A secret that callers over TCP have to say: a loopback port does not tell which user calls.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Lengths of a token, in bytes.
const BYTES_MIN: usize = 16;
const BYTES_MAX: usize = 256;

/// The secret.
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads the token of a file: one line. Errors: why it is no secret, and the fix.
    pub fn read(path: &Path) -> Result<Token, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let data = file.metadata().map_err(|error| error.to_string())?;
        if !data.is_file() {
            return Err("it is no file".to_owned());
        }
        if data.permissions().mode() & 0o007 != 0 {
            let path = path.display();
            return Err(format!("every user may open it: chmod 600 {path}"));
        }
        let mut text = String::new();
        let bytes_max = BYTES_MAX as u64 + 2; // a line end, and one to see that it is too long
        let read = file.take(bytes_max).read_to_string(&mut text);
        read.map_err(|error| error.to_string())?;
        Token::parse(text.trim_end()).ok_or_else(|| {
            format!(
                "a token is one line of {BYTES_MIN} to {BYTES_MAX} letters, digits and signs, such as \
                 `openssl rand -hex 32` prints"
            )
        })
    }

    fn parse(text: &str) -> Option<Token> {
        let is_long_enough = (BYTES_MIN..=BYTES_MAX).contains(&text.len());
        let is_visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        (is_long_enough && is_visible).then(|| Token(text.to_owned()))
    }

    /// Whether an `Authorization` header says it: `Bearer TOKEN`, or `Basic` of any user with the
    /// token as password, for which a browser asks.
    pub(crate) fn is_in(&self, header: Option<&str>) -> bool {
        let Some((scheme, given)) = header.and_then(|header| header.split_once(' ')) else {
            return false;
        };
        let given = given.trim().as_bytes();
        if scheme.eq_ignore_ascii_case("bearer") {
            return self.is(given);
        }
        let Some(given) = from_base64(given).filter(|_| scheme.eq_ignore_ascii_case("basic"))
        else {
            return false;
        };
        let mut parts = given.splitn(2, |byte| *byte == b':');
        parts.nth(1).is_some_and(|password| self.is(password))
    }

    /// Compares in a time that does not depend on where they differ.
    fn is(&self, given: &[u8]) -> bool {
        let differs = self
            .0
            .bytes()
            .zip(given)
            .fold(0, |all, (a, b)| all | (a ^ b));
        self.0.len() == given.len() && differs == 0
    }
}

/// `None`: it is no base64.
fn from_base64(text: &[u8]) -> Option<Vec<u8>> {
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0u32, 0);
    let end = text
        .iter()
        .rposition(|byte| *byte != b'=')
        .map_or(0, |at| at + 1);
    for letter in &text[..end] {
        let six = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_says_the_token_as_bearer_or_as_any_users_password() {
        let token = Token::parse("0123456789abcdef").expect("a token");
        for said in [
            "Bearer 0123456789abcdef",
            "bearer  0123456789abcdef",
            "Basic bWU6MDEyMzQ1Njc4OWFiY2RlZg==", // me
            "Basic OjAxMjM0NTY3ODlhYmNkZWY=",     // no user
        ] {
            assert!(token.is_in(Some(said)), "{said}");
        }
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdef0",
            "Basic 0123456789abcdef",
            "Basic !!!",
            "Basic bWU6",
            "Digest 0123456789abcdef",
        ] {
            assert!(!token.is_in(Some(wrong)), "{wrong}");
        }
        assert!(!token.is_in(None));
    }

    #[test]
    fn a_file_that_others_may_open_or_that_has_no_token_is_refused_with_its_fix() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("token");
        let read = |text: &str, mode: u32| {
            std::fs::write(&path, text).expect("a file");
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("ours");
            Token::read(&path)
        };
        assert!(read("0123456789abcdef\n", 0o600).is_ok());
        assert!(read(&"x".repeat(256), 0o640).is_ok());
        let open = read("0123456789abcdef\n", 0o644).expect_err("open");
        assert!(open.contains("chmod 600"), "{open}");
        for text in [
            "",
            "short\n",
            "0123456789abcdef\nmore\n",
            &"x".repeat(257),
            "0123456789 bcdef",
        ] {
            let error = read(text, 0o600).expect_err(text);
            assert!(error.contains("openssl rand"), "{text}: {error}");
        }
        assert!(Token::read(folder.path()).is_err(), "a directory");
    }
}
