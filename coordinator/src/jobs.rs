//! The service that people's commands call.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, watch};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_runtime::auth::{self, Caller};
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn, spawn_on_thread};
use trainctl_spec::{JobId, JobSpec};
use trainctl_store::admission::{self, Admission, Asked, Refusal};
use trainctl_store::layout::CheckpointName;
use trainctl_store::{CheckpointStore, RunDir, Tenure, write_job_spec};

use crate::answers::{AnswerStream, Answers};
use crate::core::Event;
use crate::exports::ExportTask;
use crate::hooks::{HookRequest, HookTask};
use crate::owner::{Gone, Handle, RunPorts};
use crate::record::JobRecord;
use crate::run_io::{IoRequest, RunTask};
use crate::runs::Runs;
use crate::{answers, exports, follow, refusal};

/// How long a submission waits for the last writes of the job before. A disk that hangs may hold them up.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);

const RUN: TaskKind = TaskKind { name: "run directory", on_cancel: OnCancel::Finish, on_error: OnError::Shutdown };
const HOOKS: TaskKind = TaskKind { name: "commands", on_cancel: OnCancel::Finish, on_error: OnError::Log };
// Its queue closes when the owner leaves.
const EXPORTS: TaskKind = TaskKind { name: "exports", on_cancel: OnCancel::Finish, on_error: OnError::Log };
const FOLLOW: TaskKind = TaskKind { name: "answer stream", on_cancel: OnCancel::Abort, on_error: OnError::Log };

/// `Jobs`.
pub struct JobsService {
    /// The owner task.
    pub owner: Handle,
    /// The run directories.
    pub runs: Arc<Runs>,
    /// Ends streams and tasks.
    pub shutdown: Shutdown,
    /// Where each job is watched.
    pub watches: Watches,
    /// One submission at a time: two for one directory must see each other.
    pub submitting: Mutex<()>,
    /// How long a reader of a stream may stand still.
    pub patience: Duration,
}

/// How each job's state and files are watched.
#[derive(Clone, Default)]
pub struct Watches(Arc<std::sync::Mutex<std::collections::HashMap<JobId, Watched>>>);

/// How one job is watched.
#[derive(Clone)]
pub struct Watched {
    /// Its run directory.
    pub run_dir: RunDir,
    /// Names of its validation sets.
    pub validations: Vec<String>,
    /// Its newest state.
    pub status: watch::Receiver<v1::Job>,
    /// Bumped after each row or event.
    pub changed: watch::Receiver<u64>,
}

impl Watches {
    fn insert(&self, job: JobId, watched: Watched) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(job, watched);
    }

    fn get(&self, job: &JobId) -> Option<Watched> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get(job).cloned()
    }

    /// Jobs whose tasks may still change this run directory. All jobs of a directory have one tenure, so no fence stands between
    /// the tasks of two of them.
    fn unreleased(&self, run_dir: &Path) -> Vec<JobId> {
        let run_dir = real(run_dir);
        let all = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let holds =
            |watched: &Watched| watched.changed.has_changed().is_ok() && real(watched.run_dir.root()) == run_dir;
        all.iter().filter(|(_, watched)| holds(watched)).map(|(id, _)| id.clone()).collect()
    }

    /// Waits, not without end, until the tasks of jobs that are over have let go of this run directory.
    async fn wait_for_release(&self, run_dir: &Path, limit: Duration) {
        let released = async {
            for id in self.unreleased(run_dir) {
                let Some(Watched { mut changed, status, .. }) = self.get(&id) else { continue };
                // A job that is not over is refused, not waited for.
                let is_over = |job: &v1::Job| job.finished_at_ms.is_some() && job.commands.is_empty();
                if !is_over(&status.borrow()) {
                    continue;
                }
                info!(job = %id, run_dir = %run_dir.display(), "a submission waits until it has let go of the directory");
                while changed.changed().await.is_ok() {}
            }
        };
        if tokio::time::timeout(limit, released).await.is_err() {
            warn!(run_dir = %run_dir.display(), "a job that is over still holds the directory");
        }
    }
}

/// The tasks of a job that are not started, and their requests.
pub struct Waiting {
    run: (RunTask, mpsc::UnboundedReceiver<IoRequest>),
    hooks: Option<(HookTask, mpsc::UnboundedReceiver<HookRequest>)>,
    exports: Option<(ExportTask, mpsc::UnboundedReceiver<CheckpointName>)>,
    owner: Handle,
}

/// Starts a job's tasks.
pub fn start(Waiting { run, hooks, exports, owner }: Waiting, shutdown: &Shutdown) {
    // The owner left first: the orderly end.
    let orderly = |leaving: Shutdown| {
        move |ended| match ended {
            Err(Gone) if leaving.is_triggered() => Ok(()),
            ended => ended,
        }
    };
    let (ended, (task, requests)) = (orderly(shutdown.clone()), run);
    spawn_on_thread(RUN, shutdown, async move { ended(task.run(requests).await) });
    if let Some((task, requests)) = hooks {
        let (ended, leaving, owner, job) =
            (orderly(shutdown.clone()), shutdown.clone(), owner.clone(), task.job.clone());
        let answer = move |result| {
            let (owner, job) = (owner.clone(), job.clone());
            async move { owner.event(Event::Hook { job, result }).await }
        };
        drop(spawn(HOOKS, shutdown, async move { ended(task.run(requests, leaving, answer).await) }));
    }
    if let Some((task, requests)) = exports {
        let (ended, job) = (orderly(shutdown.clone()), task.job.clone());
        let answer = move |result| {
            let (owner, job) = (owner.clone(), job.clone());
            async move { owner.event(Event::Exported { job, result }).await }
        };
        drop(spawn(EXPORTS, shutdown, async move { ended(task.run(requests, answer).await) }));
    }
}

/// How the owner shows a job that is over: nothing is changed in its run directory, so nothing of it is held.
pub fn watch_only(watches: &Watches, record: &JobRecord, spec: &JobSpec) -> RunPorts {
    let (status, _) = watch_job(watches, record, spec);
    RunPorts { io: None, status, hooks: None, exports: None }
}

fn watch_job(watches: &Watches, record: &JobRecord, spec: &JobSpec) -> (watch::Sender<v1::Job>, watch::Sender<u64>) {
    let (status, seen) = watch::channel(v1::Job { id: record.id.0.clone(), ..v1::Job::default() });
    let (changed, changes) = watch::channel(0);
    let watched = Watched {
        run_dir: RunDir::new(&spec.run_dir),
        validations: spec.validation_datasets.keys().cloned().collect(),
        status: seen,
        changed: changes,
    };
    watches.insert(record.id.clone(), watched);
    (status, changed)
}

/// A job's run directory task, and how the owner reaches it.
#[expect(clippy::disallowed_methods, reason = "bounded by what workers have in flight: RunPorts::io says why")]
pub fn run_task(
    owner: &Handle,
    watches: &Watches,
    tenure: Arc<Tenure>,
    record: &JobRecord,
    spec: &JobSpec,
) -> (RunPorts, Waiting) {
    let (io, requests) = mpsc::unbounded_channel();
    let (status, changed) = watch_job(watches, record, spec);
    // Where the place of the checkpoints cannot be used nothing is committed, and the job's end is told all the same.
    let store = CheckpointStore::of_job(spec).unwrap_or_else(|_| CheckpointStore::open(&spec.run_dir));
    let hooks = HookTask::of(record.id.clone(), spec, store.clone());
    let (hooks, hook_requests) = queue_for(hooks);
    let (exports, export_requests) = queue_for(ExportTask::of(record.id.clone(), spec, store));
    let task = RunTask {
        job: record.id.clone(),
        spec: spec.clone(),
        spec_yaml: record.spec_yaml.clone(),
        begun: record.begun(),
        tenure,
        owner: owner.clone(),
        changed,
    };
    let waiting =
        Waiting { run: (task, requests), hooks: hook_requests, exports: export_requests, owner: owner.clone() };
    (RunPorts { io: Some(io), status, hooks, exports }, waiting)
}

/// A task that has not started, with its requests.
type Queued<T, R> = Option<(T, mpsc::UnboundedReceiver<R>)>;

/// A task's queue, where there is a task.
#[expect(clippy::disallowed_methods, reason = "RunPorts says for each queue what bounds it")]
fn queue_for<T, R>(task: Option<T>) -> (Option<mpsc::UnboundedSender<R>>, Queued<T, R>) {
    match task {
        None => (None, None),
        Some(task) => {
            let (sender, requests) = mpsc::unbounded_channel();
            (Some(sender), Some((task, requests)))
        }
    }
}

impl JobsService {
    async fn job_id(&self, asked: &str) -> Result<JobId, Status> {
        let asked = asked.to_owned();
        let found = self.owner.look(move |core| {
            let wanted = JobId(asked.clone());
            let id = if asked.is_empty() { core.latest().cloned() } else { core.status(&wanted).map(|_| wanted) };
            id.ok_or(asked)
        });
        found.await.map_err(unavailable)?.map_err(|asked| match asked.as_str() {
            "" => Status::not_found("this coordinator has no job; `trainctl submit job.yaml` makes one"),
            id => Status::not_found(format!("this coordinator has no job {id:?}; `trainctl list` shows those it has")),
        })
    }

    async fn watched(&self, asked: &str) -> Result<Watched, Status> {
        let id = self.job_id(asked).await?;
        self.watches.get(&id).ok_or_else(|| Status::not_found(format!("job {id} is over and its run directory closed")))
    }

    async fn status(&self, id: &JobId) -> Result<v1::Job, Status> {
        let id = id.clone();
        let status = self.owner.look(move |core| core.status(&id)).await.map_err(unavailable)?;
        status.ok_or_else(|| Status::not_found("the job is gone"))
    }

    async fn worker_status(&self, worker: &str) -> Result<v1::WorkerStatus, Status> {
        let id = worker.to_owned();
        let status = self.owner.look(move |core| core.worker_status(&id)).await.map_err(unavailable)?;
        status.ok_or_else(|| {
            let hint = "`trainctl workers list` shows those it has";
            Status::not_found(format!("this coordinator has no worker {worker:?}; {hint}"))
        })
    }

    /// Answers until all is said, the caller leaves or stands still, or may look no longer.
    fn answer<T, F>(&self, caller: Caller, answer: impl FnOnce(Arc<Answers<T>>) -> F) -> AnswerStream<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<(), answers::Error>> + Send + 'static,
    {
        let (answers, stream) = answers::stream(self.patience);
        let answers = Arc::new(answers);
        let answering = answer(answers.clone());
        drop(spawn(FOLLOW, &self.shutdown, async move {
            tokio::select! {
                // Callers hang up when they like; one that had to be dropped is worth a line.
                ended = answering => if let Err(error @ answers::Error::TooSlow(_)) = ended {
                    info!(%error, "a slow reader");
                },
                status = caller.over() => answers.end(status),
            }
            Ok::<(), std::convert::Infallible>(())
        }));
        stream
    }

    /// A job that holds this run directory: one that is not over, or whose commands are not.
    async fn live_job(&self, run_dir: &Path) -> Result<Option<JobId>, Status> {
        let run_dir = real(run_dir);
        let live = self.owner.look(|core| core.live_jobs()).await.map_err(unavailable)?;
        Ok(live.into_iter().find(|(_, dir)| real(dir) == run_dir).map(|(id, _)| id))
    }

    async fn admit(&self, asked: v1::SubmitRequest, spec: JobSpec, from: String) -> Result<JobId, Status> {
        let tenure =
            self.runs.hold(&RunDir::new(&spec.run_dir).control()).await.map_err(|error| refusal::not_held(&error))?;
        // Before the job takes a worker: a server that cannot keep its checkpoints apart, or credentials that are refused.
        CheckpointStore::of_job(&spec).map_err(unusable)?.check_server().await.map_err(unusable)?;
        let written = write_job_spec(&RunDir::new(&spec.run_dir), asked.spec_yaml.clone()).await;
        written.map_err(|error| {
            Status::internal(format!(
                "the job was not started: {error}; once that is mended, give the same command again"
            ))
        })?;
        let suffix = auth::random_hex(4).map_err(|error| Status::internal(error.to_string()))?;
        let id = JobId(format!("{}-{suffix}", spec.name));
        let record = JobRecord {
            request_id: asked.request_id,
            submitted_at_ms: now_ms(),
            until_step: asked.until_step,
            from,
            ..JobRecord::queued(id.clone(), asked.spec_yaml, tenure.term())
        };
        let (ports, task) = run_task(&self.owner, &self.watches, tenure, &record, &spec);
        self.owner.run(id.clone(), ports).await.map_err(unavailable)?;
        let admitted = Event::Admitted { record: Box::new(record), spec: Box::new(spec) };
        self.owner.event(admitted).await.map_err(unavailable)?;
        // Only now: what the task finds in the directory must reach a job that is known.
        start(task, &self.shutdown);
        Ok(id)
    }
}

#[tonic::async_trait]
impl v1::jobs_server::Jobs for JobsService {
    async fn submit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::SubmitResponse>, Status> {
        let asked = request.into_inner();
        let spec = JobSpec::from_yaml(&asked.spec_yaml).map_err(|faults| refusal::bad_spec(&faults))?;
        if !spec.run_dir.is_absolute() {
            return Err(Status::invalid_argument("run_dir of a submitted spec must be absolute"));
        }
        if asked.request_id.is_empty() {
            return Err(Status::invalid_argument("request_id must not be empty"));
        }
        self.watches.wait_for_release(&spec.run_dir, RELEASE_LIMIT).await;
        let _one_at_a_time = self.submitting.lock().await;
        let request_id = asked.request_id.clone();
        let before = self.owner.look(move |core| core.submitted_as(&request_id).cloned()).await.map_err(unavailable)?;
        if let Some(id) = before {
            let job = Some(self.status(&id).await?);
            let message = "was submitted before".to_owned();
            return Ok(Response::new(v1::SubmitResponse { job, message, already_finished: false }));
        }
        let run_dir = spec.run_dir.display().to_string();
        if let Some(job) = self.live_job(&spec.run_dir).await? {
            return Err(refusal::not_admitted(&Refusal::LiveJob(job.0), &run_dir));
        }
        if let Some(job) = self.watches.unreleased(&spec.run_dir).first() {
            return Err(Status::unavailable(format!(
                "{run_dir}: {job} is over, but not all that it wrote is durable yet"
            )));
        }
        let question = Asked {
            from: asked.from.clone(),
            until_step: asked.until_step,
            fresh: asked.fresh,
            allow_older: asked.allow_older,
        };
        let looked = admission::look(&spec, &question).await.map_err(|error| refusal::not_looked(&error))?;
        match admission::decide(&looked.found, &question, &spec) {
            Admission::Refuse(refusal) => Err(refusal::not_admitted(&refusal, &run_dir)),
            Admission::AlreadyFinished(finished) => {
                let job = v1::Job {
                    name: spec.name.clone(),
                    run_dir,
                    phase: v1::JobPhase::Succeeded as i32,
                    steps_done: finished.steps_done,
                    max_steps: spec.step_scheduler.max_steps,
                    latest: finished.latest.to_string(),
                    ..v1::Job::default()
                };
                let message = finished.to_string();
                Ok(Response::new(v1::SubmitResponse { job: Some(job), message, already_finished: true }))
            }
            Admission::Admit { from, reason } => {
                let mut notes = looked.notes;
                notes.extend(exports::note(&spec).map(str::to_owned));
                let id = self.admit(asked, spec, from).await?;
                let message = notes.into_iter().chain([reason.to_string()]).collect::<Vec<_>>().join("; ");
                let job = Some(self.status(&id).await?);
                Ok(Response::new(v1::SubmitResponse { job, message, already_finished: false }))
            }
        }
    }

    async fn list(&self, _: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        let jobs = self.owner.look(|core| core.statuses()).await.map_err(unavailable)?;
        Ok(Response::new(v1::ListResponse { jobs }))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::Job>, Status> {
        let id = self.job_id(&request.into_inner().job).await?;
        Ok(Response::new(self.status(&id).await?))
    }

    async fn cancel(&self, request: Request<v1::CancelRequest>) -> Result<Response<v1::Job>, Status> {
        let asked = request.into_inner();
        let save = match asked.mode() {
            v1::CancelMode::Save => true,
            v1::CancelMode::Now => false,
            v1::CancelMode::Unspecified => return Err(Status::invalid_argument("cancel mode must be SAVE or NOW")),
        };
        let job = self.job_id(&asked.job).await?;
        self.owner.event(Event::Cancel { job: job.clone(), save }).await.map_err(unavailable)?;
        Ok(Response::new(self.status(&job).await?))
    }

    async fn list_workers(
        &self,
        _: Request<v1::ListWorkersRequest>,
    ) -> Result<Response<v1::ListWorkersResponse>, Status> {
        let workers = self.owner.look(|core| core.worker_statuses()).await.map_err(unavailable)?;
        Ok(Response::new(v1::ListWorkersResponse { workers }))
    }

    async fn quarantine_worker(
        &self,
        request: Request<v1::QuarantineWorkerRequest>,
    ) -> Result<Response<v1::WorkerStatus>, Status> {
        let v1::QuarantineWorkerRequest { worker, reason, now } = request.into_inner();
        if reason.trim().is_empty() {
            return Err(Status::invalid_argument("reason must not be empty: it is shown wherever the worker is"));
        }
        self.worker_status(&worker).await?;
        let event = Event::Quarantine { worker: worker.clone(), reason, now };
        self.owner.event(event).await.map_err(unavailable)?;
        Ok(Response::new(self.worker_status(&worker).await?))
    }

    async fn release_worker(
        &self,
        request: Request<v1::ReleaseWorkerRequest>,
    ) -> Result<Response<v1::WorkerStatus>, Status> {
        let worker = request.into_inner().worker;
        let before = self.worker_status(&worker).await?;
        self.owner.event(Event::Release { worker: worker.clone() }).await.map_err(unavailable)?;
        // One that is away was known for its quarantine alone.
        let after = self.owner.look(move |core| core.worker_status(&worker)).await.map_err(unavailable)?;
        Ok(Response::new(after.unwrap_or(v1::WorkerStatus { quarantine: None, ..before })))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchEvent, Status>> + Send>>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let caller = Caller::of(&request)?;
        let v1::WatchRequest { job, from_start, once } = request.into_inner();
        let watched = self.watched(&job).await?;
        let answer = |answers: Arc<Answers<_>>| async move { follow::watch(watched, from_start, once, &answers).await };
        Ok(Response::new(Box::pin(self.answer(caller, answer))))
    }

    type LogsStream = Pin<Box<dyn Stream<Item = Result<v1::LogChunk, Status>> + Send>>;

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let caller = Caller::of(&request)?;
        let v1::LogsRequest { job, rank, follow } = request.into_inner();
        let watched = self.watched(&job).await?;
        let answer = |answers: Arc<Answers<_>>| async move { follow::logs(watched, rank, follow, &answers).await };
        Ok(Response::new(Box::pin(self.answer(caller, answer))))
    }
}

/// Two spellings of one directory (a symlink, a `..`) are one directory.
fn real(dir: &Path) -> PathBuf {
    std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned())
}

fn now_ms() -> u64 {
    trainctl_runtime::clock::Clock::wall_ms(&trainctl_runtime::clock::SystemClock::new())
}

fn unavailable(_: Gone) -> Status {
    Status::unavailable("the coordinator is shutting down")
}

/// The place of the checkpoints: wrong in the spec, in the environment, or refused by its server.
fn unusable(error: trainctl_store::Error) -> Status {
    Status::failed_precondition(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = "
name: tiny
run_dir: RUN
model: {config: {model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 8, vocab_size: 64, n_positions: 16}}
dataset: {paths: /data/text, seq_length: 8, split: '99,1,0'}
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 40}
";

    #[tokio::test(start_paused = true)]
    async fn j2_a_directory_is_free_when_the_task_of_the_job_before_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (run, link) = (dir.path().join("run"), dir.path().join("link"));
        std::fs::create_dir(&run).unwrap();
        std::os::unix::fs::symlink(&run, &link).unwrap();
        let spec = JobSpec::from_yaml(&SPEC.replace("RUN", run.to_str().unwrap())).unwrap();
        let id = JobId("tiny-1".to_owned());
        let record = JobRecord::queued(id.clone(), String::new(), trainctl_spec::Term(1));
        let watches = Watches::default();
        let (status, changed) = watch_job(&watches, &record, &spec);
        let second = Duration::from_secs(1);
        let waited = |start: tokio::time::Instant| start.elapsed() >= second;

        // One that lives is refused, not waited for.
        let start = tokio::time::Instant::now();
        watches.wait_for_release(&link, second).await;
        assert!(!waited(start));
        assert_eq!(watches.unreleased(&link), std::slice::from_ref(&id));
        status.send_replace(v1::Job { finished_at_ms: Some(1), ..v1::Job::default() });
        watches.wait_for_release(&link, second).await;
        assert!(waited(start), "its task still writes");
        assert_eq!(watches.unreleased(&link), [id]);
        assert!(watches.unreleased(dir.path()).is_empty(), "another directory");

        let ends = async {
            tokio::time::sleep(second / 2).await;
            drop(changed);
        };
        let start = tokio::time::Instant::now();
        tokio::join!(ends, watches.wait_for_release(&link, second));
        assert!(!waited(start));
        assert!(watches.unreleased(&link).is_empty());
    }
}
