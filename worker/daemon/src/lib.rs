//! The per-GPU worker daemon: it owns one GPU (or one CPU slot), runs at most one trainer on it, and keeps what the
//! trainer says until the coordinator has it. It outlives trainers and coordinators and never links libtorch.
//!
//! - [`session`]: its life with the coordinator. Invariants W1–W5.
//! - [`trainer`]: the trainer's process and link. Invariants T1–T4, R1–R3.
//! - [`spool`]: what must not be lost. Invariants S1–S4.
//! - [`health`]: what it measures of itself, and probes of run directories and peers.
//! - [`state`]: what a `kill -9` of the daemon must not forget.
//! - [`keeper`]: cleans up after a daemon that was killed.
//! - [`daemon`]: puts them together.

pub mod daemon;
pub mod health;
pub mod keeper;
pub mod session;
pub mod spool;
pub mod state;
pub mod trainer;
