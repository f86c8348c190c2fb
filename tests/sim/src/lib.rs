//! Nothing but its test: see `sim/main.rs`.
