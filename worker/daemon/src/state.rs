//! The worker's state directory: one daemon owns it, and what it must remember over a `kill -9` lies in it.
//!
//! - `lock`: held while the daemon lives, so that two daemons never share a directory.
//! - `worker-id`: stable over restarts.
//! - `fences.json`: the highest (term, generation) obeyed per run directory (J2, J3).
//! - `running.json`: the trainer that runs now, so that a successor can report its end.
//! - `spool`: see [`crate::spool`].

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trainctl_proto::v1::Fence;

/// Run directories whose fence is remembered; the one used longest ago is forgotten first.
const MAX_FENCES: usize = 64;

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another daemon holds the lock.
    #[error(
        "state directory {0} is in use by another trainctl-worker: stop that one, or give each worker its own --state-dir"
    )]
    Locked(PathBuf),
    /// A file operation failed.
    #[error("{action} {path}: {source}; check that the directory is writable and the disk is not full")]
    Io {
        /// Verb phrase.
        action: &'static str,
        /// File or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file holds something else than this daemon wrote.
    #[error("{path} cannot be read ({reason}): it was changed by hand or damaged; remove it to go on without it")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StateError {
    let path = path.to_path_buf();
    move |source| StateError::Io { action, path, source }
}

/// (term, generation) as JSON keeps it; `job` says whose generation it was.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFence {
    /// Job id.
    pub job: String,
    /// Generation in the run directory's sequence.
    pub generation: u64,
    /// Term in the same sequence.
    pub term: u64,
}

impl From<&Fence> for StoredFence {
    fn from(fence: &Fence) -> Self {
        Self { job: fence.job.clone(), generation: fence.generation, term: fence.term }
    }
}

impl From<&StoredFence> for Fence {
    fn from(fence: &StoredFence) -> Self {
        Self { job: fence.job.clone(), generation: fence.generation, term: fence.term }
    }
}

/// Highest fence per run directory. Numbers belong to a run directory (J2), so those of two are never compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fences {
    by_run: BTreeMap<String, Entry>,
    uses: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    fence: StoredFence,
    used: u64,
}

impl Fences {
    /// What was obeyed last in `run`.
    pub fn get(&self, run: &str) -> Option<&StoredFence> {
        self.by_run.get(run).map(|entry| &entry.fence)
    }

    /// Raises the fence of `run`; neither number ever falls. Returns whether anything changed.
    pub fn raise(&mut self, run: &str, fence: &Fence) -> bool {
        self.uses += 1;
        let used = self.uses;
        let entry = self.by_run.entry(run.to_owned()).or_default();
        let before = entry.fence.clone();
        if fence.generation >= entry.fence.generation {
            entry.fence.generation = fence.generation;
            entry.fence.job.clone_from(&fence.job);
        }
        entry.fence.term = entry.fence.term.max(fence.term);
        entry.used = used;
        let changed = entry.fence != before;
        while self.by_run.len() > MAX_FENCES {
            let oldest = self.by_run.iter().min_by_key(|(_, entry)| entry.used).map(|(run, _)| run.clone());
            if let Some(oldest) = oldest {
                self.by_run.remove(&oldest);
            }
        }
        changed
    }

    /// The term of the run directory that was used last; 0 when none was.
    pub fn latest_term(&self) -> u64 {
        self.by_run.values().max_by_key(|entry| entry.used).map_or(0, |entry| entry.fence.term)
    }
}

/// A trainer that was started and whose end has not been spooled yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// Fence of its assignment.
    pub fence: StoredFence,
    /// Its rank.
    pub rank: u32,
    /// Incarnation of the daemon that started it = the marker in its environment.
    pub incarnation: String,
    /// Its log file.
    pub log: PathBuf,
    /// Where in the log its own output begins, bytes.
    pub log_start: u64,
}

/// An open state directory. Cheap to clone; the lock is released when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct StateDir {
    dir: PathBuf,
    _lock: std::sync::Arc<File>,
}

impl StateDir {
    /// Creates the directory when it is missing and takes its lock.
    ///
    /// # Errors
    /// [`StateError::Locked`] when another daemon lives on it; [`StateError::Io`] when it cannot be made.
    pub fn open(dir: &Path) -> Result<Self, StateError> {
        std::fs::create_dir_all(dir).map_err(io_error("create state directory", dir))?;
        let dir = dir.canonicalize().map_err(io_error("resolve state directory", dir))?;
        let path = dir.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(io_error("open lock file", &path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { dir, _lock: std::sync::Arc::new(lock) }),
            Err(TryLockError::WouldBlock) => Err(StateError::Locked(dir)),
            Err(TryLockError::Error(source)) => Err(io_error("lock", &path)(source)),
        }
    }

    /// The directory, absolute.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The spool's file.
    pub fn spool(&self) -> PathBuf {
        self.dir.join("spool")
    }

    /// The id under which the coordinator knows this worker: `name` when given, else the one of the last start, else a
    /// new one made of the host name and `fresh`.
    ///
    /// # Errors
    /// [`StateError::Io`] when it cannot be read or stored.
    pub fn worker_id(&self, name: Option<&str>, host: &str, fresh: &str) -> Result<String, StateError> {
        let path = self.dir.join("worker-id");
        let stored = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text.trim().to_owned()).filter(|id| !id.is_empty()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(io_error("read", &path)(error)),
        };
        let id = match (name, &stored) {
            (Some(name), _) => name.to_owned(),
            (None, Some(stored)) => return Ok(stored.clone()),
            (None, None) => format!("{host}-{fresh}"),
        };
        if stored.as_deref() != Some(&id) {
            write_durable(&path, format!("{id}\n").as_bytes())?;
        }
        Ok(id)
    }

    /// The fences obeyed so far.
    ///
    /// # Errors
    /// [`StateError::Damaged`] when the file is not what this daemon wrote.
    pub fn load_fences(&self) -> Result<Fences, StateError> {
        Ok(self.load("fences.json")?.unwrap_or_default())
    }

    /// Stores the fences durably.
    ///
    /// # Errors
    /// [`StateError::Io`].
    pub fn save_fences(&self, fences: &Fences) -> Result<(), StateError> {
        self.save("fences.json", fences)
    }

    /// The trainer of a predecessor whose end was not spooled.
    ///
    /// # Errors
    /// [`StateError::Damaged`] when the file is not what this daemon wrote.
    pub fn load_running(&self) -> Result<Option<Remembered>, StateError> {
        self.load("running.json")
    }

    /// Remembers the trainer that is about to start, durably.
    ///
    /// # Errors
    /// [`StateError::Io`].
    pub fn save_running(&self, running: &Remembered) -> Result<(), StateError> {
        self.save("running.json", running)
    }

    /// Forgets the trainer: its end is in the spool.
    ///
    /// # Errors
    /// [`StateError::Io`].
    pub fn forget_running(&self) -> Result<(), StateError> {
        let path = self.dir.join("running.json");
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    fn load<T: for<'de> Deserialize<'de>>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.dir.join(name);
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| StateError::Damaged { path, reason: error.to_string() }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error("read", &path)(error)),
        }
    }

    fn save<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StateError> {
        let path = self.dir.join(name);
        let bytes = serde_json::to_vec(value)
            .map_err(|error| StateError::Damaged { path: path.clone(), reason: error.to_string() })?;
        write_durable(&path, &bytes)
    }
}

/// Replaces `path` so that a reader sees the old or the new content, also after a power cut: temporary name in the same
/// directory, fsync, rename, fsync of the directory.
#[expect(clippy::disallowed_methods, reason = "the worker's own state directory; synced here")]
fn write_durable(path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary).map_err(io_error("create", &temporary))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io_error("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(io_error("rename into", path))?;
    if let Some(parent) = path.parent() {
        File::open(parent).and_then(|dir| dir.sync_all()).map_err(io_error("sync", parent))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(job: &str, generation: u64, term: u64) -> Fence {
        Fence { job: job.to_owned(), generation, term }
    }

    #[test]
    fn a_second_daemon_is_refused_until_the_first_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateDir::open(dir.path()).unwrap();
        assert!(matches!(StateDir::open(dir.path()), Err(StateError::Locked(_))));
        drop(first);
        StateDir::open(dir.path()).unwrap();
    }

    #[test]
    fn the_worker_id_is_kept_and_a_name_replaces_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        assert_eq!(state.worker_id(None, "host", "01").unwrap(), "host-01");
        assert_eq!(state.worker_id(None, "host", "02").unwrap(), "host-01");
        assert_eq!(state.worker_id(Some("gpu3"), "host", "03").unwrap(), "gpu3");
        assert_eq!(state.worker_id(None, "host", "04").unwrap(), "gpu3");
    }

    /// J2: neither number falls, and run directories do not mix.
    #[test]
    fn fences_only_rise_and_are_kept_per_run_directory() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let mut fences = state.load_fences().unwrap();
        assert!(fences.raise("/a", &fence("j", 7, 5)));
        assert!(!fences.raise("/a", &fence("j", 6, 4)));
        assert!(fences.raise("/b", &fence("k", 2, 1)));
        state.save_fences(&fences).unwrap();
        let back = state.load_fences().unwrap();
        assert_eq!(back, fences);
        assert_eq!(back.get("/a"), Some(&StoredFence { job: "j".into(), generation: 7, term: 5 }));
        assert_eq!(back.latest_term(), 1);
    }

    #[test]
    fn the_number_of_remembered_runs_is_bounded() {
        let mut fences = Fences::default();
        for run in 0..200 {
            fences.raise(&format!("/{run}"), &fence("j", 1, 1));
        }
        assert_eq!(fences.by_run.len(), MAX_FENCES);
        assert!(fences.get("/199").is_some());
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        std::fs::write(dir.path().join("running.json"), "{").unwrap();
        let text = state.load_running().unwrap_err().to_string();
        assert!(text.contains("running.json") && text.contains("remove it"), "{text}");
    }
}
