//! What comes before a formation: its number, what it starts from, and what is later than that.

use tracing::{info, warn};
use trainctl_spec::Generation;
use trainctl_spec::report::SaveKind;
use trainctl_store::checkpoints::{GENERATION_PIN, ResolveError, ResolveOptions, Selector};
use trainctl_store::io::Io;
use trainctl_store::origin::{FindError, Origin, Parent};
use trainctl_store::{CheckpointStore, Fence, RunDir};

use super::{Error, PrepareRequest, Prepared, RunTask};
use crate::record::StartPoint;
use crate::rows::Rows;

impl RunTask {
    /// Earlier generations read nothing any more (C9). A pin that stays is harmless: it lapses after a day.
    async fn unpin_older(&self, store: &CheckpointStore, generation: Generation) {
        let released = async {
            for pin in store.pins().await? {
                if pin.who != pin_of(generation) && pin.who.starts_with(GENERATION_PIN) {
                    store.unpin(pin.name, &pin.who).await?;
                }
            }
            Ok::<(), trainctl_store::Error>(())
        };
        if let Err(error) = released.await {
            warn!(job = %self.job, %error, "pins of earlier generations stay");
        }
    }

    /// Takes the generation's number, finds its start (the newest commit, else what the run begins with), and retires what is
    /// later (C6, C9). `begun`: the generation before, and the step after which it started.
    pub(super) async fn prepare(
        &self,
        store: &CheckpointStore,
        rows: &mut Rows,
        request: &PrepareRequest,
        begun: Option<(Generation, Option<u64>)>,
    ) -> Result<Prepared, Error> {
        // What a dead generation committed after the last one had retired all that there was is no start: the rows up to it
        // are the last one's, or missing.
        let late = match begun {
            Some((generation, step)) => self.retire_late(store, &store.list().await?, generation, step).await?,
            None => Vec::new(),
        };
        let options = ResolveOptions { best_metric_key: self.best_metric_key(), ..ResolveOptions::default() };
        let selector: Selector = match request.from.as_str() {
            "" => Selector::Latest,
            from => from.parse().map_err(|error| Error::Save(format!("{from}: {error}")))?,
        };
        let found = match store.resolve(selector, &options).await {
            Ok(found) => Some(found),
            // Nothing was ever committed: from scratch. Directories of saves that never ended are the dead generations' own; a
            // submission refuses them (C5), a restart of the same job does not.
            Err(ResolveError::Empty { .. } | ResolveError::NoneCommitted { damaged: false, .. })
                if request.from.is_empty() =>
            {
                None
            }
            Err(error) => return Err(error.into()),
        };
        let begun = if found.is_none() { self.begin().await? } else { None };
        let generation = self.tenure.take_generation().await?;
        let (start, step, notes) = match found {
            None => {
                let (start, notes) = begun.unwrap_or_default();
                (start, None, notes)
            }
            Some(found) => {
                let checkpoint = found.checkpoint;
                let name = checkpoint.name();
                store.pin(name, &pin_of(generation)).await?;
                self.unpin_older(store, generation).await;
                self.release_parent().await;
                let step = checkpoint.manifest.step;
                let start = StartPoint {
                    checkpoint: name.to_string(),
                    manifest_blake3: checkpoint.hash,
                    step: step + 1,
                    phase: checkpoint.manifest.phase,
                    parent: checkpoint.manifest.parent,
                    ..StartPoint::default()
                };
                (start, Some(step), found.notes.iter().map(ToString::to_string).collect())
            }
        };
        let retired = store.retire_after(&*self.tenure, step, generation.0, self.best_metric_key()).await?;
        store.repair_pointers(&*self.tenure, self.best_metric_key()).await?;
        let weights = store.weights();
        let mut retired: Vec<_> = retired.into_iter().map(|gone| (SaveKind::Full, gone)).collect();
        if self.has_weights(&weights).await? {
            let late = weights.retire_after(&*self.tenure, step, generation.0, self.best_metric_key()).await?;
            retired.extend(late.into_iter().map(|gone| (SaveKind::Weights, gone)));
        }
        rows.cut_after(step, generation)?;
        for (_, gone) in &retired {
            info!(job = %self.job, checkpoint = %gone.name, to = ?gone.moved_to, "retired: later than the start");
        }
        // What was never committed did not exist.
        let retired = retired.into_iter().filter(|(_, gone)| gone.moved_to.is_some());
        let late = late.into_iter().map(|name| (SaveKind::Full, name));
        let retired = late.chain(retired.map(|(kind, gone)| (kind, gone.name))).collect();
        Ok(Prepared { generation, start, pointers: self.pointers(store).await, retired, notes })
    }

    /// A run without a commit of its own begins with the checkpoint of another one, if a fork or `checkpoint.restore_from`
    /// says so. From then on its `origin.json` names that checkpoint, and a pin keeps it.
    async fn begin(&self) -> Result<Option<(StartPoint, Vec<String>)>, Error> {
        let run_dir = &self.spec.run_dir;
        let control = Io::new(RunDir::new(run_dir).control());
        let stored = Origin::read(&control).await?;
        let found = Parent::wanted(&self.spec, stored.clone()).await;
        let found = found.map_err(|error| not_found(error.name, error.error))?;
        let Some(found) = found else { return Ok(None) };
        let name = found.origin.text();
        // Pinned first, then looked at: what is there now stays (C9).
        self.tenure.pass().await?;
        let is_pinned = found.origin.pin(run_dir).await?;
        let parent = Parent::of(&found.origin).await.map_err(|error| not_found(name.clone(), error))?;
        let decided = parent.decide(&self.spec, self.spec.step_scheduler.max_steps).await?;
        let beginning = decided.map_err(|reasons| Error::Parent {
            message: format!("this run cannot begin with {name}: {}", reasons.join("; ")),
            name: name.clone(),
        })?;
        self.tenure.pass().await?;
        parent.origin.write(&control).await?;
        if let Some(old) = stored.filter(|old| !old.is_same_checkpoint(&parent.origin)) {
            old.release(run_dir).await?;
        }
        let start = StartPoint {
            checkpoint: parent.origin.name.to_string(),
            manifest_blake3: parent.origin.manifest.clone(),
            step: beginning.start_step,
            store: parent.origin.store.clone(),
            keep: parent.origin.keep,
            phase: beginning.phase,
            parent: Some(parent.origin.parent()),
        };
        let mut notes = found.notes;
        notes.push(format!("begins with {name}, of which it keeps {}", parent.origin.keep));
        if !is_pinned {
            notes.push(parent.origin.not_pinned());
        }
        Ok(Some((start, notes)))
    }

    /// The run has a commit of its own: what it began with need not stay for it. A pin that cannot be removed costs space
    /// only.
    pub(super) async fn release_parent(&self) {
        let released = async {
            let control = Io::new(RunDir::new(&self.spec.run_dir).control());
            match Origin::read(&control).await? {
                Some(origin) => origin.release(&self.spec.run_dir).await,
                None => Ok(()),
            }
        };
        if let Err(error) = released.await {
            warn!(job = %self.job, %error, "the checkpoint that this run began with stays pinned");
        }
    }
}

/// The run cannot begin with the checkpoint of that name. A store that is away says nothing of the checkpoint: it is waited
/// for.
fn not_found(name: String, error: FindError) -> Error {
    match error.of_the_place() {
        Ok(error) => Error::Store(error),
        Err(error) => Error::Parent { message: format!("this run begins with {name}: {error}"), name },
    }
}

/// Who pins a generation's start.
fn pin_of(generation: Generation) -> String {
    format!("{GENERATION_PIN}{generation}")
}

#[cfg(test)]
mod tests {
    use trainctl_spec::state::Cause;

    use super::*;

    fn away() -> trainctl_store::Error {
        let reason = "connection refused".to_owned();
        trainctl_store::Error::Object { action: "list", url: "s3://bucket/run".to_owned(), reason, away: true }
    }

    #[test]
    fn a_store_that_is_away_is_waited_for_and_a_checkpoint_that_is_not_there_ends_the_job() {
        let parent = |error| not_found("/runs/a/LATEST".to_owned(), error).cause("");
        for cause in [
            Error::from(ResolveError::Store(away())).cause(""),
            parent(FindError::Store(away())),
            parent(FindError::Resolve(ResolveError::Store(away()))),
        ] {
            assert!(matches!(cause, Cause::Storage { .. }), "{cause:?}");
        }
        let empty = || ResolveError::Empty { directory: "/runs/a".to_owned() };
        let (name, wanted, found) = ("epoch_0_step_9".to_owned(), "a".to_owned(), "b".to_owned());
        let other = trainctl_store::Error::OtherManifest { name, wanted, found };
        for cause in
            [Error::from(empty()).cause(""), parent(FindError::Resolve(empty())), parent(FindError::Store(other))]
        {
            assert!(matches!(cause, Cause::Checkpoint { .. }), "{cause:?}");
        }
    }
}
