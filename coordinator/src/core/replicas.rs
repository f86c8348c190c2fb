//! What follows when the replicas of a state differ: the generation ends, nothing of it is committed any more, and the run goes
//! back to its newest commit ([`crate::decide::replicas`] says why that one).

use tracing::error;
use trainctl_spec::state::{Cause, JobPhase, StopReason, Suspect};
use trainctl_spec::{JobId, Rank};

use super::saves::{SaveKey, name_of};
use super::{Core, Effect, Job, Moment};
use crate::decide::replicas::Divergence;
use crate::events::Entry;

impl Job {
    /// The zero-based step from which on the current generation's state is known to be corrupt. A successor reads it from the
    /// journaled phase.
    pub(super) fn corrupt_from(&self) -> Option<u64> {
        let journaled = match &self.record.phase {
            JobPhase::Stopping { why: StopReason::Restart { cause: Cause::Corrupt { step, .. } }, .. } => Some(*step),
            _ => None,
        };
        self.live.as_ref().and_then(|live| live.corrupt_from).or(journaled)
    }
}

impl Core {
    /// A rank and where it runs.
    pub(super) fn suspect(&self, id: &JobId, rank: u32) -> Suspect {
        let live = self.jobs.get(id).and_then(|job| job.live.as_ref()?.ranks.get(rank as usize));
        let worker = live.map(|rank| rank.worker.clone()).unwrap_or_default();
        let host = self.workers.get(&worker).map(|worker| worker.host.clone()).unwrap_or_default();
        Suspect { rank: Rank(rank), worker, host }
    }

    /// A save has shown that the ranks do not hold the same state.
    pub(super) fn replicas_differ(
        &mut self,
        id: &JobId,
        key @ (kind, step): SaveKey,
        divergence: &Divergence,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let suspects = divergence.suspects.iter().map(|rank| self.suspect(id, *rank)).collect::<Vec<_>>();
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = job.live.as_mut() else { return };
        let held: Vec<String> = live.saves.get(&key).map(|save| save.held()).unwrap_or_default();
        live.corrupt_from = Some(live.corrupt_from.map_or(step, |from| from.min(step)));
        // A run whose last save this was has not done its work.
        live.gave_up = live.gave_up.take().max(Some((step, "the replicas differ".to_owned())));
        let cause =
            Cause::Corrupt { step, replicas: divergence.replicas, suspects: suspects.clone(), named: divergence.named };
        error!(job = %id, step, %cause, "replicas differ");
        job.record.avoided.extend(suspects.iter().map(|suspect| suspect.worker.clone()));
        self.suspects.extend(suspects.iter().map(|suspect| suspect.worker.clone()));
        let of = |what: fn(&Suspect) -> serde_json::Value| suspects.iter().map(what).collect::<Vec<_>>().into();
        let entry = Entry::new("replicas_differ").step(step).with("save", name_of(kind).into());
        let entry = entry.with("replicas", divergence.replicas.into()).with("named", divergence.named.into());
        let entry = entry.with("ranks", of(|suspect| suspect.rank.0.into()));
        let entry = entry.with("workers", of(|suspect| suspect.worker.clone().into()));
        let entry = entry.with("hosts", of(|suspect| suspect.host.clone().into()));
        self.event_row(id, entry.with("held", held.into()), at, out);
        self.stop_generation(id, cause, at, out);
        self.drop_corrupt(id, out);
    }

    /// Forgets the saves of a corrupt state. Only once the end of the generation is journaled: a successor must not meet a later
    /// save without this one.
    pub(super) fn drop_corrupt(&mut self, id: &JobId, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(from) = job.corrupt_from() else { return };
        let Some(live) = job.live.as_mut() else { return };
        let dropped = live.saves.extract_if(.., |(_, step), save| *step >= from && !save.is_committing());
        let tokens = dropped.flat_map(|(_, save)| save.tokens).collect();
        self.acknowledge(tokens, out);
    }
}
