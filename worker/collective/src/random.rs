//! Random values from explicit seeds (D3): element i of a tensor is a function of (seed, i) alone.
//!
//! The generator is Philox4x32-10 (csrc/philox.cpp); libtorch's global generator is never touched. Neither the number of threads
//! nor the machine's vector width changes a value of a mask or a uniform fill; a normal fill also depends on libm's `log`, `sin`
//! and `cos`.

use tch::{Device, Kind, Tensor};

use crate::error::Error;
use crate::ffi;

/// Mixes words (run seed, step, sequence, layer, …) into one seed by SplitMix64's finaliser. The order of the words matters.
pub fn mix(words: &[u64]) -> u64 {
    let mut state = 0x243f_6a88_85a3_08d3_u64 ^ words.len() as u64;
    for word in words {
        state = finalise(state ^ finalise(*word)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    }
    finalise(state)
}

fn finalise(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Fills `out` of shape [B, …] with a dropout mask: 0 with probability `p`, else 1 / (1 − p) (1 for a bool or uint8 tensor). Row b
/// is drawn from `seeds[b]` alone, so the mask of a sequence does not depend on how sequences are batched.
///
/// `out` is contiguous, of kind float, double, bfloat16, bool or uint8. On another device than the CPU the mask is drawn on the
/// host and copied.
///
/// # Errors
/// [`Error::Argument`] for another kind, `p` outside [0, 1), or a number of seeds other than B.
pub fn dropout_mask(out: &mut Tensor, seeds: &[u64], p: f64) -> Result<(), Error> {
    dropout_mask_from(out, seeds, p, 0)
}

/// As [`dropout_mask`], for a part of each sequence: the first element of each row is number `first_element` of the whole
/// sequence's row. Ranks that hold parts of one sequence so draw the same mask as one rank that holds it whole.
///
/// # Errors
/// As [`dropout_mask`].
pub fn dropout_mask_from(out: &mut Tensor, seeds: &[u64], p: f64, first_element: u64) -> Result<(), Error> {
    let operation = "dropout_mask";
    let argument = |message| Error::Argument { operation, message };
    if !(0.0..1.0).contains(&p) {
        return Err(argument(format!("a probability of {p}: it must lie in [0, 1)")));
    }
    let kind = out.kind();
    let scale = (1.0 / (1.0 - p)) as f32;
    let (element_size, kept) = match kind {
        Kind::Float => (4, u64::from(scale.to_bits())),
        Kind::Double => (8, (1.0 / (1.0 - p)).to_bits()),
        Kind::BFloat16 => (2, u64::from(bfloat16_bits(scale))),
        Kind::Bool | Kind::Uint8 => (1, 1),
        other => return Err(argument(format!("kind {other:?}: float, double, bfloat16, bool or uint8 is allowed"))),
    };
    let rows = out.size().first().copied().unwrap_or(1);
    if usize::try_from(rows) != Ok(seeds.len()) {
        return Err(argument(format!("{} seeds for a tensor of shape {:?}: one a row", seeds.len(), out.size())));
    }
    if out.device() != Device::Cpu {
        let mut host = Tensor::empty(out.size(), (kind, Device::Cpu));
        dropout_mask_from(&mut host, seeds, p, first_element)?;
        tch::no_grad(|| out.copy_(&host));
        return Ok(());
    }
    let threshold = (p * 4_294_967_296.0).round().min(f64::from(u32::MAX)) as u32;
    let shape = out.size();
    let target = ffi::tensor::host_bytes_mut(out)
        .ok_or_else(|| argument(format!("a tensor of shape {shape:?} that is not contiguous")))?;
    if ffi::random::mask(target, element_size, seeds, first_element, threshold, kept) {
        Ok(())
    } else {
        Err(argument(format!("a tensor of shape {shape:?} whose storage is not aligned for {kind:?}")))
    }
}

/// A new tensor on the CPU, uniform in [0, 1), drawn in fp32 with 24 bits and converted to `kind`.
///
/// # Errors
/// [`Error::Argument`] for a negative size.
pub fn uniform(shape: &[i64], seed: u64, kind: Kind) -> Result<Tensor, Error> {
    fill("uniform", shape, kind, |out| ffi::random::uniform(out, seed))
}

/// A new tensor on the CPU, normal with `mean` and standard deviation `std`, drawn in fp32 and converted to `kind`. Box and
/// Muller's method on 32-bit words: no value lies further than 6.7 deviations out.
///
/// # Errors
/// [`Error::Argument`] for a negative size.
pub fn normal(shape: &[i64], mean: f64, std: f64, seed: u64, kind: Kind) -> Result<Tensor, Error> {
    fill("normal", shape, kind, |out| ffi::random::normal(out, seed, mean, std))
}

fn fill(operation: &'static str, shape: &[i64], kind: Kind, draw: impl FnOnce(&mut [f32])) -> Result<Tensor, Error> {
    let sizes: Option<Vec<usize>> = shape.iter().map(|size| usize::try_from(*size).ok()).collect();
    let Some(numel) = sizes.and_then(|sizes| sizes.into_iter().try_fold(1_usize, usize::checked_mul)) else {
        return Err(Error::Argument { operation, message: format!("shape {shape:?}: sizes must be 0 or more") });
    };
    let mut values = vec![0.0_f32; numel];
    draw(&mut values);
    Ok(Tensor::from_slice(&values).reshape(shape).to_kind(kind))
}

/// The bits of the bfloat16 nearest to a positive finite number (ties to even).
fn bfloat16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounding = 0x7fff + ((bits >> 16) & 1);
    ((bits + rounding) >> 16) as u16
}
