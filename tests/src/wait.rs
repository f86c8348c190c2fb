//! Waiting for conditions of other processes.

use std::time::{Duration, Instant};

/// Long enough for anything that works on a busy machine of two cores.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// How often a condition is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Looks until `look` answers something.
///
/// # Panics
/// After `limit`, with what was waited for.
pub fn within<T>(limit: Duration, what: &str, look: impl FnMut() -> Option<T>) -> T {
    within_every(LOOK_EVERY, limit, what, look)
}

/// Looks so often until `look` answers something. For looks that cost something themselves.
///
/// # Panics
/// After `limit`, with what was waited for.
pub fn within_every<T>(every: Duration, limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < limit, "waited {limit:?} for {what}");
        std::thread::sleep(every);
    }
}

/// Looks until `look` answers something, with [`PATIENCE`].
///
/// # Panics
/// After [`PATIENCE`].
pub fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, look)
}

/// Waits until `condition` holds, with [`PATIENCE`].
///
/// # Panics
/// After [`PATIENCE`].
pub fn until_true(what: &str, mut condition: impl FnMut() -> bool) {
    until(what, || condition().then_some(()));
}
