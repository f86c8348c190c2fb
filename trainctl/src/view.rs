//! Jobs and rows as `--output json` shows them and as people read them. The JSON names are a contract.

use serde::Serialize;
use trainctl_proto::v1;

use crate::output::{moment, people, size, steps};

/// A job, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct JobView {
    id: String,
    name: String,
    run_dir: String,
    phase: &'static str,
    reason: String,
    generation: u64,
    term: u64,
    steps_done: u64,
    max_steps: u64,
    until_step: Option<u64>,
    world_size: u32,
    restarts: u32,
    max_restarts: u32,
    submitted_at_ms: u64,
    finished_at_ms: Option<u64>,
    latest: Option<String>,
    lowest_val: Option<String>,
    started_from: Option<String>,
    first_row: Option<TrainRowView>,
    last_row: Option<TrainRowView>,
    last_validation: Option<ValidationRowView>,
    last_save: Option<SaveView>,
    commands: Vec<String>,
    ranks: Vec<RankView>,
}

/// What the last save cost, as JSON.
#[derive(Debug, Serialize)]
struct SaveView {
    checkpoint: String,
    save: &'static str,
    step: u64,
    bytes: u64,
    stall_seconds: f64,
    write_seconds: f64,
    commit_seconds: f64,
}

impl From<v1::SaveSummary> for SaveView {
    fn from(save: v1::SaveSummary) -> Self {
        Self {
            save: match save.kind() {
                v1::SaveKind::Weights => "weights",
                v1::SaveKind::Full | v1::SaveKind::Unspecified => "full",
            },
            checkpoint: save.checkpoint,
            step: save.step,
            bytes: save.bytes,
            stall_seconds: save.stall_seconds,
            write_seconds: save.write_seconds,
            commit_seconds: save.commit_seconds,
        }
    }
}

/// The last save in one line: `epoch_0_step_999, 1.0 GiB; training stood 0.21 s, written in 1.9 s, committed in 0.02 s`.
pub(crate) fn save_line(save: &v1::SaveSummary) -> String {
    let kind = if save.kind() == v1::SaveKind::Weights { " (weights)" } else { "" };
    format!(
        "{}{kind}, {}; training stood {:.2} s, written in {:.2} s, committed in {:.2} s",
        save.checkpoint,
        size(save.bytes),
        save.stall_seconds,
        save.write_seconds,
        save.commit_seconds
    )
}

#[derive(Debug, Serialize)]
struct RankView {
    rank: u32,
    worker: String,
    host: String,
    pid: u32,
    phase: String,
    step: Option<u64>,
    connected: bool,
    /// Median of its own time per step.
    compute_seconds: Option<f64>,
    straggler_score: Option<f64>,
    straggler: bool,
}

/// A row of training.jsonl, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct TrainRowView {
    step: u64,
    epoch: u64,
    timestamp: String,
    loss: f64,
    grad_norm: f64,
    lr: f64,
    mem: f64,
    tps: f64,
    tps_per_gpu: f64,
    mfu: Option<f64>,
    num_tokens_per_step: u64,
    num_label_tokens: u64,
    generation: u64,
}

/// A row of validation.jsonl, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct ValidationRowView {
    name: String,
    step: u64,
    epoch: u64,
    timestamp: String,
    val_loss: f64,
    lr: f64,
    num_label_tokens: u64,
    mem: f64,
    generation: u64,
}

fn some(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

impl From<v1::Job> for JobView {
    fn from(job: v1::Job) -> Self {
        Self {
            phase: phase_name(job.phase()),
            id: job.id,
            name: job.name,
            run_dir: job.run_dir,
            reason: job.reason,
            generation: job.generation,
            term: job.term,
            steps_done: job.steps_done,
            max_steps: job.max_steps,
            until_step: job.until_step,
            world_size: job.world_size,
            restarts: job.restarts,
            max_restarts: job.max_restarts,
            submitted_at_ms: job.submitted_at_ms,
            finished_at_ms: job.finished_at_ms,
            latest: some(job.latest),
            lowest_val: some(job.lowest_val),
            started_from: some(job.started_from),
            first_row: job.first_row.map(Into::into),
            last_row: job.last_row.map(Into::into),
            last_validation: job.last_validation.map(Into::into),
            last_save: job.last_save.map(Into::into),
            commands: job.commands,
            ranks: job.ranks.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<v1::RankStatus> for RankView {
    fn from(rank: v1::RankStatus) -> Self {
        Self {
            phase: rank_phase(rank.phase()).to_owned(),
            rank: rank.rank,
            worker: rank.worker,
            host: rank.host,
            pid: rank.pid,
            step: rank.step,
            connected: rank.connected,
            compute_seconds: rank.compute_seconds,
            straggler_score: rank.straggler_score,
            straggler: rank.straggler,
        }
    }
}

impl From<v1::TrainRow> for TrainRowView {
    fn from(row: v1::TrainRow) -> Self {
        Self {
            step: row.step,
            epoch: row.epoch,
            timestamp: row.timestamp,
            loss: row.loss,
            grad_norm: row.grad_norm,
            lr: row.lr,
            mem: row.mem,
            tps: row.tps,
            tps_per_gpu: row.tps_per_gpu,
            mfu: row.mfu,
            num_tokens_per_step: row.num_tokens_per_step,
            num_label_tokens: row.num_label_tokens,
            generation: row.generation,
        }
    }
}

impl From<v1::ValidationRow> for ValidationRowView {
    fn from(row: v1::ValidationRow) -> Self {
        Self {
            name: row.name,
            step: row.step,
            epoch: row.epoch,
            timestamp: row.timestamp,
            val_loss: row.val_loss,
            lr: row.lr,
            num_label_tokens: row.num_label_tokens,
            mem: row.mem,
            generation: row.generation,
        }
    }
}

/// A phase in lower case.
pub(crate) fn phase_name(phase: v1::JobPhase) -> &'static str {
    match phase {
        v1::JobPhase::Unspecified => "unknown",
        v1::JobPhase::Queued => "queued",
        v1::JobPhase::Held => "held",
        v1::JobPhase::Forming => "forming",
        v1::JobPhase::Running => "running",
        v1::JobPhase::Stopping => "stopping",
        v1::JobPhase::Suspended => "suspended",
        v1::JobPhase::Succeeded => "succeeded",
        v1::JobPhase::Failed => "failed",
        v1::JobPhase::Cancelled => "cancelled",
    }
}

/// Whether nothing will happen to the job any more (J1).
pub(crate) fn is_terminal(phase: v1::JobPhase) -> bool {
    matches!(phase, v1::JobPhase::Succeeded | v1::JobPhase::Failed | v1::JobPhase::Cancelled)
}

fn rank_phase(phase: v1::Phase) -> &'static str {
    trainctl_spec::report::Phase::try_from(phase).map_or("unknown", trainctl_spec::report::Phase::doing)
}

/// Steps done at which the job ends.
pub(crate) fn stop_at(job: &v1::Job) -> u64 {
    job.until_step.map_or(job.max_steps, |until| until.min(job.max_steps))
}

/// One training row for a person.
pub(crate) fn train_line(row: &v1::TrainRow, total: u64) -> String {
    let total = if total == 0 { String::new() } else { format!("/{}", people(total)) };
    format!(
        "step {}{total}  loss {:.4}  lr {:.2e}  grad norm {:.3}  {} tokens/s",
        people(row.step + 1),
        row.loss,
        row.lr,
        row.grad_norm,
        rate(row.tps)
    )
}

/// Tokens per second without decimals.
pub(crate) fn rate(tokens_per_second: f64) -> String {
    if tokens_per_second.is_finite() && tokens_per_second >= 0.0 {
        let digits = format!("{tokens_per_second:.0}");
        digits.parse().map_or(digits, people)
    } else {
        "?".to_owned()
    }
}

/// One validation row for a person.
pub(crate) fn validation_line(row: &v1::ValidationRow) -> String {
    let set = if row.name == "default" { String::new() } else { format!(" on {}", row.name) };
    format!("validation loss{set} {:.4} after {}", row.val_loss, steps(row.step + 1))
}

/// A rank's own time per step, and whether it holds the others up; empty before it is known.
fn pace(rank: &v1::RankStatus) -> String {
    let Some(seconds) = rank.compute_seconds else { return String::new() };
    let score = rank.straggler_score.filter(|_| rank.straggler);
    let straggler = score.map_or_else(String::new, |score| format!(" STRAGGLER (score {score:.1})"));
    format!(" own time {seconds:.3} s/step{straggler}")
}

/// A job as a block of lines.
pub(crate) fn job_block(job: &v1::Job) -> String {
    let mut lines = vec![format!("{}  {}", job.id, phase_name(job.phase()))];
    let mut add = |name: &str, value: String| {
        if !value.is_empty() {
            lines.push(format!("  {name:<12} {value}"));
        }
    };
    add("reason", job.reason.clone());
    add("run", job.run_dir.clone());
    add("steps", format!("{} of {}", people(job.steps_done), people(stop_at(job))));
    add("world size", job.world_size.to_string());
    add("generation", format!("{} (term {})", job.generation, job.term));
    add("restarts", format!("{} of {}", job.restarts, job.max_restarts));
    add("started from", job.started_from.clone());
    add("LATEST", job.latest.clone());
    add("LOWEST_VAL", job.lowest_val.clone());
    add("last save", job.last_save.as_ref().map(save_line).unwrap_or_default());
    add("commands", job.commands.join(", "));
    add("last row", job.last_row.as_ref().map_or_else(String::new, |row| train_line(row, stop_at(job))));
    add("validation", job.last_validation.as_ref().map_or_else(String::new, validation_line));
    add("submitted", moment(job.submitted_at_ms));
    add("finished", job.finished_at_ms.map_or_else(String::new, moment));
    for rank in &job.ranks {
        let step = rank.step.map_or_else(String::new, |step| format!(" step {}", people(step + 1)));
        let link = if rank.connected { "" } else { " (not connected)" };
        let doing = rank_phase(rank.phase());
        let pace = pace(rank);
        add(
            &format!("rank {}", rank.rank),
            format!("{doing}{step} on {} pid {} worker {}{pace}{link}", rank.host, rank.pid, rank.worker),
        );
    }
    lines.join("\n")
}
