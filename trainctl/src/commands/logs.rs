//! `trainctl logs`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use futures::StreamExt;
use serde_json::json;
use trainctl_proto::v1;
use trainctl_store::RunDir;

use super::JobArgs;
use crate::client;
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, bytes, json as print_json, note};

/// Show the trainers' logs of the newest generation
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl logs gpt2-124m-7f3a1b2c --rank 0 --follow")]
pub(super) struct Logs {
    #[command(flatten)]
    job: JobArgs,
    /// Only this rank
    #[arg(long, value_name = "R")]
    rank: Option<u32>,
    /// Go on until the job ends
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl Logs {
    pub(super) async fn run(self) -> Outcome {
        let mut printer = Printer::new(self.rank.is_none(), self.output.is_json());
        if let (Some(run_dir), false) = (self.job.run_dir(), self.follow) {
            self.print_files(&run_dir, &mut printer)?;
            printer.finish()?;
            return Ok(Exit::Ok);
        }
        let (mut client, job) = self.job.connect().await?;
        let request = v1::LogsRequest { job, rank: self.rank, follow: self.follow };
        let mut stream = client.logs(request).await.map_err(|status| client::failure(&status))?.into_inner();
        loop {
            let chunk = tokio::select! {
                chunk = stream.next() => chunk,
                interrupted = tokio::signal::ctrl_c() => {
                    interrupted?;
                    None
                }
            };
            let Some(chunk) = chunk else { break };
            let chunk = chunk.map_err(|status| client::failure(&status))?;
            printer.add(chunk.rank, chunk.generation, &chunk.data)?;
        }
        printer.finish()?;
        Ok(Exit::Ok)
    }

    /// The files themselves: a run's logs outlive its coordinator.
    fn print_files(&self, run_dir: &Path, printer: &mut Printer) -> Result<(), Failure> {
        let Some(generation) = newest_generation(run_dir)? else {
            note(&format!("{} has no logs: no trainer was started yet", run_dir.display()));
            return Ok(());
        };
        let dir = RunDir::new(run_dir).generation_logs(generation);
        let mut found = false;
        for (rank, path) in rank_logs(&dir)? {
            if self.rank.is_none_or(|wanted| wanted == rank) {
                printer.add(rank, generation, &std::fs::read(path)?)?;
                found = true;
            }
        }
        match self.rank {
            Some(rank) if !found => Err(Failure::usage(format!("{} has no log of rank {rank}", dir.display()))),
            _ => Ok(()),
        }
    }
}

/// Newest generation with a folder `logs/g0007`.
fn newest_generation(run_dir: &Path) -> Result<Option<u64>, Failure> {
    let entries = match std::fs::read_dir(run_dir.join("logs")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix('g')?.parse().ok();
    Ok(entries.flatten().filter_map(number).max())
}

/// `rank-00003.log` files in rank order.
fn rank_logs(dir: &Path) -> Result<BTreeMap<u32, PathBuf>, Failure> {
    let rank = |path: &Path| path.file_name()?.to_str()?.strip_prefix("rank-")?.strip_suffix(".log")?.parse().ok();
    let paths = std::fs::read_dir(dir)?.flatten().map(|entry| entry.path());
    Ok(paths.filter_map(|path| Some((rank(&path)?, path))).collect())
}

/// Prints whole lines, each with its rank when there may be several.
struct Printer {
    prefixed: bool,
    json: bool,
    /// Unfinished line and its generation, by rank.
    partial: BTreeMap<u32, (u64, Vec<u8>)>,
}

impl Printer {
    fn new(prefixed: bool, json: bool) -> Self {
        Self { prefixed, json, partial: BTreeMap::new() }
    }

    fn add(&mut self, rank: u32, generation: u64, data: &[u8]) -> Result<(), Failure> {
        if !self.prefixed && !self.json {
            return bytes(data);
        }
        let (_, mut text) = self.partial.remove(&rank).unwrap_or_default();
        text.extend_from_slice(data);
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let rest = text.split_off(whole);
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            self.line(rank, generation, line)?;
        }
        if !rest.is_empty() {
            self.partial.insert(rank, (generation, rest));
        }
        Ok(())
    }

    fn line(&self, rank: u32, generation: u64, line: &[u8]) -> Result<(), Failure> {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end_matches('\n');
        if self.json {
            print_json(&json!({ "rank": rank, "generation": generation, "line": text }))
        } else {
            bytes(format!("[rank {rank}] {text}\n").as_bytes())
        }
    }

    fn finish(&mut self) -> Result<(), Failure> {
        for (rank, (generation, text)) in std::mem::take(&mut self.partial) {
            self.line(rank, generation, &text)?;
        }
        Ok(())
    }
}
