//! Checkpoints and run directories.
