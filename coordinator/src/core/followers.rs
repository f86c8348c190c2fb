//! What follows a commit and the job's end: Hugging Face directories and a person's commands. Neither is waited for by a
//! step or a commit. A job that reaches its end waits for its last export before it is reported as done, and its run
//! directory is released when its commands are over.

use trainctl_spec::JobId;
use trainctl_spec::job::SaveConsolidated;
use trainctl_spec::report::SaveKind;
use trainctl_spec::state::JobPhase;
use trainctl_store::layout::CheckpointName;

use super::{Core, Effect, Job, Moment};
use crate::events::Entry;
use crate::exports::{self, ExportResult};
use crate::hooks::{Hook, HookRequest, HookResult, Outcome, Which};

/// What of a job's followers is under way.
#[derive(Debug, Default)]
pub struct Followers {
    /// Commands that run or wait, for people.
    pub commands: Vec<String>,
    /// Commands that come when their checkpoint is exported.
    after_export: Vec<Hook>,
    /// The newest checkpoint whose export is over, however it went.
    exported: Option<CheckpointName>,
    /// The newest checkpoint whose export was asked for.
    exporting: Option<CheckpointName>,
    /// All that the job still waits for before it is done is an export.
    pub(super) is_last: bool,
}

impl Followers {
    /// An export is under way.
    pub(super) fn is_exporting(&self) -> bool {
        self.exporting > self.exported
    }
}

impl Core {
    /// A commit stands: exports it where every one is exported, then runs `on_commit`.
    pub(super) fn after_commit(
        &mut self,
        id: &JobId,
        kind: SaveKind,
        checkpoint: &str,
        pointers: Vec<String>,
        out: &mut Vec<Effect>,
    ) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Ok(name) = checkpoint.parse::<CheckpointName>() else { return };
        let exports = kind == SaveKind::Full && exports::wanted(&job.spec) == SaveConsolidated::Every;
        let hook = job.spec.on_commit.is_some().then(|| Hook {
            which: Which::OnCommit,
            kind,
            checkpoint: Some(name),
            pointers,
            state: "",
            cause: String::new(),
        });
        if let Some(hook) = &hook {
            job.followers.commands.push(hook.label());
        }
        if exports {
            job.followers.exporting = Some(name);
            job.followers.after_export.extend(hook);
            out.push(Effect::Export { job: id.clone(), checkpoint: name });
        } else if let Some(hook) = hook {
            out.push(Effect::Hook { job: id.clone(), request: HookRequest::Run(Box::new(hook)) });
        }
    }

    /// Whether a job that has done its work still waits for its last checkpoint's export. Asks for it at the first call.
    pub(super) fn waits_for_export(&mut self, id: &JobId, out: &mut Vec<Effect>) -> bool {
        let Some(job) = self.jobs.get_mut(id) else { return false };
        let newest = job.pointers.0.parse::<CheckpointName>().ok();
        let wanted = newest.filter(|_| exports::wanted(&job.spec) != SaveConsolidated::False);
        let Some(name) = wanted.filter(|name| job.followers.exported < Some(*name)) else { return false };
        job.followers.is_last = true;
        if job.followers.exporting < Some(name) {
            job.followers.exporting = Some(name);
            job.waiting = format!("writes {name}/model/consolidated");
            out.push(Effect::Export { job: id.clone(), checkpoint: name });
            self.publish(id, out);
        }
        true
    }

    /// An export is over. That it failed is said, and fails no job: the checkpoint is as good as before.
    pub(super) fn exported(&mut self, id: &JobId, result: ExportResult, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let name = result.checkpoint;
        job.followers.exported = job.followers.exported.max(Some(name));
        if std::mem::take(&mut job.followers.is_last) {
            job.waiting.clear();
        }
        let due = |hook: &mut Hook| hook.checkpoint <= Some(name);
        let hooks: Vec<Hook> = job.followers.after_export.extract_if(.., due).collect();
        let entry = match &result.outcome {
            Ok(bytes) => Entry::new("consolidated").with("bytes", (*bytes).into()),
            Err(reason) => Entry::new("consolidate_failed").with("error", reason.clone().into()),
        };
        let entry = entry.step(name.step).with("checkpoint", name.to_string().into());
        let entry = entry.with("seconds", result.seconds.into());
        self.event_row(id, entry.with("warnings", result.warnings.into()), at, out);
        for hook in hooks {
            out.push(Effect::Hook { job: id.clone(), request: HookRequest::Run(Box::new(hook)) });
        }
        self.publish(id, out);
    }

    /// The job is over. Answers whether its run directory must be kept until its commands are over too.
    pub(super) fn end_hooks(&mut self, id: &JobId, out: &mut Vec<Effect>) -> bool {
        let Some(job) = self.jobs.get_mut(id) else { return false };
        if job.spec.on_commit.is_none() && job.spec.on_end.is_none() {
            return false;
        }
        for hook in std::mem::take(&mut job.followers.after_export) {
            out.push(Effect::Hook { job: id.clone(), request: HookRequest::Run(Box::new(hook)) });
        }
        if job.spec.on_end.is_some() {
            let hook = Hook {
                which: Which::OnEnd,
                kind: SaveKind::Full,
                checkpoint: job.pointers.0.parse().ok(),
                pointers: Vec::new(),
                state: job.record.phase.name(),
                cause: match &job.record.phase {
                    JobPhase::Failed { cause } => cause.to_string(),
                    _ => String::new(),
                },
            };
            job.followers.commands.push(hook.label());
            out.push(Effect::Hook { job: id.clone(), request: HookRequest::Run(Box::new(hook)) });
        }
        out.push(Effect::Hook { job: id.clone(), request: HookRequest::End });
        true
    }

    /// A command is over, or all of them are.
    pub(super) fn hook_done(&mut self, id: &JobId, result: HookResult, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let entry = match result {
            HookResult::Ended { hook, outcome, seconds, log } => {
                job.forget_command(&hook);
                let entry = entry("hook_ended", &hook);
                let entry = match outcome {
                    Outcome::Code(code) => entry.with("code", code.into()),
                    Outcome::Signal(signal) => entry.with("signal", signal.into()),
                    Outcome::Failed(error) => entry.with("error", error.into()),
                };
                entry.with("seconds", seconds.into()).with("log", log.into())
            }
            HookResult::Skipped { hook, reason } => {
                job.forget_command(&hook);
                entry("hook_skipped", &hook).with("reason", reason.into())
            }
            HookResult::Over => {
                job.followers.commands.clear();
                self.publish(id, out);
                out.push(Effect::Release(id.clone()));
                return;
            }
        };
        self.event_row(id, entry, at, out);
        self.publish(id, out);
    }
}

impl Job {
    fn forget_command(&mut self, hook: &Hook) {
        let label = hook.label();
        if let Some(place) = self.followers.commands.iter().position(|command| *command == label) {
            self.followers.commands.remove(place);
        }
    }
}

fn entry(kind: &'static str, hook: &Hook) -> Entry {
    let entry = Entry::new(kind).with("hook", hook.which.name().into());
    let entry = match hook.checkpoint {
        Some(name) => entry.step(name.step).with("checkpoint", name.to_string().into()),
        None => entry,
    };
    match hook.which {
        Which::OnCommit => entry.with("save", super::saves::name_of(hook.kind).into()),
        Which::OnEnd => entry.with("state", hook.state.into()),
    }
}
