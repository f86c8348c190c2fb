//! Free space.

use std::path::Path;

/// Bytes that a person's process may still write; 0 also where no further file can be made.
///
/// # Errors
/// The system's.
pub(super) fn free(path: &Path) -> std::io::Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    // File systems without a fixed number of files say that they have none.
    let is_out_of_files = stat.files() > 0 && stat.files_available() == 0;
    Ok(if is_out_of_files { 0 } else { stat.blocks_available() * stat.fragment_size() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_space_and_a_missing_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free(dir.path()).unwrap() > 0);
        assert_eq!(free(&dir.path().join("none")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        assert_eq!(free(Path::new("/proc")).unwrap(), 0, "a file system without blocks");
    }
}
