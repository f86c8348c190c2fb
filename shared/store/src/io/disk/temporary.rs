//! Names of files in the making.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Disk, parent};
use crate::error::Result;
use crate::fault::FailPoint;
use crate::io::calls::Calls;

/// Temporary names start so; listings leave them out.
pub(super) const TEMP_PREFIX: &str = ".tmp-";

impl Disk {
    /// Removes temporary files of `key` that a killed process left. Only whoever alone may write the key calls this.
    pub(crate) fn sweep(&self, key: &str, point: FailPoint) -> Result<()> {
        let (directory, name) = key.rsplit_once('/').unwrap_or(("", key));
        self.sweep_prefix(directory, &format!("{TEMP_PREFIX}{name}-"), point)
    }

    /// Removes all temporary files in a directory.
    pub(crate) fn sweep_dir(&self, directory: &str, point: FailPoint) -> Result<()> {
        self.sweep_prefix(directory, TEMP_PREFIX, point)
    }

    fn sweep_prefix(&self, directory: &str, prefix: &str, point: FailPoint) -> Result<()> {
        for entry in self.list_all(directory)?.into_iter().filter(|entry| entry.name.starts_with(prefix)) {
            let stale = if directory.is_empty() { entry.name } else { format!("{directory}/{}", entry.name) };
            self.remove_file(&stale, point)?;
        }
        Ok(())
    }
}

/// Whether a name is that of a file in the making.
pub(crate) fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMP_PREFIX)
}

/// A name beside `path` that nobody else uses: process, counter and the time of the first use, so that two hosts with
/// equal process ids do not meet.
pub(super) fn temp_path(path: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    static SALT: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let salt = SALT.get_or_init(|| {
        let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        since.subsec_nanos() ^ since.as_secs() as u32
    });
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    parent(path).join(format!("{TEMP_PREFIX}{name}-{}-{salt:08x}-{count}", std::process::id()))
}

pub(super) fn remove_quietly(calls: &Calls, path: &Path) {
    if let Err(error) = calls.remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "a temporary file stays");
    }
}
