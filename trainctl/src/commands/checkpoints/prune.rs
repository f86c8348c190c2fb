//! `trainctl checkpoints prune`

use clap::Args;
use serde::Serialize;
use trainctl_store::checkpoints::{KeepReason, PrunePlan, Retention, Verdict};
use trainctl_store::{CheckpointName, CheckpointStore};

use super::{listing, pins};
use crate::exit::{Exit, Failure, Outcome};
use crate::held::Held;
use crate::output::{OutputArgs, json, line, note, size};
use crate::run_place::{RunPlace, RunRef, failure};

/// Remove what retention drops: all but the newest, pointer targets, and what is pinned
///
/// A running coordinator does this after each commit, by checkpoint.max_recent_checkpoints; while one holds the run this verb
/// refuses (exit code 69). With --dry-run it only looks, at any time.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl checkpoints prune runs/gpt2-124m --keep 3 --dry-run")]
pub(super) struct Prune {
    /// The run, or RUN/weights for its weights-only checkpoints
    #[arg(value_name = "RUN", default_value = ".")]
    run: RunRef,
    /// How many of the newest stay [default: checkpoint.max_recent_checkpoints of the run, or max_recent_weights]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep: Option<u32>,
    /// Say what would be removed and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Serialize)]
struct Line {
    name: CheckpointName,
    action: &'static str,
    reason: String,
    bytes: u64,
}

impl Prune {
    pub(super) async fn run(self) -> Outcome {
        if let Some(name) = self.run.name {
            let text =
                format!("prune takes a run, not a checkpoint: {name} goes when it is not among the newest --keep");
            return Err(Failure::usage(text));
        }
        let place = RunPlace::open(&self.run.run)?;
        let run_dir = place.run_dir()?;
        let keep = self.keep(&place)?;
        let store = place.store(self.run.weights);
        let best = place.best_metric_key();
        let milestones = place.spec.as_ref().filter(|_| !self.run.weights);
        let keep_every_steps = milestones.and_then(|spec| spec.checkpoint.keep_every_steps);
        let retention = Retention { keep: Some(keep), keep_every_steps, best_metric_key: best };
        let plan = store.plan_prune(&retention).await.map_err(failure)?;
        let lines = lines(&store, &plan).await?;
        if !self.dry_run && plan.removes() {
            let held = Held::acquire(run_dir).await?;
            let report = held.during(|fence| store.prune(fence, &retention)).await?.map_err(failure)?;
            // What was removed may differ from what was planned: somebody may have pinned one in between.
            for name in plan.leaving().filter(|name| !report.removed.contains(name) && !report.swept.contains(name)) {
                note(&format!("{name} stays: it was pinned or became a pointer's target meanwhile"));
            }
        }
        if self.output.is_json() {
            json(&serde_json::json!({ "dry_run": self.dry_run, "keep": keep, "checkpoints": lines }))?;
            return Ok(Exit::Ok);
        }
        let freed: u64 = lines.iter().filter(|line| line.action == "remove").map(|line| line.bytes).sum();
        for row in &lines {
            let action = if self.dry_run && row.action == "remove" { "would be removed" } else { row.action };
            line(&format!("{}  {action}  {}", row.name, row.reason))?;
        }
        let verb = if self.dry_run { "would free" } else { "freed" };
        note(&format!("{verb} {}", size(freed)));
        Ok(Exit::Ok)
    }

    fn keep(&self, place: &RunPlace) -> Result<usize, Failure> {
        let checkpoint = place.spec.as_ref().map(|spec| &spec.checkpoint);
        let of_spec = checkpoint.and_then(|keys| match self.run.weights {
            true => keys.max_recent_weights,
            false => keys.max_recent_checkpoints,
        });
        let keep = self.keep.or(of_spec).ok_or_else(|| {
            Failure::usage("the run keeps all its checkpoints; say how many stay with --keep N".to_owned())
        })?;
        usize::try_from(keep).map_err(|error| Failure::usage(format!("--keep: {error}")))
    }
}

async fn lines(store: &CheckpointStore, plan: &PrunePlan) -> Result<Vec<Line>, Failure> {
    let listing = listing(store).await?;
    let pins = pins(store).await?;
    let bytes = |name| listing.get(name).map_or(0, |committed| committed.manifest.total_bytes());
    let mut lines: Vec<Line> = plan
        .verdicts
        .iter()
        .map(|(name, verdict)| {
            let (action, reason) = match verdict {
                Verdict::Remove => ("remove", "not among the newest".to_owned()),
                Verdict::Keep(KeepReason::Pinned) => {
                    let who = pins.iter().filter(|pin| pin.name == *name).map(|pin| pin.who.as_str());
                    ("keep", format!("pinned by {}", who.collect::<Vec<_>>().join(", ")))
                }
                Verdict::Keep(reason) => ("keep", reason.to_string()),
            };
            Line { name: *name, action, reason, bytes: bytes(*name) }
        })
        .collect();
    let dead = |name: &CheckpointName| Line {
        name: *name,
        action: "remove",
        reason: "never committed, and older than the newest commit".to_owned(),
        bytes: 0,
    };
    lines.extend(plan.dead.iter().map(dead));
    lines.sort_by_key(|line| line.name);
    Ok(lines)
}
