//! `trainctl checkpoints verify`

use clap::Args;
use trainctl_store::checkpoints::{Committed, Listing, ReadPin, Selector, pointer_targets};
use trainctl_store::{CheckpointName, CheckpointStore, Error};

use super::{bar, listing};
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line, note, people, size};
use crate::run_place::{RunPlace, RunRef, failure};

/// Read checkpoints through and compare every byte with its manifest
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl checkpoints verify runs/gpt2-124m LATEST")]
pub(super) struct Verify {
    /// The run, or one checkpoint of it
    #[arg(value_name = "RUN[/NAME]", default_value = ".")]
    run: RunRef,
    /// LATEST, LOWEST_VAL or a checkpoint's name [default: every committed one, and the weights-only ones]
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: Option<Selector>,
    #[command(flatten)]
    output: OutputArgs,
}

/// What was found.
#[derive(Default)]
struct Found {
    /// There is a run directory in which pins can be kept.
    has_pins: bool,
    broken: usize,
    verified: Vec<serde_json::Value>,
}

impl Verify {
    pub(super) async fn run(mut self) -> Outcome {
        if let Some(checkpoint) = self.checkpoint.take()
            && self.run.name.replace(checkpoint).is_some()
        {
            return Err(Failure::usage("name the checkpoint once: RUN/NAME or RUN NAME"));
        }
        let place = RunPlace::open(&self.run.run)?;
        let mut found = Found { has_pins: place.has_pins(), ..Found::default() };
        match self.run.name {
            Some(selector) => self.one(&place, selector, &mut found).await?,
            None if self.run.weights => self.every(&place.store(true), "weights/", &mut found).await?,
            None => {
                self.every(&place.full, "", &mut found).await?;
                self.every(&place.store(true), "weights/", &mut found).await?;
            }
        }
        if found.verified.is_empty() && found.broken == 0 {
            return Err(Failure::usage(format!("{} holds no committed checkpoint", self.run)));
        }
        if self.output.is_json() {
            json(&found.verified)?;
        }
        Ok(if found.broken == 0 { Exit::Ok } else { Exit::JobFailed })
    }

    async fn every(&self, store: &CheckpointStore, prefix: &str, found: &mut Found) -> Result<(), Failure> {
        let listing = listing(store).await?;
        for damaged in &listing.damaged {
            self.damaged(&format!("{prefix}{}", damaged.name), &damaged.fault.to_string(), found)?;
        }
        for committed in &listing.committed {
            if !self.check(store, prefix, committed, found).await? {
                note(&format!("{prefix}{}: retention has removed it meanwhile", committed.name()));
            }
        }
        Ok(())
    }

    async fn one(&self, place: &RunPlace, selector: Selector, found: &mut Found) -> Result<(), Failure> {
        let (store, prefix) = (place.store(self.run.weights), if self.run.weights { "weights/" } else { "" });
        let listing = listing(&store).await?;
        let wanted = meant(selector, &listing, place.best_metric_key());
        let name = wanted.ok_or_else(|| Failure::usage(format!("{} holds no such checkpoint", self.run)))?;
        if let Some(damaged) = listing.damaged.iter().find(|damaged| damaged.name == name) {
            return self.damaged(&format!("{prefix}{name}"), &damaged.fault.to_string(), found);
        }
        let committed = store.read_manifest(name).await.map_err(failure)?;
        match self.check(&store, prefix, &committed, found).await? {
            true => Ok(()),
            false => Err(Failure::usage(format!("{name}: retention has removed it meanwhile"))),
        }
    }

    fn damaged(&self, name: &str, fault: &str, found: &mut Found) -> Result<(), Failure> {
        found.broken += 1;
        note(&format!("{name}: {fault}"));
        found.verified.push(serde_json::json!({ "name": name, "files": 0, "bytes": 0, "faults": [fault] }));
        if self.output.is_json() { Ok(()) } else { line(&format!("{name}  DAMAGED  its manifest")) }
    }

    /// `false` if it is there no more.
    async fn check(
        &self,
        store: &CheckpointStore,
        prefix: &str,
        committed: &Committed,
        found: &mut Found,
    ) -> Result<bool, Failure> {
        let name = committed.name();
        let shown = format!("{prefix}{name}");
        let bar = bar(committed.manifest.total_bytes(), &shown);
        let pin = match found.has_pins {
            true => Some(store.pin_to_read(name, "verify").await.map_err(failure)?),
            false => None,
        };
        let result = store.verify(name, &|done, _| bar.set_position(done)).await;
        bar.finish_and_clear();
        if let Some(warning) = ReadPin::release_all(pin).await {
            note(&warning);
        }
        let result = match result {
            Err(Error::NotCommitted { .. }) => return Ok(false),
            other => other.map_err(failure)?,
        };
        result.faults.iter().for_each(|fault| note(&format!("{shown}/{fault}")));
        found.broken += usize::from(!result.faults.is_empty());
        let faults: Vec<String> = result.faults.iter().map(ToString::to_string).collect();
        let verdict = if faults.is_empty() { "ok" } else { "DAMAGED" };
        found.verified.push(serde_json::json!({
            "name": shown, "files": result.files, "bytes": result.bytes, "state_hash": committed.manifest.state_hash,
            "faults": faults,
        }));
        if self.output.is_json() {
            return Ok(true);
        }
        line(&format!("{shown}  {verdict}  {} files, {}", people(result.files as u64), size(result.bytes)))?;
        Ok(true)
    }
}

/// A damaged manifest of a higher step is what LATEST meant before it was damaged.
fn meant(selector: Selector, listing: &Listing, best_metric_key: &str) -> Option<CheckpointName> {
    let targets = pointer_targets(&listing.summaries(), best_metric_key);
    match selector {
        Selector::Name(name) => Some(name),
        Selector::Latest => targets.latest.max(listing.damaged.last().map(|damaged| damaged.name)),
        Selector::LowestVal => targets.lowest_val,
    }
}
