//! `checkpoint.save_consolidated`: a Hugging Face directory inside a checkpoint, one task a job.
//!
//! It is made of a committed checkpoint and can be made again at any time, so the manifest does not list it: it is written
//! beside its place and renamed, `verify` does not look at it, and retention removes it with its checkpoint.

use std::path::PathBuf;

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

    /// Exports what is asked for until the queue closes. Of several that wait the newest one is exported, and the others
    /// are answered as left out: an export must not fall ever further behind the commits.
    ///
    /// # Errors
    /// Those of `answer`: whoever asked is gone.
    pub async fn run<E, F, A>(self, mut requests: mpsc::UnboundedReceiver<CheckpointName>, answer: A) -> Result<(), E>
    where
        F: Future<Output = Result<(), E>>,
        A: Fn(ExportResult) -> F,
    {
        while let Some(mut checkpoint) = requests.recv().await {
            while let Ok(newer) = requests.try_recv() {
                let outcome = Err(format!("left out: {newer} came before it could begin"));
                self.unpin(checkpoint).await;
                answer(ExportResult { checkpoint, outcome, seconds: 0.0, warnings: Vec::new() }).await?;
                checkpoint = newer;
            }
            let started = Instant::now();
            let (outcome, warnings) = match self.export(checkpoint).await {
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
        Ok(())
    }

    async fn export(&self, name: CheckpointName) -> Result<(u64, Vec<String>), String> {
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
        let exported = self.store.export(name, None, &to, &ExportOptions::default(), |_, _| ()).await;
        let exported = exported.map_err(|error| error.to_string())?;
        Ok((exported.bytes, exported.warnings))
    }

    async fn unpin(&self, checkpoint: CheckpointName) {
        if let Err(error) = self.store.unpin(checkpoint, PIN).await {
            warn!(job = %self.job, %checkpoint, %error, "the pin of an export stays");
        }
    }
}
