//! What the threads of a trainer are doing, for a run that stands still.
//!
//! The trainer asks its own threads (a signal handler writes raw return addresses, see `trainctl-collective`); this daemon
//! gives them names. A thread that does not answer, and every thread of a process that is frozen, is shown by what `/proc`
//! says of it, and its stack is walked from outside ([`walk`]). The stacks of all threads go into a file beside the rank's log, what
//! c10d has noted of the last collectives into another; the coordinator is told the path and the threads
//! that matter. Nothing here changes the trainer, and it comes before anything is killed.

mod file;
mod symbols;
mod threads;
mod walk;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use trainctl_proto::v1::{DumpStacksRequest, Stacks, TrainerControl, rank_report::Report, trainer_control::Request};

use self::walk::Walker;
use super::link::Line;

/// How long the trainer may take to answer: two seconds for its threads, and as many for the way.
const ANSWER: Duration = Duration::from_secs(4);
/// Threads that are reported; the file has all.
const REPORTED: usize = 8;
/// Frames of a thread that are reported, innermost first.
const REPORTED_FRAMES: usize = 32;

/// Which trainer, and where its log is.
pub(super) struct Subject {
    pub(super) line: Arc<Line>,
    pub(super) pid: u32,
    pub(super) log: PathBuf,
    pub(super) run_dir: PathBuf,
}

/// Asks, names, writes the file; the report for the coordinator.
pub(super) async fn dump(subject: Subject) -> Report {
    let answer = subject.line.expect_stacks();
    let fence = subject.line.assignment().fence.clone();
    subject.line.control(TrainerControl { fence, request: Some(Request::DumpStacks(DumpStacksRequest {})) });
    let answered = match tokio::time::timeout(ANSWER, answer).await {
        Ok(Ok(stacks)) => stacks,
        Ok(Err(_)) | Err(_) => {
            tracing::warn!(pid = subject.pid, "the trainer does not say what its threads do: /proc is read instead");
            Stacks::default()
        }
    };
    let named = tokio::task::spawn_blocking(move || complete(&subject, answered)).await;
    Report::Stacks(named.unwrap_or_else(|error| {
        tracing::error!(%error, "the stacks could not be read");
        Stacks::default()
    }))
}

fn complete(subject: &Subject, answered: Stacks) -> Stacks {
    let mut threads = if answered.threads.is_empty() { threads::all(subject.pid) } else { answered.threads };
    let mut walker = None;
    for thread in threads.iter_mut().filter(|thread| thread.addresses.is_empty()) {
        let seen = threads::look(subject.pid, thread.tid);
        thread.state = seen.text;
        let Some(left) = seen.left else { continue };
        let walk = walker.get_or_insert_with(|| Walker::of(subject.pid)).walk(left);
        thread.addresses = walk.addresses;
        if let Some(first) = walk.guessed_from {
            thread.state.push_str(&format!(", frames from {first} on are guesses"));
        }
    }
    symbols::name(subject.pid, &mut threads);
    // The main thread runs the engine; what did not answer is next in interest.
    threads.sort_by_key(|thread| (thread.tid != subject.pid, thread.state.is_empty(), thread.tid));
    let kept = |written: io::Result<PathBuf>| match written {
        Ok(path) => relative(&path, &subject.run_dir),
        Err(error) => {
            tracing::error!(%error, "the stacks could not be written");
            String::new()
        }
    };
    let path = kept(file::write(&subject.log, &threads));
    let record = Some(answered.flight_record).filter(|record| !record.is_empty());
    let record = record.map(|record| kept(file::write_record(&subject.log, &record)));
    tracing::warn!(pid = subject.pid, threads = threads.len(), path, "stacks of the trainer's threads");
    threads.truncate(REPORTED);
    for thread in &mut threads {
        thread.frames.truncate(REPORTED_FRAMES);
        thread.addresses.clear();
    }
    Stacks { threads, path, flight_record: String::new(), flight_record_path: record.unwrap_or_default() }
}

fn relative(path: &Path, run_dir: &Path) -> String {
    path.strip_prefix(run_dir).unwrap_or(path).display().to_string()
}
