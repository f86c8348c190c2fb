//! `trainctl checkpoints list`

use std::collections::BTreeMap;

use clap::Args;
use serde::Serialize;
use trainctl_spec::report::SaveKind;
use trainctl_store::CheckpointName;
use trainctl_store::checkpoints::{Committed, Listing, Pin};
use trainctl_store::layout::WEIGHTS;
use trainctl_store::manifest::ForkParent;

use super::{Pointers, failure, listing, pins};
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, line, note, people, size, table};
use crate::run_place::RunPlace;

/// List committed checkpoints, weights, pointers, pins, and what is no checkpoint (any more)
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl checkpoints list runs/gpt2-124m --output json")]
pub(super) struct List {
    /// The run
    #[arg(value_name = "RUN", default_value = ".")]
    run: String,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Serialize)]
struct Line {
    name: String,
    state: &'static str,
    kind: SaveKind,
    steps: u64,
    train_loss: Option<f64>,
    val_losses: BTreeMap<String, Option<f64>>,
    bytes: u64,
    created_at: Option<String>,
    pointers: Vec<&'static str>,
    pins: Vec<Pin>,
    parent: Option<ForkParent>,
    fault: Option<String>,
}

impl List {
    pub(super) async fn run(self) -> Outcome {
        let place = RunPlace::open(&self.run)?;
        let pins = pins(&place.full).await?;
        let pointers = Pointers::read(&place.full).await?;
        let mut all = lines(&listing(&place.full).await?, &pointers, &pins, SaveKind::Full);
        all.extend(lines(&listing(&place.store(true)).await?, &Pointers::none(), &pins, SaveKind::Weights));
        for (store, prefix) in [(place.full.clone(), String::new()), (place.store(true), format!("{WEIGHTS}/"))] {
            for (folder, listing) in store.set_aside().await.map_err(failure)? {
                all.extend(abandoned(&format!("{prefix}{folder}"), &listing));
            }
        }
        if self.output.is_json() {
            json(&all)?;
            return Ok(Exit::Ok);
        }
        if all.is_empty() {
            note(&format!("{} holds no checkpoint", self.run));
            return Ok(Exit::Ok);
        }
        let rows: Vec<_> = all.iter().map(Line::cells).collect();
        line(&table(&["CHECKPOINT", "STEPS", "TRAIN", "VALIDATION", "SIZE", "CREATED", ""], &rows))?;
        Ok(Exit::Ok)
    }
}

impl Line {
    fn committed(committed: &Committed, kind: SaveKind) -> Self {
        let manifest = &committed.manifest;
        Self {
            name: shown(committed.name(), kind),
            state: "committed",
            kind: manifest.kind,
            steps: manifest.step + 1,
            train_loss: manifest.metrics.train_loss,
            val_losses: manifest.metrics.val_losses.clone(),
            bytes: manifest.total_bytes(),
            created_at: Some(manifest.created_at.clone()),
            pointers: Vec::new(),
            pins: Vec::new(),
            parent: manifest.parent.clone(),
            fault: None,
        }
    }

    fn broken(name: CheckpointName, kind: SaveKind, state: &'static str, fault: String) -> Self {
        Self {
            name: shown(name, kind),
            state,
            kind,
            steps: name.step + 1,
            train_loss: None,
            val_losses: BTreeMap::new(),
            bytes: 0,
            created_at: None,
            pointers: Vec::new(),
            pins: Vec::new(),
            parent: None,
            fault: Some(fault),
        }
    }

    fn cells(&self) -> Vec<String> {
        let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
        let validation = self.val_losses.iter().map(|(name, value)| match name.as_str() {
            "default" => loss(*value),
            name => format!("{name}={}", loss(*value)),
        });
        let mut notes: Vec<String> = Vec::new();
        if self.state != "committed" {
            notes.push(format!("{}: {}", self.state, self.fault.as_deref().unwrap_or_default()));
        }
        notes.extend(self.pointers.iter().map(|pointer| (*pointer).to_owned()));
        notes.extend(self.parent.iter().map(|parent| format!("fork of {}/{}", parent.run, parent.name)));
        notes.extend(self.pins.iter().map(|pin| format!("pinned by {}", pin.who)));
        vec![
            self.name.clone(),
            people(self.steps),
            loss(self.train_loss),
            validation.collect::<Vec<_>>().join(" "),
            size(self.bytes),
            self.created_at.clone().unwrap_or_default(),
            notes.join(", "),
        ]
    }
}

fn shown(name: CheckpointName, kind: SaveKind) -> String {
    match kind {
        SaveKind::Full => name.to_string(),
        SaveKind::Weights => format!("{WEIGHTS}/{name}"),
    }
}

/// State of what a rollback left behind; trainctl never deletes it.
const SET_ASIDE: &str = "set aside";
const BY_ROLLBACK: &str = "by a start from an earlier step; free to remove";

/// Lines of what a generation set aside in its folder.
fn abandoned(folder: &str, listing: &Listing) -> Vec<Line> {
    let mut lines = lines(listing, &Pointers::none(), &[], SaveKind::Full);
    for line in &mut lines {
        line.name = format!("{folder}/{}", line.name);
        line.state = SET_ASIDE;
        line.fault.get_or_insert_with(|| BY_ROLLBACK.to_owned());
    }
    lines
}

/// One store's lines in step order.
fn lines(listing: &Listing, pointers: &Pointers, pins: &[Pin], kind: SaveKind) -> Vec<Line> {
    let committed = listing.committed.iter().map(|committed| (committed.name(), Line::committed(committed, kind)));
    let damaged = listing
        .damaged
        .iter()
        .map(|damaged| (damaged.name, Line::broken(damaged.name, kind, "damaged", damaged.fault.to_string())));
    let uncommitted = listing
        .uncommitted
        .iter()
        .map(|name| (*name, Line::broken(*name, kind, "uncommitted", "no valid manifest".to_owned())));
    let retired =
        listing.retired.iter().map(|name| (*name, Line::broken(*name, kind, SET_ASIDE, BY_ROLLBACK.to_owned())));
    let mut lines: Vec<(CheckpointName, Line)> = committed.chain(damaged).chain(uncommitted).chain(retired).collect();
    lines.sort_by_key(|(name, _)| *name);
    let marked = |(name, mut line): (CheckpointName, Line)| {
        line.pointers = pointers.naming(&name.to_string());
        line.pins = pins.iter().filter(|pin| pin.name == name).cloned().collect();
        line
    };
    lines.into_iter().map(marked).collect()
}
