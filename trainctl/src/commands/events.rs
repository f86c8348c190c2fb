//! `trainctl events`

use clap::Args;
use futures::StreamExt;
use serde_json::Value;
use trainctl_proto::v1;
use trainctl_store::RunDir;
use trainctl_store::rows::read_rows;

use super::JobArgs;
use crate::client;
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, line};

/// Print what happened to a job: generations, exits, checkpoints, pointers
///
/// A run directory is read from its files, so that this works without a coordinator.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  trainctl events runs/gpt2-124m --output json | jq 'select(.kind == \"trainer_exited\")'"
)]
pub(super) struct Events {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Events {
    pub(super) async fn run(self) -> Outcome {
        rows(&self.job).await?.iter().try_for_each(|row| self.print(row))?;
        Ok(Exit::Ok)
    }

    fn print(&self, row: &str) -> Result<(), Failure> {
        if self.output.is_json() { line(row.trim_end()) } else { line(&readable(row)) }
    }
}

/// The lines of a job's `events.jsonl`: of a run directory all that it has, whichever jobs they are of.
pub(super) async fn rows(job: &JobArgs) -> Result<Vec<String>, Failure> {
    if let Some(run_dir) = job.run_dir() {
        let rows = read_rows(RunDir::new(run_dir).events(), 0);
        return Ok(rows.map_err(|error| Failure::internal(error.to_string()))?.lines);
    }
    let (mut client, job) = job.connect().await?;
    let request = v1::WatchRequest { job, from_start: true, once: true };
    let mut stream = client.watch(request).await.map_err(|status| client::failure(&status))?.into_inner();
    let mut rows = Vec::new();
    while let Some(event) = stream.next().await {
        if let Some(v1::watch_event::Kind::EventJson(row)) = event.map_err(|status| client::failure(&status))?.kind {
            rows.push(row);
        }
    }
    Ok(rows)
}

/// `2026-11-29T22:31:14.123Z  g7  trainer_exited  rank=1 step=12 class=…`
fn readable(row: &str) -> String {
    let Ok(Value::Object(event)) = serde_json::from_str(row) else { return row.to_owned() };
    let text = |key: &str| event.get(key).map(plain).unwrap_or_default();
    // Lists such as the end of stderr are for programs and for `trainctl logs`, verdicts for `trainctl explain`.
    let is_shown = |key: &str, value: &Value| {
        !matches!(key, "ts" | "kind" | "job" | "generation")
            && !value.is_null()
            && !value.is_array()
            && !value.is_object()
    };
    let rest = event.iter().filter(|(key, value)| is_shown(key, value));
    let rest: Vec<String> = rest.map(|(key, value)| format!("{key}={}", plain(value))).collect();
    format!("{}  g{:<4} {:<22} {}", text("ts"), text("generation"), text("kind"), rest.join(" ")).trim_end().to_owned()
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_reads_from_left_to_right_and_a_strange_one_stays() {
        let row = r#"{"ts":"T","kind":"trainer_exited","job":"a","generation":7,"rank":1,"class":"lost","step":null,"stderr_tail":["x"],"verdict":{"kind":"preempted"}}"#;
        assert_eq!(readable(row), "T  g7    trainer_exited         rank=1 class=lost");
        assert_eq!(readable("torn {"), "torn {");
    }
}
