//! `on_commit` and `on_end`: a person's commands, one task a job.
//!
//! Commands are children of the coordinator, each in a process group of its own, one at a time and in order
//! ([`crate::decide::hooks`]). The task shares nothing with the run directory's task but pins: no step and no commit waits
//! for a command. A commit's checkpoint is pinned before retention can look at it, and unpinned when its command is over.
//!
//! Commands run at most once: what waits or runs when the coordinator dies is not run again by its successor.

mod child;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{info, warn};
use trainctl_runtime::tasks::Shutdown;
use trainctl_spec::report::SaveKind;
use trainctl_spec::{JobId, JobSpec};
use trainctl_store::layout::CheckpointName;
use trainctl_store::{CheckpointStore, RunDir};

use self::child::Running;
use crate::decide::hooks::{Enqueue, decide_enqueue};

/// How long commands may take once the job has ended: first what is left of `on_commit`, then `on_end`.
const END_LIMIT: Duration = Duration::from_secs(10 * 60);
/// How long a command may take to leave after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// A command of the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// After a commit.
    OnCommit,
    /// After the job's end.
    OnEnd,
}

impl Which {
    /// Its key in the spec.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnCommit => "on_commit",
            Self::OnEnd => "on_end",
        }
    }
}

/// What a command is told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// The command.
    pub which: Which,
    /// What the checkpoint holds.
    pub kind: SaveKind,
    /// The checkpoint that was made, or LATEST at the job's end; `None` if there is none.
    pub checkpoint: Option<CheckpointName>,
    /// Pointers that moved to it.
    pub pointers: Vec<String>,
    /// At the job's end: its phase, as `status` names it.
    pub state: &'static str,
    /// At the job's end: why, if it did not succeed.
    pub cause: String,
}

impl Hook {
    /// How people see it: `on_commit epoch_0_step_9`.
    pub fn label(&self) -> String {
        match (self.which, self.checkpoint) {
            (Which::OnCommit, Some(name)) => format!("on_commit {name}{}", suffix(self.kind)),
            (which, _) => which.name().to_owned(),
        }
    }

    /// `logs/hooks/on_commit-9.log`, in the run directory.
    fn log(&self) -> String {
        let step = self.checkpoint.map_or_else(|| "none".to_owned(), |name| name.step.to_string());
        format!("logs/hooks/{}{}-{step}.log", self.which.name(), suffix(self.kind))
    }
}

fn suffix(kind: SaveKind) -> &'static str {
    match kind {
        SaveKind::Full => "",
        SaveKind::Weights => "-weights",
    }
}

/// Who pins a checkpoint for its command. The two kinds may share a name, and so need pins of their own.
pub fn pin_of(kind: SaveKind) -> &'static str {
    match kind {
        SaveKind::Full => "on_commit",
        SaveKind::Weights => "on_commit, weights",
    }
}

/// What the task can be asked.
#[derive(Debug)]
pub enum HookRequest {
    /// Run this when its turn comes.
    Run(Box<Hook>),
    /// The job has ended; when nothing runs or waits any more, say so.
    End,
    /// Another coordinator holds the job: nothing more is started.
    Forget,
}

/// What the task says.
#[derive(Clone, Debug, PartialEq)]
pub enum HookResult {
    /// A command is over.
    Ended {
        /// Which.
        hook: Hook,
        /// How.
        outcome: Outcome,
        /// How long it took.
        seconds: f64,
        /// Its output, relative to the run directory.
        log: String,
    },
    /// A command was left out.
    Skipped {
        /// Which.
        hook: Hook,
        /// Why.
        reason: String,
    },
    /// The job has ended, and so have its commands.
    Over,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// It could not be started or waited for.
    Failed(String),
}

/// A job's commands.
pub struct HookTask {
    /// The job.
    pub job: JobId,
    /// Its resolved spec.
    pub spec: JobSpec,
    /// Its checkpoints.
    pub store: CheckpointStore,
    /// How long commands may take after the job's end.
    pub end_limit: Duration,
    /// How long one may take to leave after SIGTERM.
    pub grace: Duration,
}

impl HookTask {
    /// The commands of a job, if its spec has any.
    pub fn of(job: JobId, spec: &JobSpec, store: CheckpointStore) -> Option<Self> {
        let has_any = spec.on_commit.is_some() || spec.on_end.is_some();
        has_any.then(|| Self { job, spec: spec.clone(), store, end_limit: END_LIMIT, grace: GRACE })
    }

    /// Runs what is asked for until the job's end or the shutdown, which ends a running command with its group.
    ///
    /// # Errors
    /// Those of `answer`: whoever asked is gone.
    pub async fn run<E, F, A>(
        self,
        mut requests: mpsc::UnboundedReceiver<HookRequest>,
        shutdown: Shutdown,
        answer: A,
    ) -> Result<(), E>
    where
        F: Future<Output = Result<(), E>>,
        A: Fn(HookResult) -> F,
    {
        let mut waiting: VecDeque<Hook> = VecDeque::new();
        let mut running: Option<Running> = None;
        // Set at the job's end: until when what is left of `on_commit` may run.
        let mut ending: Option<Instant> = None;
        loop {
            while running.is_none()
                && let Some(hook) = waiting.pop_front()
            {
                let overdue = hook.which == Which::OnCommit && ending.is_some_and(|until| until <= Instant::now());
                let started = if overdue {
                    Err(format!("the job ended {} s ago", self.end_limit.as_secs()))
                } else {
                    self.start(&hook).await
                };
                match started {
                    Ok(mut child) => {
                        child.deadline = match hook.which {
                            Which::OnCommit => ending,
                            Which::OnEnd => Some(Instant::now() + self.end_limit),
                        };
                        running = Some(child);
                    }
                    Err(reason) => self.skip(hook, reason, &answer).await?,
                }
            }
            if running.is_none() && ending.is_some() {
                return answer(HookResult::Over).await;
            }
            tokio::select! {
                biased;
                () = shutdown.cancelled() => {
                    if let Some(child) = running {
                        child.end(self.grace).await;
                    }
                    return Ok(());
                }
                outcome = Running::ended(&mut running, self.grace), if running.is_some() => {
                    if let Some(child) = running.take() {
                        self.over(child, outcome, &answer).await?;
                    }
                }
                request = requests.recv() => match request {
                    Some(HookRequest::Run(hook)) => {
                        let may_drop = waiting.iter().map(|hook| hook.which == Which::OnCommit).collect();
                        if let Enqueue::DropOldest(place) = decide_enqueue(&may_drop, running.is_some())
                            && let Some(oldest) = waiting.remove(place)
                        {
                            self.skip(oldest, "commits come faster than the command runs".to_owned(), &answer).await?;
                        }
                        waiting.push_back(*hook);
                    }
                    Some(HookRequest::End) => {
                        let until = Instant::now() + self.end_limit;
                        ending = Some(until);
                        if let Some(child) = running.as_mut().filter(|child| child.hook.which == Which::OnCommit) {
                            child.deadline = Some(until);
                        }
                    }
                    // The holder runs its own; what runs here is let go.
                    Some(HookRequest::Forget) | None => return Ok(()),
                },
            }
        }
    }

    fn store_of(&self, kind: SaveKind) -> CheckpointStore {
        match kind {
            SaveKind::Full => self.store.clone(),
            SaveKind::Weights => self.store.weights(),
        }
    }

    async fn start(&self, hook: &Hook) -> Result<Running, String> {
        let command = match hook.which {
            Which::OnCommit => self.spec.on_commit.as_deref(),
            Which::OnEnd => self.spec.on_end.as_deref(),
        };
        let command = command.ok_or_else(|| "the spec does not have it".to_owned())?;
        let store = self.store_of(hook.kind);
        if let (Which::OnCommit, Some(name)) = (hook.which, hook.checkpoint) {
            // A generation that started from an earlier step has retired it meanwhile.
            store.read_manifest(name).await.map_err(|error| error.to_string())?;
        }
        let log: PathBuf = RunDir::new(&self.spec.run_dir).root().join(hook.log());
        let child =
            Running::start(command, &self.variables(hook, &store), &self.spec.run_dir, &log, hook.clone()).await;
        let child = child.map_err(|error| format!("start {command:?}: {error}"))?;
        info!(job = %self.job, hook = hook.label(), pid = child.pid, "command started");
        Ok(child)
    }

    /// What a command finds in its environment.
    fn variables(&self, hook: &Hook, store: &CheckpointStore) -> Vec<(&'static str, String)> {
        let name = hook.checkpoint;
        let text = |name: Option<String>| name.unwrap_or_default();
        let kind = match hook.kind {
            SaveKind::Full => "full",
            SaveKind::Weights => "weights",
        };
        let mut variables = vec![
            ("TRAINCTL_JOB", self.job.0.clone()),
            ("TRAINCTL_RUN_DIR", self.spec.run_dir.display().to_string()),
            ("TRAINCTL_CHECKPOINT", text(name.map(|name| store.path(name).display().to_string()))),
            ("TRAINCTL_CHECKPOINT_NAME", text(name.map(|name| name.to_string()))),
            ("TRAINCTL_CHECKPOINT_KIND", kind.to_owned()),
            ("TRAINCTL_STEP", text(name.map(|name| name.step.to_string()))),
            ("TRAINCTL_POINTERS", hook.pointers.join(" ")),
        ];
        if hook.which == Which::OnEnd {
            variables.push(("TRAINCTL_STATE", hook.state.to_owned()));
            variables.push(("TRAINCTL_CAUSE", hook.cause.clone()));
        }
        variables
    }

    async fn over<E, F>(&self, child: Running, outcome: Outcome, answer: impl Fn(HookResult) -> F) -> Result<(), E>
    where
        F: Future<Output = Result<(), E>>,
    {
        let seconds = child.started.elapsed().as_secs_f64();
        let hook = child.hook;
        if outcome != Outcome::Code(0) {
            warn!(job = %self.job, hook = hook.label(), ?outcome, log = hook.log(), "command failed");
        }
        self.unpin(&hook).await;
        let log = hook.log();
        answer(HookResult::Ended { hook, outcome, seconds, log }).await
    }

    async fn skip<E, F>(&self, hook: Hook, reason: String, answer: impl Fn(HookResult) -> F) -> Result<(), E>
    where
        F: Future<Output = Result<(), E>>,
    {
        warn!(job = %self.job, hook = hook.label(), reason, "command left out");
        self.unpin(&hook).await;
        answer(HookResult::Skipped { hook, reason }).await
    }

    /// A pin that stays is harmless: it lapses after a day (C9).
    async fn unpin(&self, hook: &Hook) {
        if let (Which::OnCommit, Some(name)) = (hook.which, hook.checkpoint)
            && let Err(error) = self.store_of(hook.kind).unpin(name, pin_of(hook.kind)).await
        {
            warn!(job = %self.job, checkpoint = %name, %error, "the pin of a command stays");
        }
    }
}

#[cfg(test)]
mod tests;
