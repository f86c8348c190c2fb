//! What a person reads when a job has ended, and the exit code that goes with it.

use trainctl_proto::v1;

use crate::exit::Exit;
use crate::output::{people, steps};
use crate::view::stop_at;

/// The exit code of an ended job. A cancelled job did not reach its end, so that `trainctl run … && next` stops there.
pub(crate) fn exit_of(phase: v1::JobPhase) -> Exit {
    match phase {
        v1::JobPhase::Succeeded => Exit::Ok,
        v1::JobPhase::Suspended => Exit::Requeue,
        _ => Exit::JobFailed,
    }
}

/// The summary as lines: what happened, the losses, the pointers, what to do next.
pub(crate) fn summary(job: &v1::Job) -> String {
    let done = steps(job.steps_done);
    let head = match job.phase() {
        v1::JobPhase::Succeeded if job.steps_done < job.max_steps => {
            format!("{} stopped as asked after {done} of {}", job.id, people(job.max_steps))
        }
        v1::JobPhase::Succeeded => format!("{} finished after {done}", job.id),
        v1::JobPhase::Cancelled => format!("{} was cancelled after {done} of {}", job.id, people(stop_at(job))),
        v1::JobPhase::Failed => format!("{} failed after {done}: {}", job.id, job.reason),
        _ => format!("{} is left in state {:?} after {done}", job.id, job.phase()),
    };
    let mut lines = vec![head];
    if let (Some(first), Some(last)) = (&job.first_row, &job.last_row) {
        let (first, last) = ((first.loss, first.step + 1), (last.loss, last.step + 1));
        lines.push(format!(
            "  loss        {:.4} after {} → {:.4} after {}",
            first.0,
            steps(first.1),
            last.0,
            steps(last.1)
        ));
    }
    if let Some(row) = &job.last_validation {
        lines.push(format!("  validation  {:.4} after {}", row.val_loss, steps(row.step + 1)));
    }
    let none = [("LATEST", "none: nothing was committed"), ("LOWEST_VAL", "none: no checkpoint has a validation loss")];
    for ((name, none), target) in none.into_iter().zip([&job.latest, &job.lowest_val]) {
        let shown = if target.is_empty() { none.to_owned() } else { pointer(target) };
        lines.push(format!("  {name:<11} {shown}"));
    }
    if job.restarts > 0 {
        lines.push(format!("  restarts    {} of {}", job.restarts, job.max_restarts));
    }
    lines.push(format!("  run         {}", job.run_dir));
    lines.push("next:".to_owned());
    lines.extend(next_commands(job).into_iter().map(|command| format!("  {command}")));
    lines.join("\n")
}

/// "epoch_0_step_999 (after 1,000 steps)".
fn pointer(name: &str) -> String {
    match name.rsplit_once('_').and_then(|(_, step)| step.parse::<u64>().ok()) {
        Some(step) => format!("{name} (after {})", steps(step + 1)),
        None => name.to_owned(),
    }
}

fn next_commands(job: &v1::Job) -> Vec<String> {
    let run = shell_word(&job.run_dir);
    let mut commands = Vec::new();
    if !job.latest.is_empty() {
        commands.push(format!("trainctl checkpoints list {run}"));
        commands.push(format!("trainctl metrics {run}"));
        if job.phase() != v1::JobPhase::Succeeded || job.steps_done < job.max_steps {
            commands.push(format!("trainctl resume {run} --from LATEST"));
        } else if !job.lowest_val.is_empty() {
            commands.push(format!("trainctl checkpoints verify {run} LOWEST_VAL"));
        }
    }
    if job.phase() == v1::JobPhase::Failed {
        commands.push(format!("trainctl logs {run}"));
        commands.push(format!("trainctl events {run}"));
    }
    commands
}

/// Quotes what a shell would cut.
pub(crate) fn shell_word(text: &str) -> String {
    let is_plain =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-' | '+' | ':' | '=' | ',' | '@');
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64, loss: f64) -> v1::TrainRow {
        v1::TrainRow { step, loss, ..Default::default() }
    }

    #[test]
    fn a_finished_run_reads_like_this() {
        let job = v1::Job {
            id: "tiny-1".into(),
            run_dir: "/tmp/a run".into(),
            phase: v1::JobPhase::Succeeded.into(),
            steps_done: 1000,
            max_steps: 1000,
            latest: "epoch_0_step_999".into(),
            lowest_val: "epoch_0_step_499".into(),
            first_row: Some(row(0, 8.31)),
            last_row: Some(row(999, 4.5)),
            ..Default::default()
        };
        insta::assert_snapshot!(summary(&job), @r"
        tiny-1 finished after 1,000 steps
          loss        8.3100 after 1 step → 4.5000 after 1,000 steps
          LATEST      epoch_0_step_999 (after 1,000 steps)
          LOWEST_VAL  epoch_0_step_499 (after 500 steps)
          run         /tmp/a run
        next:
          trainctl checkpoints list '/tmp/a run'
          trainctl metrics '/tmp/a run'
          trainctl checkpoints verify '/tmp/a run' LOWEST_VAL
        ");
        assert_eq!(exit_of(job.phase()), Exit::Ok);
    }

    #[test]
    fn every_end_has_its_exit_code() {
        assert_eq!(exit_of(v1::JobPhase::Failed), Exit::JobFailed);
        assert_eq!(exit_of(v1::JobPhase::Cancelled), Exit::JobFailed);
        assert_eq!(exit_of(v1::JobPhase::Suspended), Exit::Requeue);
    }
}
