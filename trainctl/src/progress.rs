//! How a running job is shown: a bar on a terminal, plain lines elsewhere. Both go to stderr.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use trainctl_proto::v1;

use crate::output::{note, people, size, steps};
use crate::view::{is_terminal, phase_name, rate, stop_at, train_line, validation_line};

/// Plain lines come at most so often; the last row always comes.
const PLAIN_EVERY: Duration = Duration::from_secs(1);

/// The display of one job.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    last_plain: Option<Instant>,
    held_back: Option<v1::TrainRow>,
    last_phase: Option<(v1::JobPhase, String)>,
    started: bool,
}

impl Progress {
    /// A bar when stderr is a terminal.
    pub(crate) fn new() -> Self {
        Self {
            bar: std::io::stderr().is_terminal().then(new_bar),
            total: 0,
            last_plain: None,
            held_back: None,
            last_phase: None,
            started: false,
        }
    }

    /// A line that stays.
    pub(crate) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }

    /// The job's state.
    pub(crate) fn job(&mut self, job: &v1::Job) {
        self.total = stop_at(job);
        let shown = (job.phase(), job.reason.clone());
        let changed = self.last_phase.as_ref() != Some(&shown);
        if let Some(bar) = &self.bar {
            bar.set_length(self.total);
            // While it runs the rows are ahead of the job's own count.
            if !self.started || is_terminal(job.phase()) {
                bar.set_position(job.steps_done);
                // The estimate starts where this run starts, not at step 0.
                bar.reset_eta();
                self.started = true;
            }
            if job.phase() != v1::JobPhase::Running {
                bar.set_message(state_text(job));
            }
        } else if changed && job.phase() != v1::JobPhase::Running {
            note(&state_text(job));
        }
        self.last_phase = Some(shown);
    }

    /// A training row.
    pub(crate) fn train(&mut self, row: v1::TrainRow) {
        match &self.bar {
            Some(bar) => {
                if row.step + 1 < bar.position() {
                    // A new generation runs these steps again.
                    bar.reset_eta();
                }
                bar.set_position(row.step + 1);
                bar.set_message(format!("loss {:.4}  lr {:.2e}  {} tokens/s", row.loss, row.lr, rate(row.tps)));
            }
            None if self.last_plain.is_none_or(|at| at.elapsed() >= PLAIN_EVERY) => {
                note(&train_line(&row, self.total));
                self.last_plain = Some(Instant::now());
                self.held_back = None;
            }
            None => self.held_back = Some(row),
        }
    }

    /// A validation row.
    pub(crate) fn validation(&mut self, row: &v1::ValidationRow) {
        self.flush();
        self.say(&validation_line(row));
    }

    /// One line of events.jsonl.
    pub(crate) fn event(&mut self, json: &str) {
        if let Some(text) = serde_json::from_str(json).ok().as_ref().and_then(event_text) {
            self.flush();
            self.say(&text);
        }
    }

    fn flush(&mut self) {
        if let Some(row) = self.held_back.take() {
            note(&train_line(&row, self.total));
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&mut self) {
        self.flush();
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
    }
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let template = "{bar:24} {human_pos}/{human_len} steps  {msg}  ETA {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message("starting");
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

fn state_text(job: &v1::Job) -> String {
    let phase = phase_name(job.phase());
    if job.reason.is_empty() { phase.to_owned() } else { format!("{phase}: {}", job.reason) }
}

/// The events that a person who watches wants to see. The rest is in `trainctl events`.
fn event_text(event: &Value) -> Option<String> {
    let number = |key: &str| event.get(key).and_then(Value::as_u64);
    let text = |key: &str| event.get(key).and_then(Value::as_str);
    // It must be plain that it is not a checkpoint that is missing.
    let part = || if text("save") == Some("weights") { "the weights of " } else { "" };
    match text("kind")? {
        "checkpoint_committed" => {
            let step = number("step")?;
            let name = text("checkpoint")
                .or_else(|| text("name"))
                .map_or_else(|| format!("epoch_0_step_{step}"), str::to_owned);
            let kind = if text("save") == Some("weights") { "weights" } else { "checkpoint" };
            let seconds = |key: &str| event.get(key).and_then(Value::as_f64);
            let cost = match (number("bytes"), seconds("stall_seconds"), seconds("write_seconds")) {
                (Some(bytes), Some(stall), Some(write)) => {
                    format!(", {}; training stood {stall:.2} s, written in {write:.2} s", size(bytes))
                }
                _ => String::new(),
            };
            Some(format!("{kind} {name} (after {}){cost}", steps(step + 1)))
        }
        "save_failed" => Some(format!("the save of {}step {} failed: {}", part(), number("step")?, text("error")?)),
        "save_skipped" => {
            Some(format!("the save of {}step {} was left out: {}", part(), number("step")?, text("reason")?))
        }
        "checkpoint_failed" => {
            Some(format!("the commit of {}step {} failed: {}", part(), number("step")?, text("error")?))
        }
        "checkpoint_refused" => Some(format!("step {} is no checkpoint: {}", number("step")?, text("reason")?)),
        "consolidate_failed" => Some(format!("{}: no consolidated weights: {}", text("checkpoint")?, text("error")?)),
        "hook_ended" if number("code") != Some(0) => {
            Some(format!("{} failed; its output: {}", text("hook")?, text("log")?))
        }
        "hook_skipped" => Some(format!("{} was left out: {}", text("hook")?, text("reason")?)),
        "trainer_exited" => {
            let how = text("message").or_else(|| text("reason")).or_else(|| text("class")).unwrap_or("ended");
            (!matches!(how, "finished" | "stopped by its worker"))
                .then(|| format!("rank {}: {how}", number("rank").unwrap_or(0)))
        }
        "generation_formed" => Some(format!("generation {} is formed", people(number("generation")?))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_with_steps_as_people_count() {
        let told = |json: &str| event_text(&serde_json::from_str(json).expect("JSON"));
        let committed = told(r#"{"kind":"checkpoint_committed","step":999,"name":"epoch_0_step_999"}"#);
        assert_eq!(committed.as_deref(), Some("checkpoint epoch_0_step_999 (after 1,000 steps)"));
        let costly = told(
            r#"{"kind":"checkpoint_committed","step":9,"checkpoint":"epoch_0_step_9","save":"weights","bytes":2048,"stall_seconds":0.1,"write_seconds":1.5}"#,
        );
        let want = "weights epoch_0_step_9 (after 10 steps), 2.0 KiB; training stood 0.10 s, written in 1.50 s";
        assert_eq!(costly.as_deref(), Some(want));
        let failed = told(r#"{"kind":"hook_ended","hook":"on_commit","code":1,"log":"logs/hooks/on_commit-9.log"}"#);
        assert_eq!(failed.as_deref(), Some("on_commit failed; its output: logs/hooks/on_commit-9.log"));
        assert_eq!(told(r#"{"kind":"hook_ended","hook":"on_commit","code":0,"log":"x"}"#), None);
        assert_eq!(told(r#"{"kind":"pointer_moved"}"#), None);
        assert_eq!(told(r#"{"step":1}"#), None);
        let killed = told(r#"{"kind":"trainer_exited","rank":1,"class":"killed by signal 9 (SIGKILL)"}"#);
        assert_eq!(killed.as_deref(), Some("rank 1: killed by signal 9 (SIGKILL)"));
    }
}
