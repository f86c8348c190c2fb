//! Interleaving several corpora by weight (D1). Pure arithmetic.
//!
//! Source: megatron-core's `build_blending_indices`, `build_exhaustive_blending_indices`, `normalize` and the size rules of its builder.
//! The blend is not shuffled: it is a deterministic interleave of parts that are.

use crate::npy::Ints;

/// Surplus with which the parts of a weighted blend are built (`mid_level_dataset_surplus`).
const SURPLUS: f64 = 0.005;
/// Part numbers are 16-bit.
const MAX_PARTS: usize = 32_767;

/// Sample `s` of a blend is sample `sample[s]` of part `part[s]`.
#[derive(Debug)]
pub struct BlendIndex {
    /// Part of each sample, i16.
    pub part: Ints,
    /// Sample within the part, i64.
    pub sample: Ints,
}

/// Weights divided by their sum, to numpy's last bit: `numpy.sum` adds pairwise.
#[must_use]
pub fn normalize(weights: &[f64]) -> Vec<f64> {
    let sum = pairwise_sum(weights);
    weights.iter().map(|weight| weight / sum).collect()
}

/// numpy's summation: eight partial sums up to 128 values, halves above.
fn pairwise_sum(values: &[f64]) -> f64 {
    let len = values.len();
    if len < 8 {
        return values.iter().sum();
    }
    if len > 128 {
        let half = len / 2 - (len / 2) % 8;
        return pairwise_sum(&values[..half]) + pairwise_sum(&values[half..]);
    }
    let (blocks, rest) = values.as_chunks::<8>();
    let mut partial = blocks[0];
    for block in &blocks[1..] {
        for (sum, value) in partial.iter_mut().zip(block) {
            *sum += value;
        }
    }
    let [a, b, c, d, e, f, g, h] = partial;
    let mut sum = ((a + b) + (c + d)) + ((e + f) + (g + h));
    for value in rest {
        sum += value;
    }
    sum
}

/// Why parts cannot be blended, or `None`.
#[must_use]
pub fn objection(weights: &[Option<f64>]) -> Option<String> {
    if weights.len() >= MAX_PARTS {
        return Some(format!("{} parts; the format's limit is {}", weights.len(), MAX_PARTS - 1));
    }
    let num_weighted = weights.iter().flatten().count();
    if num_weighted != 0 && num_weighted != weights.len() {
        return Some(format!(
            "{num_weighted} of {} parts have a weight; give a weight to all or to none",
            weights.len()
        ));
    }
    let bad = weights
        .iter()
        .enumerate()
        .find_map(|(part, weight)| weight.filter(|w| !w.is_finite() || *w <= 0.0).map(|w| (part, w)));
    bad.map(|(part, weight)| format!("part {part} has weight {weight}; weights are finite and above 0 (leave out a part that should give nothing)"))
}

/// Samples that each part of a weighted blend of `size` contributes at most, ⌈size · weight⌉. Their sum is the blend's size.
#[must_use]
pub fn targets(weights: &[f64], size: u64) -> Vec<u64> {
    weights.iter().map(|weight| (size as f64 * weight).ceil() as u64).collect()
}

/// Samples with which a part of that target is built.
#[must_use]
pub fn with_surplus(target: u64) -> u64 {
    (target as f64 * (1.0 + SURPLUS)).ceil() as u64
}

/// At each step the part that is furthest behind its weight: the largest weight · max(step, 1) − count, the lowest of equals.
#[must_use]
pub fn weighted(weights: &[f64], size: u64) -> BlendIndex {
    let mut counts = vec![0i64; weights.len()];
    let (mut parts, mut samples) = (Vec::with_capacity(size as usize), Vec::with_capacity(size as usize));
    for step in 0..size {
        let scale = step.max(1) as f64;
        let mut best = (0, f64::NEG_INFINITY);
        for (part, (weight, count)) in weights.iter().zip(&counts).enumerate() {
            let behind = weight * scale - *count as f64;
            if behind > best.1 {
                best = (part, behind);
            }
        }
        take(best.0, &mut counts, &mut parts, &mut samples);
    }
    BlendIndex { part: Ints::I16(parts), sample: Ints::I64(samples) }
}

/// The same rule with weights in proportion to the parts' sizes, among parts not yet used up, until all are.
#[must_use]
pub fn exhaustive(sizes: &[u64]) -> BlendIndex {
    let total: u64 = sizes.iter().sum();
    let weights: Vec<f64> = sizes.iter().map(|size| *size as f64 / total as f64).collect();
    let mut counts = vec![0i64; sizes.len()];
    let (mut parts, mut samples) = (Vec::with_capacity(total as usize), Vec::with_capacity(total as usize));
    for step in 0..total {
        let scale = step.max(1) as f64;
        let mut best = (0, f64::NEG_INFINITY);
        for (part, (weight, count)) in weights.iter().zip(&counts).enumerate() {
            let behind = weight * scale - *count as f64;
            if (*count as u64) < sizes[part] && behind > best.1 {
                best = (part, behind);
            }
        }
        take(best.0, &mut counts, &mut parts, &mut samples);
    }
    BlendIndex { part: Ints::I16(parts), sample: Ints::I64(samples) }
}

fn take(part: usize, counts: &mut [i64], parts: &mut Vec<i16>, samples: &mut Vec<i64>) {
    parts.push(part as i16);
    samples.push(counts[part]);
    counts[part] += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_zero_and_negative_weights_are_refused() {
        assert!(objection(&[Some(1.0), None]).is_some());
        assert!(objection(&[Some(0.0), Some(1.0)]).is_some());
        assert!(objection(&[Some(f64::NAN), Some(1.0)]).is_some());
        assert_eq!(objection(&[None, None]), None);
        assert_eq!(objection(&[Some(0.3), Some(0.7)]), None);
    }

    /// numpy 2.4.6's `numpy.sum` of 1 ÷ (i + 3); a running sum of all 300 gives 4.789297397713856.
    #[test]
    fn sums_are_pairwise_as_in_numpy() {
        let values: Vec<f64> = (0..300).map(|index| 1.0 / f64::from(index + 3)).collect();
        assert_eq!(pairwise_sum(&values[..10]), 1.603_210_678_210_677_8);
        assert_eq!(pairwise_sum(&values[..129]), 3.956_224_926_052_236);
        assert_eq!(pairwise_sum(&values), 4.789_297_397_713_862);
    }

    #[test]
    fn targets_round_up_and_carry_a_surplus() {
        assert_eq!(targets(&[0.3, 0.7], 101), [31, 71]);
        assert_eq!(with_surplus(200), 201);
        assert_eq!(with_surplus(201), 203);
    }
}
