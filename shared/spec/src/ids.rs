//! Identifiers. Numbers that must not be mixed up are types of their own.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// One formation of the world of a job. Each restart, resize or resume is a new one; it fences everything below it.
    Generation(u64)
}
number! {
    /// One coordinator's tenure over a run directory. Only the highest term may act (J2).
    Term(u64)
}
number! {
    /// Rank as in torch.distributed: 0 ≤ rank < world size.
    Rank(u32)
}
number! {
    /// Zero-based optimizer step.
    Step(u64)
}

/// A job's id: its name, a dash and eight hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub String);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
