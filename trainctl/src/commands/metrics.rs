//! `trainctl metrics`

use std::path::Path;

use clap::Args;
use futures::StreamExt;
use serde_json::{Map, Value};
use trainctl_proto::v1;
use trainctl_spec::report;
use trainctl_store::RunDir;
use trainctl_store::rows::parse_rows;

use super::JobArgs;
use crate::client;
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line};
use crate::view::{TrainRowView, ValidationRowView, train_line, validation_line};

/// Print a job's training and validation rows
///
/// A run directory is read from its files, so that this works without a coordinator.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl metrics runs/gpt2-124m --output json | jq .loss")]
pub(super) struct Metrics {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// One row in both forms; the JSON has its kind first.
struct Row {
    json: Map<String, Value>,
    text: String,
}

impl Row {
    fn new(kind: &str, row: &impl serde::Serialize, text: String) -> Result<Self, Failure> {
        let mut json = Map::from_iter([("kind".to_owned(), Value::from(kind))]);
        match serde_json::to_value(row) {
            Ok(Value::Object(keys)) => json.extend(keys),
            Ok(other) => drop(json.insert("row".to_owned(), other)),
            Err(error) => return Err(Failure::internal(format!("write JSON: {error}"))),
        }
        Ok(Self { json, text })
    }

    fn train(row: v1::TrainRow) -> Result<Self, Failure> {
        let text = train_line(&row, 0);
        Self::new("train", &TrainRowView::from(row), text)
    }

    fn validation(row: v1::ValidationRow) -> Result<Self, Failure> {
        let text = validation_line(&row);
        Self::new("validation", &ValidationRowView::from(row), text)
    }
}

impl Metrics {
    pub(super) async fn run(self) -> Outcome {
        if let Some(run_dir) = self.job.run_dir() {
            for row in read_files(&run_dir)? {
                self.print(&row)?;
            }
            return Ok(Exit::Ok);
        }
        let (mut client, job) = self.job.connect().await?;
        let request = v1::WatchRequest { job, from_start: true, once: true };
        let mut stream = client.watch(request).await.map_err(|status| client::failure(&status))?.into_inner();
        while let Some(event) = stream.next().await {
            match event.map_err(|status| client::failure(&status))?.kind {
                Some(v1::watch_event::Kind::Train(row)) => self.print(&Row::train(row)?)?,
                Some(v1::watch_event::Kind::Validation(row)) => self.print(&Row::validation(row)?)?,
                _ => {}
            }
        }
        Ok(Exit::Ok)
    }

    fn print(&self, row: &Row) -> Result<(), Failure> {
        if self.output.is_json() { json(&row.json) } else { line(&row.text) }
    }
}

/// All rows of a run directory in step order, a step's training row before its validation rows.
fn read_files(run_dir: &Path) -> Result<Vec<Row>, Failure> {
    let run = RunDir::new(run_dir);
    let failure = |error: trainctl_store::Error| Failure::internal(error.to_string());
    let mut rows: Vec<(u64, u8, Row)> = Vec::new();
    for row in parse_rows::<report::TrainRow>(run.training_rows()).map_err(failure)? {
        rows.push((row.step, 0, Row::new("train", &row, train_line(&(&row).into(), 0))?));
    }
    for name in validation_sets(run_dir)? {
        for row in parse_rows::<report::ValidationRow>(run.validation_rows(&name)).map_err(failure)? {
            let text = validation_line(&v1::ValidationRow { name: name.clone(), ..(&row).into() });
            let mut shown = Row::new("validation", &row, text)?;
            // The file's name says it, not the row.
            shown.json.insert("name".to_owned(), name.clone().into());
            rows.push((row.step, 1, shown));
        }
    }
    rows.sort_by_key(|(step, order, _)| (*step, *order));
    Ok(rows.into_iter().map(|(_, _, row)| row).collect())
}

/// Names of the validation sets that have a file.
fn validation_sets(run_dir: &Path) -> Result<Vec<String>, Failure> {
    let name = |entry: std::fs::DirEntry| {
        let file = entry.file_name().into_string().ok()?;
        let stem = file.strip_suffix(".jsonl")?;
        if stem == "validation" {
            Some("default".to_owned())
        } else {
            stem.strip_prefix("validation_").map(str::to_owned)
        }
    };
    let mut names: Vec<String> = std::fs::read_dir(run_dir)?.flatten().filter_map(name).collect();
    names.sort();
    Ok(names)
}
