//! The end-to-end suites.

#![expect(clippy::unwrap_used, reason = "tests")]

mod killed_trainers;
