//! The files that hold tokens, 0600: nobody but their owner reads them, and they are never in argv, environment or logs.

use std::path::{Path, PathBuf};

use rand::TryRngCore;
use rand::rngs::OsRng;
use serde::{Deserialize, Serialize};

use crate::files;

/// File with the owner's token.
pub const OWNER_FILE: &str = "owner.json";
/// File with the workers' token.
pub const JOIN_FILE: &str = "join.json";

/// The two secrets of a coordinator. Their `Debug` shows nothing.
#[derive(Clone, PartialEq, Eq)]
pub struct Tokens {
    /// The owner's.
    pub owner: String,
    /// The workers': to enrol with, or on loopback to work with.
    pub worker: String,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokens(…)")
    }
}

#[derive(Serialize, Deserialize)]
struct TokenFile {
    token: String,
}

/// Why a token could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read or written.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file holds no token.
    #[error(
        "{path} holds no token: {reason}; if it is the coordinator's own, delete it and start the coordinator again"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file of the grants is not one. It is not replaced: that would take every grant back unsaid.
    #[error("{path} holds no grants: {reason}; delete it, start the coordinator again and make the grants anew")]
    Grants {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The system gave no random bytes.
    #[error("no random bytes for a token: {0}")]
    Random(String),
}

/// Reads the tokens of `state_dir`, or makes them: `owner.json` and `join.json`, both 0600.
///
/// # Errors
/// [`Error`]: the directory cannot be written, or a file is damaged.
pub fn load_or_create(state_dir: &Path) -> Result<Tokens, Error> {
    Ok(Tokens { owner: load_or_create_one(state_dir, OWNER_FILE)?, worker: load_or_create_one(state_dir, JOIN_FILE)? })
}

fn load_or_create_one(dir: &Path, name: &str) -> Result<String, Error> {
    match read_file(&dir.join(name)) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            let token = new_token()?;
            write_file(&dir.join(name), &token)?;
            Ok(token)
        }
        other => other,
    }
}

/// Writes `join.json` in another control directory, for workers that start there.
///
/// # Errors
/// [`Error::Io`].
pub fn publish_join(tokens: &Tokens, control_dir: &Path) -> Result<(), Error> {
    write_file(&control_dir.join(JOIN_FILE), &tokens.worker)
}

/// The worker token in a control directory.
///
/// # Errors
/// [`Error`] when there is none.
pub fn read_join(control_dir: &Path) -> Result<String, Error> {
    read_file(&control_dir.join(JOIN_FILE))
}

/// The owner token in a state directory.
///
/// # Errors
/// [`Error`] when there is none.
pub fn read_owner(state_dir: &Path) -> Result<String, Error> {
    read_file(&state_dir.join(OWNER_FILE))
}

/// Writes a token into a file of its own, 0600.
///
/// # Errors
/// [`Error::Io`].
pub fn write_file(path: &Path, token: &str) -> Result<(), Error> {
    let io = |source| Error::Io { action: "write", path: path.to_owned(), source };
    let bytes = serde_json::to_vec(&TokenFile { token: token.to_owned() }).map_err(|error| io(error.into()))?;
    files::write_atomically(path, &bytes, 0o600).map_err(io)
}

/// Reads a token file: the JSON that [`write_file`] makes, or the bare token.
///
/// # Errors
/// [`Error`] when it is none.
pub fn read_file(path: &Path) -> Result<String, Error> {
    let malformed = |reason: String| Error::Malformed { path: path.to_owned(), reason };
    let bytes = std::fs::read(path).map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })?;
    let bare = std::str::from_utf8(&bytes).ok().map(str::trim).filter(|text| !text.starts_with('{'));
    let token = match bare {
        Some(token) => token.to_owned(),
        // serde's own text would quote what is there.
        None => {
            serde_json::from_slice::<TokenFile>(&bytes)
                .map_err(|error| malformed(format!("line {} column {}", error.line(), error.column())))?
                .token
        }
    };
    if token.len() < 32 || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(malformed("a token has 32 characters at least, and no blanks".to_owned()));
    }
    Ok(token)
}

/// 256 random bits in hexadecimal.
pub(super) fn new_token() -> Result<String, Error> {
    random_hex(32)
}

/// `bytes` random bytes from the operating system, in hexadecimal: tokens, incarnations, nonces.
///
/// # Errors
/// [`Error::Random`].
pub fn random_hex(bytes: usize) -> Result<String, Error> {
    let mut buffer = vec![0_u8; bytes];
    OsRng.try_fill_bytes(&mut buffer).map_err(|error| Error::Random(error.to_string()))?;
    Ok(buffer.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn tokens_are_made_once_private_and_different() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let tokens = load_or_create(dir.path()).expect("create");
        assert_ne!(tokens.owner, tokens.worker);
        assert_eq!(load_or_create(dir.path()).expect("load"), tokens);
        assert_eq!(read_owner(dir.path()).expect("owner"), tokens.owner);
        assert_eq!(read_join(dir.path()).expect("join"), tokens.worker);
        for name in [OWNER_FILE, JOIN_FILE] {
            let mode = std::fs::metadata(dir.path().join(name)).expect("metadata").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        let other = tempfile::tempdir().expect("temporary directory");
        publish_join(&tokens, other.path()).expect("publish");
        assert_eq!(read_join(other.path()).expect("join"), tokens.worker);
        assert!(read_owner(other.path()).is_err(), "the owner's token is not published");
        assert!(!format!("{tokens:?}").contains(&tokens.owner));
    }

    #[test]
    fn a_damaged_token_file_is_not_replaced() {
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::write(dir.path().join(OWNER_FILE), "{\"token\": \"abc\"}").expect("write");
        assert!(matches!(load_or_create(dir.path()), Err(Error::Malformed { .. })));
        let file = dir.path().join("bare");
        std::fs::write(&file, format!("{}\n", "a1".repeat(32))).expect("write");
        assert_eq!(read_file(&file).expect("a bare token"), "a1".repeat(32));
        for content in ["", "short", "{\"token\": 5}", "\"a1a1a1a1a1a1a1a1 a1a1a1a1a1a1a1a1a1\""] {
            std::fs::write(&file, content).expect("write");
            assert!(matches!(read_file(&file), Err(Error::Malformed { .. })), "{content}");
        }
    }
}
