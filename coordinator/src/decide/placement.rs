//! Which worker takes which rank?

use std::collections::BTreeSet;

/// A worker that could take a rank now: connected, drained, idle.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Worker id.
    pub worker: String,
    /// Machine it runs on (kernel boot id).
    pub machine: String,
}

/// The decision: rank → worker, or how many are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// One worker for each rank, in rank order.
    Place(Vec<Candidate>),
    /// Not enough workers.
    Wait {
        /// How many more are needed.
        missing: usize,
    },
}

/// Places `world_size` ranks. A worker keeps the rank that it had (`before`, in rank order); a replacement takes the lost
/// rank's number; new worlds are filled machine by machine, so that neighbours in rank are neighbours in place.
/// Workers that the job avoids are taken only where there are not enough others: a job that waits for ever is no better.
pub fn decide_placement(
    world_size: usize,
    before: &[String],
    avoided: &BTreeSet<String>,
    candidates: &[Candidate],
) -> Placement {
    if candidates.len() < world_size {
        return Placement::Wait { missing: world_size - candidates.len() };
    }
    let mut free: Vec<&Candidate> = candidates.iter().collect();
    free.sort_by(|a, b| (&a.machine, &a.worker).cmp(&(&b.machine, &b.worker)));
    let num_others = free.iter().filter(|c| !avoided.contains(&c.worker)).count();
    let mut num_needed = world_size.saturating_sub(num_others);
    free.retain(|c| {
        let is_avoided = avoided.contains(&c.worker);
        let is_taken = !is_avoided || num_needed > 0;
        num_needed -= usize::from(is_avoided && is_taken);
        is_taken
    });
    let kept: Vec<Option<&Candidate>> = (0..world_size)
        .map(|rank| before.get(rank).and_then(|worker| free.iter().find(|c| c.worker == *worker).copied()))
        .collect();
    let taken: BTreeSet<&str> = kept.iter().flatten().map(|c| c.worker.as_str()).collect();
    let mut rest = free.iter().filter(|c| !taken.contains(c.worker.as_str()));
    let placed: Option<Vec<Candidate>> =
        kept.iter().map(|kept| kept.or_else(|| rest.next().copied()).cloned()).collect();
    match placed {
        Some(placed) => Placement::Place(placed),
        None => Placement::Wait { missing: 1 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(machine: &str, worker: &str) -> Candidate {
        Candidate { worker: worker.to_owned(), machine: machine.to_owned() }
    }

    fn names(placement: &Placement) -> Vec<&str> {
        match placement {
            Placement::Place(placed) => placed.iter().map(|c| c.worker.as_str()).collect(),
            Placement::Wait { .. } => Vec::new(),
        }
    }

    #[test]
    fn a_new_world_fills_machine_by_machine() {
        let got =
            decide_placement(3, &[], &BTreeSet::new(), &[on("b", "w1"), on("a", "w2"), on("b", "w0"), on("a", "w3")]);
        assert_eq!(names(&got), ["w2", "w3", "w0"]);
    }

    #[test]
    fn survivors_keep_their_ranks_and_a_replacement_takes_the_lost_one() {
        let before = ["w0".to_owned(), "w1".to_owned(), "w2".to_owned()];
        let got = decide_placement(3, &before, &BTreeSet::new(), &[on("a", "w2"), on("a", "spare"), on("a", "w0")]);
        assert_eq!(names(&got), ["w0", "spare", "w2"]);
    }

    #[test]
    fn a_worker_that_is_avoided_gives_way_to_a_spare_and_serves_where_there_is_none() {
        let before = ["w0".to_owned(), "w1".to_owned()];
        let avoided = BTreeSet::from(["w0".to_owned()]);
        let with_spare = [on("a", "w0"), on("a", "w1"), on("b", "spare")];
        assert_eq!(names(&decide_placement(2, &before, &avoided, &with_spare)), ["spare", "w1"]);
        assert_eq!(names(&decide_placement(2, &before, &avoided, &with_spare[..2])), ["w0", "w1"]);
        let both = BTreeSet::from(["w0".to_owned(), "w1".to_owned()]);
        assert_eq!(names(&decide_placement(2, &before, &both, &with_spare)), ["w0", "spare"]);
    }

    #[test]
    fn too_few_workers_wait() {
        assert_eq!(decide_placement(3, &[], &BTreeSet::new(), &[on("a", "w0")]), Placement::Wait { missing: 2 });
    }
}
