//! Compressors of the RAM pool and of packed files, and each thread's working memory for them.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use undercroft_base::BASE_PAGE_BYTES;

/// How new copies are compressed. Each copy says how, so a pool reads copies of another setting.
///
/// lz4_flex without its "safe" features is a little slower than the C library. The difference is
/// too small for a second C dependency (docs/design/0006). Its unchecked-copy decoder still checks
/// every length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compressor {
    /// LZ4 (lz4_flex): the fastest.
    #[default]
    Lz4,
    /// Zstandard level -1: little more than half the bytes on heaps, at twice the time.
    Zstd,
}

/// Names that a user may write, in the order of messages.
pub(crate) const COMPRESSOR_NAMES: &str = "lz4, zstd";
/// Level 1 takes half as much time again, and saves 6 to 24 % of the bytes (docs/design/0006).
const ZSTD_LEVEL: i32 = -1;
/// Room for the output of one page, for any compressor.
const OUTPUT_BYTES: usize = 2 * BASE_PAGE_BYTES;

/// There is no such compressor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown compressor (one of: {COMPRESSOR_NAMES})")]
pub struct UnknownCompressor;

impl Compressor {
    /// The byte stored with each copy.
    pub(super) fn code(self) -> u8 {
        match self {
            Compressor::Lz4 => 1,
            Compressor::Zstd => 2,
        }
    }

    /// The compressor of a stored byte. `None`: the copy is corrupt.
    pub(super) fn from_code(code: u8) -> Option<Compressor> {
        match code {
            1 => Some(Compressor::Lz4),
            2 => Some(Compressor::Zstd),
            _ => None,
        }
    }
}

impl fmt::Display for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compressor::Lz4 => "lz4",
            Compressor::Zstd => "zstd",
        })
    }
}

impl FromStr for Compressor {
    type Err = UnknownCompressor;

    fn from_str(text: &str) -> Result<Self, UnknownCompressor> {
        match text {
            "lz4" => Ok(Compressor::Lz4),
            "zstd" => Ok(Compressor::Zstd),
            _ => Err(UnknownCompressor),
        }
    }
}

/// The buffers of one thread: with them it compresses a batch and decompresses a page without
/// allocating.
pub(crate) struct Scratch {
    table: CompressTable,
    pub(super) zstd: Option<ZstdContexts>,
    /// Objects of the batch in hand, one after another, with room for one more page.
    pub(crate) objects: Vec<u8>,
    /// An object copied out of the pool, so that its bytes do not change under the decompressor.
    pub(crate) object: [u8; BASE_PAGE_BYTES],
    /// A large page, compressed. It grows when the first is stored or loaded.
    pub(super) large: Vec<u8>,
}

pub(super) struct ZstdContexts {
    compress: zstd::bulk::Compressor<'static>,
    decompress: zstd::bulk::Decompressor<'static>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        table: CompressTable::small(),
        zstd: None,
        objects: Vec::new(),
        object: [0; BASE_PAGE_BYTES],
        large: Vec::new(),
    });
}

/// Runs `work` with this thread's scratch memory, which its first call allocates.
pub(crate) fn with_scratch<T>(work: impl FnOnce(&mut Scratch) -> T) -> T {
    SCRATCH.with_borrow_mut(work)
}

impl Scratch {
    /// Makes room for a batch of `pages` and for `compressor`'s contexts, if there is none yet.
    pub(crate) fn reserve(&mut self, compressor: Compressor, pages: usize) {
        let bytes = pages * BASE_PAGE_BYTES + OUTPUT_BYTES;
        debug_assert!(get_maximum_output_size(BASE_PAGE_BYTES) <= OUTPUT_BYTES);
        if self.objects.len() < bytes {
            self.objects.resize(bytes, 0);
        }
        if compressor == Compressor::Zstd && self.zstd.is_none() {
            self.zstd = ZstdContexts::new();
        }
    }

    /// Compresses `page` to `objects[at..]`. Returns the length, or `None` if the compressor failed
    /// (out of memory).
    pub(crate) fn compress(
        &mut self,
        compressor: Compressor,
        page: &[u8],
        at: usize,
    ) -> Option<usize> {
        let output = self.objects.get_mut(at..at + OUTPUT_BYTES)?;
        match compressor {
            Compressor::Lz4 => compress_into_with_table(page, output, &mut self.table).ok(),
            Compressor::Zstd => {
                let zstd = self.zstd.as_mut()?;
                zstd.compress.compress_to_buffer(page, output).ok()
            }
        }
    }

    /// Compresses a page to `large`, as [`Scratch::compress`].
    pub(super) fn compress_large(&mut self, compressor: Compressor, page: &[u8]) -> Option<usize> {
        let output =
            get_maximum_output_size(page.len()).max(zstd::zstd_safe::compress_bound(page.len()));
        self.large.resize(output, 0);
        match compressor {
            Compressor::Lz4 => lz4_flex::block::compress_into(page, &mut self.large).ok(),
            Compressor::Zstd => {
                let zstd = self.zstd.as_mut()?;
                zstd.compress
                    .compress_to_buffer(page, &mut self.large[..])
                    .ok()
            }
        }
    }

    /// Decompresses the first `bytes` of `object` into the page `dst`, as [`decompress`].
    pub(crate) fn decompress(
        &mut self,
        compressor: Compressor,
        bytes: usize,
        dst: &mut [u8],
    ) -> bool {
        decompress(&mut self.zstd, compressor, &self.object[..bytes], dst)
    }
}

/// Decompresses `object` into the page `dst`. False if it is not one page. Any input is safe: both
/// decoders check every length against both buffers.
pub(super) fn decompress(
    zstd: &mut Option<ZstdContexts>,
    compressor: Compressor,
    object: &[u8],
    dst: &mut [u8],
) -> bool {
    let written = match compressor {
        Compressor::Lz4 => lz4_flex::block::decompress_into(object, dst).ok(),
        Compressor::Zstd => {
            if zstd.is_none() {
                *zstd = ZstdContexts::new();
            }
            zstd.as_mut()
                .and_then(|zstd| zstd.decompress.decompress_to_buffer(object, dst).ok())
        }
    };
    written == Some(dst.len())
}

impl ZstdContexts {
    /// `None`: out of memory.
    fn new() -> Option<ZstdContexts> {
        let mut compress = zstd::bulk::Compressor::new(ZSTD_LEVEL).ok()?;
        // Our own checksum covers the page; its size is always one page.
        compress.include_checksum(false).ok()?;
        compress.include_contentsize(false).ok()?;
        let decompress = zstd::bulk::Decompressor::new().ok()?;
        Some(ZstdContexts {
            compress,
            decompress,
        })
    }
}
