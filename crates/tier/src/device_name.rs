//! Names of the devices that there are models of, as `shape=` has them.

use std::fmt;
use std::str::FromStr;

use undercroft_device::{NAMES, Profile, by_name};

/// The name of a device that there is a model of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShapeName(&'static str);

impl ShapeName {
    /// The device's constants.
    pub fn profile(self) -> Profile {
        by_name(self.0).expect("a name of the list")
    }
}

/// The names of all devices.
pub fn names() -> String {
    NAMES.join(", ")
}

/// There is no such device; the text names those that there are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no device `{0}`; use one of: {list}", list = names())]
pub struct UnknownShape(String);

impl FromStr for ShapeName {
    type Err = UnknownShape;

    fn from_str(text: &str) -> Result<ShapeName, UnknownShape> {
        let known = NAMES.into_iter().find(|name| *name == text);
        known
            .map(ShapeName)
            .ok_or_else(|| UnknownShape(text.to_owned()))
    }
}

impl fmt::Display for ShapeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_the_names_of_the_devices() {
        for name in NAMES {
            let shape: ShapeName = name.parse().expect(name);
            assert_eq!(
                (shape.to_string().as_str(), shape.profile().name),
                (name, name)
            );
        }
        let refused = "floppy".parse::<ShapeName>().unwrap_err().to_string();
        assert!(refused.contains("`floppy`") && refused.contains("optane-dimm, "));
    }
}
