//! Integers of variable length: LEB128, shortest form only; signed ones as zigzag.

/// Most bytes of one number.
pub(crate) const VARINT_BYTES_MAX: usize = 10;

/// Appends `value`: 7 bits a byte, lowest first, bit 7 set on all but the last.
pub(crate) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Reads a number at `*at` and moves past it. On `Err`, which gives the reason, `*at` is the
/// number's first byte.
#[inline]
pub(crate) fn get(bytes: &[u8], at: &mut usize) -> Result<u64, &'static str> {
    match bytes.get(*at) {
        Some(&byte) if byte < 0x80 => {
            *at += 1;
            Ok(u64::from(byte))
        }
        _ => get_long(bytes, at),
    }
}

fn get_long(bytes: &[u8], at: &mut usize) -> Result<u64, &'static str> {
    let mut value = 0u64;
    for index in 0..VARINT_BYTES_MAX {
        let &byte = bytes
            .get(*at + index)
            .ok_or("the columns end inside a number")?;
        let low = u64::from(byte & 0x7f);
        if index == VARINT_BYTES_MAX - 1 && byte > 1 {
            return Err("a number is larger than 64 bits");
        }
        value |= low << (7 * index);
        if byte < 0x80 {
            if byte == 0 && index > 0 {
                return Err("a number is not in its shortest form");
            }
            *at += index + 1;
            return Ok(value);
        }
    }
    Err("a number is larger than 64 bits")
}

/// Small for small differences of either sign: 0, -1, 1, -2 become 0, 1, 2, 3.
#[inline]
pub(crate) fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// The inverse of [`zigzag`].
#[inline]
pub(crate) fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_take_their_length() {
        for value in [0, 1, 127, 128, 16383, 16384, u64::MAX >> 1, u64::MAX] {
            let mut bytes = Vec::new();
            put(&mut bytes, value);
            assert_eq!(
                bytes.len(),
                (64 - value.leading_zeros()).max(1).div_ceil(7) as usize
            );
            let mut at = 0;
            assert_eq!(get(&bytes, &mut at), Ok(value));
            assert_eq!(at, bytes.len());
            assert!(get(&bytes[..bytes.len() - 1], &mut 0).is_err());
        }
        for value in [0, 1, -1, i64::MAX, i64::MIN] {
            assert_eq!(unzigzag(zigzag(value)), value);
        }
    }

    #[test]
    fn long_forms_and_overlong_numbers_are_refused() {
        for bytes in [
            &[0x80, 0][..],
            &[0xff; 10],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
        ] {
            assert!(get(bytes, &mut 0).is_err(), "{bytes:?}");
        }
    }
}
