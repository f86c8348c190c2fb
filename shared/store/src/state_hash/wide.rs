//! BLAKE3 of many short inputs of one size at once.
//!
//! `blake3::hash` works on one input, and a block of 1,024 floats has four chunks, which fill a quarter of an AVX-512
//! register. Here the same chunk of sixteen blocks shares a register instead: twice as fast, same digests. The call that
//! takes several inputs is public in the `blake3` crate but not stable, so the workspace pins the crate's exact version, and
//! the tests compare every size with `blake3::hash`.

use std::sync::OnceLock;

use blake3::IncrementCounter::No;
use blake3::platform::Platform;

/// Inputs hashed side by side: the widest SIMD that BLAKE3 uses.
const LANES: usize = 16;
const CHUNK: usize = blake3::CHUNK_LEN;
/// Chunks of the longest input: 1,024 elements of 8 bytes.
const MAX_CHUNKS: usize = 8;

/// BLAKE3's initial values and domain flags (BLAKE3 paper, section 2.2).
const IV: [u32; 8] =
    [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A, 0x510E_527F, 0x9B05_688C, 0x1F83_D9AB, 0x5BE0_CD19];
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 1 << 1;
const PARENT: u8 = 1 << 2;
const ROOT: u8 = 1 << 3;

type Digest = [u8; 32];

/// The digests of the successive `size`-byte pieces of `bytes`, the last of which may be short. `out` has room for exactly
/// that many.
pub(super) fn digests(size: usize, bytes: &[u8], out: &mut [Digest]) {
    let chunks = size / CHUNK;
    let whole = match chunks {
        1 | 2 | 4 | 8 if size.is_multiple_of(CHUNK) => bytes.len() / size,
        _ => 0,
    };
    let (full, rest) = bytes.split_at(whole * size);
    let (full_out, rest_out) = out.split_at_mut(whole);
    for (group, out) in full.chunks(LANES * size).zip(full_out.chunks_mut(LANES)) {
        match chunks {
            1 => group_digests::<1>(group, out),
            2 => group_digests::<2>(group, out),
            4 => group_digests::<4>(group, out),
            _ => group_digests::<MAX_CHUNKS>(group, out),
        }
    }
    for (piece, out) in rest.chunks(size).zip(rest_out) {
        *out = *blake3::hash(piece).as_bytes();
    }
}

/// Up to [`LANES`] inputs of `CHUNKS` chunks each.
fn group_digests<const CHUNKS: usize>(group: &[u8], out: &mut [Digest]) {
    let (all, _) = group.as_chunks::<CHUNK>();
    // values[n][lane]: what stands for the n-th subtree of each input, from its chunks up to its root.
    let mut values = [[[0; 32]; LANES]; MAX_CHUNKS];
    for (chunk, values) in values.iter_mut().enumerate().take(CHUNKS) {
        let inputs: [&[u8; CHUNK]; LANES] = std::array::from_fn(|lane| &all[lane.min(out.len() - 1) * CHUNKS + chunk]);
        let end = if CHUNKS == 1 { CHUNK_END | ROOT } else { CHUNK_END };
        let flat = values.as_flattened_mut();
        platform().hash_many(&inputs[..out.len()], &IV, chunk as u64, No, 0, CHUNK_START, end, flat);
    }
    let mut width = CHUNKS;
    while width > 1 {
        let flags = if width == 2 { PARENT | ROOT } else { PARENT };
        for parent in 0..width / 2 {
            let pairs: [[u8; 64]; LANES] = std::array::from_fn(|lane| {
                let mut pair = [0; 64];
                pair[..32].copy_from_slice(&values[2 * parent][lane]);
                pair[32..].copy_from_slice(&values[2 * parent + 1][lane]);
                pair
            });
            let inputs: [&[u8; 64]; LANES] = std::array::from_fn(|lane| &pairs[lane]);
            platform().hash_many(&inputs[..out.len()], &IV, 0, No, flags, 0, 0, values[parent].as_flattened_mut());
        }
        width /= 2;
    }
    out.copy_from_slice(&values[0][..out.len()]);
}

fn platform() -> Platform {
    static PLATFORM: OnceLock<Platform> = OnceLock::new();
    *PLATFORM.get_or_init(Platform::detect)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_blake3() {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for size in [1024, 2048, 4096, 8192, 1000, 3072] {
            for count in [0, 1, 2, 7, 15, 16, 17, 31, 33] {
                for rest in [0, 1, 64, 999] {
                    let bytes = &bytes[..count * size + rest];
                    let expected: Vec<Digest> = bytes.chunks(size).map(|b| *blake3::hash(b).as_bytes()).collect();
                    let mut out = vec![[0; 32]; expected.len()];
                    digests(size, bytes, &mut out);
                    assert_eq!(out, expected, "{count} pieces of {size} bytes and {rest}");
                }
            }
        }
    }
}
