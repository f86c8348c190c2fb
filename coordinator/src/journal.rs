//! The journal: what a coordinator must not forget, written before an effect becomes visible.
//!
//! SQLite in a file that one incarnation only writes, `journal-<term>.db`: a successor copies its predecessor's file (and
//! its `-journal`, the rollback of a half-made transaction) to its own name and goes on, so a frozen predecessor that wakes
//! up writes to a file that nobody reads. `unix-none` turns off SQLite's own locks, which shared file systems refuse or
//! fake; the tenure (J2) takes their place. Heartbeats, metric rows and rendezvous keys never go into it.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};
use trainctl_fault::{FailPoint, Faults, Stage};
use trainctl_spec::Term;

use crate::record::{JobRecord, WorkerRecord};

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
    /// The file cannot be written.
    #[error("journal {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A record could not be read or written as JSON.
    #[error("journal {path}: record {key}: {source}")]
    Record {
        /// The file.
        path: PathBuf,
        /// Job or worker id.
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
    /// Writes one worker's record durably.
    fn put_worker(&mut self, record: &WorkerRecord) -> Result<(), Error>;
    /// All workers that were ever quarantined, by id.
    fn workers(&self) -> Result<Vec<WorkerRecord>, Error>;
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
             CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, submitted_at_ms INTEGER NOT NULL, record TEXT NOT NULL);
             CREATE TABLE IF NOT EXISTS workers (id TEXT PRIMARY KEY, record TEXT NOT NULL);",
        )
        .map_err(sqlite)?;
        Ok(Self { path, db })
    }

    fn pass(&self, stage: Stage) -> Result<(), Error> {
        let passed = Faults::from_env().hit(FailPoint::JOURNAL_WRITE, stage);
        passed.map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    fn json(&self, key: &str, record: &impl serde::Serialize) -> Result<String, Error> {
        let failed = |source| Error::Record { path: self.path.clone(), key: key.to_owned(), source };
        serde_json::to_string(record).map_err(failed)
    }

    /// What a query for ids and records finds.
    fn records<T: serde::de::DeserializeOwned>(&self, sql: &str) -> Result<Vec<T>, Error> {
        let read = || -> rusqlite::Result<Vec<(String, String)>> {
            let mut rows = self.db.prepare(sql)?;
            rows.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        };
        let rows = read().map_err(|source| self.sqlite(source))?;
        let parse = |(key, json): (String, String)| {
            serde_json::from_str(&json).map_err(|source| Error::Record { path: self.path.clone(), key, source })
        };
        rows.into_iter().map(parse).collect()
    }

    fn sqlite(&self, source: rusqlite::Error) -> Error {
        Error::Sqlite { path: self.path.clone(), source }
    }
}

impl Journal for SqliteJournal {
    fn put_job(&mut self, record: &JobRecord) -> Result<(), Error> {
        let json = self.json(&record.id.0, record)?;
        self.pass(Stage::Before)?;
        let sql = "INSERT INTO jobs (id, submitted_at_ms, record) VALUES (?1, ?2, ?3)
                   ON CONFLICT (id) DO UPDATE SET record = excluded.record";
        self.db
            .execute(sql, (&record.id.0, record.submitted_at_ms as i64, json))
            .map_err(|source| self.sqlite(source))?;
        self.pass(Stage::Done)
    }

    fn jobs(&self) -> Result<Vec<JobRecord>, Error> {
        self.records("SELECT id, record FROM jobs ORDER BY submitted_at_ms, id")
    }

    fn put_worker(&mut self, record: &WorkerRecord) -> Result<(), Error> {
        let json = self.json(&record.id, record)?;
        self.pass(Stage::Before)?;
        let sql = "INSERT INTO workers (id, record) VALUES (?1, ?2)
                   ON CONFLICT (id) DO UPDATE SET record = excluded.record";
        self.db.execute(sql, (&record.id, json)).map_err(|source| self.sqlite(source))?;
        self.pass(Stage::Done)
    }

    fn workers(&self) -> Result<Vec<WorkerRecord>, Error> {
        self.records("SELECT id, record FROM workers ORDER BY id")
    }
}

/// The newest journal of an older term.
fn newest_below(dir: &Path, term: Term) -> Option<PathBuf> {
    let term_of = |name: &str| -> Option<u64> { name.strip_prefix("journal-")?.strip_suffix(".db")?.parse().ok() };
    let names = std::fs::read_dir(dir).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let newest = names.filter_map(|name| term_of(&name)).filter(|found| *found < term.0).max()?;
    Some(dir.join(format!("journal-{newest:08}.db")))
}

/// Copies a journal and the rollback of its half-made transaction. The database gets its name last and whole: what a kill in
/// between leaves is no `.db`, so the next successor copies the older one again.
#[expect(clippy::disallowed_methods, reason = "a file that only this incarnation names; synced here")]
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    let beside = |path: &Path, suffix: &str| PathBuf::from(format!("{}{suffix}", path.display()));
    let failed = |source| Error::Copy { from: from.to_owned(), to: to.to_owned(), source };
    let synced = |from: &Path, to: &Path| std::fs::copy(from, to).and_then(|_| std::fs::File::open(to)?.sync_all());
    Faults::from_env().hit(FailPoint::JOURNAL_COPY, Stage::Before).map_err(failed)?;
    // SQLite finds the rollback by the database's name.
    match synced(&beside(from, "-journal"), &beside(to, "-journal")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let temporary = beside(to, ".tmp");
    synced(from, &temporary).map_err(failed)?;
    Faults::from_env().hit(FailPoint::JOURNAL_COPY, Stage::Temp).map_err(failed)?;
    std::fs::rename(&temporary, to).map_err(failed)?;
    let directory = to.parent().unwrap_or(Path::new("."));
    std::fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use trainctl_spec::JobId;
    use trainctl_spec::state::JobPhase;

    use super::*;

    fn record(id: &str, submitted_at_ms: u64) -> JobRecord {
        let queued = JobRecord::queued(JobId(id.to_owned()), "x".repeat(2000), Term(1));
        JobRecord { submitted_at_ms, ..queued }
    }

    fn ids(journal: &SqliteJournal) -> Vec<String> {
        journal.jobs().unwrap().into_iter().map(|record| record.id.0).collect()
    }

    #[test]
    fn a_record_is_replaced_and_jobs_come_in_order_of_submission() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = SqliteJournal::open(dir.path(), Term(1)).unwrap();
        journal.put_job(&record("later", 2)).unwrap();
        journal.put_job(&record("earlier", 1)).unwrap();
        journal.put_job(&JobRecord { phase: JobPhase::Cancelled, ..record("later", 2) }).unwrap();
        assert_eq!(ids(&journal), ["earlier", "later"]);
        assert_eq!(journal.jobs().unwrap()[1].phase, JobPhase::Cancelled);
    }

    #[test]
    fn a_quarantine_is_handed_on_until_it_is_lifted() {
        let dir = tempfile::tempdir().unwrap();
        let quarantine = crate::record::Quarantine {
            by: crate::record::QuarantinedBy::Person,
            reason: "fan".to_owned(),
            figures: String::new(),
            since_ms: 7,
        };
        let record = WorkerRecord { id: "w0".to_owned(), host: "h".to_owned(), quarantine: Some(quarantine) };
        SqliteJournal::open(dir.path(), Term(1)).unwrap().put_worker(&record).unwrap();
        let mut successor = SqliteJournal::open(dir.path(), Term(2)).unwrap();
        assert_eq!(successor.workers().unwrap(), std::slice::from_ref(&record));
        let lifted = WorkerRecord { quarantine: None, ..record };
        successor.put_worker(&lifted).unwrap();
        assert_eq!(SqliteJournal::open(dir.path(), Term(3)).unwrap().workers().unwrap(), [lifted]);
    }

    #[test]
    fn j2_what_a_frozen_predecessor_writes_later_nobody_reads() {
        let dir = tempfile::tempdir().unwrap();
        let mut frozen = SqliteJournal::open(dir.path(), Term(1)).unwrap();
        frozen.put_job(&record("before", 1)).unwrap();
        let mut successor = SqliteJournal::open(dir.path(), Term(4)).unwrap();
        frozen.put_job(&record("late", 2)).unwrap();
        successor.put_job(&record("after", 3)).unwrap();
        drop(successor);
        assert_eq!(ids(&SqliteJournal::open(dir.path(), Term(6)).unwrap()), ["before", "after"]);
    }

    #[test]
    fn a_transaction_that_was_cut_off_is_rolled_back_in_the_copy() {
        let dir = tempfile::tempdir().unwrap();
        let mut killed = SqliteJournal::open(dir.path(), Term(1)).unwrap();
        killed.put_job(&record("kept", 1)).unwrap();
        // More than the page cache holds, so that half of it is in the database file and the rollback is hot.
        killed.db.execute_batch("PRAGMA cache_size = 5; BEGIN").unwrap();
        for n in 0..200 {
            killed.put_job(&record(&format!("torn-{n}"), n)).unwrap();
        }
        let hot = dir.path().join("journal-00000001.db-journal");
        assert!(std::fs::metadata(hot).unwrap().len() > 0, "there is nothing to roll back");
        let successor = SqliteJournal::open(dir.path(), Term(2)).unwrap();
        assert_eq!(ids(&successor), ["kept"]);
        let verdict: String = successor.db.query_row("PRAGMA integrity_check", (), |row| row.get(0)).unwrap();
        assert_eq!(verdict, "ok");
    }
}
