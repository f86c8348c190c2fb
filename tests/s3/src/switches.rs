//! How the server misbehaves.

use serde::{Deserialize, Serialize};

/// Shares are between 0 and 1 and are drawn for each request from `seed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Switches {
    /// Seed of all draws.
    pub seed: u64,
    /// Share of requests that are answered with 500 or 503 and not carried out.
    pub refuse: f64,
    /// Share of changing requests that are carried out and then answered with 500.
    pub lose: f64,
    /// Share of answers with a body that end in the middle of it.
    pub truncate: f64,
    /// Bytes per second of each body that is read.
    pub bytes_per_second: Option<u64>,
    /// How far the server's clock is ahead of the real one. Beyond 15 minutes it refuses requests, as S3 does.
    pub clock_offset_seconds: i64,
    /// `If-None-Match` and `If-Match` are ignored, as old servers do.
    pub ignore_conditions: bool,
    /// The server kills itself in the middle of the body of this uploaded part, counted from 1 since its start.
    pub die_at_part: Option<u64>,
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            seed: 0,
            refuse: 0.0,
            lose: 0.0,
            truncate: 0.0,
            bytes_per_second: None,
            clock_offset_seconds: 0,
            ignore_conditions: false,
            die_at_part: None,
        }
    }
}
