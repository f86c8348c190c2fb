//! `checkpoint.save_consolidated`: a Hugging Face directory inside a checkpoint, one task a job.
//!
//! It is made of a committed checkpoint and can be made again at any time, so the manifest does not list it: it is written
//! beside its place and renamed, `verify` does not look at it, and retention removes it with its checkpoint.
//!
//! It does not outlive its job: when the task's queue is closed, at the release of the run directory and at the coordinator's
//! end, the export under way stops and leaves nothing behind.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{info, warn};
use trainctl_spec::job::SaveConsolidated;
use trainctl_spec::{JobId, JobSpec};
use trainctl_store::export::ExportOptions;
use trainctl_store::layout::CheckpointName;
use trainctl_store::{CheckpointStore, Location};

/// Who pins a checkpoint until it is exported.
pub const PIN: &str = "save_consolidated";

/// Where the directory is, in its checkpoint.
const FOLDER: &str = "model/consolidated";

/// What came of an export.
#[derive(Debug)]
pub struct ExportResult {
    /// The checkpoint.
    pub checkpoint: CheckpointName,
    /// Bytes of the weights that were written, or why there is no directory.
    pub outcome: Result<u64, String>,
    /// How long it took.
    pub seconds: f64,
    /// What a person should know of it.
    pub warnings: Vec<String>,
}

/// Tells the thread of an export to end.
#[derive(Clone, Debug, Default)]
struct Stop(Arc<AtomicBool>);

impl Stop {
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Waits for an export's end, and meanwhile collects what is asked for. When the queue closes the export is told to stop.
async fn while_wanted<T>(
    export: impl Future<Output = T>,
    requests: &mut mpsc::UnboundedReceiver<CheckpointName>,
    waiting: &mut VecDeque<CheckpointName>,
    stop: &Stop,
) -> T {
    let mut export = pin!(export);
    loop {
        tokio::select! {
            biased;
            exported = &mut export => return exported,
            newer = requests.recv(), if !stop.is_set() => match newer {
                Some(newer) => waiting.push_back(newer),
                None => stop.set(),
            },
        }
    }
}

/// A job's exports.
pub struct ExportTask {
    /// The job.
    pub job: JobId,
    /// Its checkpoints.
    pub store: CheckpointStore,
}

/// Which checkpoints of a job are exported: none in an object store, where `trainctl export` makes a directory from one.
pub fn wanted(spec: &JobSpec) -> SaveConsolidated {
    match Location::of_job(spec) {
        Ok(location) if location.directory().is_some() => spec.checkpoint.save_consolidated,
        _ => SaveConsolidated::False,
    }
}

/// What whoever submits `spec` is told: that what it asks for in so many words will not be. The default asks for nothing.
pub fn note(spec: &JobSpec) -> Option<&'static str> {
    let asked = spec.checkpoint.save_consolidated == SaveConsolidated::Every;
    (asked && wanted(spec) == SaveConsolidated::False).then_some(
        "checkpoint.save_consolidated: every has no effect where checkpoint_dir is an object store: `trainctl export` makes the directory",
    )
}

impl ExportTask {
    /// The exports of a job, if there are to be any.
    pub fn of(job: JobId, spec: &JobSpec, store: CheckpointStore) -> Option<Self> {
        (wanted(spec) != SaveConsolidated::False).then_some(Self { job, store })
    }

    /// Exports what is asked for until the queue closes, which stops the export under way. Of several that wait the newest one
    /// is exported, and the others are answered as left out: an export must not fall ever further behind the commits.
    ///
    /// # Errors
    /// Those of `answer`: whoever asked is gone.
    pub async fn run<E, F, A>(self, mut requests: mpsc::UnboundedReceiver<CheckpointName>, answer: A) -> Result<(), E>
    where
        F: Future<Output = Result<(), E>>,
        A: Fn(ExportResult) -> F,
    {
        let mut waiting = VecDeque::new();
        loop {
            if waiting.is_empty() {
                let Some(checkpoint) = requests.recv().await else { return Ok(()) };
                waiting.push_back(checkpoint);
            }
            while let Ok(newer) = requests.try_recv() {
                waiting.push_back(newer);
            }
            let Some(checkpoint) = waiting.pop_back() else { continue };
            for older in waiting.drain(..) {
                let outcome = Err(format!("left out: {checkpoint} came before it could begin"));
                self.unpin(older).await;
                answer(ExportResult { checkpoint: older, outcome, seconds: 0.0, warnings: Vec::new() }).await?;
            }
            let started = Instant::now();
            let stop = Stop::default();
            let exported =
                while_wanted(self.export(checkpoint, stop.clone()), &mut requests, &mut waiting, &stop).await;
            if stop.is_set() {
                info!(job = %self.job, %checkpoint, "the export ends with its job");
                self.unpin(checkpoint).await;
                return Ok(());
            }
            let (outcome, warnings) = match exported {
                Ok((bytes, warnings)) => (Ok(bytes), warnings),
                Err(reason) => (Err(reason), Vec::new()),
            };
            let seconds = started.elapsed().as_secs_f64();
            self.unpin(checkpoint).await;
            match &outcome {
                Ok(bytes) => info!(job = %self.job, %checkpoint, bytes, seconds, "consolidated"),
                Err(reason) => warn!(job = %self.job, %checkpoint, reason, "consolidated weights could not be written"),
            }
            answer(ExportResult { checkpoint, outcome, seconds, warnings }).await?;
        }
    }

    async fn export(&self, name: CheckpointName, stop: Stop) -> Result<(u64, Vec<String>), String> {
        let checkpoint = self.store.path(name);
        if !checkpoint.is_dir() {
            let place = checkpoint.display();
            return Err(format!("{place} is no directory: `trainctl export` writes one from an object store"));
        }
        let to: PathBuf = checkpoint.join(FOLDER);
        // A directory gets its name when it is whole: one that is there was made before the coordinator restarted.
        if to.join("config.json").is_file() {
            return Ok((0, Vec::new()));
        }
        let progress = move |_, _| if stop.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        let exported = self.store.export(name, None, &to, &ExportOptions::default(), progress).await;
        let exported = exported.map_err(|error| error.to_string())?;
        Ok((exported.bytes, exported.warnings))
    }

    async fn unpin(&self, checkpoint: CheckpointName) {
        if let Err(error) = self.store.unpin(checkpoint, PIN).await {
            warn!(job = %self.job, %checkpoint, %error, "the pin of an export stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    #[expect(clippy::disallowed_methods, reason = "as RunPorts::exports is")]
    async fn an_export_ends_with_its_job_and_newer_ones_wait_meanwhile() {
        let (sender, mut requests) = mpsc::unbounded_channel();
        let (stop, mut waiting) = (Stop::default(), VecDeque::new());
        // As the thread of an export does, it ends when it is told to and not before.
        let thread = tokio::task::spawn_blocking({
            let stop = stop.clone();
            move || {
                while !stop.is_set() {
                    std::thread::yield_now();
                }
            }
        });
        let newer = CheckpointName { epoch: 0, step: 19 };
        sender.send(newer).unwrap();
        drop(sender);
        while_wanted(thread, &mut requests, &mut waiting, &stop).await.unwrap();
        assert_eq!(waiting, [newer]);
    }
}
