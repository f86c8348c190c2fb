//! Megatron data.
