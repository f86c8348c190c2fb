//! The kit of the end-to-end suites: real daemons in real processes, ephemeral ports, real kills.
//!
//! - [`programs`]: where the programs under test are, and when a suite may skip.
//! - [`scratch`]: a test's folder; kept, with the tails of its logs printed, when the test fails.
//! - [`process`]: a child with its output in files.
//! - [`corpus`], [`job`]: a tiny real corpus and the job specs over it.
//! - [`run`]: what a run directory shows: rows, events, checkpoints, the pids of its trainers.
//! - [`reference`]: the unbroken run of a job, to compare with.
//! - [`daemons`]: coordinator and workers started by hand.
//! - [`synthetic`]: committed checkpoints without a training.
//! - [`wait`]: waiting for conditions. Nothing here sleeps for a fixed time and hopes.
//! - [`seed`]: the test's random numbers, printed and settable by `TRAINCTL_SEED`.
//!
//! A suite says what it proves in its module doc and cites the promise (P…) or invariant (J…, C…, D…) by number.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test kit: what does not go as expected fails the test, and what a test says goes to its output"
)]

pub mod corpus;
pub mod daemons;
pub mod job;
pub mod process;
pub mod programs;
pub mod reference;
pub mod run;
pub mod scratch;
pub mod seed;
pub mod synthetic;
pub mod wait;
