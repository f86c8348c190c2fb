//! `trainctl checkpoints prune`

use std::collections::BTreeSet;

use clap::Args;
use serde::Serialize;
use trainctl_store::checkpoints::{KeepReason, PrunePlan, PruneReport, Retention, Verdict};
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

const REMOVE: &str = "remove";
const KEEP: &str = "keep";

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
        let mut lines = lines(&store, &plan).await?;
        let mut strays = Vec::new();
        if !self.dry_run && plan.removes() {
            let held = Held::acquire(run_dir).await?;
            let report = held.during(|fence| store.prune(fence, &retention)).await?.map_err(failure)?;
            settle(&mut lines, &report);
            strays = report.strays;
        }
        if self.output.is_json() {
            let (dry_run, checkpoints) = (self.dry_run, lines);
            json(&serde_json::json!({
                "dry_run": dry_run, "keep": keep, "checkpoints": checkpoints, "strays": strays,
            }))?;
            return Ok(Exit::Ok);
        }
        let freed: u64 = lines.iter().filter(|line| line.action == REMOVE).map(|line| line.bytes).sum();
        for row in &lines {
            let action = match (row.action, self.dry_run) {
                (REMOVE, true) => "would be removed",
                (REMOVE, false) => "removed",
                (action, _) => action,
            };
            line(&format!("{}  {action}  {}", row.name, row.reason))?;
        }
        for stray in strays {
            line(&format!("{stray}  removed  left by a dead generation"))?;
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

/// What was done may differ from what was planned: somebody pinned one in between, or committed one.
fn settle(lines: &mut Vec<Line>, report: &PruneReport) {
    let gone: BTreeSet<CheckpointName> = report.removed.iter().chain(&report.swept).copied().collect();
    for line in lines.iter_mut().filter(|line| line.action == REMOVE && !gone.contains(&line.name)) {
        (line.action, line.reason) = (KEEP, "pinned or named by a pointer meanwhile".to_owned());
    }
    for name in gone {
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) if line.action == REMOVE => {}
            Some(line) => (line.action, line.reason) = (REMOVE, "not kept any more when its turn came".to_owned()),
            None => lines.push(Line { name, action: REMOVE, reason: "came meanwhile".to_owned(), bytes: 0 }),
        }
    }
    lines.sort_by_key(|line| line.name);
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
                Verdict::Remove => (REMOVE, "not among the newest".to_owned()),
                Verdict::Keep(KeepReason::Pinned) => {
                    let who = pins.iter().filter(|pin| pin.name == *name).map(|pin| pin.who.as_str());
                    (KEEP, format!("pinned by {}", who.collect::<Vec<_>>().join(", ")))
                }
                Verdict::Keep(reason) => (KEEP, reason.to_string()),
            };
            Line { name: *name, action, reason, bytes: bytes(*name) }
        })
        .collect();
    let dead = |name: &CheckpointName| Line {
        name: *name,
        action: REMOVE,
        reason: "never committed, and older than the newest commit".to_owned(),
        bytes: 0,
    };
    lines.extend(plan.dead.iter().map(dead));
    lines.sort_by_key(|line| line.name);
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_is_told_and_not_what_was_planned() {
        let name = |step| CheckpointName { epoch: 0, step };
        let line = |step, action| Line { name: name(step), action, reason: String::new(), bytes: 7 };
        let mut lines = vec![line(9, REMOVE), line(19, REMOVE), line(29, KEEP)];
        let report = PruneReport { removed: vec![name(9)], swept: vec![name(14)], strays: Vec::new() };
        settle(&mut lines, &report);
        let told: Vec<_> = lines.iter().map(|line| (line.name.step, line.action)).collect();
        assert_eq!(told, [(9, REMOVE), (14, REMOVE), (19, KEEP), (29, KEEP)]);
        assert!(lines[2].reason.contains("meanwhile"));
    }
}
