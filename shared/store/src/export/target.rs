//! The directory that an export makes: hidden until it is whole.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use jiff::Timestamp;
use serde_json::Value;

use super::ExportError;
use crate::error::Error;
use crate::fault::FailPoint;
use crate::io::{Disk, Kind};

/// Folders in the making start so: `.export-<target>.<process>.<number>`.
pub(crate) const STAGING: &str = ".export-";

/// A target that is missing or empty.
#[derive(Debug)]
pub(super) struct Target {
    disk: Disk,
    name: String,
    path: PathBuf,
}

impl Target {
    /// Looks at the target and changes nothing.
    pub(super) fn check(path: &Path) -> Result<Self, ExportError> {
        let refuse = |reason: &str| ExportError::Target { path: path.to_owned(), reason: reason.to_owned() };
        let absolute = std::path::absolute(path).map_err(|e| refuse(&e.to_string()))?;
        let name = absolute.file_name().and_then(|name| name.to_str());
        let (Some(parent), Some(name)) = (absolute.parent(), name) else {
            return Err(refuse("name a new directory in UTF-8"));
        };
        match std::fs::symlink_metadata(&absolute) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(refuse(&e.to_string())),
            Ok(metadata) if !metadata.is_dir() => return Err(refuse("it exists and is no directory")),
            Ok(_) => {
                let mut entries = std::fs::read_dir(&absolute).map_err(|e| refuse(&e.to_string()))?;
                if entries.next().is_some() {
                    return Err(refuse("it is not empty; remove it or name another directory"));
                }
            }
        }
        Ok(Self { disk: Disk::new(parent), name: name.to_owned(), path: absolute })
    }

    /// Where the export will be, absolute.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes what killed exports to this target left and makes a new folder beside it. Of two exports to one target at
    /// the same time the later one wins, and the other one fails: a leftover loses its name before its files, so nothing
    /// that is half removed can be published.
    pub(super) fn begin(&self) -> Result<Staging<'_>, ExportError> {
        for entry in self.disk.list("")?.into_iter().filter(|entry| entry.kind == Kind::Dir) {
            if is_staging(&entry.name, &self.name) {
                let condemned = self.staging_name();
                self.disk.rename_dir(&entry.name, &condemned, FailPoint::EXPORT_SWEEP)?;
                self.disk.remove_tree(&condemned, FailPoint::EXPORT_SWEEP)?;
            }
        }
        let folder = self.staging_name();
        self.disk.make_dir(&folder)?;
        Ok(Staging { target: self, folder })
    }

    fn staging_name(&self) -> String {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        // Process, time and counter: two hosts with equal process ids do not meet.
        let unique = Timestamp::now().as_microsecond().unsigned_abs() + COUNTER.fetch_add(1, Ordering::Relaxed);
        format!("{STAGING}{}.{}.{unique}", self.name, std::process::id())
    }
}

/// Whether `folder` is a folder in the making for exactly this target.
fn is_staging(folder: &str, target: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = || {
        let (rest, number) = folder.strip_prefix(STAGING)?.rsplit_once('.')?;
        let (name, process) = rest.rsplit_once('.')?;
        Some(name == target && is_number(process) && is_number(number))
    };
    parts().unwrap_or(false)
}

/// An export in the making.
#[derive(Debug)]
pub(super) struct Staging<'a> {
    target: &'a Target,
    folder: String,
}

impl Staging<'_> {
    /// The directory in which [`Staging::folder`] lies.
    pub(super) fn disk(&self) -> &Disk {
        &self.target.disk
    }

    /// The folder to write to.
    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    /// Writes a file, durably.
    pub(super) fn bytes(&self, name: &str, bytes: Vec<u8>) -> Result<(), ExportError> {
        Ok(self.disk().put_durable(&format!("{}/{name}", self.folder), &bytes, FailPoint::EXPORT_FILE)?)
    }

    /// Writes a JSON file as `transformers` does: two spaces, a newline at the end.
    pub(super) fn json(&self, name: &str, value: &Value) -> Result<(), ExportError> {
        self.bytes(name, format!("{value:#}\n").into_bytes())
    }

    /// Gives the folder the target's name and lists its files.
    pub(super) fn publish(self) -> Result<Vec<String>, ExportError> {
        let files = self.disk().list(&self.folder)?.into_iter().map(|entry| entry.name).collect();
        match self.disk().rename_dir(&self.folder, &self.target.name, FailPoint::EXPORT_PUBLISH) {
            Ok(()) => Ok(files),
            Err(error) => {
                let taken = matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::DirectoryNotEmpty);
                self.discard();
                Err(match taken {
                    true => ExportError::Target {
                        path: self.target.path.clone(),
                        reason: "somebody else has filled it meanwhile".to_owned(),
                    },
                    false => error.into(),
                })
            }
        }
    }

    /// Removes what was written. What cannot be removed is removed by the next export to this target.
    pub(super) fn discard(&self) {
        if let Err(error) = self.disk().remove_tree(&self.folder, FailPoint::EXPORT_SWEEP) {
            tracing::warn!(folder = self.folder, %error, "a part of an export stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_staging;

    #[test]
    fn a_leftover_is_told_from_another_targets() {
        assert!(is_staging(".export-out.12.345", "out"));
        assert!(is_staging(".export-out.v2.12.345", "out.v2"));
        for other in [".export-out.v2.12.345", ".export-out2.12.345", ".export-out.12", "out", ".export-out.a.1"] {
            assert!(!is_staging(other, "out"), "{other}");
        }
    }
}
