//! When a daemon that ended is started again: a pure function of the times at which it ended.

use std::collections::VecDeque;
use std::time::Duration;

/// So many ends within [`WINDOW`] are too many.
const MOST: usize = 8;
const WINDOW: Duration = Duration::from_secs(60);
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// What to do about a daemon that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Start it again after this time.
    After(Duration),
    /// It ends too often.
    GiveUp,
}

/// The recent ends of one daemon.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    ends: VecDeque<Duration>,
}

impl Restarts {
    /// Records an end at `now` and decides.
    pub(super) fn decide(&mut self, now: Duration) -> Decision {
        while self.ends.front().is_some_and(|end| now.saturating_sub(*end) > WINDOW) {
            self.ends.pop_front();
        }
        self.ends.push_back(now);
        if self.ends.len() > MOST {
            return Decision::GiveUp;
        }
        let doublings = u32::try_from(self.ends.len() - 1).unwrap_or(u32::MAX);
        let factor = 2_u32.checked_pow(doublings).unwrap_or(u32::MAX);
        Decision::After(FIRST_DELAY.saturating_mul(factor).min(LONGEST_DELAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_bound_and_a_crash_loop_ends() {
        let mut restarts = Restarts::default();
        let decisions: Vec<_> = (0..9).map(|second| restarts.decide(Duration::from_secs(second))).collect();
        let after = |ms| Decision::After(Duration::from_millis(ms));
        let want = [200, 400, 800, 1600, 3200, 5000, 5000, 5000].map(after);
        assert_eq!(decisions[..8], want);
        assert_eq!(decisions[8], Decision::GiveUp);
    }

    #[test]
    fn ends_that_are_far_apart_are_forgiven() {
        let mut restarts = Restarts::default();
        for minute in 0..100 {
            assert_eq!(restarts.decide(Duration::from_secs(61 * minute)), Decision::After(FIRST_DELAY));
        }
    }
}
