//! Exit codes (README.md) and the error that carries one.

use std::fmt;

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// What was asked is done.
    Ok = 0,
    /// The job failed, or was cancelled before its end.
    JobFailed = 1,
    /// Something in trainctl or on this machine broke.
    Internal = 2,
    /// A flag, an argument or the spec is wrong.
    Usage = 64,
    /// No coordinator answers, or another one holds the run directory.
    Unreachable = 69,
    /// The job stopped before its end and wants to be queued again.
    Requeue = 75,
}

/// An error that knows its exit code. Its text says what, where, why, and what to do.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Exit code.
    pub(crate) exit: Exit,
    /// Empty when everything was said already.
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into() }
    }

    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Self { exit: Exit::Unreachable, message: message.into() }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self { exit: Exit::Internal, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::internal(format!("{error:#}"))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::internal(error.to_string())
    }
}

/// What a command returns.
pub(crate) type Outcome = Result<Exit, Failure>;
