//! What a generation starts from, and which samples follow.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What is taken of a checkpoint besides its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The optimizer's state.
    pub optimizer: bool,
    /// The place in the data.
    pub data: bool,
    /// The step number, and with it the place in the learning-rate schedule.
    pub schedule: bool,
}

impl Keep {
    /// Everything: the run goes on.
    pub const ALL: Self = Self { optimizer: true, data: true, schedule: true };
    /// The weights alone.
    pub const WEIGHTS: Self = Self { optimizer: false, data: false, schedule: false };
}

impl Default for Keep {
    fn default() -> Self {
        Self::ALL
    }
}

/// The checkpoint that a generation starts from (C9: exactly this one, never a pointer).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFrom {
    /// Directory or URL that holds it; empty = where this run's own checkpoints are.
    #[serde(default)]
    pub store: String,
    /// Its directory's name.
    pub name: String,
    /// blake3 of its manifest, hexadecimal.
    pub manifest_blake3: String,
    /// What is taken of it.
    #[serde(default)]
    pub keep: Keep,
}

/// A stretch of steps that reads one blend in order (D2). A run has one, unless it is a fork: then its steps may start
/// elsewhere than at sample 0 of the blend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPhase {
    /// Zero-based step that reads the phase's first sample.
    pub first_step: u64,
    /// Sampler position of that sample.
    pub first_sample: u64,
    /// Samples of each corpus, by its prefix, that were used before this phase: the corpus goes on there.
    #[serde(default)]
    pub corpora: BTreeMap<String, u64>,
}

impl DataPhase {
    /// N(s): the sampler position of the first sample of `step`. A step before the phase has its first position.
    #[must_use]
    pub fn position(&self, step: u64, global_batch_size: u32) -> u64 {
        self.first_sample + step.saturating_sub(self.first_step) * u64::from(global_batch_size)
    }
}

#[cfg(test)]
mod tests {
    use super::DataPhase;

    #[test]
    fn a_phase_counts_from_its_first_step() {
        let phase = DataPhase { first_step: 10, first_sample: 7, ..DataPhase::default() };
        assert_eq!(phase.position(10, 4), 7);
        assert_eq!(phase.position(12, 4), 15);
        assert_eq!(DataPhase::default().position(12, 4), 48);
    }
}
