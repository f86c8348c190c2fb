//! `trainctl run`

use std::path::PathBuf;

use clap::Args;

use crate::attached;
use crate::exit::Outcome;
use crate::overrides::OverrideArgs;
use crate::precheck::Asked;
use crate::spec_file;

/// Train on this machine: coordinator, workers and job, attached to this terminal
///
/// On a run directory that holds checkpoints it continues from LATEST. Ctrl-C once saves after the running step and stops,
/// twice stops at once.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl run job.yaml --workers 2 --set optimizer.lr=1e-4")]
pub(super) struct Run {
    /// The spec
    #[arg(value_name = "JOB_YAML")]
    spec: PathBuf,
    #[command(flatten)]
    overrides: OverrideArgs,
    /// Number of workers; overrides the spec's resources.workers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    workers: Option<u32>,
    /// Directory of the run; overrides the spec's run_dir
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Stop after this many steps, leaving max_steps and the learning-rate schedule alone
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    until_step: Option<u64>,
    /// Refuse a run directory that holds anything
    #[arg(long)]
    fresh: bool,
    /// Of checkpoint.restore_from take the weights only; overrides checkpoint.weights_only
    #[arg(long)]
    weights_only: bool,
}

impl Run {
    pub(super) async fn run(self) -> Outcome {
        let mut overrides = self.overrides.all();
        overrides.extend(spec_file::workers_override(self.workers));
        overrides.extend(spec_file::run_dir_override(self.run_dir.as_deref())?);
        overrides.extend(spec_file::weights_only_override(self.weights_only));
        let spec = spec_file::accept(&self.spec, &overrides)?;
        let asked = Asked { until_step: self.until_step, fresh: self.fresh, ..Asked::default() };
        attached::run(&spec, &asked).await
    }
}
