//! `trainctl checkpoints`

use std::path::PathBuf;

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use trainctl_store::CheckpointStore;
use trainctl_store::checkpoints::{Committed, Listing};
use trainctl_store::layout::{LATEST, LOWEST_VAL};

use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line, note, people, size, table};

/// List or verify the checkpoints of a run directory; needs no coordinator
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  trainctl checkpoints list runs/gpt2-124m\n  trainctl checkpoints verify runs/gpt2-124m LATEST"
)]
pub(super) struct Checkpoints {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List committed checkpoints, pointers, and what is no checkpoint
    #[command(after_help = "Example:\n  trainctl checkpoints list runs/gpt2-124m --output json")]
    List(List),
    /// Read checkpoints through and compare every byte with its manifest
    #[command(after_help = "Example:\n  trainctl checkpoints verify runs/gpt2-124m LATEST")]
    Verify(Verify),
}

#[derive(Debug, Args)]
struct List {
    /// The run
    #[arg(value_name = "RUN_DIR", default_value = ".")]
    run_dir: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct Verify {
    /// The run
    #[arg(value_name = "RUN_DIR", default_value = ".")]
    run_dir: PathBuf,
    /// LATEST, LOWEST_VAL or a checkpoint's name [default: every committed one]
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

impl Checkpoints {
    pub(super) async fn run(self) -> Outcome {
        match self.verb {
            Verb::List(list) => list.run().await,
            Verb::Verify(verify) => verify.run().await,
        }
    }
}

#[derive(Debug, Serialize)]
struct Line {
    name: String,
    state: &'static str,
    steps: u64,
    train_loss: Option<f64>,
    val_losses: std::collections::BTreeMap<String, Option<f64>>,
    bytes: u64,
    created_at: Option<String>,
    pointers: Vec<&'static str>,
    fault: Option<String>,
}

impl List {
    async fn run(self) -> Outcome {
        let store = open(&self.run_dir)?;
        let listing = listing(&store).await?;
        let pointers = Pointers::read(&store).await?;
        let lines = lines(&listing, &pointers);
        if self.output.is_json() {
            json(&lines)?;
            return Ok(Exit::Ok);
        }
        if lines.is_empty() {
            note(&format!("{} holds no checkpoint", self.run_dir.display()));
            return Ok(Exit::Ok);
        }
        let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
        let row = |line: &Line| {
            let validation = line.val_losses.iter().map(|(name, value)| match name.as_str() {
                "default" => loss(*value),
                name => format!("{name}={}", loss(*value)),
            });
            let note = line.fault.clone().unwrap_or_else(|| line.pointers.join(" "));
            vec![
                line.name.clone(),
                people(line.steps),
                loss(line.train_loss),
                validation.collect::<Vec<_>>().join(" "),
                size(line.bytes),
                line.created_at.clone().unwrap_or_default(),
                if line.state == "committed" { note } else { format!("{}: {note}", line.state) },
            ]
        };
        let rows: Vec<_> = lines.iter().map(row).collect();
        line(&table(&["CHECKPOINT", "STEPS", "TRAIN", "VALIDATION", "SIZE", "CREATED", ""], &rows))?;
        Ok(Exit::Ok)
    }
}

fn lines(listing: &Listing, pointers: &Pointers) -> Vec<Line> {
    let mut lines: Vec<(u64, Line)> = Vec::new();
    for committed in &listing.committed {
        let manifest = &committed.manifest;
        let name = committed.name().to_string();
        lines.push((
            manifest.step,
            Line {
                state: "committed",
                steps: manifest.step + 1,
                train_loss: manifest.metrics.train_loss,
                val_losses: manifest.metrics.val_losses.clone(),
                bytes: manifest.total_bytes(),
                created_at: Some(manifest.created_at.clone()),
                pointers: pointers.naming(&name),
                fault: None,
                name,
            },
        ));
    }
    let broken = |name: trainctl_store::CheckpointName, state, fault: String| {
        let steps = name.step + 1;
        let (name, pointers) = (name.to_string(), pointers.naming(&name.to_string()));
        let val_losses = std::collections::BTreeMap::new();
        let line = Line {
            name,
            state,
            steps,
            train_loss: None,
            val_losses,
            bytes: 0,
            created_at: None,
            pointers,
            fault: Some(fault),
        };
        (steps - 1, line)
    };
    let damaged = listing.damaged.iter().map(|damaged| broken(damaged.name, "damaged", damaged.fault.to_string()));
    let uncommitted =
        listing.uncommitted.iter().map(|name| broken(*name, "uncommitted", "no valid manifest".to_owned()));
    lines.extend(damaged.chain(uncommitted));
    lines.sort_by_key(|(step, _)| *step);
    lines.into_iter().map(|(_, line)| line).collect()
}

impl Verify {
    async fn run(self) -> Outcome {
        let store = open(&self.run_dir)?;
        let listing = listing(&store).await?;
        let wanted = self.wanted(&store, &listing).await?;
        if wanted.is_empty() {
            return Err(Failure::usage(format!("{} holds no committed checkpoint", self.run_dir.display())));
        }
        let mut broken = listing.damaged.len();
        for damaged in listing.damaged.iter().filter(|_| self.checkpoint.is_none()) {
            note(&format!("{}: {}", damaged.name, damaged.fault));
        }
        if self.checkpoint.is_some() {
            broken = 0;
        }
        let mut verified = Vec::new();
        for committed in &wanted {
            let name = committed.name();
            let bar = bar(committed.manifest.total_bytes(), &name.to_string());
            let progress = |done, _| bar.set_position(done);
            let result = store.verify(name, &progress).await.map_err(|error| Failure::internal(error.to_string()))?;
            bar.finish_and_clear();
            result.faults.iter().for_each(|fault| note(&format!("{name}/{fault}")));
            broken += usize::from(!result.faults.is_empty());
            let faults: Vec<String> = result.faults.iter().map(ToString::to_string).collect();
            if self.output.is_json() {
                verified.push(serde_json::json!({
                    "name": name.to_string(), "files": result.files, "bytes": result.bytes,
                    "state_hash": committed.manifest.state_hash, "faults": faults,
                }));
            } else {
                let verdict = if faults.is_empty() { "ok" } else { "DAMAGED" };
                line(&format!("{name}  {verdict}  {} files, {}", people(result.files as u64), size(result.bytes)))?;
            }
        }
        if self.output.is_json() {
            json(&verified)?;
        }
        Ok(if broken == 0 { Exit::Ok } else { Exit::JobFailed })
    }

    async fn wanted(&self, store: &CheckpointStore, listing: &Listing) -> Result<Vec<Committed>, Failure> {
        let Some(text) = &self.checkpoint else { return Ok(listing.committed.clone()) };
        let pointed = match text.as_str() {
            pointer @ (LATEST | LOWEST_VAL) => {
                let target =
                    store.io().read_link(pointer).await.map_err(|error| Failure::internal(error.to_string()))?;
                target.ok_or_else(|| Failure::usage(format!("{} has no {pointer}", self.run_dir.display())))?
            }
            name => name.to_owned(),
        };
        let name = pointed.parse().map_err(|error| Failure::usage(format!("{text}: {error}")))?;
        let committed = store
            .read_manifest(name)
            .await
            .map_err(|error| Failure { exit: Exit::JobFailed, message: error.to_string() })?;
        Ok(vec![committed])
    }
}

/// Where the pointers point now.
struct Pointers {
    latest: Option<String>,
    lowest_val: Option<String>,
}

impl Pointers {
    async fn read(store: &CheckpointStore) -> Result<Self, Failure> {
        let failure = |error: trainctl_store::Error| Failure::internal(error.to_string());
        let latest = store.io().read_link(LATEST).await.map_err(failure)?;
        let lowest_val = store.io().read_link(LOWEST_VAL).await.map_err(failure)?;
        Ok(Self { latest, lowest_val })
    }

    fn naming(&self, name: &str) -> Vec<&'static str> {
        let both = [(LATEST, &self.latest), (LOWEST_VAL, &self.lowest_val)];
        both.into_iter().filter(|(_, target)| target.as_deref() == Some(name)).map(|(pointer, _)| pointer).collect()
    }
}

fn open(run_dir: &PathBuf) -> Result<CheckpointStore, Failure> {
    if run_dir.is_dir() {
        Ok(CheckpointStore::open(run_dir))
    } else {
        Err(Failure::usage(format!("{} is no directory; name a run directory", run_dir.display())))
    }
}

async fn listing(store: &CheckpointStore) -> Result<Listing, Failure> {
    store.list().await.map_err(|error| Failure::internal(error.to_string()))
}

/// Hidden by indicatif when stderr is not a terminal.
fn bar(bytes: u64, name: &str) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:24} {bytes}/{total_bytes}  ETA {eta}") {
        bar.set_style(style);
    }
    bar.set_message(name.to_owned());
    bar
}
