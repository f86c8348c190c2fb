//! When a write that failed is tried again. Pure.
//!
//! Only that of the run's last save is: any other costs itself alone, since the next one is due in any case. As long as the
//! last one fails, its snapshot is held and nothing is computed anew. It ends when the write succeeds, when the coordinator
//! stops the job (`checkpoint.max_failures` counts attempts), or soon after a stop was asked for.

use std::time::Duration;

/// Pause after the first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Attempts that may fail after a stop was asked for: whoever asks has little time.
const ATTEMPTS_AFTER_STOP: u32 = 3;

/// The attempts of one write that have failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Failures {
    all: u32,
    after_stop: u32,
}

impl Failures {
    /// How many.
    pub(super) fn count(self) -> u32 {
        self.all
    }

    /// Another attempt has failed. How long to wait before the next one; `None`: give up. `is_stopping`: a stop was asked for.
    pub(super) fn add(&mut self, is_stopping: bool) -> Option<Duration> {
        self.all += 1;
        self.after_stop += u32::from(is_stopping);
        let in_a_row = if is_stopping { self.after_stop } else { self.all };
        let pause = FIRST_PAUSE.saturating_mul(1 << (in_a_row - 1).min(16)).min(LONGEST_PAUSE);
        (self.after_stop < ATTEMPTS_AFTER_STOP).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_a_minute_and_there_is_no_last_attempt() {
        let mut failures = Failures::default();
        let pauses: Vec<_> = (0..100).map(|_| failures.add(false).unwrap().as_secs()).collect();
        assert_eq!(pauses[..8], [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!((pauses[99], failures.count()), (60, 100));
    }

    #[test]
    fn a_stop_leaves_three_attempts_soon_after_it() {
        let mut failures = Failures::default();
        let before: Vec<_> = (0..9).map(|_| failures.add(false)).collect();
        assert!(before.iter().all(Option::is_some));
        let pauses = [true; 3].map(|stop| failures.add(stop).map(|pause| pause.as_secs()));
        assert_eq!(pauses, [Some(1), Some(2), None]);
    }
}
