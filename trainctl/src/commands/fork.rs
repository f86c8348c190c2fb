//! `trainctl fork`

use std::path::PathBuf;

use clap::Args;
use trainctl_spec::JobSpec;
use trainctl_spec::start::Keep;
use trainctl_store::io::Io;
use trainctl_store::origin::{Origin, Parent};
use trainctl_store::{CheckpointStore, Location, RunDir, write_job_spec};

use crate::begin;
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line, note};
use crate::overrides::OverrideArgs;
use crate::precheck::{Asked, refuse_live_holder};
use crate::summary::shell_word;
use crate::{attached, spec_file};

/// Make a run that begins with a checkpoint of another one
///
/// Checks that everything fits, then writes the new run directory and pins the checkpoint until the new run has one of its own. The
/// weights are always kept; what else is, --keep says. Training starts with `trainctl run` or `submit`, or at once with --run.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl fork runs/gpt2-124m/LOWEST_VAL stage2.yaml --keep weights,optimizer,data")]
pub(super) struct Fork {
    /// The run, or one of its checkpoints: RUN, RUN/LATEST, RUN/LOWEST_VAL, RUN/epoch_0_step_999, URL/epoch_0_step_999
    #[arg(value_name = "RUN[/CHECKPOINT]")]
    parent: String,
    /// The new run's spec; its run_dir must hold no checkpoint
    #[arg(value_name = "JOB_YAML")]
    spec: PathBuf,
    #[command(flatten)]
    overrides: OverrideArgs,
    /// What to keep: weights, optimizer (its state), data (the place in it), schedule (the step number)
    #[arg(long, value_name = "PARTS", default_value = "weights,optimizer")]
    keep: Keep,
    /// Directory of the new run; overrides the spec's run_dir
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Start to train on this machine, as `trainctl run` does
    #[arg(long, conflicts_with = "output")]
    run: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl Fork {
    /// Whether it goes on as `trainctl run`.
    pub(super) fn is_attached(&self) -> bool {
        self.run
    }

    pub(super) async fn run(self) -> Outcome {
        let mut overrides = self.overrides.all();
        overrides.extend(spec_file::run_dir_override(self.run_dir.as_deref())?);
        let spec = spec_file::accept(&self.spec, &overrides)?;
        if let Some(from) = &spec.checkpoint.restore_from {
            return Err(Failure::usage(format!(
                "checkpoint.restore_from is {from}, but a fork begins with {}; leave one of them out",
                self.parent
            )));
        }
        refuse_used(&spec).await?;
        let found = Parent::find(&self.parent, self.keep).await;
        let found = found.map_err(|error| begin::not_found(&self.parent, error))?;
        let beginning = begin::examine(&found, &spec, spec.step_scheduler.max_steps).await?;
        let is_pinned = self.write(&found, &spec).await?;
        let described = begin::describe(&found, &spec, &beginning);
        let job_yaml = shell_word(&RunDir::new(&spec.run_dir).job_spec().to_string_lossy());
        if self.output.is_json() {
            json(&serde_json::json!({
                "run_dir": spec.run_dir, "parent": found.origin.text(), "manifest": found.origin.manifest,
                "keep": found.origin.keep, "start_step": beginning.start_step, "phase": beginning.phase,
                "differences": beginning.differences, "pinned": is_pinned,
            }))?;
        } else {
            line(&format!("{} {}", spec.run_dir.display(), described.join("\n")))?;
        }
        if !is_pinned {
            note(&found.origin.not_pinned());
        }
        if self.run {
            return attached::run(&spec, &Asked::default()).await;
        }
        note(&format!("next:\n  trainctl run {job_yaml}\n  trainctl submit {job_yaml}"));
        Ok(Exit::Ok)
    }

    /// Pins the parent, then writes the new run directory: its spec first, since the origin makes it a fork. `false`: the
    /// parent cannot be pinned.
    async fn write(&self, found: &Parent, spec: &JobSpec) -> Result<bool, Failure> {
        let failure = |error: trainctl_store::Error| Failure::internal(error.to_string());
        let run_dir = RunDir::new(&spec.run_dir);
        let control = Io::new(run_dir.control());
        let earlier = Origin::read(&control).await.map_err(failure)?;
        let is_pinned = found.origin.pin(run_dir.root()).await.map_err(failure)?;
        // Pinned first, then looked at again: what is there now stays (C9).
        if let Err(error) = Parent::of(&found.origin).await {
            found.origin.release(run_dir.root()).await.map_err(failure)?;
            return Err(begin::not_found(&self.parent, error));
        }
        let yaml = spec.to_yaml().map_err(|error| Failure::usage(error.to_string()))?;
        write_job_spec(&run_dir, yaml).await.map_err(failure)?;
        found.origin.write(&control).await.map_err(failure)?;
        if let Some(earlier) = earlier.filter(|earlier| !earlier.is_same_checkpoint(&found.origin)) {
            earlier.release(run_dir.root()).await.map_err(failure)?;
        }
        Ok(is_pinned)
    }
}

/// A fork needs a run directory without a single checkpoint, and one that nobody holds.
async fn refuse_used(spec: &JobSpec) -> Result<(), Failure> {
    let run_dir = RunDir::new(&spec.run_dir);
    refuse_live_holder(&run_dir).await?;
    let usage = |error: trainctl_store::Error| Failure::usage(error.to_string());
    let place = Location::of_job(spec).map_err(usage)?;
    let store = CheckpointStore::open_at(&place, run_dir.control()).map_err(usage)?;
    let listing = store.list().await.map_err(|error| Failure::internal(error.to_string()))?;
    let committed = listing.committed.iter().map(|checkpoint| checkpoint.name());
    let damaged = listing.damaged.iter().map(|damaged| damaged.name);
    let names: Vec<String> = committed.chain(damaged).chain(listing.uncommitted).map(|name| name.to_string()).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{place} holds checkpoints already: {}; a fork is a new run: name another run_dir (--run-dir)",
        names.join(", ")
    )))
}
