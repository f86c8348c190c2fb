//! Grants: tokens for people who may look. The state directory keeps their hashes only, so whoever reads it can show nobody's
//! token.
//!
//! One file for each term, which only the coordinator of that term writes: a successor copies its predecessor's, and what a
//! frozen predecessor that wakes up writes to its own nobody reads (J2).
//!
//! Expiry is judged by the wall clock of necessity: it is a promise to a person, and must hold over restarts.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use super::access::{Proof, Refusal};
use super::tokens::{Error, new_token};
use crate::clock::{Clock, SystemClock};
use crate::files;

/// So many grants a coordinator keeps.
pub const MAX_GRANTS: usize = 1000;
/// An hour in milliseconds.
pub const HOUR_MS: u64 = 3_600_000;
/// Longest life of a grant, milliseconds: ten years.
const MAX_LIFE_MS: u64 = 3650 * 24 * HOUR_MS;
/// Longest wait before the wall clock is looked at again: it may be set.
const LOOK: Duration = Duration::from_secs(60);

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// For whom.
    pub name: String,
    /// BLAKE3 of the token, hexadecimal. The token has 256 random bits, so a plain hash does not give it away.
    token_blake3: String,
    /// When it was made, milliseconds since the Unix epoch.
    pub created_at_ms: u64,
    /// When it ends, milliseconds since the Unix epoch.
    pub expires_at_ms: u64,
}

impl Grant {
    pub(super) fn new(name: &str, token: &str, created_at_ms: u64, life_ms: u64) -> Self {
        let expires_at_ms = created_at_ms.saturating_add(life_ms);
        Self { name: name.to_owned(), token_blake3: hash(token.as_bytes()), created_at_ms, expires_at_ms }
    }
}

/// Why a grant was not made or taken back.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The name cannot be one.
    #[error("{0:?} is no name for a grant: letters, digits and any of . _ - @, 1 to 64 of them")]
    Name(String),
    /// The life cannot be one.
    #[error("a grant lives between a second and ten years, not {0} ms")]
    Life(u64),
    /// The name is taken.
    #[error("there is a grant {0:?}; take it back first with `trainctl auth revoke {0}`, or choose another name")]
    Exists(String),
    /// Too many.
    #[error("there are {MAX_GRANTS} grants already; take some back with `trainctl auth revoke NAME`")]
    TooMany,
    /// No such grant.
    #[error("there is no grant {0:?}; `trainctl auth list` shows those there are")]
    Missing(String),
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] Error),
}

#[derive(Default, Serialize, Deserialize)]
struct File {
    grants: Vec<Grant>,
}

/// All grants of a coordinator.
#[derive(Debug)]
pub struct Grants {
    path: PathBuf,
    current: watch::Sender<Arc<Vec<Grant>>>,
    /// Readers never wait for the disk: they read `current`.
    changing: Mutex<()>,
}

impl Grants {
    /// The grants of a state directory, from now on those of `term`; none if no earlier term has any. The caller holds the
    /// directory.
    ///
    /// # Errors
    /// [`Error`]: a file cannot be read or written, or is not one.
    pub fn load(state_dir: &Path, term: u64) -> Result<Self, Error> {
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { action, path, source }
        };
        let path = file_of(state_dir, term);
        let newest = newest_up_to(state_dir, term).map_err(io("read", state_dir))?;
        let file = match newest.map(|newest| file_of(state_dir, newest)) {
            None => File::default(),
            Some(from) => {
                let bytes = std::fs::read(&from).map_err(io("read", &from))?;
                let parsed = serde_json::from_slice(&bytes);
                parsed.map_err(|error| Error::Grants { path: from.clone(), reason: error.to_string() })?
            }
        };
        // Also when there are none: what a predecessor writes from now on must not be the newest.
        let bytes = serde_json::to_vec_pretty(&file).map_err(|error| io("write", &path)(error.into()))?;
        files::write_atomically(&path, &bytes, 0o600).map_err(io("write", &path))?;
        Ok(Self { path, current: watch::Sender::new(Arc::new(file.grants)), changing: Mutex::default() })
    }

    /// All, also those that have expired.
    #[must_use]
    pub fn list(&self) -> Arc<Vec<Grant>> {
        self.current.borrow().clone()
    }

    /// Makes a grant and its token, which is known to nobody afterwards. Blocking: it is durable when this returns. The name
    /// of one that has expired is free.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn add(&self, name: &str, life_ms: u64, now_ms: u64) -> Result<(Grant, String), GrantError> {
        let is_named = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@".contains(&byte);
        if name.is_empty() || name.len() > 64 || !name.bytes().all(is_named) {
            return Err(GrantError::Name(name.chars().take(80).collect()));
        }
        if !(1000..=MAX_LIFE_MS).contains(&life_ms) {
            return Err(GrantError::Life(life_ms));
        }
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut grants = self.list().to_vec();
        grants.retain(|grant| grant.name != name || grant.expires_at_ms > now_ms);
        if grants.iter().any(|grant| grant.name == name) {
            return Err(GrantError::Exists(name.to_owned()));
        }
        if grants.len() >= MAX_GRANTS {
            return Err(GrantError::TooMany);
        }
        let token = new_token()?;
        let grant = Grant::new(name, &token, now_ms, life_ms);
        grants.push(grant.clone());
        self.store(grants)?;
        Ok((grant, token))
    }

    /// Takes a grant back, at once. Blocking.
    ///
    /// # Errors
    /// [`GrantError::Missing`], [`GrantError::File`].
    pub fn revoke(&self, name: &str) -> Result<Grant, GrantError> {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut grants = self.list().to_vec();
        let Some(index) = grants.iter().position(|grant| grant.name == name) else {
            return Err(GrantError::Missing(name.to_owned()));
        };
        let revoked = grants.remove(index);
        self.store(grants)?;
        Ok(revoked)
    }

    /// On the disk first: what was answered survives a crash.
    fn store(&self, grants: Vec<Grant>) -> Result<(), Error> {
        let io = |source| Error::Io { action: "write", path: self.path.clone(), source };
        let bytes = serde_json::to_vec_pretty(&File { grants: grants.clone() }).map_err(|error| io(error.into()))?;
        files::write_atomically(&self.path, &bytes, 0o600).map_err(io)?;
        self.current.send_replace(Arc::new(grants));
        Ok(())
    }

    /// What a token proves.
    pub(super) fn proof(&self, token: &[u8], now_ms: u64) -> Proof {
        let hash = hash(token);
        let grants = self.list();
        let is_it = |grant: &&Grant| bool::from(grant.token_blake3.as_bytes().ct_eq(hash.as_bytes()));
        match grants.iter().find(is_it) {
            None => Proof::Nothing,
            Some(grant) if grant.expires_at_ms <= now_ms => Proof::Expired(grant.clone()),
            Some(grant) => Proof::Grant(grant.clone()),
        }
    }

    /// Returns when a grant has expired or is taken back.
    pub(super) async fn over(&self, grant: &Grant) -> Refusal {
        let clock = SystemClock::new();
        let mut current = self.current.subscribe();
        loop {
            if !current.borrow_and_update().contains(grant) {
                return Refusal::Unknown;
            }
            let left = Duration::from_millis(grant.expires_at_ms.saturating_sub(clock.wall_ms()));
            if left.is_zero() {
                return Refusal::Expired(grant.name.clone());
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(LOOK)) => {}
                // The sender is in `self`.
                changed = current.changed() => if changed.is_err() { return Refusal::Unknown },
            }
        }
    }
}

fn hash(token: &[u8]) -> String {
    blake3::hash(token).to_hex().to_string()
}

fn file_of(state_dir: &Path, term: u64) -> PathBuf {
    state_dir.join(format!("grants-{term:08}.json"))
}

/// The newest term up to `term` that has a file.
fn newest_up_to(state_dir: &Path, term: u64) -> std::io::Result<Option<u64>> {
    let term_of = |name: &str| -> Option<u64> { name.strip_prefix("grants-")?.strip_suffix(".json")?.parse().ok() };
    let mut newest = None;
    for entry in std::fs::read_dir(state_dir)? {
        let found = entry?.file_name().to_str().and_then(term_of);
        newest = newest.max(found.filter(|found| *found <= term));
    }
    Ok(newest)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_grant_lives_until_its_end_over_restarts_and_its_token_is_nowhere() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let grants = Grants::load(dir.path(), 1).expect("load");
        let (grant, token) = grants.add("ann", 5000, 1000).expect("add");
        assert_eq!((grant.created_at_ms, grant.expires_at_ms), (1000, 6000));
        let file = file_of(dir.path(), 1);
        assert!(!std::fs::read_to_string(&file).expect("read").contains(&token));
        assert_eq!(std::fs::metadata(&file).expect("metadata").permissions().mode() & 0o777, 0o600);

        let again = Grants::load(dir.path(), 2).expect("load");
        assert_eq!(again.proof(token.as_bytes(), 5999), Proof::Grant(grant.clone()));
        assert_eq!(again.proof(token.as_bytes(), 6000), Proof::Expired(grant));
        assert_eq!(again.proof(b"another", 2000), Proof::Nothing);
        assert!(matches!(again.add("ann", 5000, 5999), Err(GrantError::Exists(_))));
        let (_, second) = again.add("ann", 5000, 6000).expect("the name of one that has expired is free");
        assert_ne!(second, token);
        assert_eq!(again.proof(token.as_bytes(), 6001), Proof::Nothing, "the old token does not come back with it");
        again.revoke("ann").expect("revoke");
        assert_eq!(again.proof(second.as_bytes(), 6001), Proof::Nothing);
        assert!(matches!(again.revoke("ann"), Err(GrantError::Missing(_))));
        assert!(Grants::load(dir.path(), 3).expect("load").list().is_empty());
    }

    #[test]
    fn j2_what_a_frozen_predecessor_grants_or_keeps_later_nobody_reads() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let frozen = Grants::load(dir.path(), 1).expect("load");
        frozen.add("ann", 5000, 0).expect("add");
        let successor = Grants::load(dir.path(), 4).expect("load");
        successor.revoke("ann").expect("revoke");
        frozen.add("eve", 5000, 0).expect("add");
        assert!(Grants::load(dir.path(), 6).expect("load").list().is_empty());
        // Nor by one that took over before there was anything to copy and then granted nothing.
        let dir = tempfile::tempdir().expect("temporary directory");
        let frozen = Grants::load(dir.path(), 1).expect("load");
        Grants::load(dir.path(), 2).expect("load");
        frozen.add("eve", 5000, 0).expect("add");
        assert!(Grants::load(dir.path(), 3).expect("load").list().is_empty());
    }

    #[test]
    fn names_and_lives_are_checked() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let grants = Grants::load(dir.path(), 1).expect("load");
        for name in ["", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert!(matches!(grants.add(name, 5000, 0), Err(GrantError::Name(_))), "{name:?}");
        }
        for life in [0, 999, MAX_LIFE_MS + 1, u64::MAX] {
            assert!(matches!(grants.add("ann", life, 0), Err(GrantError::Life(_))), "{life}");
        }
        std::fs::write(file_of(dir.path(), 1), "{").expect("write");
        assert!(matches!(Grants::load(dir.path(), 2), Err(Error::Grants { .. })), "a damaged file is not replaced");
    }

    #[tokio::test]
    async fn who_waits_for_the_end_of_a_grant_hears_of_it() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let grants = Grants::load(dir.path(), 1).expect("load");
        let now = SystemClock::new().wall_ms();
        let (long, _) = grants.add("long", HOUR_MS, now).expect("add");
        let revoke = async {
            tokio::task::yield_now().await;
            grants.revoke("long").map(drop)
        };
        let (over, revoked) = tokio::join!(grants.over(&long), revoke);
        revoked.expect("revoke");
        assert_eq!(over, Refusal::Unknown);
        let (short, _) = grants.add("short", 1000, now).expect("add");
        assert_eq!(grants.over(&short).await, Refusal::Expired("short".to_owned()));
    }
}
