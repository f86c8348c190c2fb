//! The checkpoint store on a bucket (P2, C2, C3, C4, C6): commits, pointers, retention, kills at every fail point and in the
//! middle of uploads, two holders, and a server that refuses, forgets, cuts off, is slow, has another time or dies.
//!
//! The holders are this test's own executable, with credentials and `TRAINCTL_FAULT` in its environment, and the server is a
//! process too. Without `TRAINCTL_MATRIX=all` the kills are a sample that has every place at least once.

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "helpers of tests")]

mod child;
mod cycle;
mod faults;
mod kills;
mod reading;
mod scene;

/// The children's entry; without the variable there is nothing to do.
#[test]
fn child() {
    child::run();
}
