//! `trainctl submit`

use std::path::PathBuf;

use clap::Args;

use super::submission::{Submission, submit_and_follow};
use crate::client::CoordinatorArgs;
use crate::exit::Outcome;
use crate::output::OutputArgs;
use crate::overrides::OverrideArgs;
use crate::spec_file;

/// Queue a job on a running coordinator
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl submit job.yaml --coordinator ~/trainctl-state --follow")]
pub(super) struct Submit {
    /// The spec
    #[arg(value_name = "JOB_YAML")]
    spec: PathBuf,
    #[command(flatten)]
    overrides: OverrideArgs,
    /// Directory of the run; overrides the spec's run_dir
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    /// Stop after this many steps, leaving max_steps and the learning-rate schedule alone
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    until_step: Option<u64>,
    /// Refuse a run directory that holds anything
    #[arg(long)]
    fresh: bool,
    /// Of checkpoint.restore_from take the weights only; overrides checkpoint.weights_only
    #[arg(long)]
    weights_only: bool,
    /// Watch the job until it ends; Ctrl-C ends the watching, not the job
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl Submit {
    pub(super) async fn run(self) -> Outcome {
        let mut overrides = self.overrides.all();
        overrides.extend(spec_file::run_dir_override(self.run_dir.as_deref())?);
        overrides.extend(spec_file::weights_only_override(self.weights_only));
        let spec = spec_file::accept(&self.spec, &overrides)?;
        let submission = Submission {
            spec: &spec,
            from: String::new(),
            until_step: self.until_step,
            fresh: self.fresh,
            allow_older: false,
        };
        submit_and_follow(&self.coordinator, &submission, self.follow, self.output).await
    }
}
