//! The daemon kit.
