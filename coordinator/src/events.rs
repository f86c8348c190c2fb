//! Lines of `events.jsonl`: what happened to a job, for people and programs.
//!
//! Every line has `ts`, `kind`, `job`, `generation`, `rank` and `step` (null where it speaks of none), then keys of its kind.

use serde_json::{Map, Value};
use trainctl_spec::state::Cause;
use trainctl_spec::{Generation, JobId};

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    kind: &'static str,
    rank: Option<u32>,
    step: Option<u64>,
    more: Vec<(&'static str, Value)>,
    head: Option<(JobId, Generation, u64)>,
}

impl Entry {
    /// An event of this kind.
    pub fn new(kind: &'static str) -> Self {
        Self { kind, rank: None, step: None, more: Vec::new(), head: None }
    }

    /// The rank that it speaks of.
    #[must_use]
    pub fn rank(mut self, rank: u32) -> Self {
        self.rank = Some(rank);
        self
    }

    /// The zero-based step that it speaks of.
    #[must_use]
    pub fn step(mut self, step: u64) -> Self {
        self.step = Some(step);
        self
    }

    /// A further key.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: Value) -> Self {
        self.more.push((key, value));
        self
    }

    /// Whose event it is, and when it happened (milliseconds since the Unix epoch).
    #[must_use]
    pub fn of(mut self, job: &JobId, generation: Generation, wall_ms: u64) -> Self {
        self.head = Some((job.clone(), generation, wall_ms));
        self
    }

    /// The line's kind.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The line as a JSON object, keys in reading order.
    pub fn to_json(&self) -> Value {
        let mut line = Map::new();
        if let Some((job, generation, wall_ms)) = &self.head {
            line.insert("ts".to_owned(), timestamp(*wall_ms).into());
            line.insert("kind".to_owned(), self.kind.into());
            line.insert("job".to_owned(), job.0.clone().into());
            line.insert("generation".to_owned(), generation.0.into());
        }
        line.insert("rank".to_owned(), self.rank.into());
        line.insert("step".to_owned(), self.step.into());
        for (key, value) in &self.more {
            line.insert((*key).to_owned(), value.clone());
        }
        Value::Object(line)
    }
}

/// A cause as `trainctl explain` reads it back.
pub fn verdict(cause: &Cause) -> Value {
    serde_json::to_value(cause).unwrap_or_default()
}

/// UTC with milliseconds, as in training.jsonl: `2026-11-29T22:31:14.123Z`.
pub fn timestamp(wall_ms: u64) -> String {
    let at = jiff::Timestamp::from_millisecond(i64::try_from(wall_ms).unwrap_or(i64::MAX)).unwrap_or_default();
    at.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_keys_in_reading_order() {
        let entry = Entry::new("trainer_exited").rank(1).step(7).with("class", "signal 9".into());
        let line = entry.of(&JobId("a-1".to_owned()), Generation(3), 1_764_455_474_123).to_json().to_string();
        let want = r#"{"ts":"2025-11-29T22:31:14.123Z","kind":"trainer_exited","job":"a-1","generation":3,"rank":1,"step":7,"class":"signal 9"}"#;
        assert_eq!(line, want);
    }
}
