//! Taking up the rank's log, for a trainer that was started before it was a rank.

use std::fs::OpenOptions;

use crate::ending::Ending;

/// From now on standard output and error are appended to the file at `path`; an empty path leaves them as they are.
pub(crate) fn take_up(path: &str) -> Result<(), Ending> {
    if path.is_empty() {
        return Ok(());
    }
    let failed = |error: std::io::Error| Ending::error(format!("take up the log {path}: {error}"));
    let log = OpenOptions::new().append(true).open(path).map_err(failed)?;
    nix::unistd::dup2_stdout(&log).map_err(|errno| failed(errno.into()))?;
    nix::unistd::dup2_stderr(&log).map_err(|errno| failed(errno.into()))
}
