//! A real S3 server for tests: `s3s-fs` behind HTTP, in a process of its own, with signatures checked.
//!
//! What a plain `s3s-fs` lacks is added in [`serve`]: conditional puts that are atomic, a log of every request, and
//! [`Switches`] by which the server refuses, loses answers, is slow, cuts bodies off, has another time, ignores conditions or
//! dies. [`Server`] is a test's handle of it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test kit: what does not go as expected fails the test")]

pub mod handle;
pub mod serve;
pub mod switches;

pub use handle::{Request, Server};
pub use switches::Switches;

/// The access key that the server knows.
pub const ACCESS_KEY: &str = "AKIATRAINCTLTESTS000";

/// Its secret. Tests look for it where it must not be.
pub const SECRET_KEY: &str = "tests-secret-key-that-must-not-be-logged";
