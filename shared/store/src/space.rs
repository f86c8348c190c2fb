//! Room on a file system.

use std::path::Path;

use crate::error::{Error, Result};

/// Bytes that this user may still write where `path` is, or will be once its missing folders are made.
///
/// # Errors
/// [`Error::Io`] if the file system does not say.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let existing = path.ancestors().find(|folder| folder.exists()).unwrap_or(path);
    let stat = nix::sys::statvfs::statvfs(existing)
        .map_err(|errno| Error::io("ask for the free space of", existing, errno.into()))?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

#[cfg(test)]
mod tests {
    use super::free_bytes;

    #[test]
    fn a_folder_that_does_not_exist_yet_has_the_room_of_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let free = free_bytes(&dir.path().join("not/yet")).unwrap();
        assert!(free > 0);
        let error = free_bytes("relative/not/there".as_ref()).unwrap_err().to_string();
        assert!(error.contains("relative/not/there"), "{error}");
    }
}
