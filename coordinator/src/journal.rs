//! The journal: what a coordinator must not forget, written before an effect becomes visible.
//!
//! SQLite in a file that one incarnation only writes, `journal-<term>.db`: a successor copies its predecessor's file (and
//! its `-journal`, the rollback of a half-made transaction) to its own name and goes on, so a frozen predecessor that wakes
//! up writes to a file that nobody reads. `unix-none` turns off SQLite's own locks, which shared file systems refuse or
//! fake; the tenure (J2) takes their place. Heartbeats, metric rows and rendezvous keys never go into it.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};
use trainctl_spec::Term;

use crate::record::JobRecord;

/// Reading or writing the journal failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// SQLite said no.
    #[error("journal {path}: {source}")]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// SQLite's error.
        source: rusqlite::Error,
    },
    /// A record could not be read or written as JSON.
    #[error("journal {path}: record {key}: {source}")]
    Record {
        /// The file.
        path: PathBuf,
        /// Job id.
        key: String,
        /// The JSON error.
        source: serde_json::Error,
    },
    /// Copying the predecessor's file failed.
    #[error("copy the journal {from} to {to}: {source}")]
    Copy {
        /// Predecessor's file.
        from: PathBuf,
        /// Own file.
        to: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
}

/// What the coordinator's core needs of a journal; a simulator has its own.
pub trait Journal: Send {
    /// Writes one job's record durably.
    fn put_job(&mut self, record: &JobRecord) -> Result<(), Error>;
    /// All jobs, in order of submission.
    fn jobs(&self) -> Result<Vec<JobRecord>, Error>;
}

/// The journal on disk.
#[derive(Debug)]
pub struct SqliteJournal {
    path: PathBuf,
    db: Connection,
}

impl SqliteJournal {
    /// Opens `journal-<term>.db` in `dir`, made from the newest older one when there is one.
    pub fn open(dir: &Path, term: Term) -> Result<Self, Error> {
        let path = dir.join(format!("journal-{:08}.db", term.0));
        if let Some(older) = newest_below(dir, term) {
            copy(&older, &path)?;
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let sqlite = |source| Error::Sqlite { path: path.clone(), source };
        let db = Connection::open_with_flags_and_vfs(&path, flags, c"unix-none").map_err(sqlite)?;
        db.execute_batch(
            "PRAGMA journal_mode = DELETE;
             PRAGMA synchronous = FULL;
             CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, submitted_at_ms INTEGER NOT NULL, record TEXT NOT NULL);",
        )
        .map_err(sqlite)?;
        Ok(Self { path, db })
    }

    fn sqlite(&self, source: rusqlite::Error) -> Error {
        Error::Sqlite { path: self.path.clone(), source }
    }
}

impl Journal for SqliteJournal {
    fn put_job(&mut self, record: &JobRecord) -> Result<(), Error> {
        let json = serde_json::to_string(record).map_err(|source| Error::Record {
            path: self.path.clone(),
            key: record.id.to_string(),
            source,
        })?;
        let sql = "INSERT INTO jobs (id, submitted_at_ms, record) VALUES (?1, ?2, ?3)
                   ON CONFLICT (id) DO UPDATE SET record = excluded.record";
        self.db
            .execute(sql, (&record.id.0, record.submitted_at_ms as i64, json))
            .map_err(|source| self.sqlite(source))?;
        Ok(())
    }

    fn jobs(&self) -> Result<Vec<JobRecord>, Error> {
        let read = || -> rusqlite::Result<Vec<(String, String)>> {
            let mut rows = self.db.prepare("SELECT id, record FROM jobs ORDER BY submitted_at_ms, id")?;
            rows.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        };
        let rows = read().map_err(|source| self.sqlite(source))?;
        rows.into_iter()
            .map(|(key, json)| {
                serde_json::from_str(&json).map_err(|source| Error::Record { path: self.path.clone(), key, source })
            })
            .collect()
    }
}

/// The newest journal of an older term.
fn newest_below(dir: &Path, term: Term) -> Option<PathBuf> {
    let term_of = |name: &str| -> Option<u64> { name.strip_prefix("journal-")?.strip_suffix(".db")?.parse().ok() };
    let names = std::fs::read_dir(dir).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let newest = names.filter_map(|name| term_of(&name)).filter(|found| *found < term.0).max()?;
    Some(dir.join(format!("journal-{newest:08}.db")))
}

/// Copies a journal and the rollback of its half-made transaction. SQLite finds the rollback by the file's name, so it is
/// copied first: a crash in between leaves a rollback without a database, which SQLite ignores and deletes.
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    let rollback = |path: &Path| PathBuf::from(format!("{}-journal", path.display()));
    for (from, to) in [(rollback(from), rollback(to)), (from.to_owned(), to.to_owned())] {
        match std::fs::copy(&from, &to) {
            Ok(_) => {}
            Err(error)
                if error.kind() == std::io::ErrorKind::NotFound && from.extension().is_some_and(|e| e != "db") => {}
            Err(source) => return Err(Error::Copy { from, to, source }),
        }
    }
    Ok(())
}
