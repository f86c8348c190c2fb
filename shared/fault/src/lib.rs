//! Fail points: every mutating call names one, so that a test can kill, freeze or fail a real process exactly there.
//!
//! `TRAINCTL_FAULT=where:nth:what[,…]`. `where` is one of
//! - a point: `commit.manifest` is before the call does anything, `commit.manifest.temp` after its temporary file is written
//!   and synced, `commit.manifest.done` after the new name is durable;
//! - a sync of a point: `commit.manifest.fsync` (of a file), `commit.manifest.fsync_dir` (of a directory);
//! - `*`: any system call that changes a file system. `trainctl_store::io` makes all of them and counts them over the process.
//!
//! `nth` counts from 1, `*` means each. `what` is `exit` (SIGKILL to itself), `stop` (SIGSTOP to itself), `hang` (this thread
//! goes no further), `spin` (this thread computes for ever), `wait<n>` (this thread is held up for n milliseconds), `code<n>` (the
//! process exits with code n), `segv`, `abort` (SIGSEGV or SIGABRT to itself), `panic`, `alloc` (an allocation that no machine can
//! fulfil), `grow` (takes memory until somebody ends that), the error with
//! which the call fails (`eio`, `enospc`, `edquot`, `erofs`), for a sync only, `skip`: it is left out, as by a programmer who
//! forgot it, for `step.begin` only, `flip`: a bit of the trainer's weights is another one from then on, as in memory that
//! fails, or for `burn_in.product` only, `flip`: a bit of that product is another one, as on a device that miscalculates. With `TRAINCTL_FAULT_TRACE=DIR` each process writes what it passes to a file there, a line for each. Without these
//! variables a hit is one look at an empty list.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, raise};

/// The variable that names the fault.
pub const ENV: &str = "TRAINCTL_FAULT";

/// The variable that names a folder for traces.
pub const ENV_TRACE: &str = "TRAINCTL_FAULT_TRACE";

/// Any system call that changes a file system.
const ANY_CALL: &str = "*";

/// The name of a place in the program where a call changes a directory, or reads a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FailPoint(pub &'static str);

macro_rules! points {
    ($($(#[$group_doc:meta])* $group:ident { $($(#[$doc:meta])* $name:ident = $text:literal;)* })*) => {
        impl FailPoint {
            $($($(#[$doc])* pub const $name: FailPoint = FailPoint($text);)*)*
            $($(#[$group_doc])* pub const $group: &'static [FailPoint] = &[$(FailPoint::$name),*];)*
            /// All points of all groups.
            pub const ALL: &'static [FailPoint] = &[$($(FailPoint::$name,)*)*];
        }
    };
}

points! {
    /// Those of `trainctl_store`: whatever happens to a run directory, and loading from it.
    STORE {
    /// Taking a term or a generation.
    NUMBER_TAKE = "numbers.take";
    /// Removing what killed processes left of taking one.
    NUMBER_SWEEP = "numbers.sweep";
    /// Rewriting `holder.json`.
    HOLDER_BEAT = "holder.beat";
    /// Writing into `holder.json` that the tenure has ended.
    HOLDER_RELEASE = "holder.release";
    /// Removing what a killed predecessor left of a rewrite.
    HOLDER_SWEEP = "holder.sweep";
    /// Reading a manifest in order to load its checkpoint.
    LOAD_MANIFEST = "load.manifest";
    /// Reading a part of a shard, to load it or to export it.
    LOAD_BLOCK = "load.block";
    /// Making a directory.
    MAKE_DIRECTORY = "directory.make";
    /// Writing a shard, or another file of a checkpoint.
    SHARD_WRITE = "shard.write";
    /// Removing what a killed predecessor left of a commit.
    COMMIT_SWEEP = "commit.sweep";
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
    /// A checkpoint that retention drops loses its name (on a directory).
    PRUNE_RENAME = "prune.rename";
    /// Removing the manifest of a checkpoint that retention drops.
    PRUNE_MANIFEST = "prune.manifest";
    /// Removing the rest of it.
    PRUNE_DIRECTORY = "prune.directory";
    /// Removing what a dead generation left inside of a committed checkpoint.
    PRUNE_STRAY = "prune.stray";
    /// Writing a pin.
    PIN_WRITE = "pin.write";
    /// Removing what killed readers left of writing one.
    PIN_SWEEP = "pin.sweep";
    /// Removing a pin.
    PIN_REMOVE = "pin.remove";
    /// Removing what a killed export left.
    EXPORT_SWEEP = "export.sweep";
    /// Writing a file of an export.
    EXPORT_FILE = "export.file";
    /// Giving a whole export its name.
    EXPORT_PUBLISH = "export.publish";
    /// Writing what a run begins with.
    ORIGIN_WRITE = "origin.write";
    /// Appending a row.
    ROW_APPEND = "rows.append";
    /// Making the appended rows durable.
    ROW_SYNC = "rows.sync";
    /// Taking over a file of rows.
    ROW_OPEN = "rows.open";
    /// Cutting the torn tail of a failed append.
    ROW_REPAIR = "rows.repair";
    /// Moving rows to `abandoned/`.
    ROW_CUT = "rows.cut";
    }
    /// Those of a worker's spool, through which a rank's reports reach the coordinator.
    SPOOL {
    /// Adding a report or an acknowledgement.
    SPOOL_APPEND = "spool.append";
    /// Making them durable.
    SPOOL_SYNC = "spool.sync";
    /// Making the file anew, at the first start and to forget what is acknowledged.
    SPOOL_REPLACE = "spool.replace";
    }
    /// Those of a trainer that are no calls of the store; they have the stage before only ([`pass`]).
    TRAINER {
    /// A product of the burn-in is there, and not yet compared.
    BURN_IN_PRODUCT = "burn_in.product";
    /// A step begins: its weights lie in memory as the step before has left them.
    STEP_BEGIN = "step.begin";
    /// A batch of samples is about to be read.
    DATA_BATCH = "data.batch";
    /// A micro-batch is about to be computed.
    COMPUTE_BATCH = "compute.batch";
    /// The state is about to be copied to host memory.
    SAVE_SNAPSHOT = "save.snapshot";
    /// A rank's shards are durable, and nobody has been told.
    SAVE_REPORT = "save.report";
    /// A checkpoint fits the model, and nothing of it is loaded.
    LOAD_STATE = "load.state";
    }
    /// Those of writing a job's spec into its run directory.
    SUBMISSION {
    /// Writing `job.yaml`.
    JOB_SPEC = "job.spec";
    /// Removing what a killed predecessor left of that.
    JOB_SWEEP = "job.sweep";
    }
    /// Those of the coordinator's journal.
    JOURNAL {
    /// Writing a job's record.
    JOURNAL_WRITE = "journal.write";
    /// Copying a predecessor's.
    JOURNAL_COPY = "journal.copy";
    }
}

/// Points at which a bit can be flipped ([`flips`]).
const FLIPPING: [FailPoint; 2] = [FailPoint::STEP_BEGIN, FailPoint::BURN_IN_PRODUCT];

/// Passes a point that is no call of the store: kills, freezes or fails where the environment says so.
///
/// # Errors
/// The error of the fault.
pub fn pass(point: FailPoint) -> io::Result<()> {
    Faults::from_env().hit(point, Stage::Before)
}

/// As [`pass`], where a bit of the state may be flipped: whether it is to be.
///
/// # Errors
/// The error of the fault.
pub fn flips(point: FailPoint) -> io::Result<bool> {
    Faults::from_env().pass(point.0, Stage::Before.suffix()).map(|goes_on| !goes_on)
}

/// How far a call has come.
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

/// What a sync makes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Synced {
    /// The bytes of a file.
    File,
    /// The names in a directory.
    Directory,
}

impl Synced {
    fn suffix(self) -> &'static str {
        match self {
            Self::File => ".fsync",
            Self::Directory => ".fsync_dir",
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
    /// This thread goes no further; the others do.
    Hang,
    /// This thread computes for ever; the others go on.
    Spin,
    /// The call fails with this error.
    Fail(Errno),
    /// This thread is held up.
    Wait(Duration),
    /// The process exits with this code.
    Code(i32),
    /// SIGSEGV to this process.
    Segv,
    /// SIGABRT, as after a failed assertion in C++.
    Abort,
    /// This thread panics.
    Panic,
    /// An allocation that fails.
    Allocate,
    /// Takes and touches memory without end.
    Grow,
    /// A sync reports success without having been made.
    Skip,
    /// A bit of the state is flipped.
    Flip,
}

impl FromStr for Action {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Ok(match text {
            "exit" => Self::Exit,
            "stop" => Self::Stop,
            "hang" => Self::Hang,
            "spin" => Self::Spin,
            "segv" => Self::Segv,
            "abort" => Self::Abort,
            "panic" => Self::Panic,
            "alloc" => Self::Allocate,
            "grow" => Self::Grow,
            "skip" => Self::Skip,
            "flip" => Self::Flip,
            "eio" => Self::Fail(Errno::EIO),
            "enospc" => Self::Fail(Errno::ENOSPC),
            "edquot" => Self::Fail(Errno::EDQUOT),
            "erofs" => Self::Fail(Errno::EROFS),
            text => match (text.strip_prefix("wait"), text.strip_prefix("code")) {
                (Some(ms), _) => Self::Wait(Duration::from_millis(ms.parse().map_err(|_| ())?)),
                (_, Some(code)) => Self::Code(code.parse().map_err(|_| ())?),
                _ => return Err(()),
            },
        })
    }
}

#[derive(Clone, Debug)]
struct Rule {
    place: String,
    /// `None`: each time.
    nth: Option<u64>,
    action: Action,
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || -> Option<Self> {
            let mut fields = text.split(':');
            let (place, nth, action) = (fields.next()?, fields.next()?, fields.next()?.parse().ok()?);
            let nth = match nth {
                "*" => None,
                nth => Some(nth.parse().ok().filter(|nth| *nth > 0)?),
            };
            let leaves_out_no_sync = action == Action::Skip && !place.contains(Synced::File.suffix());
            let flips_nothing = action == Action::Flip && !FLIPPING.iter().any(|point| place == point.0);
            if place.is_empty() || fields.next().is_some() || leaves_out_no_sync || flips_nothing {
                return None;
            }
            Some(Self { place: place.to_owned(), nth, action })
        };
        parse().ok_or_else(|| {
            format!(
                "`{text}` is not `point:nth:exit|stop|hang|spin|wait<ms>|code<n>|segv|abort|panic|alloc|grow|eio|enospc|edquot|erofs`, \
                 `point.fsync[_dir]:nth:skip`, `step.begin:nth:flip` or `burn_in.product:nth:flip`"
            )
        })
    }
}

/// The faults of a process, and how often each point was reached.
#[derive(Debug, Default)]
pub struct Faults {
    rules: Vec<Rule>,
    trace: Option<File>,
    hits: Mutex<HashMap<String, u64>>,
}

impl Faults {
    /// The faults of [`ENV`], read once in the life of the process. What cannot be understood is logged and ignored.
    pub fn from_env() -> Arc<Self> {
        static FAULTS: OnceLock<Arc<Faults>> = OnceLock::new();
        Arc::clone(FAULTS.get_or_init(|| {
            let mut faults = Self::default();
            if let Ok(text) = std::env::var(ENV) {
                match Self::parse(&text) {
                    Ok(parsed) => {
                        tracing::warn!(fault = %text, "{ENV} is set: this process will fail on purpose");
                        faults = parsed;
                    }
                    Err(reason) => tracing::error!(%reason, "{ENV} is not understood and has no effect"),
                }
            }
            if let Some(folder) = std::env::var_os(ENV_TRACE) {
                match trace_file(Path::new(&folder)) {
                    Ok(file) => faults.trace = Some(file),
                    Err(error) => tracing::error!(%error, "{ENV_TRACE} has no effect"),
                }
            }
            Arc::new(faults)
        }))
    }

    /// Faults from the text of [`ENV`].
    ///
    /// # Errors
    /// A sentence that says which part is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rules = text.split(',').filter(|part| !part.is_empty()).map(str::parse).collect::<Result<_, _>>()?;
        Ok(Self { rules, ..Self::default() })
    }

    /// Passes a point; acts if a rule says so.
    ///
    /// # Errors
    /// The error that the rule names.
    pub fn hit(&self, point: FailPoint, stage: Stage) -> io::Result<()> {
        self.pass(point.0, stage.suffix()).map(|_| ())
    }

    /// Passes a system call that changes a file system.
    ///
    /// # Errors
    /// The error that the rule names.
    pub fn call(&self) -> io::Result<()> {
        self.pass(ANY_CALL, "").map(|_| ())
    }

    /// Passes a sync, which is such a call too. Whether it is to be made.
    ///
    /// # Errors
    /// The error that the rule names.
    pub fn sync(&self, point: FailPoint, what: Synced) -> io::Result<bool> {
        self.call()?;
        self.pass(point.0, what.suffix())
    }

    /// Whether the program goes on as it would without faults.
    fn pass(&self, place: &str, suffix: &str) -> io::Result<bool> {
        if self.rules.is_empty() && self.trace.is_none() {
            return Ok(true);
        }
        let place = format!("{place}{suffix}");
        if let Some(mut file) = self.trace.as_ref() {
            file.write_all(format!("{place}\n").as_bytes())?;
        }
        let count = {
            let mut hits = self.hits.lock().unwrap_or_else(PoisonError::into_inner);
            let count = hits.entry(place.clone()).or_insert(0);
            *count += 1;
            *count
        };
        match self.rules.iter().find(|rule| rule.place == place && rule.nth.is_none_or(|nth| nth == count)) {
            Some(rule) => act(rule.action),
            None => Ok(true),
        }
    }
}

/// The file of this process: `<program>-<process id>`.
fn trace_file(folder: &Path) -> io::Result<File> {
    let program = std::env::current_exe()?;
    let program = program.file_name().unwrap_or_default().to_string_lossy();
    OpenOptions::new().append(true).create(true).open(folder.join(format!("{program}-{}", std::process::id())))
}

/// Bytes that [`Action::Grow`] takes at a time.
const GROWTH: usize = 1 << 20;

#[expect(clippy::exit, clippy::panic, reason = "these are what is asked for")]
fn act(action: Action) -> io::Result<bool> {
    match action {
        Action::Exit => raise(Signal::SIGKILL)?,
        Action::Stop => raise(Signal::SIGSTOP)?,
        Action::Hang => loop {
            std::thread::park();
        },
        Action::Spin => loop {
            std::hint::spin_loop();
        },
        Action::Fail(errno) => return Err(errno.into()),
        Action::Wait(time) => std::thread::sleep(time),
        Action::Code(code) => std::process::exit(code),
        // Rust's own handler takes the first one for a stack overflow that is none, and removes itself.
        Action::Segv => loop {
            raise(Signal::SIGSEGV)?;
        },
        Action::Abort => std::process::abort(),
        Action::Panic => panic!("a fault was asked for here"),
        Action::Allocate => drop(std::hint::black_box(Vec::<u8>::with_capacity(isize::MAX.unsigned_abs()))),
        Action::Grow => loop {
            std::mem::forget(std::hint::black_box(vec![1_u8; GROWTH]));
        },
        Action::Skip | Action::Flip => return Ok(false),
    }
    Ok(true)
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
    fn each_system_call_counts_and_each_sync_can_be_left_out() {
        let faults = Faults::parse("*:3:enospc,commit.config.fsync:*:skip").unwrap();
        assert!(faults.call().is_ok());
        assert!(!faults.sync(FailPoint::COMMIT_CONFIG, Synced::File).unwrap());
        let full = faults.sync(FailPoint::COMMIT_LOSSES, Synced::File).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert!(!faults.sync(FailPoint::COMMIT_CONFIG, Synced::File).unwrap());
        assert!(faults.sync(FailPoint::COMMIT_CONFIG, Synced::Directory).unwrap());
    }

    #[test]
    fn a_bit_is_flipped_and_a_thread_held_up_where_they_are_asked_for() {
        assert!(Faults::parse("burn_in.product:*:flip").is_ok());
        let faults = Faults::parse("step.begin:2:flip,load.state:1:wait20").unwrap();
        assert!(faults.pass("step.begin", "").unwrap() && !faults.pass("step.begin", "").unwrap());
        let started = std::time::Instant::now();
        assert!(faults.pass("load.state", "").unwrap());
        assert!(started.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn malformed_faults_are_named() {
        let skips = ["commit.config:1:skip", "save.report:1:flip"];
        for text in ["x", "x:0:exit", "x:1:boom", "x:1:wait", ":1:exit", "x:1:exit:y"].into_iter().chain(skips) {
            assert!(Faults::parse(text).unwrap_err().contains(text));
        }
    }

    #[test]
    fn no_two_points_have_one_name() {
        let mut names: Vec<_> = FailPoint::ALL.iter().map(|point| point.0).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
