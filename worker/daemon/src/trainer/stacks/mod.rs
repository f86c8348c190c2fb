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

use trainctl_proto::v1::{
    DumpStacksRequest, Stacks, ThreadStack, TrainerControl, rank_report::Report, trainer_control::Request,
};

use self::threads::Left;
use self::walk::Walker;
use super::link::Line;

/// How long the trainer may take to answer: two seconds for its threads, and as many for the way.
const ANSWER: Duration = Duration::from_secs(4);
/// How long states may take, frames and their names, and files. With [`ANSWER`] less than the coordinator waits (15 s).
const LOOKING: Duration = Duration::from_secs(1);
const NAMING: Duration = Duration::from_secs(7);
const WRITING: Duration = Duration::from_millis(2_500);
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
    let Stacks { threads, flight_record, .. } = answered;
    let pid = subject.pid;
    let seen = blocking(LOOKING, move || look(pid, threads)).await.unwrap_or_default();
    let bare = seen.iter().map(|(thread, _)| thread.clone()).collect();
    // The binaries may lie on the file system that is dead: then their states are all that is known.
    let mut threads = blocking(NAMING, move || name(pid, seen)).await.unwrap_or(bare);
    // The main thread runs the engine; what did not answer is next in interest.
    threads.sort_by_key(|thread| (thread.tid != pid, thread.state.is_empty(), thread.tid));
    let all = threads.clone();
    let files = blocking(WRITING, move || keep(&subject, &all, &flight_record)).await.unwrap_or_default();
    tracing::warn!(pid, threads = threads.len(), path = files.path, "stacks of the trainer's threads");
    threads.truncate(REPORTED);
    for thread in &mut threads {
        thread.frames.truncate(REPORTED_FRAMES);
        thread.addresses.clear();
    }
    Report::Stacks(Stacks { threads, ..files })
}

/// What `work` answers within `limit`; a thread that hangs in it is left behind.
async fn blocking<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match tokio::time::timeout(limit, tokio::task::spawn_blocking(work)).await {
        Ok(Ok(done)) => Some(done),
        Ok(Err(error)) => {
            tracing::error!(%error, "the stacks could not be read");
            None
        }
        Err(_) => {
            tracing::error!(?limit, "reading or writing stacks takes too long: it is left out");
            None
        }
    }
}

/// Every thread with its state, and where it left for the kernel, if it did not answer.
fn look(pid: u32, answered: Vec<ThreadStack>) -> Vec<(ThreadStack, Option<Left>)> {
    let threads = if answered.is_empty() { threads::all(pid) } else { answered };
    let look = |thread: ThreadStack| {
        if !thread.addresses.is_empty() {
            return (thread, None);
        }
        let seen = threads::look(pid, thread.tid);
        (ThreadStack { state: seen.text, ..thread }, seen.left)
    };
    threads.into_iter().map(look).collect()
}

/// Walks the stacks of those that did not answer, and names all frames.
fn name(pid: u32, seen: Vec<(ThreadStack, Option<Left>)>) -> Vec<ThreadStack> {
    let mut walker = None;
    let walked = |(mut thread, left): (ThreadStack, Option<Left>)| {
        let Some(left) = left else { return thread };
        let walk = walker.get_or_insert_with(|| Walker::of(pid)).walk(left);
        thread.addresses = walk.addresses;
        if let Some(first) = walk.guessed_from {
            thread.state.push_str(&format!(", frames from {first} on are guesses"));
        }
        thread
    };
    let mut threads: Vec<ThreadStack> = seen.into_iter().map(walked).collect();
    symbols::name(pid, &mut threads);
    threads
}

/// Writes the files beside the rank's log; the answer has their paths only.
fn keep(subject: &Subject, threads: &[ThreadStack], flight_record: &str) -> Stacks {
    let kept = |written: io::Result<PathBuf>| match written {
        Ok(path) => relative(&path, &subject.run_dir),
        Err(error) => {
            tracing::error!(%error, "the stacks could not be written");
            String::new()
        }
    };
    let path = kept(file::write(&subject.log, threads));
    let record = Some(flight_record).filter(|record| !record.is_empty());
    let flight_record_path = record.map(|record| kept(file::write_record(&subject.log, record)));
    Stacks { path, flight_record_path: flight_record_path.unwrap_or_default(), ..Stacks::default() }
}

fn relative(path: &Path, run_dir: &Path) -> String {
    path.strip_prefix(run_dir).unwrap_or(path).display().to_string()
}
