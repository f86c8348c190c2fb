//! One run directory's task: everything that a job changes on disk, in order, off the owner task and on a thread of its own.
//!
//! Rows, events, commits and the work before a formation go through one queue, so that rows reach their file before the
//! commit that follows them, and a commit is done before the next generation is prepared. The task is the only writer of
//! the `.jsonl` files. Each change to a checkpoint passes the tenure's fence directly before it (J2).

mod commit;
mod prepare;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use trainctl_spec::report::{SaveKind, ShardReport, TrainRow, ValidationRow};
use trainctl_spec::state::Cause;
use trainctl_spec::{Generation, JobId, JobSpec};
use trainctl_store::checkpoints::{Listing, PointerMove, PruneReport, ResolveError, Retention};
use trainctl_store::layout::CheckpointName;
use trainctl_store::{CheckpointStore, Fence, RunDir, Tenure, Unfenced};

use crate::core::Event;
use crate::decide::rows::{RowUse, decide_row};
use crate::events::Entry;
use crate::owner::Handle;
use crate::record::StartPoint;
use crate::rows::Rows;

/// Pause before a row that could not be written is tried again: rows are the last thing that is dropped (P5).
const ROW_RETRY: Duration = Duration::from_secs(1);

/// Rows are made durable together: this long after the first of them, or after so many. Until then workers keep them.
const SYNC_AFTER: Duration = Duration::from_secs(1);
const SYNC_ROWS: usize = 256;
/// When a predecessor that was frozen at our takeover must have done what it was about to do (C2).
const TAKEOVER_LEASE: Duration = Duration::from_secs(15);

/// One spooled record of a worker, to be acknowledged when what it caused is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AckToken {
    /// Worker.
    pub worker: String,
    /// Its spool.
    pub spool: String,
    /// Number within the spool.
    pub seq: u64,
}

/// What the task can be asked.
#[derive(Debug)]
pub enum IoRequest {
    /// Append to `events.jsonl`.
    Event(Entry),
    /// Append to `training.jsonl`, unless that step is there.
    TrainRow {
        /// The row.
        row: TrainRow,
        /// Acknowledged afterwards.
        token: Option<AckToken>,
    },
    /// Append to `validation[_name].jsonl`, unless that step is there.
    ValidationRow {
        /// The row.
        row: ValidationRow,
        /// Acknowledged afterwards.
        token: Option<AckToken>,
    },
    /// Make a save a checkpoint.
    Commit(Box<CommitRequest>),
    /// Get the directory ready for the next generation.
    Prepare(PrepareRequest),
    /// The job is over. Answered; until the queue closes events may follow.
    Release,
}

/// A complete save.
#[derive(Debug)]
pub struct CommitRequest {
    /// Generation that wrote it.
    pub generation: Generation,
    /// What it holds.
    pub kind: SaveKind,
    /// Zero-based step.
    pub step: u64,
    /// Number of ranks.
    pub world_size: u32,
    /// Their reports.
    pub reports: BTreeMap<u32, ShardReport>,
    /// Checkpoint that the generation started from; empty = from scratch.
    pub started_from: StartPoint,
    /// `--until-step`.
    pub until_step: Option<u64>,
}

/// What the next generation starts from.
#[derive(Debug)]
pub struct PrepareRequest {
    /// `LATEST`, `LOWEST_VAL`, a name; empty = the newest commit, else from scratch.
    pub from: String,
}

/// What came of a request.
#[derive(Debug)]
pub enum IoResult {
    /// These records' effects are durable.
    Done(Vec<AckToken>),
    /// A generation may form, or why not.
    Prepared(Box<Result<Prepared, Cause>>),
    /// A commit was made, or failed.
    Committed(Box<Committed>),
    /// What the directory held when the task started.
    Known(Box<Known>),
    /// What a takeover mended, or what went with a job's last command.
    Mended(Box<Mended>),
    /// Nothing is changed any more but what the queue still holds: it may be closed.
    Released,
    /// A higher term holds the directory: nothing more may be done to the job here.
    Superseded {
        /// That term.
        term: u64,
    },
}

/// What of one kind of saves was changed besides a commit.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Committed late by dead generations, and retired.
    pub retired: Vec<CheckpointName>,
    /// Taken away late by an earlier holder, and put back.
    pub restored: Vec<CheckpointName>,
    /// Pointers that moved: name, from, to.
    pub moves: Vec<(String, String, String)>,
    /// Checkpoints that retention removed.
    pub pruned: Vec<String>,
    /// What dead generations left behind and was removed, relative to the checkpoint directory.
    pub swept: Vec<String>,
}

/// Changes that follow from no request.
#[derive(Debug)]
pub struct Mended {
    /// Those of each kind of saves that there were any of.
    pub changes: Vec<(SaveKind, Changes)>,
    /// What LATEST and LOWEST_VAL name now.
    pub pointers: (String, String),
}

/// What a run directory held when its task started.
#[derive(Debug)]
pub struct Known {
    /// What LATEST and LOWEST_VAL name.
    pub pointers: (String, String),
    /// First training row.
    pub first: Option<TrainRow>,
    /// Newest training row.
    pub last: Option<TrainRow>,
    /// Newest validation row.
    pub validation: Option<ValidationRow>,
}

/// A generation may form.
#[derive(Debug)]
pub struct Prepared {
    /// Its number.
    pub generation: Generation,
    /// What it starts from.
    pub start: StartPoint,
    /// What LATEST and LOWEST_VAL name now.
    pub pointers: (String, String),
    /// Checkpoints, and saves of weights, that were retired because they are later than the start.
    pub retired: Vec<(SaveKind, CheckpointName)>,
    /// What a person should be told.
    pub notes: Vec<String>,
}

/// What came of a commit.
#[derive(Debug)]
pub struct Committed {
    /// Generation that wrote the save.
    pub generation: Generation,
    /// What it holds.
    pub kind: SaveKind,
    /// Zero-based step.
    pub step: u64,
    /// What was made, or why not.
    pub outcome: Result<CommitInfo, CommitError>,
}

/// Why a commit was not made.
#[derive(Debug)]
pub struct CommitError {
    /// For people.
    pub reason: String,
    /// The store can be written, but this save is not whole.
    pub refused: bool,
}

/// A checkpoint that was made.
#[derive(Debug)]
pub struct CommitInfo {
    /// Its name.
    pub checkpoint: String,
    /// Its state hash.
    pub state_hash: String,
    /// What else was changed with it.
    pub changes: Changes,
    /// Bytes of all files that the manifest lists.
    pub bytes: u64,
    /// How long manifest and pointers took, seconds.
    pub commit_seconds: f64,
    /// What LATEST and LOWEST_VAL name now.
    pub pointers: (String, String),
}

/// The task.
pub struct RunTask {
    /// The job.
    pub job: JobId,
    /// Its resolved spec.
    pub spec: JobSpec,
    /// The same as text: `config.yaml` of each checkpoint.
    pub spec_yaml: String,
    /// The newest generation that an earlier coordinator began, and the step of the checkpoint that it starts from.
    pub begun: Option<(Generation, Option<u64>)>,
    /// The right to change the directory.
    pub tenure: Arc<Tenure>,
    /// Where results go.
    pub owner: Handle,
    /// Bumped after each row or event, for those who watch.
    pub changed: watch::Sender<u64>,
}

impl RunTask {
    /// Carries out requests until the queue closes.
    pub async fn run(self, mut requests: mpsc::UnboundedReceiver<IoRequest>) -> Result<(), crate::owner::Gone> {
        let store = match CheckpointStore::of_job(&self.spec) {
            Ok(store) => store,
            Err(error) => return self.without_store(error.into(), requests).await,
        };
        let weights = store.weights();
        let fence: Arc<dyn Fence> = self.tenure.clone();
        let mut rows = Rows::open(&RunDir::new(&self.spec.run_dir), self.spec.validation_datasets.keys(), &fence);
        self.answer(IoResult::Known(Box::new(known(&self.spec).await))).await?;
        self.take_over(&store, &weights, None).await?;
        // C2: once more when a predecessor that was frozen at our takeover must have done what it was about to do.
        let second_look = tokio::time::sleep(TAKEOVER_LEASE);
        tokio::pin!(second_look);
        let mut looked = false;
        // The generation that was prepared last, and the step after which it starts.
        let mut begun = self.begun;
        let mut unsynced: Vec<AckToken> = Vec::new();
        let soon = || tokio::time::Instant::now() + SYNC_AFTER;
        let mut sync_at = soon();
        loop {
            if unsynced.is_empty() {
                sync_at = soon();
            }
            let request = tokio::select! {
                biased;
                request = requests.recv() => match request {
                    Some(request) => request,
                    None => return Ok(()),
                },
                () = &mut second_look, if !looked => {
                    looked = true;
                    self.take_over(&store, &weights, begun).await?;
                    continue;
                }
                () = tokio::time::sleep_until(sync_at), if !unsynced.is_empty() => {
                    self.sync(&mut rows, &mut unsynced).await?;
                    sync_at = soon();
                    continue;
                }
            };
            match request {
                IoRequest::Event(entry) => {
                    self.unless_fenced(rows.event(&entry, ROW_RETRY).await).await?;
                }
                IoRequest::TrainRow { row, token } if is_dropped(row.generation, begun) => unsynced.extend(token),
                IoRequest::ValidationRow { row, token } if is_dropped(row.generation, begun) => unsynced.extend(token),
                IoRequest::TrainRow { row, token } => {
                    let written = rows.train(&row, ROW_RETRY).await;
                    unsynced.extend(to_acknowledge(token, &written));
                    self.unless_fenced(written).await?;
                }
                IoRequest::ValidationRow { row, token } => {
                    let written = rows.validation(&row, ROW_RETRY).await;
                    unsynced.extend(to_acknowledge(token, &written));
                    self.unless_fenced(written).await?;
                }
                IoRequest::Commit(request) => {
                    self.sync(&mut rows, &mut unsynced).await?;
                    let kept = if request.kind == SaveKind::Full { &store } else { &weights };
                    let outcome = self.commit(kept, &request).await;
                    let (generation, kind, step) = (request.generation, request.kind, request.step);
                    if let Some(outcome) = self.unless_superseded(outcome).await? {
                        let committed =
                            Committed { generation, kind, step, outcome: outcome.map_err(CommitError::from) };
                        self.answer(IoResult::Committed(Box::new(committed))).await?;
                    }
                }
                IoRequest::Prepare(request) => {
                    let prepared = self.prepare(&store, &mut rows, &request, begun).await;
                    if let Some(prepared) = self.unless_superseded(prepared).await? {
                        // One that failed has begun nothing: the generation before it still counts.
                        begun = prepared.as_ref().map_or(begun, |now| Some((now.generation, now.start.own_step())));
                        self.answer(IoResult::Prepared(Box::new(prepared.map_err(|error| error.cause(&request.from)))))
                            .await?;
                    }
                }
                IoRequest::Release => {
                    self.sync(&mut rows, &mut unsynced).await?;
                    self.prune_after_commands(&store, &weights).await?;
                    looked = true;
                    info!(job = %self.job, "run directory released");
                    self.answer(IoResult::Released).await?;
                }
            }
            if unsynced.len() >= SYNC_ROWS {
                self.sync(&mut rows, &mut unsynced).await?;
            }
            self.changed.send_modify(|version| *version += 1);
        }
    }

    /// The checkpoints cannot be reached at all, by what the environment of this process says: nothing is formed and nothing
    /// committed. Rows are not acknowledged, so that their workers keep them.
    async fn without_store(
        &self,
        error: Error,
        mut requests: mpsc::UnboundedReceiver<IoRequest>,
    ) -> Result<(), crate::owner::Gone> {
        tracing::error!(job = %self.job, %error, "the place of the checkpoints cannot be used");
        // No job ends before it was told what its directory holds.
        self.answer(IoResult::Known(Box::new(known(&self.spec).await))).await?;
        while let Some(request) = requests.recv().await {
            match request {
                IoRequest::Prepare(request) => {
                    self.answer(IoResult::Prepared(Box::new(Err(error.cause(&request.from))))).await?
                }
                IoRequest::Commit(request) => {
                    let outcome = Err(CommitError { reason: error.to_string(), refused: false });
                    let (generation, kind, step) = (request.generation, request.kind, request.step);
                    self.answer(IoResult::Committed(Box::new(Committed { generation, kind, step, outcome }))).await?;
                }
                IoRequest::Release => self.answer(IoResult::Released).await?,
                IoRequest::Event(_) | IoRequest::TrainRow { .. } | IoRequest::ValidationRow { .. } => {}
            }
        }
        Ok(())
    }

    /// Undoes late renames and late commits, recomputes pointers and drops what retention would have (C2, C6).
    async fn take_over(
        &self,
        store: &CheckpointStore,
        weights: &CheckpointStore,
        begun: Option<(Generation, Option<u64>)>,
    ) -> Result<(), crate::owner::Gone> {
        let [mut of_weights, mut of_full] = [Changes::default(), Changes::default()];
        let mended = async {
            if self.has_weights(weights).await? {
                self.mend(weights, SaveKind::Weights, begun, &mut of_weights).await?;
            }
            self.mend(store, SaveKind::Full, begun, &mut of_full).await
        };
        let mended = mended.await;
        // What was done before something failed is done.
        self.tell(store, [(SaveKind::Weights, of_weights), (SaveKind::Full, of_full)]).await?;
        if let Some(Err(error)) = self.unless_superseded(mended).await? {
            warn!(job = %self.job, %error, "what an earlier holder left could not be mended");
        }
        Ok(())
    }

    async fn mend(
        &self,
        store: &CheckpointStore,
        kind: SaveKind,
        begun: Option<(Generation, Option<u64>)>,
        changes: &mut Changes,
    ) -> Result<(), Error> {
        if let Some((generation, step)) = begun {
            changes.retired = self.retire_late(store, &store.list().await?, generation, step).await?;
        }
        let taken = store.take_over(&*self.tenure, self.best_metric_key()).await?;
        changes.restored = taken.restored;
        changes.moves = moves(taken.moves);
        let report = store.prune(&*self.tenure, &self.retention(kind)).await?;
        changes.pruned(&report);
        Ok(())
    }

    /// Tells the owner of changes, if there were any.
    async fn tell(&self, store: &CheckpointStore, changes: [(SaveKind, Changes); 2]) -> Result<(), crate::owner::Gone> {
        let changes: Vec<_> = changes.into_iter().filter(|(_, changes)| *changes != Changes::default()).collect();
        if changes.is_empty() {
            return Ok(());
        }
        info!(job = %self.job, ?changes, "mended");
        let pointers = self.pointers(store).await;
        self.answer(IoResult::Mended(Box::new(Mended { changes, pointers }))).await
    }

    /// What a dead generation commits after this one has retired all that there was (C6).
    async fn retire_late(
        &self,
        store: &CheckpointStore,
        listing: &Listing,
        generation: Generation,
        step: Option<u64>,
    ) -> Result<Vec<CheckpointName>, trainctl_store::Error> {
        let fence: &dyn Fence = &*self.tenure;
        let late = store.retire_late(fence, listing, step, generation.0, self.best_metric_key()).await?;
        for gone in &late {
            warn!(job = %self.job, checkpoint = %gone.name, to = ?gone.moved_to, "retired: a dead generation committed it late");
        }
        Ok(late.into_iter().map(|gone| gone.name).collect())
    }

    /// The last commands are over: what was only pinned for them goes.
    async fn prune_after_commands(
        &self,
        store: &CheckpointStore,
        weights: &CheckpointStore,
    ) -> Result<(), crate::owner::Gone> {
        if self.spec.on_commit.is_none() {
            return Ok(());
        }
        let mut all = [(SaveKind::Full, Changes::default()), (SaveKind::Weights, Changes::default())];
        for (store, (kind, changes)) in [store, weights].into_iter().zip(&mut all) {
            match store.prune(&*self.tenure, &self.retention(*kind)).await {
                Ok(report) => changes.pruned(&report),
                Err(error) => warn!(job = %self.job, %error, "retention after the last command"),
            }
        }
        self.tell(store, all).await
    }

    /// Makes the rows durable, then lets their workers forget them.
    async fn sync(&self, rows: &mut Rows, unsynced: &mut Vec<AckToken>) -> Result<(), crate::owner::Gone> {
        rows.sync(ROW_RETRY).await;
        if unsynced.is_empty() {
            return Ok(());
        }
        // C2: frozen directly before an append, we may have written to a file that our successor had replaced by then.
        let held = self.tenure.pass().await.map_err(Error::Store);
        match self.unless_superseded(held).await? {
            Some(Ok(())) => self.answer(IoResult::Done(std::mem::take(unsynced))).await,
            Some(Err(error)) => {
                warn!(job = %self.job, %error, "whether the rows are ours is not known yet: not acknowledged");
                Ok(())
            }
            None => {
                unsynced.clear();
                Ok(())
            }
        }
    }

    /// A row that a higher term forbids is not written and never acknowledged: the new holder gets it.
    async fn unless_fenced(&self, written: Result<(), trainctl_store::Error>) -> Result<(), crate::owner::Gone> {
        self.unless_superseded(written.map_err(Error::Store)).await.map(|_| ())
    }

    async fn answer(&self, result: IoResult) -> Result<(), crate::owner::Gone> {
        self.owner.event(Event::Io { job: self.job.clone(), result: Box::new(result) }).await
    }

    /// A change that a higher term forbids is not an error of the job: the job is not ours any more.
    async fn unless_superseded<T>(
        &self,
        outcome: Result<T, Error>,
    ) -> Result<Option<Result<T, Error>>, crate::owner::Gone> {
        if let Err(Error::Store(trainctl_store::Error::Superseded { theirs, .. })) = &outcome {
            warn!(job = %self.job, term = theirs, "a higher term holds the run directory");
            self.answer(IoResult::Superseded { term: *theirs }).await?;
            return Ok(None);
        }
        Ok(Some(outcome))
    }

    /// What stays of one kind of saves.
    fn retention(&self, kind: SaveKind) -> Retention<'_> {
        let keep = &self.spec.checkpoint;
        match kind {
            SaveKind::Full => Retention {
                keep: keep.max_recent_checkpoints.map(|recent| recent as usize),
                keep_every_steps: keep.keep_every_steps,
                best_metric_key: self.best_metric_key(),
            },
            SaveKind::Weights => {
                Retention { keep: keep.max_recent_weights.map(|recent| recent as usize), ..Retention::default() }
            }
        }
    }

    /// Nothing is looked for, and nothing made, where weights were never saved apart.
    async fn has_weights(&self, weights: &CheckpointStore) -> Result<bool, Error> {
        Ok(self.spec.checkpoint.weights_every_steps.is_some() || !weights.io().list("").await?.is_empty())
    }

    fn best_metric_key(&self) -> &str {
        self.spec.best_metric_key()
    }

    async fn pointers(&self, store: &CheckpointStore) -> (String, String) {
        pointers(store, self.best_metric_key()).await
    }
}

impl Changes {
    fn pruned(&mut self, report: &PruneReport) {
        self.pruned = report.removed.iter().map(ToString::to_string).collect();
        self.swept = report.orphans();
    }
}

/// Name, from, to.
fn moves(moves: Vec<PointerMove>) -> Vec<(String, String, String)> {
    let name = |to: Option<CheckpointName>| to.map(|name| name.to_string()).unwrap_or_default();
    moves.into_iter().map(|moved| (moved.pointer.to_owned(), moved.from.unwrap_or_default(), name(moved.to))).collect()
}

/// J3: a row of a generation that is over, behind the cut that the next one has made.
fn is_dropped(generation: u64, begun: Option<(Generation, Option<u64>)>) -> bool {
    let decided = decide_row(generation, begun.map(|(generation, _)| generation));
    if let RowUse::Drop { begun } = decided {
        info!(generation, %begun, "a row of an earlier generation came late: dropped");
    }
    decided != RowUse::Write
}

/// A row that the fence refused is the new holder's to write: its worker must not forget it.
fn to_acknowledge(token: Option<AckToken>, written: &Result<(), trainctl_store::Error>) -> Option<AckToken> {
    token.filter(|_| written.is_ok())
}

/// What a run directory holds, for a job's summary.
async fn known(spec: &JobSpec) -> Known {
    let unfenced: Arc<dyn Fence> = Arc::new(Unfenced);
    let rows = Rows::open(&RunDir::new(&spec.run_dir), spec.validation_datasets.keys(), &unfenced);
    let (first, last, validation) = rows.known();
    let pointers = match CheckpointStore::of_job(spec) {
        Ok(store) => pointers(&store, spec.best_metric_key()).await,
        Err(error) => {
            warn!(%error, "the place of the checkpoints cannot be used");
            Default::default()
        }
    };
    Known { pointers, first, last, validation }
}

async fn pointers(store: &CheckpointStore, best_metric_key: &str) -> (String, String) {
    let name = |target: Option<CheckpointName>| target.map(|name| name.to_string()).unwrap_or_default();
    match store.list().await {
        Ok(listing) => {
            let targets = trainctl_store::checkpoints::pointer_targets(&listing.summaries(), best_metric_key);
            (name(targets.latest), name(targets.lowest_val))
        }
        Err(error) => {
            warn!(directory = %store.root().display(), %error, "the checkpoints cannot be listed");
            Default::default()
        }
    }
}

/// Work on the run directory failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The store.
    #[error(transparent)]
    Store(#[from] trainctl_store::Error),
    /// Nothing to start from.
    #[error(transparent)]
    Resolve(ResolveError),
    /// A save that can never be a checkpoint.
    #[error("{0}")]
    Save(String),
    /// The run cannot begin with the checkpoint of another run that it names.
    #[error("{message}")]
    Parent {
        /// The checkpoint.
        name: String,
        /// Why not.
        message: String,
    },
}

impl From<ResolveError> for Error {
    /// A store that is away says nothing of a checkpoint.
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::Store(error) => Self::Store(error),
            error => Self::Resolve(error),
        }
    }
}

impl From<Error> for CommitError {
    fn from(error: Error) -> Self {
        let refused = matches!(error, Error::Save(_) | Error::Store(trainctl_store::Error::Commit { .. }));
        Self { reason: error.to_string(), refused }
    }
}

impl Error {
    fn cause(&self, from: &str) -> Cause {
        match self {
            Self::Resolve(error) => {
                let name = if from.is_empty() { "LATEST" } else { from };
                Cause::Checkpoint { name: name.to_owned(), message: error.to_string() }
            }
            Self::Store(error) => Cause::Storage { message: error.to_string() },
            Self::Save(message) => Cause::Storage { message: message.clone() },
            Self::Parent { name, message } => Cause::Checkpoint { name: name.clone(), message: message.clone() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p5_a_row_that_the_fence_refused_is_not_acknowledged() {
        let token = AckToken { worker: "w0".to_owned(), spool: "s".to_owned(), seq: 7 };
        let refused = Err(trainctl_store::Error::Superseded { mine: 1, theirs: 2 });
        assert_eq!(to_acknowledge(Some(token.clone()), &refused), None);
        assert_eq!(to_acknowledge(Some(token.clone()), &Ok(())), Some(token));
    }
}
