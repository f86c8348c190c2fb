//! `trainctl resume`

use std::path::{Path, PathBuf};

use clap::Args;
use trainctl_runtime::endpoint::{self, Located};
use trainctl_spec::{JobSpec, Override};

use super::submission::{Submission, submit_and_follow};
use crate::attached;
use crate::client::{self, CoordinatorArgs, PlaceArgs};
use crate::exit::{Failure, Outcome};
use crate::output::{OutputArgs, note};
use crate::overrides::{OverrideArgs, is_bare};
use crate::precheck::Asked;
use crate::spec_file;

/// Continue a run from a checkpoint
///
/// With a coordinator (one that is named, holds the run directory or is the user's own) the job is queued there; without one
/// it runs attached to this terminal, like `trainctl run`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl resume runs/gpt2-124m --from LOWEST_VAL")]
pub(super) struct Resume {
    /// Run directory or job id [default: the run in the current folder, else the coordinator's latest job]
    #[arg(value_name = "RUN_DIR|JOB")]
    target: Option<String>,
    #[command(flatten)]
    overrides: OverrideArgs,
    /// Checkpoint to start from: LATEST, LOWEST_VAL or a name such as epoch_0_step_999; later ones are set aside
    #[arg(long, value_name = "CHECKPOINT", default_value = "LATEST")]
    from: String,
    /// Take the next older valid checkpoint when the wanted one is damaged
    #[arg(long)]
    allow_older: bool,
    /// Number of workers; overrides the run's resources.workers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    workers: Option<u32>,
    /// Stop after this many steps, leaving max_steps and the learning-rate schedule alone
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    until_step: Option<u64>,
    /// Refused with the way to do it: people look for it here.
    #[arg(long, hide = true)]
    weights_only: bool,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    /// Watch the queued job until it ends
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl Resume {
    pub(super) async fn run(mut self) -> Outcome {
        if self.weights_only {
            let run = self.target.as_deref().unwrap_or("RUN");
            return Err(Failure::usage(format!(
                "--weights-only: a resume keeps everything, since it is the same run; another run begins with this one's weights by `trainctl fork {run}/{} job.yaml --keep weights`",
                self.from
            )));
        }
        // `trainctl resume a.b=c`: no target, an override.
        let first_override = self.target.take_if(|target| is_bare(target) && !Path::new(target.as_str()).exists());
        let mut overrides: Vec<Override> = first_override.iter().map(|text| Override::bare(text)).collect();
        overrides.extend(self.overrides.all());
        overrides.extend(spec_file::workers_override(self.workers));
        let (run_dir, found_by_coordinator) = self.run_dir().await?;
        overrides.extend(spec_file::run_dir_override(Some(&run_dir))?);
        let spec = self.spec(&run_dir, &overrides)?;
        let asked =
            Asked { from: self.from.clone(), until_step: self.until_step, fresh: false, allow_older: self.allow_older };
        let Some(coordinator) = self.coordinator(&run_dir, found_by_coordinator).await else {
            return attached::run(&spec, &asked).await;
        };
        let submission = Submission {
            spec: &spec,
            from: asked.from,
            until_step: asked.until_step,
            fresh: false,
            allow_older: self.allow_older,
        };
        submit_and_follow(&coordinator, &submission, self.follow, self.output).await
    }

    /// The coordinator that was named or that knew the job, else one that answers: the run directory's holder, then the
    /// user's own.
    async fn coordinator(&self, run_dir: &Path, found_by_coordinator: bool) -> Option<CoordinatorArgs> {
        let is_named = self.coordinator.place.coordinator.is_some()
            || std::env::var_os(endpoint::VARIABLE).is_some_and(|value| !value.is_empty());
        if is_named || found_by_coordinator {
            return Some(self.coordinator.clone());
        }
        for dir in [Some(run_dir.join("control")), endpoint::user_state_dir()].into_iter().flatten() {
            if let Ok(endpoint) = endpoint::read(&dir)
                && client::answers(&Located { endpoint, dir: dir.clone() }).await
            {
                note(&format!("queueing on the coordinator of {}", dir.display()));
                return Some(CoordinatorArgs {
                    place: PlaceArgs { coordinator: Some(dir.to_string_lossy().into_owned()) },
                    ..CoordinatorArgs::default()
                });
            }
        }
        None
    }

    /// The run directory that is meant, said aloud when nobody named it.
    /// True: a coordinator told it.
    async fn run_dir(&self) -> Result<(PathBuf, bool), Failure> {
        if let Some(target) = &self.target {
            let path = PathBuf::from(target);
            if path.is_dir() {
                return Ok((path, false));
            }
            if path.components().count() > 1 {
                return Err(Failure::usage(format!("{target} is no directory; name a run directory or a job id")));
            }
            return Ok((self.run_dir_of(Some(target)).await?, true));
        }
        let current = PathBuf::from(".");
        if is_run(&current) {
            let shown = std::path::absolute(&current)?;
            note(&format!("resuming the run in the current folder, {}", shown.display()));
            return Ok((current, false));
        }
        Ok((self.run_dir_of(None).await?, true))
    }

    async fn run_dir_of(&self, job: Option<&str>) -> Result<PathBuf, Failure> {
        let mut client = self.coordinator.connect().await.map_err(|failure| match job {
            Some(job) => {
                Failure { message: format!("{job} is no directory here, and as a job id: {failure}"), ..failure }
            }
            None => Failure {
                message: format!("the current folder holds no run, and there is no coordinator to ask: {failure}"),
                ..failure
            },
        })?;
        let found = client::get_job(&mut client, job).await?;
        if job.is_none() {
            note(&format!("resuming the coordinator's latest job, {} in {}", found.id, found.run_dir));
        }
        Ok(PathBuf::from(found.run_dir))
    }

    /// The run's own resolved spec with the overrides.
    fn spec(&self, run_dir: &Path, overrides: &[Override]) -> Result<JobSpec, Failure> {
        let job_yaml = run_dir.join("job.yaml");
        let named = run_dir.join(&self.from).join("config.yaml");
        let latest = run_dir.join("LATEST").join("config.yaml");
        let source = [job_yaml.clone(), named, latest].into_iter().find(|path| path.is_file());
        let Some(source) = source else {
            return Err(Failure::usage(format!(
                "{} holds no run: there is no {}; start one with `trainctl run job.yaml --run-dir {}`",
                run_dir.display(),
                job_yaml.display(),
                run_dir.display()
            )));
        };
        spec_file::accept(&source, overrides)
    }
}

fn is_run(dir: &Path) -> bool {
    dir.join("job.yaml").is_file() && dir.join("control").is_dir()
}
