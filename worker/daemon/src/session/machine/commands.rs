//! The coordinator's commands: carried out once (W1), never those of an older generation or term (W2, J2), and one trainer after
//! the other (W4).

use trainctl_proto::v1::{CommandResult, Fence, StartTrainer, StopTrainer, TrainerControl};

use super::{Effect, Machine, Outgoing, Trainer};
use crate::state::StoredFence;

impl Machine {
    /// W1: the answer to a command that was seen before; nothing while it is still being carried out.
    fn repeat(&self, id: &str) -> Option<Vec<Effect>> {
        let known = self.results.of(id)?;
        Some(known.iter().map(|result| Effect::Send(Outgoing::Result(result.clone()))).collect())
    }

    pub(super) fn answer(&mut self, id: &str, error: String, stale: bool, current: Option<Fence>) -> Effect {
        let result = CommandResult { command_id: id.to_owned(), error, stale, current, not_started: false };
        self.results.answer(result.clone());
        Effect::Send(Outgoing::Result(result))
    }

    /// A successor of the coordinator that gave the command does not know its id, but waits for the trainer.
    pub(super) fn answer_not_started(&mut self, id: &str, error: String, fence: Fence) -> Effect {
        let result =
            CommandResult { command_id: id.to_owned(), error, stale: false, current: Some(fence), not_started: true };
        self.results.answer(result.clone());
        Effect::Send(Outgoing::Result(result))
    }

    pub(super) fn done(&mut self, id: &str) -> Effect {
        let current = self.trainer.current().map(|(_, fence)| fence.clone());
        self.answer(id, String::new(), false, current)
    }

    fn refuse(&mut self, id: &str, error: String, known: Option<&StoredFence>) -> Effect {
        self.answer(id, error, true, known.map(Fence::from))
    }

    pub(super) fn start(&mut self, start: StartTrainer) -> Vec<Effect> {
        self.repeat(&start.command_id).unwrap_or_else(|| self.admit(start))
    }

    /// Starts, queues or refuses.
    fn admit(&mut self, start: StartTrainer) -> Vec<Effect> {
        let id = start.command_id.clone();
        let Some(assignment) = start.assignment.clone() else {
            return vec![self.answer(&id, "StartTrainer has no assignment".to_owned(), false, None)];
        };
        let fence = assignment.fence.clone().unwrap_or_default();
        let run = match (self.run_of)(&assignment) {
            Ok(run) => run,
            Err(reason) => return vec![self.answer(&id, reason, false, None)],
        };
        let known = self.fences.get(&run).cloned();
        let raises = known.as_ref().is_none_or(|known| fence.generation > known.generation);
        if let Some(known) = &known
            && fence.term < known.term
        {
            let reason = format!("term {} is over: this worker has obeyed term {}", fence.term, known.term);
            return vec![self.refuse(&id, reason, Some(known))];
        }
        if let Some((current_run, current)) = self.trainer.current() {
            let same = current_run == run && current.generation == fence.generation && current.job == fence.job;
            if same && !matches!(self.trainer, Trainer::Stuck { .. }) {
                return vec![self.done(&id)];
            }
            let (current, older) = (current.clone(), !raises);
            if raises && self.trainer.is_ending() {
                // The coordinator may learn of the end before we have cleaned up after it: W4 makes the start wait.
                self.results.pending(&id);
                let before = self.next.replace(start);
                return before.into_iter().map(|before| self.superseded(&before.command_id, &id)).collect();
            }
            let mut reason = format!("the trainer of generation {} has not ended yet", current.generation);
            if let Trainer::Stuck { reason: stuck, .. } = &self.trainer {
                reason = format!("quarantined: {stuck}");
            }
            return vec![self.answer(&id, reason, older, Some(current))];
        }
        if !raises {
            let reason = format!("generation {} is over on this worker", fence.generation);
            return vec![self.refuse(&id, reason, known.as_ref())];
        }
        self.fences.raise(&run, &fence);
        self.results.pending(&id);
        self.trainer = Trainer::Starting { run, fence, rank: assignment.rank, command: id, stop: Vec::new() };
        vec![Effect::Remember, Effect::Start(Box::new(assignment))]
    }

    fn superseded(&mut self, before: &str, by: &str) -> Effect {
        self.answer(before, format!("superseded by {by} before it was carried out"), false, None)
    }

    /// The trainer is gone: the start that waited for that may be carried out.
    pub(super) fn admit_next(&mut self) -> Vec<Effect> {
        self.next.take().map(|start| self.admit(start)).unwrap_or_default()
    }

    pub(super) fn stop(&mut self, stop: StopTrainer) -> Vec<Effect> {
        let id = stop.command_id;
        if let Some(again) = self.repeat(&id) {
            return again;
        }
        let fence = stop.fence.unwrap_or_default();
        let Some((run, current)) = self.trainer.current().map(|(run, fence)| (run.to_owned(), fence.clone())) else {
            // Nothing runs: what was to be stopped is stopped.
            return vec![self.done(&id)];
        };
        let waits = |next: &StartTrainer| {
            let theirs = next.assignment.as_ref().and_then(|assignment| assignment.fence.as_ref());
            theirs.is_some_and(|next| {
                next.job == fence.job && next.generation == fence.generation && next.term <= fence.term
            })
        };
        if let Some(next) = self.next.take_if(|next| waits(next)) {
            // Numbers belong to a run directory: the waiting job's own, not the running one's.
            let theirs = next.assignment.as_ref().and_then(|assignment| (self.run_of)(assignment).ok());
            if let Some(theirs) = theirs {
                self.fences.raise(&theirs, &fence);
            }
            return vec![Effect::Remember, self.superseded(&next.command_id, &id), self.done(&id)];
        }
        if current.job != fence.job || fence.generation > current.generation {
            return vec![self.done(&id)];
        }
        let known = self.fences.get(&run).cloned();
        let old_term = known.as_ref().is_some_and(|known| fence.term < known.term);
        if old_term || fence.generation < current.generation {
            let reason = format!(
                "term {} generation {} is over: generation {} runs here",
                fence.term, fence.generation, current.generation
            );
            return vec![self.refuse(&id, reason, known.as_ref())];
        }
        let mut effects = Vec::new();
        if self.fences.raise(&run, &fence) {
            effects.push(Effect::Remember);
        }
        match &mut self.trainer {
            Trainer::Starting { stop, .. } => stop.push(id.clone()),
            Trainer::Running { stop, .. } => {
                stop.push(id.clone());
                effects.push(Effect::Kill { reason: over(&current) });
            }
            Trainer::Stuck { reason, .. } => {
                let reason = reason.clone();
                effects.push(self.answer(&id, reason, false, Some(current)));
                return effects;
            }
            Trainer::Idle => {}
        }
        self.results.pending(&id);
        effects
    }

    pub(super) fn control(&mut self, control: TrainerControl) -> Vec<Effect> {
        let fence = control.fence.clone().unwrap_or_default();
        let Some((run, current)) = self.trainer.current().map(|(run, fence)| (run.to_owned(), fence.clone())) else {
            tracing::info!(generation = fence.generation, "request for a trainer that is gone: ignored");
            return Vec::new();
        };
        let old_term = self.fences.get(&run).is_some_and(|known| fence.term < known.term);
        if old_term || current.job != fence.job || current.generation != fence.generation {
            tracing::info!(generation = fence.generation, term = fence.term, "stale request for the trainer: ignored");
            return Vec::new();
        }
        let mut effects = Vec::new();
        if self.fences.raise(&run, &fence) {
            effects.push(Effect::Remember);
        }
        effects.push(Effect::Control(control));
        effects
    }

    /// Changes nothing, so it needs no fence on the disk; but it is the current trainer's or nobody's (J3).
    pub(super) fn dump_stacks(&self, fence: Fence) -> Vec<Effect> {
        let is_current = |current: &Fence| current.job == fence.job && current.generation == fence.generation;
        match self.trainer.current() {
            Some((_, current)) if is_current(current) => vec![Effect::DumpStacks],
            _ => Vec::new(),
        }
    }
}

pub(super) fn over(fence: &Fence) -> String {
    format!("generation {} is over: the coordinator stopped this trainer", fence.generation)
}
