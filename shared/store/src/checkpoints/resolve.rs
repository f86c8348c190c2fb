//! From LATEST, LOWEST_VAL or a name to a checkpoint that can be loaded, without writing anything (C5).

use std::fmt;
use std::str::FromStr;

use super::{CheckpointStore, Committed, Depth, Listing, pointer_targets};
use crate::error::Error;
use crate::layout::{CheckpointName, LATEST, LOWEST_VAL, NotACheckpoint};
use crate::manifest::Fault;

/// What `--from` may say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The highest committed step.
    Latest,
    /// The lowest validation loss.
    LowestVal,
    /// A directory's name.
    Name(CheckpointName),
}

impl FromStr for Selector {
    type Err = NotACheckpoint;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            LATEST => Ok(Self::Latest),
            LOWEST_VAL => Ok(Self::LowestVal),
            name => name.trim_end_matches('/').parse().map(Self::Name),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str(LATEST),
            Self::LowestVal => f.write_str(LOWEST_VAL),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// How to resolve.
#[derive(Clone, Copy, Debug)]
pub struct ResolveOptions<'a> {
    /// The validation set that LOWEST_VAL goes by.
    pub best_metric_key: &'a str,
    /// Take an older checkpoint where the wanted one is damaged (`--allow-older`).
    pub allow_older: bool,
    /// How closely the files of the wanted checkpoint are looked at.
    pub depth: Depth,
}

impl Default for ResolveOptions<'_> {
    fn default() -> Self {
        Self { best_metric_key: "default", allow_older: false, depth: Depth::Sizes }
    }
}

/// Something that a person should be told with the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The pointer is missing; its target was computed from the manifests.
    PointerMissing {
        /// `LATEST` or `LOWEST_VAL`.
        pointer: &'static str,
        /// Where it belongs.
        to: CheckpointName,
    },
    /// The pointer names something that is not committed.
    PointerDangling {
        /// `LATEST` or `LOWEST_VAL`.
        pointer: &'static str,
        /// What it names.
        named: String,
        /// Where it belongs.
        to: CheckpointName,
    },
    /// The pointer names a committed checkpoint, and the manifests say another one.
    PointerStale {
        /// `LATEST` or `LOWEST_VAL`.
        pointer: &'static str,
        /// What it names.
        named: String,
        /// Where it belongs.
        to: CheckpointName,
    },
    /// The wanted checkpoint is damaged and an older one was taken, as allowed.
    Older {
        /// The damaged one.
        damaged: CheckpointName,
        /// In which way.
        reason: String,
        /// The one taken.
        taken: CheckpointName,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PointerMissing { pointer, to } => {
                write!(f, "{pointer} is missing; recomputed from the committed manifests: {to}")
            }
            Self::PointerDangling { pointer, named, to } => {
                write!(
                    f,
                    "{pointer} names {named}, which is not a committed checkpoint; recomputed from the committed manifests: {to}"
                )
            }
            Self::PointerStale { pointer, named, to } => {
                write!(f, "{pointer} names {named}; the committed manifests say {to}, which is taken")
            }
            Self::Older { damaged, reason, taken } => {
                write!(f, "{damaged} is damaged ({reason}); the older {taken} is taken, as --allow-older says")
            }
        }
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The checkpoint.
    pub checkpoint: Committed,
    /// What to say with it.
    pub notes: Vec<Note>,
}

/// Why there is nothing to load.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// No checkpoint directory at all: a fresh run.
    #[error("{directory} holds no checkpoint")]
    Empty {
        /// Where was looked.
        directory: String,
    },
    /// Directories, and none of them is committed (C5): never a fresh start.
    #[error("{directory} holds checkpoint directories, but none is committed: {}; remove or move them, or name another run directory", found.join(", "))]
    NoneCommitted {
        /// Where was looked.
        directory: String,
        /// Each directory and what is wrong with it.
        found: Vec<String>,
        /// At least one of them was committed once: something is lost. Otherwise all are saves that never ended.
        damaged: bool,
    },
    /// No checkpoint of that name.
    #[error("there is no committed checkpoint {name}; committed are: {}", committed.join(", "))]
    Unknown {
        /// What was asked for.
        name: CheckpointName,
        /// What there is.
        committed: Vec<String>,
    },
    /// LOWEST_VAL, and no checkpoint has that metric.
    #[error("no committed checkpoint has a finite validation loss `{key}`, so there is no LOWEST_VAL; committed are: {}", committed.join(", "))]
    NoMetric {
        /// The validation set.
        key: String,
        /// What there is.
        committed: Vec<String>,
    },
    /// The wanted checkpoint is damaged.
    #[error("checkpoint {name} is damaged: {reason}; {}", offer_text(*offer))]
    Damaged {
        /// Which one.
        name: CheckpointName,
        /// In which way.
        reason: String,
        /// The next older one that is whole.
        offer: Option<CheckpointName>,
    },
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] Error),
}

fn offer_text(offer: Option<CheckpointName>) -> String {
    match offer {
        Some(name) => format!("the next older valid one is {name}: `--allow-older` takes it"),
        None => "there is no older valid one".to_owned(),
    }
}

impl CheckpointStore {
    /// Finds the checkpoint that a selector means. Writes nothing: a pointer that is missing, dangling or behind is
    /// computed again from the manifests and noted; [`CheckpointStore::repair_pointers`] mends it.
    ///
    /// # Errors
    /// [`ResolveError`].
    pub async fn resolve(&self, from: Selector, options: &ResolveOptions<'_>) -> Result<Resolved, ResolveError> {
        let listing = self.list().await?;
        self.refuse_if_none(&listing)?;
        let targets = pointer_targets(&listing.summaries(), options.best_metric_key);
        let mut notes = Vec::new();
        // A damaged manifest of a higher step is what LATEST meant before it was damaged.
        let wanted = match from {
            Selector::Name(name) => name,
            Selector::Latest => {
                let damaged = listing.damaged.last().map(|damaged| damaged.name);
                let latest = targets.latest.max(damaged);
                if latest == targets.latest {
                    self.compare_pointer(LATEST, targets.latest, &listing, &mut notes).await?;
                }
                match latest {
                    Some(name) => name,
                    None => return Err(ResolveError::Empty { directory: self.root().display().to_string() }),
                }
            }
            Selector::LowestVal => {
                self.compare_pointer(LOWEST_VAL, targets.lowest_val, &listing, &mut notes).await?;
                targets.lowest_val.ok_or_else(|| ResolveError::NoMetric {
                    key: options.best_metric_key.to_owned(),
                    committed: names(&listing),
                })?
            }
        };
        let Some(reason) = self.fault_of(wanted, &listing, options.depth).await? else {
            let checkpoint = found(&listing, wanted)?;
            return Ok(Resolved { checkpoint, notes });
        };
        let mut offer = None;
        for older in listing.committed.iter().rev().map(Committed::name).filter(|name| *name < wanted) {
            if self.fault_of(older, &listing, options.depth).await?.is_none() {
                offer = Some(older);
                break;
            }
        }
        match offer {
            Some(taken) if options.allow_older => {
                notes.push(Note::Older { damaged: wanted, reason, taken });
                Ok(Resolved { checkpoint: found(&listing, taken)?, notes })
            }
            _ => Err(ResolveError::Damaged { name: wanted, reason, offer }),
        }
    }

    fn refuse_if_none(&self, listing: &Listing) -> Result<(), ResolveError> {
        if !listing.committed.is_empty() {
            return Ok(());
        }
        let directory = self.root().display().to_string();
        let found = listing.not_committed();
        if found.is_empty() {
            return Err(ResolveError::Empty { directory });
        }
        Err(ResolveError::NoneCommitted { directory, found, damaged: !listing.damaged.is_empty() })
    }

    async fn compare_pointer(
        &self,
        pointer: &'static str,
        target: Option<CheckpointName>,
        listing: &Listing,
        notes: &mut Vec<Note>,
    ) -> Result<(), Error> {
        let Some(to) = target else { return Ok(()) };
        match self.io.read_link(pointer).await? {
            None => notes.push(Note::PointerMissing { pointer, to }),
            Some(named) if named == to.to_string() => {}
            Some(named) => {
                let committed = named.parse().is_ok_and(|name| listing.get(name).is_some());
                notes.push(match committed {
                    true => Note::PointerStale { pointer, named, to },
                    false => Note::PointerDangling { pointer, named, to },
                });
            }
        }
        Ok(())
    }

    /// What is wrong with a checkpoint, or `None`; one that does not exist has no fault either.
    async fn fault_of(&self, name: CheckpointName, listing: &Listing, depth: Depth) -> Result<Option<String>, Error> {
        if let Some(damaged) = listing.damaged.iter().find(|damaged| damaged.name == name) {
            return Ok(Some(damaged.fault.to_string()));
        }
        let Some(committed) = listing.get(name) else { return Ok(None) };
        match depth {
            Depth::Sizes => Ok(self.check_sizes(&committed.manifest).await?.map(|fault: Fault| fault.to_string())),
            Depth::Hashes => {
                let verified = self.verify_files(&committed.manifest, &|_, _| {}).await?;
                Ok(verified.faults.first().map(ToString::to_string))
            }
        }
    }
}

fn found(listing: &Listing, name: CheckpointName) -> Result<Committed, ResolveError> {
    listing.get(name).cloned().ok_or_else(|| ResolveError::Unknown { name, committed: names(listing) })
}

fn names(listing: &Listing) -> Vec<String> {
    listing.committed.iter().map(|committed| committed.name().to_string()).collect()
}
