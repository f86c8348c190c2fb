//! Do the replicas of a state agree?
//!
//! Every rank of a data-parallel world holds the same state bit for bit, and says at each save what it holds. One whose memory
//! or arithmetic has failed says something else. It has also computed gradients from a wrong state, and these have reached all:
//! so nothing of the generation since its last commit can be trusted, whoever is right now, and the save is no commit even of
//! the majority's share. The run goes back **to the newest commit**: all agreed on that one when it was made, hence the damage
//! is younger. That is the "one commit" that it goes back, with two replicas as with more; only the naming needs a majority.

use std::collections::BTreeMap;

/// The decision on one save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Fewer than two ranks have said what they hold: there is nothing to compare.
    NotCompared,
    /// All hold the same.
    Unanimous,
    /// They do not.
    Diverged(Divergence),
}

/// Replicas that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Replicas that were compared.
    pub replicas: u32,
    /// Ranks that hold another state than the majority; without a majority, all that were compared.
    pub suspects: Vec<u32>,
    /// More than half agree, so the suspects are named; otherwise any of them may be the one.
    pub named: bool,
}

/// Decides on what each rank holds.
pub fn decide_replicas(held: &BTreeMap<u32, u128>) -> Agreement {
    if held.len() < 2 {
        return Agreement::NotCompared;
    }
    let mut counts: BTreeMap<u128, usize> = BTreeMap::new();
    for digest in held.values() {
        *counts.entry(*digest).or_default() += 1;
    }
    if counts.len() == 1 {
        return Agreement::Unanimous;
    }
    let majority = counts.iter().find(|(_, count)| 2 * **count > held.len()).map(|(digest, _)| *digest);
    let suspects = held.iter().filter(|(_, digest)| Some(**digest) != majority).map(|(rank, _)| *rank).collect();
    Agreement::Diverged(Divergence { replicas: held.len() as u32, suspects, named: majority.is_some() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(digests: &[u128]) -> Agreement {
        decide_replicas(&(0..).zip(digests.iter().copied()).collect())
    }

    fn diverged(replicas: u32, suspects: &[u32], named: bool) -> Agreement {
        Agreement::Diverged(Divergence { replicas, suspects: suspects.to_vec(), named })
    }

    #[test]
    fn the_minority_is_named_only_by_more_than_half() {
        let cases: [(&[u128], Agreement); 10] = [
            (&[], Agreement::NotCompared),
            (&[7], Agreement::NotCompared),
            (&[7, 7], Agreement::Unanimous),
            (&[7, 8], diverged(2, &[0, 1], false)),
            (&[7, 8, 7], diverged(3, &[1], true)),
            (&[7, 8, 9], diverged(3, &[0, 1, 2], false)),
            (&[8, 7, 7, 8], diverged(4, &[0, 1, 2, 3], false)),
            (&[7, 7, 7, 8], diverged(4, &[3], true)),
            (&[1, 7, 7, 7, 2], diverged(5, &[0, 4], true)),
            (&[1, 1, 2, 2, 3], diverged(5, &[0, 1, 2, 3, 4], false)),
        ];
        for (digests, wanted) in cases {
            assert_eq!(of(digests), wanted, "{digests:?}");
        }
    }

    #[test]
    fn ranks_that_do_not_say_are_not_compared() {
        let held = BTreeMap::from([(0, 7), (3, 8), (4, 7)]);
        assert_eq!(decide_replicas(&held), diverged(3, &[3], true));
    }
}
