//! Time as a dependency. Daemons take an `Arc<dyn Clock>`, so that leases and back-offs run in tests and in the
//! simulator without waiting. Decisions never read a clock: they get `now` as an argument.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of time.
pub trait Clock: Send + Sync + std::fmt::Debug {
    /// Monotonic time since this clock's origin. Never goes back, also when the wall clock is set.
    fn now(&self) -> Duration;

    /// Wall-clock time, milliseconds since the Unix epoch. For people and files; never for a decision.
    fn wall_ms(&self) -> u64;
}

/// The machine's clocks; the origin is the moment of construction.
#[derive(Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// A clock that starts at zero.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    #[expect(clippy::disallowed_methods, reason = "the clock that others are told to use")]
    fn wall_ms(&self) -> u64 {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
    }
}

/// A clock that moves only when told to.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
    wall_at_origin_ms: AtomicU64,
}

impl ManualClock {
    /// A clock at zero, with the given wall time.
    #[must_use]
    pub fn new(wall_ms: u64) -> Self {
        Self { now: Mutex::default(), wall_at_origin_ms: AtomicU64::new(wall_ms) }
    }

    /// Moves both clocks forward.
    pub fn advance(&self, by: Duration) {
        *self.lock() += by;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Duration> {
        // A poisoned Duration is still a Duration.
        self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.lock()
    }

    fn wall_ms(&self) -> u64 {
        let elapsed = u64::try_from(self.lock().as_millis()).unwrap_or(u64::MAX);
        self.wall_at_origin_ms.load(Ordering::Relaxed).saturating_add(elapsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_moves_only_when_told() {
        let clock = ManualClock::new(1_000);
        assert_eq!((clock.now(), clock.wall_ms()), (Duration::ZERO, 1_000));
        clock.advance(Duration::from_millis(250));
        assert_eq!((clock.now(), clock.wall_ms()), (Duration::from_millis(250), 1_250));
    }
}
