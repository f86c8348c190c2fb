//! Why a job is suspended, restarted or failed, in words that say what to do next (P6).

use std::fmt;

use serde::{Deserialize, Serialize};

use super::exit::{ExitClass, Fingerprint, RankFailure};
use crate::ids::Rank;
use crate::report::Phase;

/// What happened to a job or a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Cause {
    /// A trainer ended.
    Rank {
        /// Who, how, in which phase.
        failure: RankFailure,
    },
    /// A worker, with its rank, is gone.
    WorkerLost {
        /// Its id.
        worker: String,
        /// The rank that it carried.
        rank: Option<Rank>,
        /// How it was noticed.
        why: WhyLost,
    },
    /// No progress within a phase's deadline.
    Hung {
        /// Rank that did not arrive, where known.
        rank: Option<Rank>,
        /// The phase whose deadline passed.
        phase: Phase,
        /// How long nothing moved, seconds.
        seconds: u64,
        /// What the other ranks waited in; empty where they waited in no collective.
        #[serde(default)]
        collective: String,
        /// How many they were.
        #[serde(default)]
        waiting: u32,
    },
    /// Fewer workers than the world needs.
    WaitingForWorkers {
        /// Workers that are there.
        have: u32,
        /// Workers that are needed.
        need: u32,
        /// Workers that would do if they were not quarantined; empty where they would not be enough.
        #[serde(default)]
        quarantined: Vec<String>,
    },
    /// The world could not be formed.
    FormingFailed {
        /// Why.
        message: String,
    },
    /// The formation was given up without a fault of the job, for example because the coordinator restarted.
    Abandoned {
        /// Why.
        message: String,
    },
    /// The scheduler takes the machines away.
    Preempted,
    /// The allocation's time ends.
    TimeLimit,
    /// A checkpoint that must be loaded cannot be.
    Checkpoint {
        /// Its name.
        name: String,
        /// Why.
        message: String,
    },
    /// Writing checkpoints or logs fails.
    Storage {
        /// Why.
        message: String,
    },
    /// The restart budget is spent (J5).
    BudgetSpent {
        /// `fault_tolerance.max_restarts`.
        max_restarts: u32,
        /// The last failure.
        last: Box<Cause>,
    },
    /// The same internal failure at the same step twice (J5).
    Deterministic {
        /// The step.
        step: u64,
        /// What was equal.
        fingerprint: Fingerprint,
        /// The failure.
        last: Box<Cause>,
    },
    /// Replicas of the state differ: silent corruption.
    Corrupt {
        /// Zero-based step whose save showed it.
        step: u64,
        /// Replicas that were compared.
        replicas: u32,
        /// Who holds another state than the majority; without a majority, everybody.
        suspects: Vec<Suspect>,
        /// A majority agrees; otherwise any of the suspects may be the one.
        named: bool,
    },
    /// Devices computed or summed wrongly in the burn-in, before the ranks loaded.
    BurnIn {
        /// Who did; where nothing says who, everybody that may have.
        suspects: Vec<Suspect>,
        /// The suspects did it, and their workers are quarantined; otherwise any of them may be the one.
        named: bool,
        /// What was wrong, with figures.
        message: String,
    },
    /// A rank holds the others up and is moved to a spare worker (`fault_tolerance.stragglers: evict`).
    Straggler {
        /// Who.
        suspect: Suspect,
        /// Its time per step over the others'.
        slower: f64,
    },
    /// Another term holds the run directory (J2).
    Superseded {
        /// That term.
        term: u64,
    },
    /// Every report was a consequence, and none says of what.
    Unknown {
        /// What is known.
        message: String,
    },
}

/// A rank and where it ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspect {
    /// Rank.
    pub rank: Rank,
    /// Its worker.
    pub worker: String,
    /// The worker's host.
    pub host: String,
}

impl fmt::Display for Suspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (worker {} on {})", self.rank, self.worker, self.host)
    }
}

/// How the loss of a worker was noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyLost {
    /// Its stream broke and it did not come back within the lease.
    LeaseExpired,
    /// Another incarnation took its place: it was restarted.
    Restarted,
    /// It said that it leaves.
    Left,
    /// It could not clean up and is quarantined.
    Quarantined,
    /// A person took it out of service.
    TakenOut,
}

impl Cause {
    /// J5: from outside, hence never deterministic, but for replicas or burn-ins that differ once more at the same step.
    #[must_use]
    pub fn is_external(&self) -> bool {
        match self {
            Self::Rank { failure } => failure.class.is_external(),
            Self::WorkerLost { .. }
            | Self::WaitingForWorkers { .. }
            | Self::Abandoned { .. }
            | Self::Preempted
            | Self::TimeLimit
            | Self::Corrupt { .. }
            | Self::BurnIn { .. }
            | Self::Straggler { .. }
            | Self::Superseded { .. } => true,
            Self::Hung { .. }
            | Self::FormingFailed { .. }
            | Self::Checkpoint { .. }
            | Self::Storage { .. }
            | Self::BudgetSpent { .. }
            | Self::Deterministic { .. }
            | Self::Unknown { .. } => false,
        }
    }

    /// Whether it costs one of `max_restarts` (J5): what the job is not to blame for and no restart could have avoided does
    /// not.
    #[must_use]
    pub fn is_charged(&self) -> bool {
        let free = matches!(
            self,
            Self::WaitingForWorkers { .. }
                | Self::Abandoned { .. }
                | Self::Preempted
                | Self::TimeLimit
                | Self::Straggler { .. }
                | Self::BurnIn { named: true, .. }
                | Self::Superseded { .. }
                | Self::WorkerLost { why: WhyLost::TakenOut, .. }
        );
        !free && !self.is_store_away()
    }

    /// A rank could not load since the checkpoint's place is away: it is waited for.
    #[must_use]
    pub fn is_store_away(&self) -> bool {
        matches!(self, Self::Rank { failure } if failure.class == ExitClass::StoreAway)
    }

    /// The fingerprint that J5 counts, for internal causes. Failing hardware is external, but what makes replicas differ at the
    /// same step again, although others carry the ranks where there are others, is the program or the kind of the machines.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match self {
            Self::Rank { failure } if !failure.class.is_external() => Some(failure.fingerprint()),
            Self::Hung { phase, .. } => Some(Fingerprint(format!("hung | {}", phase.doing()))),
            Self::FormingFailed { message } => Some(plain("forming failed", message)),
            Self::Checkpoint { message, .. } => Some(plain("checkpoint", message)),
            Self::Storage { message } => Some(plain("storage", message)),
            Self::Unknown { message } => Some(plain("unknown", message)),
            Self::Corrupt { .. } => Some(Fingerprint("replicas differ".to_owned())),
            Self::BurnIn { named: false, .. } => Some(Fingerprint("burn-ins differ".to_owned())),
            _ => None,
        }
    }

    /// The cause of the failure that spent the budget or came twice.
    #[must_use]
    pub fn first(&self) -> &Self {
        match self {
            Self::BudgetSpent { last, .. } | Self::Deterministic { last, .. } => last.first(),
            cause => cause,
        }
    }

    /// The rank to blame, where it is one.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        match self.first() {
            Self::Rank { failure } => Some(failure.rank),
            Self::WorkerLost { rank, .. } | Self::Hung { rank, .. } => *rank,
            Self::Straggler { suspect, .. } => Some(suspect.rank),
            Self::Corrupt { suspects, named: true, .. } | Self::BurnIn { suspects, named: true, .. } => {
                match &suspects[..] {
                    [suspect] => Some(suspect.rank),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// What a person should do next; empty when nothing is needed.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::BudgetSpent { .. } | Self::Deterministic { .. } => {
                "look at the rank's log, repair the cause, then `trainctl resume --from LATEST`"
            }
            Self::Rank { failure } => failure.class.remedy(),
            Self::WorkerLost { why: WhyLost::LeaseExpired | WhyLost::Restarted, .. } => ExitClass::Lost.remedy(),
            Self::WorkerLost { why: WhyLost::Quarantined, .. } => {
                "look for a process in state D on its node: a file system or a device that does not answer"
            }
            Self::Hung { .. } => {
                "read the stacks: a file system, a device or a peer that does not answer; if it was slow and not hung, raise \
                 fault_tolerance.hang"
            }
            Self::WaitingForWorkers { quarantined, .. } if !quarantined.is_empty() => {
                "`trainctl workers list` says why they are quarantined; `trainctl workers release` lets them in again"
            }
            Self::WaitingForWorkers { .. } => "start workers, or resume with a smaller resources.workers",
            Self::Checkpoint { .. } => "`trainctl checkpoints verify`, then resume from an older one",
            Self::Storage { .. } => "free space or repair the file system, then `trainctl resume --from LATEST`",
            Self::Corrupt { .. } => {
                "test memory and devices of what is named before it is used again (memtester; on GPUs nvidia-smi -q -d ECC and \
                 dcgmi diag -r 3). If replicas differ at the same step again, compare the hosts' processors and libraries: \
                 replicas are equal only where these are; fault_tolerance.compare_replicas: false does without"
            }
            Self::BurnIn { named: true, .. } => {
                "test memory and device of the quarantined worker (memtester; on GPUs nvidia-smi -q -d ECC and dcgmi diag -r 3), \
                 repair it, then `trainctl workers release`"
            }
            Self::BurnIn { .. } => {
                "test memory, devices and network of what is named (memtester; on GPUs nvidia-smi -q -d ECC and dcgmi diag -r 3). \
                 If the results differ each time, compare the hosts' processors and libraries: products are equal only where these \
                 are; fault_tolerance.burn_in_seconds: 0 does without"
            }
            Self::Straggler { .. } => {
                "look at its host: clocks and temperature (nvidia-smi -q -d PERFORMANCE), other processes, a slow file system"
            }
            Self::Superseded { .. } => "talk to the coordinator that holds the run directory now",
            _ => "",
        }
    }
}

/// So many suspects are written out.
const LISTED: usize = 8;

fn listed(suspects: &[Suspect]) -> String {
    let names: Vec<String> = suspects.iter().take(LISTED).map(ToString::to_string).collect();
    match suspects.len().saturating_sub(LISTED) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

fn plain(kind: &str, message: &str) -> Fingerprint {
    let words =
        message.split_whitespace().map(|word| if word.contains(|c: char| c.is_ascii_digit()) { "#" } else { word });
    Fingerprint(format!("{kind} | {}", words.collect::<Vec<_>>().join(" ")))
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank { failure } => failure.fmt(f),
            Self::WorkerLost { worker, rank, why } => {
                let why = match why {
                    WhyLost::LeaseExpired => "was not heard from within its lease",
                    WhyLost::Restarted => "was restarted",
                    WhyLost::Left => "left",
                    WhyLost::Quarantined => "is quarantined: a process of it cannot be killed",
                    WhyLost::TakenOut => "was taken out of service by `trainctl workers quarantine --now`",
                };
                match rank {
                    Some(rank) => write!(f, "worker {worker} (rank {rank}) {why}"),
                    None => write!(f, "worker {worker} {why}"),
                }
            }
            Self::Hung { rank, phase, seconds, collective, waiting } => {
                match rank {
                    Some(rank) => write!(f, "rank {rank} made no progress")?,
                    None => f.write_str("no rank made progress")?,
                }
                write!(f, " for {seconds} s while {}", phase.doing())?;
                match (*waiting, rank) {
                    (0, _) => Ok(()),
                    (1, Some(_)) => write!(f, "; another rank waited for it in: {collective}"),
                    (others, Some(_)) => write!(f, "; {others} other ranks waited for it in: {collective}"),
                    (_, None) => write!(f, "; all waited in: {collective}"),
                }
            }
            Self::WaitingForWorkers { have, need, quarantined } => {
                let missing = need.saturating_sub(*have);
                write!(
                    f,
                    "waiting for {missing} more worker{} ({have} of {need})",
                    if missing == 1 { "" } else { "s" }
                )?;
                match quarantined.as_slice() {
                    [] => Ok(()),
                    names => write!(f, "; quarantined: {}", names.join(", ")),
                }
            }
            Self::FormingFailed { message } => write!(f, "the world could not be formed: {message}"),
            Self::Abandoned { message } => write!(f, "the formation was given up: {message}"),
            Self::Preempted => f.write_str("preempted"),
            Self::TimeLimit => f.write_str("the allocation's time ends"),
            Self::Checkpoint { name, message } => write!(f, "checkpoint {name}: {message}"),
            Self::Storage { message } => write!(f, "storage: {message}"),
            Self::BudgetSpent { max_restarts, last } => {
                write!(f, "fault_tolerance.max_restarts = {max_restarts} is spent; last: {last}")
            }
            Self::Deterministic { step, last, .. } => write!(f, "failed twice in the same way at step {step}: {last}"),
            Self::Corrupt { step, replicas, suspects, named } => {
                let who = listed(suspects);
                if *named {
                    let others = replicas.saturating_sub(suspects.len() as u32);
                    let verb = if suspects.len() == 1 { "holds" } else { "hold" };
                    write!(
                        f,
                        "{who} {verb} another state than the {others} other replicas after step {step}: silent corruption"
                    )
                } else {
                    let why = "no majority says which is right";
                    write!(
                        f,
                        "the {replicas} replicas differ after step {step} and {why}: silent corruption at one of {who}"
                    )
                }
            }
            Self::BurnIn { suspects, named: true, message } => {
                write!(f, "{} failed the burn-in: {message}", listed(suspects))
            }
            Self::BurnIn { suspects, named: false, message } => {
                write!(f, "the burn-in failed at one of {} and nothing says at which: {message}", listed(suspects))
            }
            Self::Straggler { suspect, slower } => {
                write!(f, "{suspect} takes {slower:.2} times as long for a step as the others: it is moved to a spare")
            }
            Self::Superseded { term } => write!(f, "term {term} holds the run directory"),
            Self::Unknown { message } => write!(f, "unknown cause: {message}"),
        }
    }
}
