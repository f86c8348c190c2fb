//! How a trainer ended, and what class of ending that is.
//!
//! Exits are causes (something broke here) or consequences (a peer was lost, or we stopped it). The verdict on a failed
//! generation is the earliest cause; consequences only point at who was lost first (P6).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::Rank;
use crate::report::Phase;

/// Raw facts of an ended process, as its parent's wait saw them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// Exit code, when it exited by itself.
    pub code: Option<i32>,
    /// Signal number, when a signal ended it.
    pub signal: Option<i32>,
    /// Whether it dumped core.
    pub core: bool,
    /// The kernel's out-of-memory killer is the likely cause.
    pub oom: bool,
    /// Our own worker sent the signal.
    pub stopped_by_us: bool,
}

/// Exit codes with a meaning that a trainer gives when it ends by itself.
pub mod code {
    /// Finished: `max_steps`, `--until-step` or a stop request.
    pub const FINISHED: i32 = 0;
    /// An error without a class of its own.
    pub const ERROR: i32 = 1;
    /// A collective or the link to the worker lost its peer.
    pub const PEER_LOST: i32 = 71;
    /// Reading or writing files failed.
    pub const DISK: i32 = 74;
    /// The place of a checkpoint cannot be reached or has trouble of its own: nothing is known of the checkpoint.
    pub const STORE_AWAY: i32 = 75;
    /// The device reported an error.
    pub const DEVICE: i32 = 76;
    /// Loss or gradient was not finite and the spec says stop.
    pub const NON_FINITE: i32 = 77;
    /// Out of host or device memory, seen by the trainer itself.
    pub const OUT_OF_MEMORY: i32 = 79;
    /// What Rust's runtime exits with after a panic.
    pub const PANIC: i32 = 101;
}

/// Class of an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitClass {
    /// Exit code 0.
    Finished,
    /// Out of memory: the kernel's killer, or an allocation that failed.
    OutOfMemory,
    /// A signal that is not ours; `core` = it dumped core.
    Signal {
        /// Signal number.
        signal: i32,
        /// Whether it dumped core.
        core: bool,
    },
    /// A Rust panic.
    Panic,
    /// A failed assertion: SIGABRT.
    Assertion,
    /// CUDA or NCCL reported a device error.
    Device,
    /// Reading or writing files failed.
    Disk,
    /// The place of a checkpoint cannot be reached or has trouble of its own, which says nothing of the checkpoint.
    StoreAway,
    /// Loss or gradient not finite.
    NonFinite,
    /// Another non-zero exit code.
    Error {
        /// Exit code.
        code: i32,
    },
    /// Worker, node or link lost: nobody saw how the process ended.
    Lost,
    /// Consequence: a collective or link lost its peer.
    PeerLost,
    /// Consequence: we stopped it.
    StoppedByUs,
}

/// What Rust's and C++'s runtimes say of an allocation that failed, before they abort.
const ALLOCATION_FAILED: [&str; 2] = ["memory allocation of ", "std::bad_alloc"];

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

impl ExitClass {
    /// Class of an ended process; an exit that we caused is a consequence whatever else is true of it.
    #[must_use]
    pub fn of(exit: &ProcessExit) -> Self {
        match *exit {
            ProcessExit { stopped_by_us: true, .. } => Self::StoppedByUs,
            ProcessExit { oom: true, .. } => Self::OutOfMemory,
            ProcessExit { signal: Some(SIGABRT), .. } => Self::Assertion,
            ProcessExit { signal: Some(signal), core, .. } => Self::Signal { signal, core },
            ProcessExit { code: Some(code), .. } => match code {
                code::FINISHED => Self::Finished,
                code::PEER_LOST => Self::PeerLost,
                code::DISK => Self::Disk,
                code::STORE_AWAY => Self::StoreAway,
                code::DEVICE => Self::Device,
                code::NON_FINITE => Self::NonFinite,
                code::OUT_OF_MEMORY => Self::OutOfMemory,
                code::PANIC => Self::Panic,
                code => Self::Error { code },
            },
            ProcessExit { code: None, signal: None, .. } => Self::Lost,
        }
    }

    /// The class, where what the process wrote last says more than its signal: an allocation that fails ends a program in Rust or
    /// C++ with SIGABRT.
    #[must_use]
    pub fn with_last_words(self, lines: &[String]) -> Self {
        let is_of_memory = |line: &String| ALLOCATION_FAILED.iter().any(|words| line.contains(words));
        if self == Self::Assertion && lines.iter().any(is_of_memory) { Self::OutOfMemory } else { self }
    }

    /// Whether it only follows from something that happened elsewhere.
    #[must_use]
    pub fn is_consequence(self) -> bool {
        matches!(self, Self::PeerLost | Self::StoppedByUs)
    }

    /// J5: came from outside the program, hence never deterministic: SIGKILL or SIGTERM without a sign of OOM, a lost
    /// worker, node or link, a store that is away.
    #[must_use]
    pub fn is_external(self) -> bool {
        matches!(
            self,
            Self::Lost
                | Self::PeerLost
                | Self::StoppedByUs
                | Self::StoreAway
                | Self::Signal { signal: SIGKILL | SIGTERM, .. }
        )
    }

    /// What a person should do when it was the first cause; empty where nothing is to be done.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::OutOfMemory => {
                "lower step_scheduler.local_batch_size (the global batch stays the same), or give the job more memory"
            }
            Self::Signal { signal: SIGKILL | SIGTERM, .. } => {
                "find out who sent the signal: the kernel's log (dmesg), the scheduler (sacct -j), a person"
            }
            Self::Signal { .. } | Self::Panic | Self::Assertion => {
                "this is a fault of the program or of the machine: keep the rank's log and the core dump, and report them"
            }
            Self::Device => {
                "look at the GPU (nvidia-smi -q, Xid lines in dmesg) and keep the node out until it is repaired"
            }
            Self::Disk => "free space or repair the file system that the rank's log names",
            Self::StoreAway => "look at the file system or the object store; it is tried again until it answers",
            Self::NonFinite => {
                "lower the learning rate, or set fault_tolerance.on_nonfinite: skip_step; look at the data of that step"
            }
            Self::Error { .. } => "look at the rank's log and repair the cause",
            Self::Lost => "look at the node: it was restarted, lost its network, or its worker was killed",
            Self::Finished | Self::PeerLost | Self::StoppedByUs => "",
        }
    }

    /// Whether its process ended by itself and said why: what a killed one wrote last has nothing to do with the kill.
    #[must_use]
    pub fn has_last_words(self) -> bool {
        self == Self::StoreAway || !self.is_external()
    }
}

impl fmt::Display for ExitClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished => f.write_str("finished"),
            Self::OutOfMemory => f.write_str("ran out of memory"),
            Self::Signal { signal, core } => {
                let core = if *core { ", core dumped" } else { "" };
                match signal_name(*signal) {
                    Some(name) => write!(f, "killed by signal {signal} ({name}{core})"),
                    None => write!(f, "killed by signal {signal}{core}"),
                }
            }
            Self::Panic => f.write_str("panicked"),
            Self::Assertion => f.write_str("aborted (SIGABRT: a failed assertion)"),
            Self::Device => f.write_str("device error"),
            Self::Disk => f.write_str("reading or writing files failed"),
            Self::StoreAway => f.write_str("cannot reach the checkpoint's place"),
            Self::NonFinite => f.write_str("loss or gradient not finite"),
            Self::Error { code } => write!(f, "exited with code {code}"),
            Self::Lost => f.write_str("lost"),
            Self::PeerLost => f.write_str("lost its peer"),
            Self::StoppedByUs => f.write_str("stopped by its worker"),
        }
    }
}

/// Names of the signals that end processes, Linux numbers.
fn signal_name(signal: i32) -> Option<&'static str> {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    };
    Some(name)
}

/// One rank's failure, as the verdict and `Failed` carry it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    /// Rank that failed.
    pub rank: Rank,
    /// How.
    pub class: ExitClass,
    /// What it was doing.
    pub phase: Phase,
    /// Innermost own message or last line of stderr; may be empty.
    pub message: String,
}

impl RankFailure {
    /// What J5 compares.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::new(self.class, self.phase, &self.message)
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {} while {}", self.rank, self.class, self.phase.doing())?;
        if !self.message.is_empty() {
            write!(f, ": {}", self.message)?;
        }
        Ok(())
    }
}

/// J5: exit class + message without numbers + phase. Two equal internal ones at the same step are deterministic.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fingerprint(pub String);

impl Fingerprint {
    /// Numbers (with hexadecimal ones and what is glued to them) become `#`, so that pids, addresses and steps do not
    /// make equal failures differ.
    #[must_use]
    pub fn new(class: ExitClass, phase: Phase, message: &str) -> Self {
        let words =
            message.split_whitespace().map(|word| if word.contains(|c: char| c.is_ascii_digit()) { "#" } else { word });
        Self(format!("{class} | {} | {}", phase.doing(), words.collect::<Vec<_>>().join(" ")))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
