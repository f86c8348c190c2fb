//! Fail points: every mutating call names one, so that a test can kill, freeze or fail a real process exactly there.
//!
//! `TRAINCTL_FAULT=point:nth:what[,…]` with `what` = `exit` (SIGKILL to itself), `stop` (SIGSTOP to itself) or `eio`.
//! `nth` counts from 1. A point may be followed by a stage: `commit.manifest` is before the call does anything,
//! `commit.manifest.temp` after its temporary file is written and synced, `commit.manifest.done` after the new name is
//! durable. Without the variable a hit is one atomic load.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nix::sys::signal::{Signal, raise};

/// The variable that names the fault.
pub const ENV: &str = "TRAINCTL_FAULT";

/// The name of a mutating call's place in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FailPoint(pub &'static str);

macro_rules! points {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        impl FailPoint {
            $($(#[$doc])* pub const $name: FailPoint = FailPoint($text);)*
            /// Every point of this crate.
            pub const ALL: &'static [FailPoint] = &[$(FailPoint::$name),*];
        }
    };
}

points! {
    /// Taking a term or a generation.
    NUMBER_TAKE = "numbers.take";
    /// Rewriting `holder.json`.
    HOLDER_BEAT = "holder.beat";
    /// Writing into `holder.json` that the tenure has ended.
    HOLDER_RELEASE = "holder.release";
    /// Removing what a killed predecessor left of a rewrite.
    HOLDER_SWEEP = "holder.sweep";
    /// Making a directory.
    MAKE_DIRECTORY = "directory.make";
    /// Writing a shard, or another file of a checkpoint.
    SHARD_WRITE = "shard.write";
    /// Writing `config.yaml`.
    COMMIT_CONFIG = "commit.config";
    /// Writing `losses.json`.
    COMMIT_LOSSES = "commit.losses";
    /// Syncing the directories of a checkpoint before its manifest.
    COMMIT_SYNC = "commit.sync";
    /// Making the manifest: the commit.
    COMMIT_MANIFEST = "commit.manifest";
    /// Swapping or removing LATEST.
    POINTER_LATEST = "pointer.latest";
    /// Swapping or removing LOWEST_VAL.
    POINTER_LOWEST_VAL = "pointer.lowest_val";
    /// Removing what a killed predecessor left of a swap.
    POINTER_SWEEP = "pointer.sweep";
    /// Renaming a directory into `abandoned/`.
    RETIRE_RENAME = "retire.rename";
    /// Renaming a directory back out of `abandoned/`.
    RETIRE_RESTORE = "retire.restore";
    /// Removing an uncommitted directory.
    RETIRE_REMOVE = "retire.remove";
    /// Removing the manifest of a checkpoint that retention drops.
    PRUNE_MANIFEST = "prune.manifest";
    /// Removing the rest of it.
    PRUNE_DIRECTORY = "prune.directory";
    /// Writing a pin.
    PIN_WRITE = "pin.write";
    /// Removing a pin.
    PIN_REMOVE = "pin.remove";
    /// Appending a row.
    ROW_APPEND = "rows.append";
    /// Taking over a file of rows.
    ROW_OPEN = "rows.open";
    /// Cutting the torn tail of a failed append.
    ROW_REPAIR = "rows.repair";
    /// Moving rows to `abandoned/`.
    ROW_CUT = "rows.cut";
}

/// How far a mutating call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Nothing is done yet.
    Before,
    /// A temporary file is written and synced, the name is still the old one.
    Temp,
    /// The new state is durable.
    Done,
}

impl Stage {
    fn suffix(self) -> &'static str {
        match self {
            Self::Before => "",
            Self::Temp => ".temp",
            Self::Done => ".done",
        }
    }
}

/// What happens at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// SIGKILL to this process.
    Exit,
    /// SIGSTOP to this process; it goes on after SIGCONT.
    Stop,
    /// The call fails with EIO.
    Eio,
}

#[derive(Clone, Debug)]
struct Rule {
    point: String,
    nth: u64,
    action: Action,
}

/// The faults of a process, and how often each point was reached.
#[derive(Debug, Default)]
pub struct Faults {
    rules: Vec<Rule>,
    trace: bool,
    hits: Mutex<Hits>,
}

#[derive(Debug, Default)]
struct Hits {
    counts: HashMap<String, u64>,
    order: Vec<String>,
}

impl Faults {
    /// The faults of [`ENV`], read once in the life of the process. What cannot be understood is logged and ignored.
    pub fn from_env() -> Arc<Self> {
        static FAULTS: OnceLock<Arc<Faults>> = OnceLock::new();
        Arc::clone(FAULTS.get_or_init(|| {
            let Ok(text) = std::env::var(ENV) else { return Arc::default() };
            match Self::parse(&text) {
                Ok(faults) => {
                    tracing::warn!(fault = %text, "{ENV} is set: this process will fail on purpose");
                    Arc::new(faults)
                }
                Err(reason) => {
                    tracing::error!(%reason, "{ENV} is not understood and has no effect");
                    Arc::default()
                }
            }
        }))
    }

    /// Faults from the text of [`ENV`].
    ///
    /// # Errors
    /// A sentence that says which part is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut rules = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let bad = || format!("`{part}` is not `point:nth:exit|stop|eio`");
            let mut fields = part.split(':');
            let (Some(point), Some(nth), Some(action), None) =
                (fields.next(), fields.next(), fields.next(), fields.next())
            else {
                return Err(bad());
            };
            let nth: u64 = nth.parse().map_err(|_| bad())?;
            let action = match action {
                "exit" => Action::Exit,
                "stop" => Action::Stop,
                "eio" => Action::Eio,
                _ => return Err(bad()),
            };
            if nth == 0 || point.is_empty() {
                return Err(bad());
            }
            rules.push(Rule { point: point.to_owned(), nth, action });
        }
        Ok(Self { rules, ..Self::default() })
    }

    /// No fault, but every hit is remembered for [`Faults::trace`].
    pub fn tracing() -> Arc<Self> {
        Arc::new(Self { trace: true, ..Self::default() })
    }

    /// The points hit so far with their stages, in order. Empty unless made by [`Faults::tracing`].
    pub fn trace(&self) -> Vec<String> {
        self.hits.lock().unwrap_or_else(PoisonError::into_inner).order.clone()
    }

    /// Passes a point; acts if a rule says so.
    pub(crate) fn hit(&self, point: FailPoint, stage: Stage) -> io::Result<()> {
        if self.rules.is_empty() && !self.trace {
            return Ok(());
        }
        let name = format!("{}{}", point.0, stage.suffix());
        let count = {
            let mut hits = self.hits.lock().unwrap_or_else(PoisonError::into_inner);
            if self.trace {
                hits.order.push(name.clone());
            }
            let count = hits.counts.entry(name.clone()).or_insert(0);
            *count += 1;
            *count
        };
        match self.rules.iter().find(|rule| rule.point == name && rule.nth == count) {
            Some(rule) => act(rule.action),
            None => Ok(()),
        }
    }
}

fn act(action: Action) -> io::Result<()> {
    match action {
        Action::Exit => {
            raise(Signal::SIGKILL)?;
            Ok(())
        }
        Action::Stop => {
            raise(Signal::SIGSTOP)?;
            Ok(())
        }
        Action::Eio => Err(io::Error::from_raw_os_error(nix::errno::Errno::EIO as i32)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_fire_at_the_nth_hit_of_their_stage_only() {
        let faults = Faults::parse("commit.manifest.temp:2:eio").unwrap();
        assert!(faults.hit(FailPoint::COMMIT_MANIFEST, Stage::Temp).is_ok());
        assert!(faults.hit(FailPoint::COMMIT_MANIFEST, Stage::Before).is_ok());
        assert_eq!(faults.hit(FailPoint::COMMIT_MANIFEST, Stage::Temp).unwrap_err().raw_os_error(), Some(5));
        assert!(faults.hit(FailPoint::COMMIT_MANIFEST, Stage::Temp).is_ok());
    }

    #[test]
    fn malformed_faults_are_named() {
        for text in ["x", "x:0:exit", "x:1:boom", ":1:exit", "x:1:exit:y"] {
            assert!(Faults::parse(text).unwrap_err().contains(text));
        }
    }
}
