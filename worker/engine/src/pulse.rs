//! Where this rank is among the generation's collectives, for whoever asks from another thread.
//!
//! Every rank enters the same collectives in the same order, so when a run stands still the rank with the lowest count is the
//! one that the others wait for. Phase and step cannot say that: they are equal on all.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Proves a new process group.
    First,
    /// The burn-in's sum over the ranks of a host. Ranks that have none count it too.
    NodeSum,
    /// The burn-in's sum over all ranks.
    WorldSum,
    /// Waits until every rank has loaded.
    Loaded,
    /// Token count and requests of a step.
    Counts,
    /// Gradients of a block.
    Gradients(u32),
    /// Loss of a step.
    Loss,
    /// Loss of a validation set.
    Validation,
    /// Whether to save.
    Save,
}

impl Collective {
    fn pack(self) -> u64 {
        match self {
            Self::First => 1,
            Self::Loaded => 2,
            Self::Counts => 3,
            Self::Loss => 4,
            Self::Validation => 5,
            Self::Save => 6,
            Self::NodeSum => 8,
            Self::WorldSum => 9,
            Self::Gradients(block) => 7 | u64::from(block) << 8,
        }
    }

    fn unpack(packed: u64) -> Option<Self> {
        Some(match packed & 0xff {
            1 => Self::First,
            2 => Self::Loaded,
            3 => Self::Counts,
            4 => Self::Loss,
            5 => Self::Validation,
            6 => Self::Save,
            8 => Self::NodeSum,
            9 => Self::WorldSum,
            7 => Self::Gradients(u32::try_from(packed >> 8).unwrap_or(u32::MAX)),
            _ => return None,
        })
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("first all-reduce of the new process group"),
            Self::NodeSum => f.write_str("sum over the ranks of a host in the burn-in"),
            Self::WorldSum => f.write_str("sum over all ranks in the burn-in"),
            Self::Loaded => f.write_str("wait until all ranks have loaded"),
            Self::Counts => f.write_str("all-reduce the token count and requests"),
            Self::Gradients(block) => write!(f, "all-reduce the gradients of block {block}"),
            Self::Loss => f.write_str("all-reduce the loss"),
            Self::Validation => f.write_str("all-reduce the loss of a validation set"),
            Self::Save => f.write_str("agree on a save"),
        }
    }
}

/// Counts collectives. The step path pays two relaxed additions for each.
#[derive(Debug, Default)]
pub struct Pulse {
    entered: AtomicU64,
    left: AtomicU64,
    newest: AtomicU64,
}

/// What a [`Pulse`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Collectives that this rank has entered.
    pub entered: u64,
    /// Those that it has come out of.
    pub left: u64,
    /// The newest that it entered.
    pub newest: Option<Collective>,
}

impl Pulse {
    /// This rank enters a collective.
    pub(crate) fn enter(&self, what: Collective) {
        self.newest.store(what.pack(), Ordering::Relaxed);
        self.entered.fetch_add(1, Ordering::Relaxed);
    }

    /// It has come out of one.
    pub(crate) fn leave(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    /// Where it is. The three numbers may be of two moments while it moves; of a rank that stands still they are exact.
    pub fn place(&self) -> Place {
        Place {
            left: self.left.load(Ordering::Relaxed),
            entered: self.entered.load(Ordering::Relaxed),
            newest: Collective::unpack(self.newest.load(Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_names_the_newest_collective() {
        let pulse = Pulse::default();
        assert_eq!(pulse.place(), Place { entered: 0, left: 0, newest: None });
        pulse.enter(Collective::Counts);
        pulse.leave();
        pulse.enter(Collective::Gradients(300));
        let place = pulse.place();
        assert_eq!((place.entered, place.left), (2, 1));
        assert_eq!(place.newest.unwrap().to_string(), "all-reduce the gradients of block 300");
    }

    #[test]
    fn every_collective_survives_packing() {
        use Collective::{Counts, First, Gradients, Loaded, Loss, NodeSum, Save, Validation, WorldSum};
        for what in
            [First, NodeSum, WorldSum, Loaded, Counts, Gradients(0), Gradients(u32::MAX), Loss, Validation, Save]
        {
            assert_eq!(Collective::unpack(what.pack()), Some(what));
        }
    }
}
