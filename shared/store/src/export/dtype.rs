//! Element types of an export, and the casts between them.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

/// Element type of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32.
    Bf16,
    /// IEEE binary16. Its largest finite value is 65,504.
    F16,
}

impl Dtype {
    /// From safetensors' spelling; `None` for what is no floating-point type of weights.
    pub fn from_safetensors(text: &str) -> Option<Self> {
        match text {
            "F32" => Some(Self::F32),
            "BF16" => Some(Self::Bf16),
            "F16" => Some(Self::F16),
            _ => None,
        }
    }

    /// safetensors' type.
    pub(super) fn safetensors(self) -> safetensors::Dtype {
        match self {
            Self::F32 => safetensors::Dtype::F32,
            Self::Bf16 => safetensors::Dtype::BF16,
            Self::F16 => safetensors::Dtype::F16,
        }
    }

    /// torch's name without `torch.`, as a `config.json` has it.
    pub fn torch(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "fp32" | "float32" => Ok(Self::F32),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            "fp16" | "float16" => Ok(Self::F16),
            _ => Err(format!("`{text}` is no type of weights: use fp32, bf16 or fp16")),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "fp32",
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
        })
    }
}

/// What a cast did to the values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct CastReport {
    /// The first finite value that the target can only hold as infinity.
    pub(super) overflow: Option<f32>,
    /// Values other than zero that became zero.
    pub(super) flushed: u64,
}

/// Casts little-endian elements, to the nearest value and to the even one of two (IEEE 754's default; torch's `.to()`).
/// `out` is replaced. `bytes` is a whole number of elements.
pub(super) fn cast(from: Dtype, to: Dtype, bytes: &[u8], out: &mut Vec<u8>) -> CastReport {
    out.clear();
    let mut report = CastReport::default();
    match (from, to) {
        (from, to) if from == to => out.extend_from_slice(bytes),
        (Dtype::F32, to) => narrow(words(bytes), to, out, &mut report),
        (Dtype::Bf16, Dtype::F32) => widen(halves(bytes).map(|bits| bf16::from_bits(bits).to_f32()), out),
        (Dtype::F16, Dtype::F32) => widen(halves(bytes).map(|bits| f16::from_bits(bits).to_f32()), out),
        (Dtype::Bf16, to) => narrow(halves(bytes).map(|bits| bf16::from_bits(bits).to_f32()), to, out, &mut report),
        (Dtype::F16, to) => narrow(halves(bytes).map(|bits| f16::from_bits(bits).to_f32()), to, out, &mut report),
    }
    report
}

fn words(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks().0.iter().map(|word: &[u8; 4]| f32::from_le_bytes(*word))
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> + '_ {
    bytes.as_chunks().0.iter().map(|half: &[u8; 2]| u16::from_le_bytes(*half))
}

fn widen(values: impl Iterator<Item = f32>, out: &mut Vec<u8>) {
    values.for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
}

fn narrow(values: impl Iterator<Item = f32>, to: Dtype, out: &mut Vec<u8>, report: &mut CastReport) {
    for value in values {
        let (bits, infinite, zero) = match to {
            Dtype::F16 => {
                let cast = f16::from_f32(value);
                (cast.to_bits(), cast.is_infinite(), cast.to_bits() & 0x7fff == 0)
            }
            // A binary32 never comes here.
            Dtype::Bf16 | Dtype::F32 => {
                let cast = bf16::from_f32(value);
                (cast.to_bits(), cast.is_infinite(), cast.to_bits() & 0x7fff == 0)
            }
        };
        if infinite && value.is_finite() && report.overflow.is_none() {
            report.overflow = Some(value);
        }
        report.flushed += u64::from(zero && value != 0.0);
        out.extend_from_slice(&bits.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn to_halves(to: Dtype, values: &[f32]) -> (Vec<u16>, CastReport) {
        let mut out = Vec::new();
        let report = cast(Dtype::F32, to, &f32s(values), &mut out);
        (halves(&out).collect(), report)
    }

    #[test]
    fn casts_round_to_the_nearest_and_to_even() {
        // 1 + 2^-8 lies between bf16's 1 and 1 + 2^-7; 1 + 3·2^-8 between 1 + 2^-7 and 1 + 2^-6.
        let tie_down = f32::from_bits(0x3f80_8000);
        let tie_up = f32::from_bits(0x3f81_8000);
        let above = f32::from_bits(0x3f80_8001);
        let (bits, report) = to_halves(Dtype::Bf16, &[1.0, tie_down, tie_up, above, -0.0, f32::INFINITY]);
        assert_eq!(bits, [0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x8000, 0x7f80]);
        assert_eq!(report, CastReport::default());
        // fp16: 2049 is a tie between 2048 and 2050.
        let (bits, report) = to_halves(Dtype::F16, &[1.0, 2049.0, 2051.0, 65504.0, 65519.0, 6e-8, f32::NEG_INFINITY]);
        assert_eq!(bits, [0x3c00, 0x6800, 0x6802, 0x7bff, 0x7bff, 0x0001, 0xfc00]);
        assert_eq!(report, CastReport::default());
        let mut out = Vec::new();
        cast(Dtype::F32, Dtype::Bf16, &f32s(&[f32::NAN]), &mut out);
        assert!(bf16::from_bits(halves(&out).next().unwrap()).is_nan());
    }

    #[test]
    fn what_a_type_cannot_hold_is_reported() {
        let (_, report) = to_halves(Dtype::F16, &[1e-9, 0.0, -1e-10, 70_000.0, 1e9]);
        assert_eq!(report, CastReport { overflow: Some(70_000.0), flushed: 2 });
        let (_, report) = to_halves(Dtype::Bf16, &[f32::MAX]);
        assert_eq!(report.overflow, Some(f32::MAX));
    }

    #[test]
    fn widening_is_exact_and_comes_back() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for half in [Dtype::Bf16, Dtype::F16] {
            let (mut wide, mut back) = (Vec::new(), Vec::new());
            cast(half, Dtype::F32, &all, &mut wide);
            cast(Dtype::F32, half, &wide, &mut back);
            let differing: Vec<_> = halves(&all).zip(halves(&back)).filter(|(a, b)| a != b).collect();
            let is_nan = |bits: u16| match half {
                Dtype::Bf16 => bf16::from_bits(bits).is_nan(),
                _ => f16::from_bits(bits).is_nan(),
            };
            assert!(differing.iter().all(|(a, b)| is_nan(*a) && is_nan(*b)), "{half}");
        }
    }
}
