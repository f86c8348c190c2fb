//! Where randomness comes from (D3).
//!
//! A dropout mask is a pure function of (seed, step, index of the sequence within the global batch, site). Neither world
//! size nor micro-batch size nor recomputation changes it, and a restart has no generator state to restore.

use tch::Tensor;
use trainctl_collective::random::{dropout_mask, mix};

use crate::Error;

/// The place of a dropout in the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// After token + position embedding.
    Embedding,
    /// On the attention probabilities of layer `.0`.
    Attention(usize),
    /// After the attention's output projection of layer `.0`.
    AttentionOutput(usize),
    /// After the feed-forward part of layer `.0`.
    MlpOutput(usize),
}

impl Site {
    /// A number of its own for every site; it goes into the seed and must not change between versions.
    fn number(self) -> u64 {
        let layer = |l: usize, k: u64| 1 + 4 * l as u64 + k;
        match self {
            Self::Embedding => 0,
            Self::Attention(l) => layer(l, 0),
            Self::AttentionOutput(l) => layer(l, 1),
            Self::MlpOutput(l) => layer(l, 2),
        }
    }
}

/// The random draws of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// `seed` of the spec.
    pub seed: u64,
    /// Zero-based optimizer step.
    pub step: u64,
    /// Index within the global batch of the micro-batch's first sequence.
    pub first_sequence: u64,
}

impl Draw {
    /// One seed for each of `count` successive sequences at `site`.
    pub fn seeds(&self, site: Site, count: i64) -> Vec<u64> {
        (0..count.max(0).cast_unsigned())
            .map(|i| mix(&[self.seed, self.step, self.first_sequence + i, site.number()]))
            .collect()
    }
}

/// Inverted dropout: `x` (first dimension: sequences) times a mask of 0 and 1 ÷ (1 − p). The identity when `draw` is
/// absent (evaluation) or `p` is 0.
pub fn dropout(x: Tensor, p: f64, site: Site, draw: Option<&Draw>) -> Result<Tensor, Error> {
    match mask(&x, p, site, draw)? {
        Some(mask) => Ok(x.f_mul(&mask)?),
        None => Ok(x),
    }
}

/// The mask that [`dropout`] multiplies by; `None` for the identity.
pub fn mask(like: &Tensor, p: f64, site: Site, draw: Option<&Draw>) -> Result<Option<Tensor>, Error> {
    let Some(draw) = draw.filter(|_| p > 0.0) else { return Ok(None) };
    let mut mask = Tensor::f_empty(like.size(), (like.kind(), like.device()))?;
    let sequences = like.size().first().copied().unwrap_or(1);
    dropout_mask(&mut mask, &draw.seeds(site, sequences), p).map_err(Error::Shim)?;
    Ok(Some(mask))
}

#[cfg(test)]
mod tests {
    use super::{Draw, Site};
    use std::collections::HashSet;

    #[test]
    fn d3_a_sequence_has_the_same_seed_in_any_micro_batch() {
        let whole = Draw { seed: 7, step: 3, first_sequence: 0 }.seeds(Site::Attention(1), 8);
        let part = Draw { seed: 7, step: 3, first_sequence: 5 }.seeds(Site::Attention(1), 3);
        assert_eq!(whole[5..], part);
    }

    #[test]
    fn seeds_differ_by_seed_step_sequence_and_site() {
        let mut seen = HashSet::new();
        let sites =
            [Site::Embedding, Site::Attention(0), Site::AttentionOutput(0), Site::MlpOutput(0), Site::Attention(1)];
        for seed in 0..3 {
            for step in 0..10 {
                for site in sites {
                    seen.extend(Draw { seed, step, first_sequence: 0 }.seeds(site, 10));
                }
            }
        }
        assert_eq!(seen.len(), 3 * 10 * sites.len() * 10);
    }
}
