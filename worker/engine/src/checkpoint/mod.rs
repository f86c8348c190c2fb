//! Checkpoints from a rank's point of view: what it saves, when that is durable, and how it loads.
//!
//! Whole tensors are dealt to ranks by size, so that all ranks write at once and every tensor is written once. The ranks
//! write and report; only the coordinator commits (C2). Names carry the generation, so a fenced writer can overwrite
//! nothing.

mod load;
mod save;

pub use load::load;
pub use save::{Meta, Saver, State, TrainerState};

use tch::Kind;

use crate::params::Entry;

/// The file that rank 0 adds; see [`TrainerState`].
pub(crate) const TRAINER_STATE: &str = "optim/trainer.json";
/// Name prefix of first moments.
pub(crate) const EXP_AVG: &str = "exp_avg.";
/// Name prefix of second moments.
pub(crate) const EXP_AVG_SQ: &str = "exp_avg_sq.";
/// Name prefix of fp32 weights under `precision: bf16`.
pub(crate) const MASTER: &str = "master.";

/// safetensors' spelling of the kinds that a training state has.
pub(crate) fn dtype(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Float => Some("F32"),
        Kind::BFloat16 => Some("BF16"),
        _ => None,
    }
}

/// Deals parameters to ranks: the largest first, each to the rank that has least so far (the lowest of equals). Returns
/// indices into `entries` by rank, ascending. A parameter's moments go with it.
pub fn deal(entries: &[Entry], world_size: u32) -> Vec<Vec<usize>> {
    let mut hands: Vec<(i64, Vec<usize>)> = vec![(0, Vec::new()); world_size.max(1) as usize];
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(entries[i].numel()), i));
    for i in order {
        if let Some((load, hand)) = hands.iter_mut().min_by_key(|(load, _)| *load) {
            *load += entries[i].numel();
            hand.push(i);
        }
    }
    let sorted = |(_, mut hand): (i64, Vec<usize>)| {
        hand.sort_unstable();
        hand
    };
    hands.into_iter().map(sorted).collect()
}

#[cfg(test)]
mod tests {
    use super::deal;
    use crate::params::Entry;

    #[test]
    fn every_tensor_is_dealt_once_and_loads_are_even() {
        let entries: Vec<Entry> =
            [4000, 100, 1000, 1000, 1000, 1000, 7].map(|n| Entry { name: n.to_string(), shape: vec![n] }).into();
        let hands = deal(&entries, 2);
        assert_eq!(hands, [vec![0, 1], vec![2, 3, 4, 5, 6]]);
        let wide = deal(&entries, 9);
        assert_eq!(wide.iter().flatten().count(), entries.len());
        assert_eq!(wide.iter().filter(|hand| hand.is_empty()).count(), 2);
    }
}
