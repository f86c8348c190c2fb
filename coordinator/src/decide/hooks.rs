//! Which of a job's waiting commands runs next, and which is left out.
//!
//! Every commit's `on_commit` runs, in order, one at a time. Where they come faster than they run, the oldest waiting ones
//! are left out: who evaluates or copies checkpoints wants the new ones. `on_end` comes last and is never left out.

use std::collections::VecDeque;

/// So many commits may wait for their command.
pub const MAX_WAITING: usize = 16;

/// The decision on a new command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueue {
    /// Nothing runs: it starts now.
    Start,
    /// It waits for its turn.
    Wait,
    /// It waits, and the one at this place of the queue is left out.
    DropOldest(usize),
}

/// Decides on a command that comes while `waiting` others wait (`true` = it may be left out) and one runs or not.
pub fn decide_enqueue(waiting: &VecDeque<bool>, is_running: bool) -> Enqueue {
    if !is_running && waiting.is_empty() {
        return Enqueue::Start;
    }
    let droppable = waiting.iter().filter(|may_drop| **may_drop).count();
    match waiting.iter().position(|may_drop| *may_drop) {
        Some(oldest) if droppable >= MAX_WAITING => Enqueue::DropOldest(oldest),
        _ => Enqueue::Wait,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_runs_sixteen_wait_and_then_the_oldest_goes() {
        let mut waiting = VecDeque::new();
        assert_eq!(decide_enqueue(&waiting, false), Enqueue::Start);
        for _ in 0..MAX_WAITING {
            assert_eq!(decide_enqueue(&waiting, true), Enqueue::Wait);
            waiting.push_back(true);
        }
        assert_eq!(decide_enqueue(&waiting, true), Enqueue::DropOldest(0));
    }

    #[test]
    fn on_end_is_never_left_out_and_what_waits_keeps_its_order() {
        let mut waiting = VecDeque::from([false]);
        assert_eq!(decide_enqueue(&waiting, false), Enqueue::Wait, "it comes after what waits");
        waiting.extend([true; MAX_WAITING]);
        assert_eq!(decide_enqueue(&waiting, true), Enqueue::DropOldest(1));
    }
}
