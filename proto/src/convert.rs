//! Conversions between wire messages and domain types.
