//! Which ranks hold the others up, and does one give way to a spare?
//!
//! What is compared is a rank's own time per step: the time in which it did not wait for others. All ranks of a step need the
//! same wall time, since each waits for the slowest; only their own times tell them apart.
//!
//! With mᵣ the median of rank r's last [`WINDOW`] steps, M the median of all mᵣ and MAD the median of |mᵣ − M| (of an even
//! number the lower middle, so that of two ranks the faster is the measure):
//!
//! score = (mᵣ − M) ÷ max(1.4826 · MAD, 5 % of M; 15 % where fewer than eight ranks say little of what is usual)
//!
//! That is the modified z-score of Iglewicz & Hoaglin, *How to Detect and Handle Outliers* (1993), which calls 3.5 an outlier; 1.4826
//! makes the MAD of normal values their standard deviation. The floor keeps ranks that are all alike, or few, from making an outlier
//! of nothing. A rank **becomes** a straggler with a score of 3.5, 1.3 times the others' time, and three quarters of its steps
//! slower than theirs, at each look of three seconds: on a busy machine medians wander for a moment. It **is no longer** one
//! below a score of 2 or 1.1 times their time.

use std::time::Duration;

use trainctl_spec::job::Stragglers;

/// Steps that a rank is judged by.
pub const WINDOW: usize = 32;
/// Score and multiple of the others' time from which a rank is a straggler.
const BECOMES: (f64, f64) = (3.5, 1.3);
/// Below one of these it is one no longer.
const REMAINS: (f64, f64) = (2.0, 1.1);
/// The MAD of normal values times this is their standard deviation.
const TO_SIGMA: f64 = 1.4826;
/// The least deviation that counts, as a part of the median: of many ranks, and of few.
const FLOOR: (f64, f64) = (0.05, 0.15);
/// From so many ranks on they are many.
const MANY: usize = 8;
/// A rank becomes a straggler when it has looked like one for so long.
pub const SUSTAINED: Duration = Duration::from_secs(3);
/// A job moves so many ranks at most: whatever slows it down then is not one worker.
pub const MAX_EVICTIONS: u32 = 3;

/// A rank's own times of its last steps.
#[derive(Clone, Debug, Default)]
pub struct Window {
    seconds: [f64; WINDOW],
    count: usize,
}

/// What a full window says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Median of the window.
    pub median: f64,
    /// A quarter of the steps took less.
    pub quartile: f64,
}

impl Window {
    /// Notes a step's time; the oldest is forgotten.
    pub fn push(&mut self, seconds: f64) {
        if seconds.is_finite() && seconds > 0.0 {
            self.seconds[self.count % WINDOW] = seconds;
            self.count += 1;
        }
    }

    /// The rank's pace, once it has done enough steps.
    pub fn pace(&self) -> Option<Pace> {
        (self.count >= WINDOW).then(|| {
            let mut sorted = self.seconds;
            sorted.sort_by(f64::total_cmp);
            Pace { median: sorted[(WINDOW - 1) / 2], quartile: sorted[WINDOW / 4] }
        })
    }
}

/// What is said of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// Its own time per step, seconds.
    pub seconds: f64,
    /// Its own time over the others'.
    pub slower: f64,
    /// The robust score.
    pub score: f64,
    /// Since when it looks like a straggler, on the caller's clock.
    pub since: Option<Duration>,
    /// It holds the others up.
    pub is_straggler: bool,
}

/// Judges ranks by their paces; `before` is what was said of them at the last look. Nothing can be said of one rank alone.
pub fn decide_stragglers(paces: &[Pace], before: &[Option<Judged>], now: Duration) -> Vec<Judged> {
    let typical = low_median(paces.iter().map(|pace| pace.median).collect());
    let deviation = low_median(paces.iter().map(|pace| (pace.median - typical).abs()).collect());
    let floor = if paces.len() < MANY { FLOOR.1 } else { FLOOR.0 };
    let scale = (TO_SIGMA * deviation).max(floor * typical).max(f64::MIN_POSITIVE);
    let judge = |(pace, before): (&Pace, Option<Judged>)| {
        let (score, slower) = ((pace.median - typical) / scale, pace.median / typical.max(f64::MIN_POSITIVE));
        let was = before.is_some_and(|before| before.is_straggler);
        let looks_like_one = match was {
            false => score >= BECOMES.0 && slower >= BECOMES.1 && pace.quartile > typical,
            true => score >= REMAINS.0 && slower >= REMAINS.1,
        };
        let since = (looks_like_one && paces.len() > 1).then(|| before.and_then(|before| before.since).unwrap_or(now));
        let is_straggler = since.is_some_and(|since| was || now.saturating_sub(since) >= SUSTAINED);
        Judged { seconds: pace.median, slower, score, since, is_straggler }
    };
    paces.iter().zip(before.iter().copied().chain(std::iter::repeat(None))).map(judge).collect()
}

/// The median; of an even number the lower one of the two in the middle. 0 of none.
fn low_median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// Whether a straggler gives way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// It is saved first, then the next generation has a spare in its place.
    Evict {
        /// The slowest of the stragglers.
        rank: u32,
    },
    /// Nobody holds the others up.
    NoStraggler,
    /// The spec says to observe.
    Observe,
    /// No worker is free that was not avoided before.
    NoSpare,
    /// The job has moved [`MAX_EVICTIONS`] ranks.
    Enough,
}

/// Decides on the ranks that were judged, in rank order. `spares` are free workers that the job does not avoid.
pub fn decide_eviction(judged: &[Judged], wanted: Stragglers, spares: usize, evictions: u32) -> Eviction {
    let slow = (0..).zip(judged).filter(|(_, judged)| judged.is_straggler);
    let Some((rank, _)) = slow.max_by(|(_, a), (_, b)| a.slower.total_cmp(&b.slower)) else {
        return Eviction::NoStraggler;
    };
    match wanted {
        Stragglers::Observe => Eviction::Observe,
        Stragglers::Evict if evictions >= MAX_EVICTIONS => Eviction::Enough,
        Stragglers::Evict if spares == 0 => Eviction::NoSpare,
        Stragglers::Evict => Eviction::Evict { rank },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(seconds: f64) -> Pace {
        Pace { median: seconds, quartile: seconds }
    }

    /// What is said after these paces were seen for long enough.
    fn judged(paces: &[Pace]) -> Vec<Judged> {
        let first = decide_stragglers(paces, &[], Duration::ZERO);
        assert!(first.iter().all(|judged| !judged.is_straggler), "not at once: {first:?}");
        let first: Vec<Option<Judged>> = first.into_iter().map(Some).collect();
        decide_stragglers(paces, &first, SUSTAINED)
    }

    fn stragglers(judged: &[Judged]) -> Vec<usize> {
        (0..judged.len()).filter(|rank| judged[*rank].is_straggler).collect()
    }

    fn named(times: &[f64]) -> Vec<usize> {
        stragglers(&judged(&times.iter().map(|seconds| steady(*seconds)).collect::<Vec<_>>()))
    }

    #[test]
    fn who_is_much_slower_than_most_is_named() {
        let cases: [(&[f64], &[usize]); 11] = [
            (&[], &[]),
            (&[9.0], &[]),
            (&[1.0, 1.0], &[]),
            (&[1.0, 1.4], &[]),
            (&[1.0, 1.6], &[1]),
            (&[1.0, 1.05, 2.0], &[2]),
            (&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.35], &[7]),
            (&[1.0, 3.0, 1.0, 3.0], &[1, 3]),
            // Ranks that differ anyhow: 1.3 times is within what is usual there.
            (&[0.8, 0.9, 1.0, 1.1, 1.2, 1.35], &[]),
            (&[0.8, 0.9, 1.0, 1.1, 1.2, 9.0], &[5]),
            // Faster than the others is no fault.
            (&[0.1, 1.0, 1.0, 1.0], &[]),
        ];
        for (times, wanted) in cases {
            assert_eq!(named(times), wanted, "{times:?}");
        }
    }

    #[test]
    fn who_was_named_stays_so_until_it_is_clearly_well() {
        let before: Vec<Option<Judged>> = judged(&[1.0, 1.0, 2.0].map(steady)).into_iter().map(Some).collect();
        let then = |times: [f64; 3]| stragglers(&decide_stragglers(&times.map(steady), &before, 2 * SUSTAINED));
        assert_eq!(named(&[1.0, 1.0, 1.35]), [] as [usize; 0]);
        assert_eq!(then([1.0, 1.0, 1.35]), [2]);
        assert_eq!(then([1.0, 1.0, 1.25]), [] as [usize; 0]);
    }

    #[test]
    fn a_moment_is_not_enough() {
        let (slow, well) = ([1.0, 2.0].map(steady), [1.0, 1.0].map(steady));
        let some = |judged: Vec<Judged>| judged.into_iter().map(Some).collect::<Vec<_>>();
        let first = some(decide_stragglers(&slow, &[], Duration::ZERO));
        let between = some(decide_stragglers(&well, &first, SUSTAINED / 2));
        assert_eq!(between[1].unwrap().since, None, "the time begins again");
        let again = some(decide_stragglers(&slow, &between, SUSTAINED));
        assert!(!again[1].unwrap().is_straggler);
        assert!(decide_stragglers(&slow, &again, 2 * SUSTAINED)[1].is_straggler);
    }

    #[test]
    fn a_rank_whose_good_steps_are_as_good_as_the_others_is_not_named() {
        let noisy = Pace { median: 1.6, quartile: 0.95 };
        assert!(!judged(&[steady(1.0), noisy, steady(1.0)])[1].is_straggler);
    }

    #[test]
    fn the_score_is_that_of_the_formula() {
        let judged = judged(&[1.0, 1.1, 1.4, 1.7, 3.0].map(steady));
        // M = 1.4, deviations 0.4 0.3 0 0.3 1.6, MAD = 0.3.
        assert!((judged[4].score - 1.6 / (1.4826 * 0.3)).abs() < 1e-9, "{judged:?}");
        assert!((judged[4].slower - 3.0 / 1.4).abs() < 1e-9);
    }

    #[test]
    fn a_window_has_a_pace_when_it_is_full_and_forgets_what_is_old() {
        let mut window = Window::default();
        for step in 1..=WINDOW {
            assert_eq!(window.pace(), None);
            // The first step is often far slower; a time that is no time is not taken.
            window.push(if step == 1 { 50.0 } else { 1.0 });
            window.push(f64::NAN);
            window.push(0.0);
        }
        assert_eq!(window.pace(), Some(steady(1.0)));
        (0..WINDOW).for_each(|_| window.push(3.0));
        assert_eq!(window.pace(), Some(steady(3.0)));
    }

    #[test]
    fn the_slowest_gives_way_where_the_spec_says_so_and_a_spare_is_there_and_not_for_ever() {
        let judged = judged(&[1.0, 2.0, 1.0, 3.0, 1.0].map(steady));
        let evict = |spares, evictions| decide_eviction(&judged, Stragglers::Evict, spares, evictions);
        assert_eq!(evict(1, 0), Eviction::Evict { rank: 3 });
        assert_eq!(evict(0, 0), Eviction::NoSpare);
        assert_eq!(evict(1, MAX_EVICTIONS), Eviction::Enough);
        assert_eq!(decide_eviction(&judged, Stragglers::Observe, 1, 0), Eviction::Observe);
        assert_eq!(decide_eviction(&judged[..1], Stragglers::Evict, 1, 0), Eviction::NoStraggler);
    }
}
