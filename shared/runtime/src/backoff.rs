//! Exponential back-off with full jitter: the n-th delay is uniform in [floor, min(cap, base · 2ⁿ)].
//!
//! Full jitter, because the usual cause of retries here is one coordinator that many workers lost in the same instant:
//! they must not come back in step.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Delays between the tries of one operation.
#[derive(Clone, Debug)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    tries: u32,
    rng: StdRng,
}

impl Backoff {
    /// Delays that start below `base` and never exceed `cap`.
    #[must_use]
    pub fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, tries: 0, rng: StdRng::from_os_rng() }
    }

    /// The same with a fixed seed: equal seeds give equal delays.
    #[must_use]
    pub fn seeded(base: Duration, cap: Duration, seed: u64) -> Self {
        Self { base, cap, tries: 0, rng: StdRng::seed_from_u64(seed) }
    }

    /// The next delay. Never shorter than a tenth of `base`, so that a refused dial is not a busy loop.
    pub fn next_delay(&mut self) -> Duration {
        let ceiling = self.base.saturating_mul(1_u32.checked_shl(self.tries.min(31)).unwrap_or(u32::MAX)).min(self.cap);
        self.tries = self.tries.saturating_add(1);
        let floor = (self.base / 10).min(ceiling);
        floor + (ceiling - floor).mul_f64(self.rng.random::<f64>())
    }

    /// Number of delays given since the start or the last [`reset`](Self::reset).
    #[must_use]
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// The operation succeeded: the next delay is short again.
    pub fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Duration = Duration::from_millis(100);
    const CAP: Duration = Duration::from_secs(1);

    #[test]
    fn delays_stay_between_floor_and_ceiling_and_grow() {
        let mut largest = Duration::ZERO;
        for seed in 0..200 {
            let mut backoff = Backoff::seeded(BASE, CAP, seed);
            for n in 0..40_u32 {
                let delay = backoff.next_delay();
                let ceiling = BASE.saturating_mul(1 << n.min(20)).min(CAP);
                assert!(delay >= BASE / 10 && delay <= ceiling, "seed {seed}, try {n}: {delay:?} above {ceiling:?}");
                largest = largest.max(delay);
            }
        }
        assert!(largest > CAP.mul_f64(0.9), "the cap is never approached: {largest:?}");
    }

    #[test]
    fn equal_seeds_give_equal_delays_and_reset_starts_again() {
        let (mut a, mut b) = (Backoff::seeded(BASE, CAP, 7), Backoff::seeded(BASE, CAP, 7));
        for _ in 0..10 {
            assert_eq!(a.next_delay(), b.next_delay());
        }
        a.reset();
        assert_eq!(a.tries(), 0);
        assert!(a.next_delay() <= BASE);
    }
}
