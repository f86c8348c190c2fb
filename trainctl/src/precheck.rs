//! What a run directory allows, looked at before any process is started. Writes nothing.
//!
//! The coordinator decides again on Submit, under its term; this look exists so that a refusal leaves no trace.

use serde_json::Value;
use trainctl_runtime::endpoint::{self, Located};
use trainctl_runtime::proc;
use trainctl_spec::JobSpec;
use trainctl_store::RunDir;
pub(crate) use trainctl_store::admission::Asked;
use trainctl_store::admission::{self, Admission, LookError, Looked};
use trainctl_store::io::Io;
use trainctl_store::rows::read_rows;
use trainctl_store::tenure::{Holder, read_holder};

use crate::begin;
use crate::client;
use crate::exit::Failure;
use crate::output::note;
use crate::summary::shell_word;

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
    refuse_live_holder(&run_dir).await?;
    let Looked { found, notes, begins } = admission::look(spec, asked).await.map_err(not_looked)?;
    notes.iter().for_each(|told| note(told));
    match admission::decide(&found, asked, spec) {
        Admission::Admit { from, .. } => {
            if let Some((parent, beginning)) = begins {
                begin::describe(&parent, spec, &beginning).iter().for_each(|told| note(told));
            }
            Ok(Verdict::Go(from))
        }
        Admission::AlreadyFinished(_) if may_have_work_left(&run_dir).await? => Ok(Verdict::Go(asked.from.clone())),
        Admission::AlreadyFinished(finished) => {
            let run = shell_word(&spec.run_dir.to_string_lossy());
            Ok(Verdict::Finished(format!("{finished}; `trainctl checkpoints list {run}`")))
        }
        Admission::Refuse(refusal) => Err(Failure::usage(format!("{}: {refusal}", run_dir.root().display()))),
    }
}

/// Whether a job that has done its steps may be alive in the coordinator's journal: it was killed before its last export was
/// written or its end was journaled. Its coordinator finds out and brings it to its end.
async fn may_have_work_left(run_dir: &RunDir) -> Result<bool, Failure> {
    let internal = |error: trainctl_store::Error| Failure::internal(error.to_string());
    let holder = read_holder(&Io::new(run_dir.control())).await.map_err(internal)?;
    let events = read_rows(run_dir.events(), 0).map_err(internal)?.lines;
    Ok(holder.is_some_and(|holder| !holder.released) || last_job_is_open(&events))
}

/// Whether the job that the events speak of last was submitted and did not end.
fn last_job_is_open(events: &[String]) -> bool {
    let kind = |row: &String| Some(serde_json::from_str::<Value>(row).ok()?.get("kind")?.as_str()?.to_owned());
    let bounds = events.iter().rev().filter_map(kind);
    bounds.into_iter().find(|kind| matches!(kind.as_str(), "job_submitted" | "job_finished")).as_deref()
        == Some("job_submitted")
}

fn not_looked(error: LookError) -> Failure {
    match error {
        LookError::Asked(_) => Failure::usage(error.to_string()),
        LookError::Store(_) | LookError::Spec { .. } => Failure::internal(error.to_string()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_open_until_its_end_is_written() {
        let events = |kinds: &[&str]| -> Vec<String> {
            kinds.iter().map(|kind| format!("{{\"kind\":\"{kind}\",\"job\":\"a-1\"}}")).collect()
        };
        assert!(!last_job_is_open(&[]), "a copy without its events");
        assert!(last_job_is_open(&events(&["job_finished", "job_submitted", "checkpoint_committed"])));
        assert!(!last_job_is_open(&events(&["job_submitted", "job_finished", "hook_ended"])));
    }
}
