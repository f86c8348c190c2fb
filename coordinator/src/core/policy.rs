//! The times and limits that the core goes by.

use std::time::Duration;

use crate::decide::{health, liveness};

/// Times that the core goes by.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Leases and ticks.
    pub liveness: liveness::Policy,
    /// Pause before a failed commit is tried again.
    pub commit_retry: Duration,
    /// Pause before a run directory that could not be made ready is tried again.
    pub prepare_retry: Duration,
    /// What makes a worker unfit.
    pub health: health::Limits,
}

impl Policy {
    /// Names a lease in milliseconds, for tests that cannot wait for the usual one.
    pub const LEASE_VARIABLE: &'static str = "TRAINCTL_LEASE_MS";

    /// The usual times, or with a worker's lease of `lease_ms`, a take-over's grace to match, and no long pauses.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn with_lease(lease_ms: Option<&str>) -> Result<Self, String> {
        let usual = Self::default();
        let Some(text) = lease_ms else { return Ok(usual) };
        let bad = || format!("{}={text}: must be a number of milliseconds from 1000 on", Self::LEASE_VARIABLE);
        let lease = Duration::from_millis(text.parse().ok().filter(|ms| *ms >= 1000).ok_or_else(bad)?);
        let liveness = liveness::Policy { lease, grace: 2 * lease, ..usual.liveness };
        Ok(Self { liveness, commit_retry: lease, prepare_retry: lease, ..usual })
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            liveness: liveness::Policy {
                lease: Duration::from_secs(5),
                grace: Duration::from_secs(30),
                tick: Duration::from_millis(500),
                alone: Duration::from_secs(60),
            },
            commit_retry: Duration::from_secs(2),
            prepare_retry: Duration::from_secs(5),
            health: health::Limits::default(),
        }
    }
}
