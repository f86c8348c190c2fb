//! c10d behind a Rust API.
