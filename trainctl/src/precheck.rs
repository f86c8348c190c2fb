//! What a run directory allows, looked at before any process is started. Writes nothing.
//!
//! The coordinator decides again on Submit, under its term; this look exists so that a refusal leaves no trace.

use std::path::Path;

use trainctl_runtime::endpoint::{self, Located};
use trainctl_runtime::proc;
use trainctl_spec::{JobSpec, resume};
use trainctl_store::checkpoints::{Listing, ResolveError, ResolveOptions, Selector};
use trainctl_store::io::Io;
use trainctl_store::tenure::{Holder, read_holder};
use trainctl_store::{CheckpointStore, RunDir};

use crate::begin;
use crate::client;
use crate::exit::Failure;
use crate::output::{note, steps};
use crate::summary::shell_word;

/// What was asked.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked {
    /// Empty, LATEST, LOWEST_VAL or a checkpoint's name.
    pub(crate) from: String,
    /// Steps done at which to stop, before `max_steps`.
    pub(crate) until_step: Option<u64>,
    /// Refuse a directory that holds anything.
    pub(crate) fresh: bool,
    /// Take an older checkpoint where the wanted one is damaged.
    pub(crate) allow_older: bool,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Start, with this `from`.
    Go(String),
    /// All that was asked is done: one line says so.
    Finished(String),
}

/// Looks at the run directory of `spec`.
pub(crate) async fn precheck(spec: &JobSpec, asked: &Asked) -> Result<Verdict, Failure> {
    let run_dir = RunDir::new(&spec.run_dir);
    if !is_empty(run_dir.root())? {
        refuse_live_holder(&run_dir).await?;
        if asked.fresh {
            let text = format!(
                "{} holds something, and --fresh takes an empty directory only; leave out --fresh to continue, or name another --run-dir",
                run_dir.root().display()
            );
            return Err(Failure::usage(text));
        }
    }
    let store = CheckpointStore::of_job(spec).map_err(|error| Failure::usage(error.to_string()))?;
    let listing = store.list().await.map_err(|error| Failure::internal(error.to_string()))?;
    let is_new = listing.committed.is_empty() && listing.uncommitted.is_empty() && listing.damaged.is_empty();
    if is_new && asked.from.is_empty() {
        let max_steps = spec.step_scheduler.max_steps;
        begin::look(spec, asked.until_step.map_or(max_steps, |until| until.min(max_steps))).await?;
        return Ok(Verdict::Go(String::new()));
    }
    let selector: Selector = match asked.from.as_str() {
        "" => Selector::Latest,
        from => {
            from.parse().map_err(|error| Failure::usage(format!("--from {from}: {error}, LATEST or LOWEST_VAL")))?
        }
    };
    let best = spec.best_metric_key();
    let options = ResolveOptions { best_metric_key: best, allow_older: asked.allow_older, ..ResolveOptions::default() };
    let resolved = store.resolve(selector, &options).await.map_err(refusal)?;
    resolved.notes.iter().for_each(|told| note(&told.to_string()));
    let name = resolved.checkpoint.name();
    let saved_with = store.read_config(name).await.map_err(|error| Failure::internal(error.to_string()))?;
    refuse_differences(spec, &saved_with, &store.path(name).join("config.yaml"))?;
    let step = resolved.checkpoint.manifest.step;
    if selector == Selector::Latest && is_done(step + 1, spec, asked) {
        return Ok(Verdict::Finished(finished(spec, step + 1, &resolved.checkpoint.name().to_string(), &listing)));
    }
    let from = if asked.allow_older { resolved.checkpoint.name().to_string() } else { asked.from.clone() };
    Ok(Verdict::Go(from))
}

fn is_done(steps_done: u64, spec: &JobSpec, asked: &Asked) -> bool {
    let max_steps = spec.step_scheduler.max_steps;
    steps_done >= asked.until_step.map_or(max_steps, |until| until.min(max_steps))
}

fn finished(spec: &JobSpec, done: u64, latest: &str, listing: &Listing) -> String {
    let max_steps = spec.step_scheduler.max_steps;
    let run = shell_word(&spec.run_dir.to_string_lossy());
    let more = if done < max_steps {
        format!("; --until-step or leaving it out goes on to {}", steps(max_steps))
    } else {
        String::new()
    };
    format!(
        "this run has done {} already: LATEST is {latest}, {} checkpoints are kept (`trainctl checkpoints list {run}`){more}",
        steps(done),
        listing.committed.len()
    )
}

fn refusal(error: ResolveError) -> Failure {
    match error {
        ResolveError::Store(error) => Failure::internal(error.to_string()),
        other => Failure::usage(other.to_string()),
    }
}

/// The spec that a checkpoint was made with fixes what a resume may not change.
fn refuse_differences(spec: &JobSpec, saved_with: &str, path: &Path) -> Result<(), Failure> {
    let old =
        JobSpec::from_yaml(saved_with).map_err(|faults| Failure::internal(format!("{}: {faults}", path.display())))?;
    let differences = resume::differences(&old, spec).map_err(|error| Failure::usage(error.to_string()))?;
    let forbidden = resume::forbidden(&differences);
    if forbidden.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = forbidden.iter().map(|difference| format!("  {difference}")).collect();
    Err(Failure::usage(format!(
        "the spec differs from the run's in keys that a resume may not change:\n{}\nset them back, or begin another run with this one's weights: `trainctl fork`",
        list.join("\n")
    )))
}

fn is_empty(dir: &Path) -> Result<bool, Failure> {
    match std::fs::read_dir(dir) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(Failure::usage(format!("list {}: {error}", dir.display()))),
    }
}

/// A holder that certainly lives is refused here; where it is uncertain the coordinator waits out the lease (J2).
pub(crate) async fn refuse_live_holder(run_dir: &RunDir) -> Result<(), Failure> {
    let holder =
        read_holder(&Io::new(run_dir.control())).await.map_err(|error| Failure::internal(error.to_string()))?;
    let Some(holder) = holder.filter(|holder| !holder.released) else { return Ok(()) };
    let process = &holder.info.process;
    let is_here = proc::boot_id().is_ok_and(|boot_id| boot_id == process.boot_id);
    if is_here && !proc::is_running(process.pid, process.start_time) {
        return Ok(());
    }
    if answers(run_dir, &holder).await { Err(live_holder(run_dir, &holder)) } else { Ok(()) }
}

/// Whether the coordinator that holds the directory answers there.
pub(crate) async fn answers(run_dir: &RunDir, holder: &Holder) -> bool {
    let dir = run_dir.control();
    let Ok(endpoint) = endpoint::read(&dir) else { return false };
    if endpoint.incarnation != holder.info.incarnation {
        return false;
    }
    client::answers(&Located { endpoint, dir }).await
}

fn live_holder(run_dir: &RunDir, holder: &Holder) -> Failure {
    let info = &holder.info;
    let place = info.addresses.first().map_or_else(String::new, |address| format!(" at {address}:{}", info.port));
    let slurm = info.slurm_job.as_ref().map_or_else(String::new, |job| format!(", Slurm job {job}"));
    let run = shell_word(&run_dir.root().to_string_lossy());
    Failure::unreachable(format!(
        "{} is held by a coordinator{place} (host {}, pid {}{slurm}); talk to it with `trainctl status {run}`, or stop it first",
        run_dir.root().display(),
        info.process.host,
        info.process.pid
    ))
}
