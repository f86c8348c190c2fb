//! What comes before a formation: its number, what it starts from, and what is later than that.

use tracing::{info, warn};
use trainctl_spec::Generation;
use trainctl_store::CheckpointStore;
use trainctl_store::checkpoints::{ResolveError, ResolveOptions, Selector};

use super::{Error, PrepareRequest, Prepared, RunTask};
use crate::record::StartPoint;
use crate::rows::Rows;

const PIN_PREFIX: &str = "generation-";

impl RunTask {
    /// Earlier generations read nothing any more (C9). A pin that stays is harmless: it lapses after a day.
    async fn unpin_older(&self, store: &CheckpointStore, generation: Generation) {
        let released = async {
            for pin in store.pins().await? {
                if pin.who != pin_of(generation) && pin.who.starts_with(PIN_PREFIX) {
                    store.unpin(pin.name, &pin.who).await?;
                }
            }
            Ok::<(), trainctl_store::Error>(())
        };
        if let Err(error) = released.await {
            warn!(job = %self.job, %error, "pins of earlier generations stay");
        }
    }

    /// Takes the generation's number, finds its start, and retires what is later (C6, C9).
    pub(super) async fn prepare(
        &self,
        store: &CheckpointStore,
        rows: &mut Rows,
        request: &PrepareRequest,
    ) -> Result<Prepared, Error> {
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
            Err(error) => return Err(Error::Resolve(error)),
        };
        let generation = self.tenure.take_generation().await?;
        let (start, step, notes) = match found {
            None => (StartPoint::default(), None, Vec::new()),
            Some(found) => {
                let checkpoint = found.checkpoint;
                let name = checkpoint.name();
                store.pin(name, &pin_of(generation)).await?;
                self.unpin_older(store, generation).await;
                let step = checkpoint.manifest.step;
                let start = StartPoint {
                    checkpoint: name.to_string(),
                    manifest_blake3: checkpoint.hash,
                    step: step + 1,
                    phase: checkpoint.manifest.phase,
                    ..StartPoint::default()
                };
                (start, Some(step), found.notes.iter().map(ToString::to_string).collect())
            }
        };
        let retired = store.retire_after(&*self.tenure, step, generation.0, self.best_metric_key()).await?;
        store.repair_pointers(&*self.tenure, self.best_metric_key()).await?;
        let weights = store.weights();
        let mut retired = retired;
        if self.has_weights(&weights).await? {
            retired.extend(weights.retire_after(&*self.tenure, step, generation.0, self.best_metric_key()).await?);
        }
        rows.cut_after(step, generation)?;
        for gone in retired {
            info!(job = %self.job, checkpoint = %gone.name, to = ?gone.moved_to, "retired: later than the start");
        }
        Ok(Prepared { generation, start, pointers: self.pointers(store).await, notes })
    }
}

/// Who pins a generation's start.
fn pin_of(generation: Generation) -> String {
    format!("{PIN_PREFIX}{generation}")
}
