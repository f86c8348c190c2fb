//! Files that appear whole or not at all: temporary name, fsync, rename, fsync of the directory.
//!
//! What it does not do: keep two writers of one name from replacing each other. Callers write the same bytes or do not share names.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::NamedTempFile;

use crate::error::{Error, Result};

/// A file under a temporary name beside `target`, with the umask's permissions. Dropping it removes it.
pub(crate) fn temporary(target: &Path) -> Result<NamedTempFile> {
    let folder = folder_of(target);
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".tmp")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(Error::io("create a temporary file in", folder))
}

/// Makes `file` durable and gives it its name. The directory still needs [`sync_folder`].
pub(crate) fn publish(file: NamedTempFile, target: &Path) -> Result<()> {
    file.as_file().sync_all().map_err(Error::io("sync", file.path()))?;
    file.persist(target).map_err(|error| Error::Io {
        action: "rename to",
        path: target.to_owned(),
        source: error.error,
    })?;
    Ok(())
}

/// Makes the names in the folder of `target` durable.
pub(crate) fn sync_folder(target: &Path) -> Result<()> {
    let folder = folder_of(target);
    OpenOptions::new()
        .read(true)
        .open(folder)
        .and_then(|handle: File| handle.sync_all())
        .map_err(Error::io("sync the directory", folder))
}

/// Writes `bytes` to `target` whole or not at all.
pub(crate) fn write(target: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write as _;
    let mut file = temporary(target)?;
    file.write_all(bytes).map_err(Error::io("write", target))?;
    publish(file, target)?;
    sync_folder(target)
}

/// Makes the folder that `target` will lie in.
pub(crate) fn create_folder_of(target: &Path) -> Result<()> {
    let folder = folder_of(target);
    fs::create_dir_all(folder).map_err(Error::io("create the directory", folder))
}

fn folder_of(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
