//! A complete save becomes a checkpoint.

use tokio::time::Instant;
use tracing::warn;
use trainctl_spec::job::SaveConsolidated;
use trainctl_spec::report::SaveKind;
use trainctl_store::layout::CheckpointName;
use trainctl_store::manifest::{Manifest, Metrics, Parent};
use trainctl_store::{CheckpointStore, state_hash};

use super::{Changes, CommitInfo, CommitRequest, Error, RunTask, moves};
use crate::{exports, hooks};

impl RunTask {
    /// C2, C3: manifest, pointers, retention, in this order.
    pub(super) async fn commit(&self, store: &CheckpointStore, request: &CommitRequest) -> Result<CommitInfo, Error> {
        let first = request.reports.values().next().ok_or_else(|| Error::Save("no rank has reported".to_owned()))?;
        let name: CheckpointName =
            first.checkpoint.parse().map_err(|error| Error::Save(format!("{}: {error}", first.checkpoint)))?;
        let tensors = request.reports.values().flat_map(|report| report.tensors.iter());
        let state_hash = state_hash::combine(tensors).map_err(|fault| Error::Save(fault.to_string()))?;
        let started_from = match request.started_from.checkpoint.parse() {
            Ok(name) => Some(Parent { name, manifest: request.started_from.manifest_blake3.clone() }),
            Err(_) => None,
        };
        let rank0 = request.reports.get(&0);
        let draft = Manifest {
            format: 0,
            name,
            job: self.job.0.clone(),
            generation: request.generation.0,
            term: self.tenure.term().0,
            step: request.step,
            epoch: name.epoch,
            consumed_samples: first.consumed_samples,
            world_size: request.world_size,
            mesh: vec![("dp_replicate".to_owned(), request.world_size)],
            skipped: Vec::new(),
            metrics: rank0.map(|r| Metrics::new(r.train_loss, &r.val_losses)).unwrap_or_default(),
            state_hash,
            spec_hash: String::new(),
            max_steps: self.spec.step_scheduler.max_steps,
            until_step: request.until_step,
            started_from,
            kind: first.kind,
            parent: request.started_from.parent.clone(),
            phase: request.started_from.phase.clone(),
            corpora: rank0.map(|report| report.corpora.clone()).unwrap_or_default(),
            created_at: String::new(),
            files: request.reports.values().flat_map(|report| report.files.iter().cloned()).collect(),
        };
        let bytes = draft.files.iter().map(|file| file.size).sum();
        let started = Instant::now();
        let outcome = store.commit(&*self.tenure, draft, &self.spec_yaml).await?;
        let state_hash = outcome.committed().manifest.state_hash.clone();
        if request.kind == SaveKind::Full && !request.started_from.store.is_empty() {
            self.release_parent().await;
        }
        self.pin_for_followers(store, request.kind, name).await;
        // One look for pointers and for retention, which takes its second one itself (C2).
        let mut listing = store.list().await?;
        let retired = self.retire_late(store, &listing, request.generation, request.started_from.own_step()).await?;
        if !retired.is_empty() {
            listing = store.list().await?;
        }
        let retention = self.retention(request.kind);
        let moved = store.point(&*self.tenure, &listing, self.best_metric_key()).await?;
        let mut changes = Changes { retired, moves: moves(moved), ..Changes::default() };
        let commit_seconds = started.elapsed().as_secs_f64();
        match store.prune_seen(&*self.tenure, &retention, &listing).await {
            Ok(report) => changes.pruned(&report),
            Err(error @ trainctl_store::Error::Superseded { .. }) => return Err(error.into()),
            // The commit stands; what could not be removed is removed after the next one.
            Err(error) => warn!(job = %self.job, %error, "retention"),
        }
        let target = |to: Option<CheckpointName>| to.map(|name| name.to_string()).unwrap_or_default();
        let targets = store.targets(&listing, self.best_metric_key());
        let pointers = (target(targets.latest), target(targets.lowest_val));
        let checkpoint = name.to_string();
        Ok(CommitInfo { checkpoint, state_hash, changes, pointers, bytes, commit_seconds })
    }

    /// Before retention can look at it. A pin that can not be written costs a command or an export its checkpoint at worst,
    /// and must not cost the run a commit.
    async fn pin_for_followers(&self, store: &CheckpointStore, kind: SaveKind, name: CheckpointName) {
        let is_exported = kind == SaveKind::Full && exports::wanted(&self.spec) == SaveConsolidated::Every;
        let export = is_exported.then_some(exports::PIN);
        let hook = self.spec.on_commit.is_some().then(|| hooks::pin_of(kind));
        for who in export.into_iter().chain(hook) {
            if let Err(error) = store.pin(name, who).await {
                warn!(job = %self.job, checkpoint = %name, who, %error, "not pinned");
            }
        }
    }
}
