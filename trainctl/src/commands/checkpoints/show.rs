//! `trainctl checkpoints show`

use clap::Args;
use trainctl_spec::report::SaveKind;
use trainctl_store::checkpoints::{Committed, Pin};

use super::{Pointers, pin_text, pins};
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line, people, size, table};
use crate::run_place::{RunPlace, RunRef};

/// Show a checkpoint's manifest
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl checkpoints show runs/gpt2-124m/LOWEST_VAL")]
pub(super) struct Show {
    /// The checkpoint; without a name the latest one of the run
    #[arg(value_name = "RUN[/NAME]", default_value = ".")]
    from: RunRef,
    #[command(flatten)]
    output: OutputArgs,
}

impl Show {
    pub(super) async fn run(self) -> Outcome {
        let place = RunPlace::open(&self.from.run)?;
        let checkpoint = place.resolve(&self.from).await?.checkpoint;
        let name = checkpoint.name();
        let pointers = match self.from.weights {
            true => Pointers::none(),
            false => Pointers::read(&place.full).await?,
        };
        let pointers = pointers.naming(&name.to_string());
        let mut pins = pins(&place.full).await?;
        pins.retain(|pin| pin.name == name);
        if self.output.is_json() {
            json(&serde_json::json!({
                "manifest": checkpoint.manifest, "manifest_hash": checkpoint.hash, "pointers": pointers, "pins": pins,
            }))?;
        } else {
            self.print(&place, &checkpoint, &pointers, &pins)?;
        }
        Ok(Exit::Ok)
    }

    fn print(&self, place: &RunPlace, checkpoint: &Committed, pointers: &[&str], pins: &[Pin]) -> Result<(), Failure> {
        let manifest = &checkpoint.manifest;
        let mut rows: Vec<(&str, String)> = Vec::new();
        let mut say = |key, value: String| rows.push((key, value));
        say("checkpoint", place.store(self.from.weights).path(manifest.name).display().to_string());
        say(
            "kind",
            match manifest.kind {
                SaveKind::Full => "full: a run can go on from it".to_owned(),
                SaveKind::Weights => "weights only".to_owned(),
            },
        );
        say(
            "steps done",
            format!("{} of {}, in epoch {}", people(manifest.step + 1), people(manifest.max_steps), manifest.epoch),
        );
        say("committed", format!("{} by job {}", manifest.created_at, manifest.job));
        say("made by", format!("generation {}, term {}", manifest.generation, manifest.term));
        let loss = |loss: Option<f64>| loss.map_or_else(|| "not finite".to_owned(), |loss| loss.to_string());
        say("train loss", loss(manifest.metrics.train_loss));
        for (set, value) in &manifest.metrics.val_losses {
            say("val loss", format!("{set} {}", loss(*value)));
        }
        let mesh: Vec<String> = manifest.mesh.iter().map(|(axis, size)| format!("{axis}={size}")).collect();
        say("world size", format!("{} ({})", manifest.world_size, mesh.join(", ")));
        say("samples", format!("{} consumed", people(manifest.consumed_samples)));
        for (first, end) in &manifest.skipped {
            say("skipped", format!("sampler positions {first} to {end}"));
        }
        for (corpus, samples) in &manifest.corpora {
            say("corpus", format!("{} samples of {corpus}", people(*samples)));
        }
        if let Some(from) = &manifest.started_from {
            say("started from", format!("{} (manifest {})", from.name, short(&from.manifest)));
        }
        if let Some(parent) = &manifest.parent {
            let kept =
                [("optimizer", parent.keep.optimizer), ("data", parent.keep.data), ("schedule", parent.keep.schedule)];
            let kept = kept.iter().filter(|(_, kept)| *kept).map(|(what, _)| *what);
            let kept: Vec<&str> = std::iter::once("weights").chain(kept).collect();
            let place = format!("{}/{} (manifest {})", parent.run, parent.name, short(&parent.manifest));
            say("fork of", format!("{place}, with {}", kept.join(", ")));
        }
        if !pointers.is_empty() {
            say("pointers", pointers.join(", "));
        }
        pins.iter().for_each(|pin| say("pinned by", pin_text(pin)));
        say("state hash", manifest.state_hash.clone());
        say("spec hash", manifest.spec_hash.clone());
        say("manifest", checkpoint.hash.clone());
        say("size", format!("{} in {} files", size(manifest.total_bytes()), people(manifest.files.len() as u64)));
        for (key, value) in rows {
            line(&format!("{key:<13} {value}"))?;
        }
        let files: Vec<_> = manifest
            .files
            .iter()
            .map(|file| vec![file.path.clone(), size(file.size), short(&file.blake3).to_owned()])
            .collect();
        line("")?;
        line(&table(&["FILE", "SIZE", "BLAKE3"], &files))
    }
}

/// The first 16 digits of a hash: enough to tell two apart.
fn short(hash: &str) -> &str {
    hash.get(..16).unwrap_or(hash)
}
