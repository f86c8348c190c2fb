//! The job's state machine: one enum with its data in the variants, and one function that
//! moves it.
//!
//! - **J1** Nothing leaves a terminal phase: `Succeeded`, `Failed`, `Cancelled`.
//! - **J3** An event that carries another generation than the current one changes nothing and is answered with the
//!   current one ([`Illegal::Stale`]).
//!
//! Pure: no clock, no I/O. Whoever owns the job applies events and journals the result before it acts on it.

mod cause;
pub mod exit;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::cause::{Cause, Suspect, WhyLost};
pub use self::exit::{ExitClass, Fingerprint, ProcessExit, RankFailure};
use crate::ids::{Generation, Step};

/// Where a job is.
///
/// | from | event | to |
/// |---|---|---|
/// | Queued | Hold | Held |
/// | Held | Release | Queued |
/// | Queued, Suspended | Form(g) | Forming(g) |
/// | Forming(g) | Formed(g, s) | Running(g, s) |
/// | Running(g, s) | Stepped(g, t) | Running(g, max(s, t + 1)) |
/// | Stopping(g) | Stepped(g, t) | unchanged: the last steps before the boundary |
/// | Forming(g), Running(g) | Stop(g, why) | Stopping(g, why) |
/// | Stopping(g, why) | Stop(g, other) | Stopping(g, the weightier of both), see [`StopReason::outweighs`] |
/// | Stopping(g, restart) | Form(h), h > g | Forming(h) |
/// | Stopping(g, restart) | Suspend(cause) | Suspended(cause) |
/// | Stopping(g, suspend) | Stopped(g) | Suspended(cause) |
/// | Stopping(g, complete or until step) | Stopped(g) | Succeeded |
/// | Stopping(g, cancel) | Stopped(g) | Cancelled |
/// | Stopping(g, fail) | Stopped(g) | Failed(cause) |
/// | Queued, Held, Suspended | Cancel | Cancelled |
/// | Queued, Held, Suspended | Fail(cause) | Failed(cause) |
///
/// Everything else is [`Illegal`]. A job with live processes is cancelled or failed through `Stop`, so that no terminal
/// phase is reached while a process of it lives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "phase")]
pub enum JobPhase {
    /// Waits for its first workers.
    Queued,
    /// Waits for a person's release.
    Held,
    /// A world is being formed: trainers start, meet and load.
    Forming {
        /// The generation that forms.
        generation: Generation,
    },
    /// Optimizer steps.
    Running {
        /// The generation that runs.
        generation: Generation,
        /// The step that is being computed: every lower one is done.
        step: Step,
    },
    /// Its processes are on their way out.
    Stopping {
        /// The generation that stops.
        generation: Generation,
        /// Why, and so what comes next.
        why: StopReason,
    },
    /// Between allocations: same job, same budget, forms again when workers come.
    Suspended {
        /// What it waits for.
        cause: Cause,
    },
    /// Terminal: it did what the spec, or `--until-step`, asked for.
    Succeeded,
    /// Terminal.
    Failed {
        /// Who failed first, and why (P6).
        cause: Cause,
    },
    /// Terminal: a person stopped it.
    Cancelled,
}

/// Why a generation is being stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "why")]
pub enum StopReason {
    /// Something failed and the budget allows another generation. Also a formation that was given up.
    Restart {
        /// What failed.
        cause: Cause,
    },
    /// The allocation ends or workers are missing.
    Suspend {
        /// What it will wait for.
        cause: Cause,
    },
    /// A person asked for it: cancel, or Ctrl-C.
    Cancel {
        /// Save at the next step boundary first.
        save: bool,
    },
    /// The job is to end as failed.
    Fail {
        /// Who failed first, and why.
        cause: Cause,
    },
    /// `--until-step` is reached and its checkpoint committed.
    UntilStep,
    /// `max_steps` are done and the last checkpoint committed.
    Complete,
}

impl StopReason {
    /// A stop under way gives way only to a weightier reason: work that is done stays done, a person's word or a failure
    /// outlives a restart, and the first of equals stands.
    #[must_use]
    pub fn weight(&self) -> u8 {
        match self {
            Self::Restart { .. } => 0,
            Self::Suspend { .. } => 1,
            Self::Cancel { .. } | Self::Fail { .. } => 2,
            Self::UntilStep | Self::Complete => 3,
        }
    }

    /// Whether it takes the place of a stop under way: the weightier one does, and of two cancels the one that does not wait
    /// for a save.
    #[must_use]
    pub fn outweighs(&self, old: &Self) -> bool {
        let is_sooner = matches!((self, old), (Self::Cancel { save: false }, Self::Cancel { save: true }));
        self.weight() > old.weight() || is_sooner
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Restart { cause } => write!(f, "restarting: {cause}"),
            Self::Suspend { cause } => write!(f, "suspending: {cause}"),
            Self::Cancel { save: true } => f.write_str("cancelled, saving at the next step"),
            Self::Cancel { save: false } => f.write_str("cancelled"),
            Self::Fail { cause } => write!(f, "failing: {cause}"),
            Self::UntilStep => f.write_str("the step named by --until-step is reached"),
            Self::Complete => f.write_str("all steps are done"),
        }
    }
}

/// What may happen to a job.
#[derive(Clone, Debug, PartialEq)]
pub enum JobEvent {
    /// A person holds a queued job.
    Hold,
    /// A person releases a held job.
    Release,
    /// A generation's number was taken (J2) and its assignments are about to go out.
    Form(Generation),
    /// Every rank of the generation has met and loaded; `from` is the first step that it computes.
    Formed {
        /// Generation that formed.
        generation: Generation,
        /// First step that it computes.
        from: Step,
    },
    /// A step is done.
    Stepped {
        /// Generation that did it.
        generation: Generation,
        /// The zero-based step that is done.
        done: Step,
    },
    /// Its processes are to stop.
    Stop {
        /// Generation to stop.
        generation: Generation,
        /// Why.
        why: StopReason,
    },
    /// No process of the generation lives.
    Stopped(Generation),
    /// A stopped generation has no workers for the next one.
    Suspend(Cause),
    /// Cancel a job that has no processes.
    Cancel,
    /// Fail a job that has no processes.
    Fail(Cause),
}

impl JobEvent {
    /// The generation that the event speaks of; `Form` names a new one and is not counted.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        match self {
            Self::Formed { generation, .. } | Self::Stepped { generation, .. } | Self::Stop { generation, .. } => {
                Some(*generation)
            }
            Self::Stopped(generation) => Some(*generation),
            Self::Hold | Self::Release | Self::Form(_) | Self::Suspend(_) | Self::Cancel | Self::Fail(_) => None,
        }
    }

    /// Short name, for logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Release => "release",
            Self::Form(_) => "form",
            Self::Formed { .. } => "formed",
            Self::Stepped { .. } => "stepped",
            Self::Stop { .. } => "stop",
            Self::Stopped(_) => "stopped",
            Self::Suspend(_) => "suspend",
            Self::Cancel => "cancel",
            Self::Fail(_) => "fail",
        }
    }
}

/// Why an event changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Illegal {
    /// J1.
    #[error("the job is {phase}; nothing leaves that phase (event: {event})")]
    Terminal {
        /// Phase that the job is in.
        phase: &'static str,
        /// Event that was refused.
        event: &'static str,
    },
    /// J3: the sender speaks of another generation.
    #[error("{event} speaks of generation {sent}; the current one is {current}")]
    Stale {
        /// Event that was refused.
        event: &'static str,
        /// Generation in the event.
        sent: Generation,
        /// Current generation: the answer to the sender.
        current: Generation,
    },
    /// The table has no such line.
    #[error("{event} is not possible while the job is {phase}")]
    NotHere {
        /// Phase that the job is in.
        phase: &'static str,
        /// Event that was refused.
        event: &'static str,
    },
}

impl JobPhase {
    /// The next phase, or why there is none; then nothing has changed.
    ///
    /// # Errors
    /// [`Illegal::Terminal`] by J1, [`Illegal::Stale`] by J3, [`Illegal::NotHere`] for what the table does not list.
    pub fn apply(&self, event: JobEvent) -> Result<Self, Illegal> {
        let name = event.name();
        if self.is_terminal() {
            return Err(Illegal::Terminal { phase: self.name(), event: name });
        }
        if let (Some(current), Some(sent)) = (self.generation(), event.generation())
            && current != sent
        {
            return Err(Illegal::Stale { event: name, sent, current });
        }
        match (self, event) {
            (Self::Queued, JobEvent::Hold) => Ok(Self::Held),
            (Self::Held, JobEvent::Release) => Ok(Self::Queued),
            (Self::Queued | Self::Suspended { .. }, JobEvent::Form(generation)) => Ok(Self::Forming { generation }),
            (Self::Forming { .. }, JobEvent::Formed { generation, from }) => {
                Ok(Self::Running { generation, step: from })
            }
            (Self::Running { generation, step }, JobEvent::Stepped { done, .. }) => {
                Ok(Self::Running { generation: *generation, step: (*step).max(Step(done.0.saturating_add(1))) })
            }
            (Self::Stopping { .. }, JobEvent::Stepped { .. }) => Ok(self.clone()),
            (Self::Forming { .. } | Self::Running { .. }, JobEvent::Stop { generation, why }) => {
                Ok(Self::Stopping { generation, why })
            }
            (Self::Stopping { why: old, .. }, JobEvent::Stop { generation, why }) => {
                Ok(if why.outweighs(old) { Self::Stopping { generation, why } } else { self.clone() })
            }
            (Self::Stopping { generation, why: StopReason::Restart { .. } }, JobEvent::Form(next))
                if next > *generation =>
            {
                Ok(Self::Forming { generation: next })
            }
            (Self::Stopping { generation, why: StopReason::Restart { .. } }, JobEvent::Form(next)) => {
                Err(Illegal::Stale { event: name, sent: next, current: *generation })
            }
            (Self::Stopping { why: StopReason::Restart { .. }, .. }, JobEvent::Suspend(cause)) => {
                Ok(Self::Suspended { cause })
            }
            (Self::Stopping { why, .. }, JobEvent::Stopped(_)) => match why.clone() {
                StopReason::Restart { .. } => Err(Illegal::NotHere { phase: self.name(), event: name }),
                StopReason::Suspend { cause } => Ok(Self::Suspended { cause }),
                StopReason::Cancel { .. } => Ok(Self::Cancelled),
                StopReason::Fail { cause } => Ok(Self::Failed { cause }),
                StopReason::UntilStep | StopReason::Complete => Ok(Self::Succeeded),
            },
            (Self::Queued | Self::Held | Self::Suspended { .. }, JobEvent::Cancel) => Ok(Self::Cancelled),
            (Self::Queued | Self::Held | Self::Suspended { .. }, JobEvent::Fail(cause)) => Ok(Self::Failed { cause }),
            _ => Err(Illegal::NotHere { phase: self.name(), event: name }),
        }
    }

    /// Whether J1 holds the job here.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed { .. } | Self::Cancelled)
    }

    /// The generation whose processes may live.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        match self {
            Self::Forming { generation } | Self::Running { generation, .. } | Self::Stopping { generation, .. } => {
                Some(*generation)
            }
            Self::Queued
            | Self::Held
            | Self::Suspended { .. }
            | Self::Succeeded
            | Self::Failed { .. }
            | Self::Cancelled => None,
        }
    }

    /// Short name, as `status` shows it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Held => "held",
            Self::Forming { .. } => "forming",
            Self::Running { .. } => "running",
            Self::Stopping { .. } => "stopping",
            Self::Suspended { .. } => "suspended",
            Self::Succeeded => "succeeded",
            Self::Failed { .. } => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Why it is in this phase, for a person; empty where the name says all.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Stopping { why, .. } => why.to_string(),
            Self::Suspended { cause } | Self::Failed { cause } => cause.to_string(),
            Self::Queued
            | Self::Held
            | Self::Forming { .. }
            | Self::Running { .. }
            | Self::Succeeded
            | Self::Cancelled => String::new(),
        }
    }
}

impl fmt::Display for JobPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
