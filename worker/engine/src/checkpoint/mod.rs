//! Checkpoints from a rank's point of view: what it saves, when that is durable, and how it loads.
//!
//! Whole tensors are dealt to ranks by size, so that all ranks write at once and every tensor is written once. The ranks
//! write and report; only the coordinator commits (C2). Names carry the generation, so a fenced writer can overwrite
//! nothing.

mod load;
mod save;

pub use load::load;
pub use save::{Meta, Saver, State, TrainerState};

use trainctl_spec::{Generation, Rank, Step};

use crate::params::Entry;

/// Directory name of the checkpoint after zero-based `step`, as NeMo AutoModel names it.
pub fn name(epoch: u64, step: Step) -> String {
    format!("epoch_{epoch}_step_{step}")
}

/// Path of a rank's shard below the checkpoint's directory; `part` is `model` or `optim`.
pub fn shard_path(part: &str, rank: Rank, world_size: u32, generation: Generation) -> String {
    format!("{part}/shard-{:05}-of-{world_size:05}.g{generation}.safetensors", rank.0)
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
    use super::{deal, name, shard_path};
    use crate::params::Entry;
    use trainctl_spec::{Generation, Rank, Step};

    #[test]
    fn every_tensor_is_dealt_once_and_loads_are_even() {
        let entries: Vec<Entry> =
            [4000, 100, 1000, 1000, 1000, 1000, 7].map(|n| Entry { name: n.to_string(), shape: vec![n] }).into();
        let hands = deal(&entries, 2);
        assert_eq!(hands, [vec![0, 6], vec![1, 2, 3, 4, 5]]);
        let wide = deal(&entries, 9);
        assert_eq!(wide.iter().flatten().count(), entries.len());
        assert_eq!(wide.iter().filter(|hand| hand.is_empty()).count(), 2);
    }

    #[test]
    fn names() {
        assert_eq!(name(0, Step(999)), "epoch_0_step_999");
        assert_eq!(
            shard_path("model", Rank(3), 8, Generation(7)),
            "model/shard-00003-of-00008.g7.safetensors"
        );
    }
}
