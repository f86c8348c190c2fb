//! The one sequence of numbers of a run directory (J2): `control/numbers/00000007.json`, each made by create-if-absent.
//! A coordinator's start takes one, its term; every formation takes one, the generation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use trainctl_spec::{Generation, Term};

use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::{Created, Files, Io};
use crate::wall;

const FOLDER: &str = "numbers";

/// What a number was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One coordinator's tenure.
    Term,
    /// One formation of the world.
    Generation,
}

/// The process that takes a number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taker {
    /// Host name.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// The host's boot id: process ids mean something only within it.
    #[serde(default)]
    pub boot_id: String,
    /// The process's start time in clock ticks after boot: with the pid it names one process for ever.
    #[serde(default)]
    pub start_time: u64,
}

/// The content of one number's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Term or generation.
    pub kind: Kind,
    /// The term it belongs to; its own number if it is a term.
    pub term: u64,
    /// Who took it.
    #[serde(flatten)]
    pub taker: Taker,
    /// When, in UTC.
    pub at: String,
}

/// One number and its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The number, from 1.
    pub number: u64,
    /// Its content; `None` if it cannot be read (a crash where hard links are refused).
    pub record: Option<Record>,
}

impl Entry {
    /// The term that this entry proves to exist. An unreadable one counts as a term of its own: to stop a holder that
    /// could go on costs a restart, to let one go on that is superseded could cost a checkpoint.
    pub fn term(&self) -> u64 {
        self.record.as_ref().map_or(self.number, |record| record.term)
    }

    fn is_term(&self) -> bool {
        self.record.as_ref().is_none_or(|record| record.kind == Kind::Term)
    }
}

/// The sequence of one control directory.
#[derive(Debug)]
pub struct Numbers {
    io: Io,
    seen: Arc<Seen>,
}

/// Everything up to `number` has been looked at, and `term` is the highest term in it.
#[derive(Debug, Default)]
struct Seen {
    number: AtomicU64,
    term: AtomicU64,
}

impl Numbers {
    /// The sequence of `control`; nothing is read yet.
    pub fn new(control: Io) -> Self {
        Self { io: control, seen: Arc::default() }
    }

    /// All entries, in order.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn all(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for file in self.io.list(FOLDER).await? {
            if let Some(number) = parse_name(&file.name)
                && let Some(entry) = self.entry(number).await?
            {
                entries.push(entry);
            }
        }
        Ok(entries)
    }

    /// One entry, or `None` if the number is free.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn entry(&self, number: u64) -> Result<Option<Entry>> {
        self.io.run(move |files| read_entry(files, number)).await
    }

    /// The highest term, 0 if there is none. Reads only what is new since the last call: cheap enough to be asked
    /// directly before every commit, pointer move and removal.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn highest_term(&self) -> Result<Term> {
        let seen = Arc::clone(&self.seen);
        self.io.run(move |files| seen.look(files)).await
    }

    /// [`Numbers::highest_term`] for code that is not async.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn highest_term_blocking(&self) -> Result<Term> {
        self.seen.look(self.io.files())
    }

    /// Takes the next number for a generation of `term` (J2: only the highest term may form).
    ///
    /// # Errors
    /// [`Error::Superseded`] if a higher term exists; [`Error::Io`].
    pub async fn take_generation(&self, term: Term, taker: &Taker) -> Result<Generation> {
        loop {
            let highest = self.highest_term().await?;
            if highest > term {
                return Err(Error::Superseded { mine: term.0, theirs: highest.0 });
            }
            let number = self.seen.number.load(Ordering::Acquire) + 1;
            if self.create(number, Kind::Generation, term.0, taker).await? == Created::New {
                return Ok(Generation(number));
            }
        }
    }

    /// Takes the next number as a term, provided that `above` is still the highest one; `None` if another came first.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn take_term(&self, above: Term, taker: &Taker) -> Result<Option<Term>> {
        loop {
            if self.highest_term().await? != above {
                return Ok(None);
            }
            let number = self.seen.number.load(Ordering::Acquire) + 1;
            if self.create(number, Kind::Term, number, taker).await? == Created::New {
                return Ok(Some(Term(number)));
            }
        }
    }

    /// Who took a term.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn taker_of(&self, term: Term) -> Result<Option<Taker>> {
        Ok(self.entry(term.0).await?.and_then(|entry| entry.record).map(|record| record.taker))
    }

    /// Removes what killed processes left. A living one that has not taken its number yet takes it again.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) async fn sweep(&self) -> Result<()> {
        self.io.run(|files| files.sweep_dir(FOLDER, FailPoint::NUMBER_SWEEP)).await
    }

    async fn create(&self, number: u64, kind: Kind, term: u64, taker: &Taker) -> Result<Created> {
        let record = Record { kind, term, taker: taker.clone(), at: wall::now() };
        let bytes =
            serde_json::to_vec(&record).map_err(|e| Error::io("write", self.io.root().join(key(number)), e.into()))?;
        let created = match self.io.create_if_absent(&key(number), bytes, FailPoint::NUMBER_TAKE).await {
            // Somebody took a term meanwhile and swept: the caller looks again.
            Err(Error::Swept { .. }) => return Ok(Created::Exists),
            other => other?,
        };
        if created == Created::New {
            self.seen.note(&Entry { number, record: Some(record) });
        }
        Ok(created)
    }
}

impl Seen {
    /// Looks from the last seen number upward.
    fn look(&self, files: &Files) -> Result<Term> {
        let mut next = self.number.load(Ordering::Acquire) + 1;
        if next == 1 {
            // The sequence of a copied directory may start above 1.
            let listed = files.list(FOLDER)?;
            next = listed.iter().find_map(|file| parse_name(&file.name)).unwrap_or(1);
        }
        files.refresh(FOLDER)?;
        while let Some(entry) = read_entry(files, next)? {
            self.note(&entry);
            next += 1;
        }
        Ok(Term(self.term.load(Ordering::Acquire)))
    }

    fn note(&self, entry: &Entry) {
        if entry.is_term() {
            self.term.fetch_max(entry.number, Ordering::AcqRel);
        }
        self.number.fetch_max(entry.number, Ordering::AcqRel);
    }
}

fn read_entry(files: &Files, number: u64) -> Result<Option<Entry>> {
    let bytes = files.read(&key(number))?;
    Ok(bytes.map(|bytes| Entry { number, record: serde_json::from_slice(&bytes).ok() }))
}

fn key(number: u64) -> String {
    format!("{FOLDER}/{number:08}.json")
}

fn parse_name(name: &str) -> Option<u64> {
    name.strip_suffix(".json")?.parse().ok().filter(|number| key(*number).ends_with(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taker() -> Taker {
        Taker { host: "a".into(), pid: 1, boot_id: "b".into(), start_time: 2 }
    }

    #[tokio::test]
    async fn terms_and_generations_share_one_sequence() {
        let dir = tempfile::tempdir().unwrap();
        let numbers = Numbers::new(Io::new(dir.path()));
        assert_eq!(numbers.highest_term().await.unwrap(), Term(0));
        let term = numbers.take_term(Term(0), &taker()).await.unwrap().unwrap();
        assert_eq!(term, Term(1));
        assert_eq!(numbers.take_generation(term, &taker()).await.unwrap(), Generation(2));
        assert_eq!(numbers.take_generation(term, &taker()).await.unwrap(), Generation(3));
        assert_eq!(numbers.highest_term().await.unwrap(), Term(1));

        let other = Numbers::new(Io::new(dir.path()));
        assert_eq!(other.take_term(Term(0), &taker()).await.unwrap(), None, "the look was stale");
        assert_eq!(other.take_term(Term(1), &taker()).await.unwrap(), Some(Term(4)));
        assert_eq!(numbers.highest_term().await.unwrap(), Term(4), "J2: the older one sees it at its next look");
        assert!(matches!(numbers.take_generation(term, &taker()).await, Err(Error::Superseded { mine: 1, theirs: 4 })));
        let all = other.all().await.unwrap();
        assert_eq!(all.iter().map(Entry::term).collect::<Vec<_>>(), [1, 1, 1, 4]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn racing_starts_get_different_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let io = Io::new(&root);
            tasks.spawn(async move { Numbers::new(io).take_term(Term(0), &taker()).await.unwrap() });
        }
        let won: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
        assert_eq!(won, [Term(1)], "one look, one term");
    }

    #[tokio::test]
    async fn an_unreadable_number_counts_as_a_term() {
        let dir = tempfile::tempdir().unwrap();
        let numbers = Numbers::new(Io::new(dir.path()));
        numbers.take_term(Term(0), &taker()).await.unwrap();
        std::fs::write(dir.path().join("numbers/00000002.json"), b"{\"kind\":").unwrap();
        assert_eq!(numbers.highest_term().await.unwrap(), Term(2));
    }
}
