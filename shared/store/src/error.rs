//! What can go wrong in a store. Every variant says what, where, why, and what to do.

use std::path::{Path, PathBuf};

/// A failed operation on a run directory or a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("cannot {action} {}: {source}{}", path.display(), remedy(source))]
    Io {
        /// What was tried: `read`, `write`, …
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A temporary file is gone before it got its name: whoever holds the directory now has removed it.
    #[error("{} was not made: the holder of the directory has removed its temporary file; try again", path.display())]
    Swept {
        /// The file that was to be made.
        path: PathBuf,
    },
    /// An object store refused, or could not be reached.
    #[error("cannot {action} {url}: {reason}")]
    Object {
        /// What was tried: `read`, `write`, …
        action: &'static str,
        /// On what.
        url: String,
        /// The store's answer, without anything secret, and what to do.
        reason: String,
        /// No answer, or one that says that the store has trouble: it says nothing of the object.
        away: bool,
    },
    /// An object store that answers a conditional put by overwriting.
    #[error(
        "{url}: this object store ignores the condition of a put (If-None-Match: *), so that two coordinators could commit \
         the same step; use a store that honours it (Amazon S3, Google Cloud Storage, Azure, Cloudflare R2, current MinIO), \
         update the server, or choose a directory as checkpoint.checkpoint_dir"
    )]
    Unconditional {
        /// Where checkpoints were to lie.
        url: String,
    },
    /// A place for checkpoints that cannot be understood.
    #[error("`{text}` is no place for checkpoints: {reason}")]
    Location {
        /// As given, without a password.
        text: String,
        /// Why.
        reason: String,
    },
    /// A key would leave the directory it belongs to.
    #[error("`{key}` is no path inside the store: use a relative path without `..`")]
    Key {
        /// The key as given.
        key: String,
    },
    /// A higher term exists: this process may change nothing any more (J2).
    #[error("term {mine} of this run directory is over: term {theirs} has taken it; this process changes nothing more")]
    Superseded {
        /// The caller's term.
        mine: u64,
        /// The highest term.
        theirs: u64,
    },
    /// A manifest is there and cannot be used.
    #[error("{}: {fault}", path.display())]
    Manifest {
        /// The manifest's path.
        path: PathBuf,
        /// Why.
        fault: crate::manifest::Fault,
    },
    /// A checkpoint has no manifest: it was never committed (C1).
    #[error(
        "checkpoint {name} has no manifest, so it was never committed; `trainctl checkpoints list` shows what can be loaded"
    )]
    NotCommitted {
        /// Its directory.
        name: String,
    },
    /// The committed manifest is not the one that was asked for.
    #[error("checkpoint {name} has manifest {found}, but {wanted} was named; was it replaced by hand?")]
    OtherManifest {
        /// Its directory.
        name: String,
        /// blake3 that was asked for.
        wanted: String,
        /// blake3 that is there.
        found: String,
    },
    /// Bytes of a file differ from what its manifest says.
    #[error("{}: {reason}; the checkpoint is damaged: resume from an older one (`trainctl checkpoints list`)", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// In which way.
        reason: String,
    },
    /// A tensor, its shape or its place is not what the caller said.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// `model/<name>` or `optim/<name>`, or the bare name while writing.
        name: String,
        /// In which way.
        reason: String,
    },
    /// The parts of a checkpoint do not fit together.
    #[error("checkpoint {name} cannot be committed: {reason}")]
    Commit {
        /// Its directory.
        name: String,
        /// Why.
        reason: String,
    },
    /// A row of a `.jsonl` file cannot be written or read.
    #[error("{}: {reason}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// `control/origin.json` cannot be used.
    #[error("{}: {reason}; `trainctl fork` writes it again", path.display())]
    Origin {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The task that did the file work was stopped with its runtime.
    #[error("the store's task was stopped: {0}")]
    Stopped(String),
}

impl Error {
    /// An [`Error::Io`].
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { action, path: path.as_ref().to_owned(), source }
    }

    /// A higher term holds the run directory.
    pub fn is_superseded(&self) -> bool {
        matches!(self, Self::Superseded { .. })
    }

    /// This process may not write there: permissions, or a read-only file system.
    pub fn is_refused(&self) -> bool {
        use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        matches!(self, Self::Io { source, .. } if matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem))
    }

    /// An [`Error::Object`] of a store that answers.
    pub(crate) fn object(action: &'static str, url: impl std::fmt::Display, reason: impl Into<String>) -> Self {
        Self::Object { action, url: url.to_string(), reason: reason.into(), away: false }
    }

    /// The store cannot be reached or has trouble of its own: nothing is known of what lies in it, and waiting may do.
    pub fn is_away(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_away(source),
            Self::Object { away, .. } => *away,
            _ => false,
        }
    }

    /// The disk or quota is full.
    pub fn is_out_of_space(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, Self::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }
}

/// Result of a store operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whether a file system answers so when its server, its network or its device has trouble, rather than of the file: EIO,
/// ESTALE, ENOTCONN of a dead FUSE server, and what the network says.
pub fn is_away(error: &std::io::Error) -> bool {
    use nix::errno::Errno;
    let Some(number) = error.raw_os_error() else { return false };
    matches!(
        Errno::from_raw(number),
        Errno::EIO
            | Errno::EREMOTEIO
            | Errno::ESTALE
            | Errno::ENOTCONN
            | Errno::ESHUTDOWN
            | Errno::ETIMEDOUT
            | Errno::ECONNREFUSED
            | Errno::ECONNRESET
            | Errno::ECONNABORTED
            | Errno::EHOSTDOWN
            | Errno::EHOSTUNREACH
            | Errno::ENETDOWN
            | Errno::ENETUNREACH
            | Errno::ENETRESET
    )
}

fn remedy(source: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match source.kind() {
        ErrorKind::StorageFull => "; free space on this file system",
        ErrorKind::QuotaExceeded => "; free space or ask for a larger quota",
        ErrorKind::PermissionDenied => "; a run directory belongs to one user: check its owner and mode",
        ErrorKind::ReadOnlyFilesystem => "; the file system is mounted read-only: choose another run_dir",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_store_that_is_away_is_told_from_a_file_that_is_not_right() {
        let io = |number: Errno| Error::io("read", "/runs/a", number.into());
        for number in [Errno::EIO, Errno::ESTALE, Errno::ENOTCONN, Errno::ETIMEDOUT, Errno::EHOSTUNREACH] {
            assert!(io(number).is_away(), "{}", io(number));
        }
        let damaged = Error::Damaged { path: "/runs/a".into(), reason: "ends before byte 9".to_owned() };
        let others = [Errno::ENOENT, Errno::EACCES, Errno::EROFS, Errno::ENOSPC, Errno::EISDIR].map(io);
        for error in others.into_iter().chain([damaged, Error::object("read", "s3://b/k", "is missing")]) {
            assert!(!error.is_away(), "{error}");
        }
    }
}
