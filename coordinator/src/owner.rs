//! The owner task: the one place that holds the coordinator's state.
//!
//! It feeds events to [`Core`] and carries out the effects in order; everything else holds a [`Handle`]. Nothing that can
//! block runs on it but the journal's write, which must precede what it makes visible; a tick that comes late because of
//! that extends every lease (J6).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;
use tonic::Status;
use tracing::{error, info};
use trainctl_proto::v1;
use trainctl_runtime::clock::Clock;
use trainctl_runtime::tasks::Shutdown;
use trainctl_spec::JobId;
use trainctl_store::layout::CheckpointName;

use crate::core::{Core, Effect, Event, Moment, SessionId, StoreChange};
use crate::hooks::HookRequest;
use crate::journal::{self, Journal};
use crate::record::WorkerRecord;
use crate::rendezvous::Rendezvous;
use crate::run_io::IoRequest;

/// Commands that wait for the owner; more than this many wait in their senders.
const QUEUE: usize = 4096;
/// Pause before a journal write that failed is tried again.
const JOURNAL_RETRY: Duration = Duration::from_secs(1);

type Outbox = mpsc::Sender<Result<v1::CoordinatorMessage, Status>>;
type Look = Box<dyn FnOnce(&Core) + Send>;

enum Command {
    Event(Event),
    /// A stream that opened, and where its messages go.
    Open(SessionId, Outbox),
    /// A job's run directory task.
    Run(JobId, RunPorts),
    Look(Look),
}

/// How the owner reaches a run directory's task and those who watch the job.
#[derive(Debug, Clone)]
pub struct RunPorts {
    /// Requests, carried out in order, until the directory is released. Unbounded: what waits in it is what workers have in
    /// flight, unacknowledged.
    pub io: Option<mpsc::UnboundedSender<IoRequest>>,
    /// The job's newest state.
    pub status: watch::Sender<v1::Job>,
    /// The task that runs the job's commands, if its spec has any. Unbounded: the task itself drops what comes too fast.
    pub hooks: Option<mpsc::UnboundedSender<HookRequest>>,
    /// The task that exports checkpoints, if the spec asks for it. Unbounded: of those that wait only the newest stays.
    pub exports: Option<mpsc::UnboundedSender<CheckpointName>>,
}

/// The owner is gone: the coordinator is shutting down.
#[derive(Debug, thiserror::Error)]
#[error("the coordinator is shutting down")]
pub struct Gone;

/// A way to reach the owner task.
#[derive(Clone)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
    sessions: Arc<std::sync::atomic::AtomicU64>,
}

impl Handle {
    /// Feeds an event.
    pub async fn event(&self, event: Event) -> Result<(), Gone> {
        self.commands.send(Command::Event(event)).await.map_err(|_| Gone)
    }

    /// Registers a stream; its number goes into every later event of it.
    pub async fn open(&self, outbox: Outbox) -> Result<SessionId, Gone> {
        let session = self.sessions.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.commands.send(Command::Open(session, outbox)).await.map_err(|_| Gone)?;
        Ok(session)
    }

    /// Registers a job's run directory task, before the job's first event.
    pub async fn run(&self, job: JobId, ports: RunPorts) -> Result<(), Gone> {
        self.commands.send(Command::Run(job, ports)).await.map_err(|_| Gone)
    }

    /// Looks at the state.
    pub async fn look<T: Send + 'static>(&self, look: impl FnOnce(&Core) -> T + Send + 'static) -> Result<T, Gone> {
        let (answer, answered) = oneshot::channel();
        let look: Look = Box::new(move |core| {
            // Nobody waits for the answer any more: the caller's own business.
            answer.send(look(core)).ok();
        });
        self.commands.send(Command::Look(look)).await.map_err(|_| Gone)?;
        answered.await.map_err(|_| Gone)
    }
}

/// What the owner task owns.
pub struct Owner {
    core: Core,
    clock: Arc<dyn Clock>,
    journal: Box<dyn Journal>,
    rendezvous: Rendezvous,
    sessions: HashMap<SessionId, Outbox>,
    runs: HashMap<JobId, RunPorts>,
    commands: mpsc::Receiver<Command>,
}

impl Owner {
    /// An owner around `core`, and the handle to it.
    pub fn new(core: Core, clock: Arc<dyn Clock>, journal: Box<dyn Journal>, rendezvous: Rendezvous) -> (Self, Handle) {
        let (sender, commands) = mpsc::channel(QUEUE);
        let (sessions, runs) = (HashMap::new(), HashMap::new());
        let owner = Self { core, clock, journal, rendezvous, sessions, runs, commands };
        (owner, Handle { commands: sender, sessions: Arc::new(1.into()) })
    }

    /// Registers an adopted job before the task runs.
    pub fn adopt(&mut self, job: JobId, ports: RunPorts, adopt: impl FnOnce(&mut Core, Moment) -> Vec<Effect>) {
        self.runs.insert(job, ports);
        let effects = adopt(&mut self.core, moment(&*self.clock));
        self.carry_out(effects);
    }

    /// A worker of the journal.
    pub fn know(&mut self, worker: WorkerRecord) {
        self.core.know(worker);
    }

    /// A job of the journal that is not ours to touch.
    pub fn leave_alone(&mut self, job: JobId) {
        self.core.leave_alone(job);
    }

    /// Runs until shutdown.
    pub async fn run(mut self, shutdown: Shutdown, tick: Duration) -> Result<(), Gone> {
        let mut ticks = tokio::time::interval(tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let command = tokio::select! {
                biased;
                () = shutdown.cancelled() => return Ok(()),
                _ = ticks.tick() => Command::Event(Event::Tick),
                command = self.commands.recv() => command.ok_or(Gone)?,
            };
            match command {
                Command::Event(event) => {
                    let effects = self.core.handle(event, moment(&*self.clock));
                    self.carry_out(effects);
                }
                Command::Open(session, outbox) => {
                    self.sessions.insert(session, outbox);
                }
                Command::Run(job, ports) => {
                    self.runs.insert(job, ports);
                }
                Command::Look(look) => look(&self.core),
            }
        }
    }

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Journal(record) => self.write(&record.id.0, |journal| journal.put_job(&record)),
                Effect::JournalWorker(record) => self.write(&record.id, |journal| journal.put_worker(&record)),
                Effect::Send { session, message } => self.send(session, *message),
                Effect::Close { session } => {
                    self.sessions.remove(&session);
                }
                Effect::Io { job, request } => {
                    if let Some(io) = self.runs.get(&job).and_then(|run| run.io.as_ref())
                        && io.send(*request).is_err()
                    {
                        error!(%job, "the run directory's task is gone");
                    }
                }
                Effect::Hook { job, request } => {
                    if let Some(hooks) = self.runs.get(&job).and_then(|run| run.hooks.as_ref())
                        && hooks.send(request).is_err()
                    {
                        info!(%job, "the task of the job's commands had ended");
                    }
                }
                Effect::Export { job, checkpoint } => {
                    if let Some(exports) = self.runs.get(&job).and_then(|run| run.exports.as_ref())
                        && exports.send(checkpoint).is_err()
                    {
                        error!(%job, "the task of the job's exports is gone");
                    }
                }
                Effect::Rendezvous { job, generation, change } => match change {
                    StoreChange::Open => self.rendezvous.open(&job, generation),
                    StoreChange::Seal => self.rendezvous.seal(&job, generation),
                    StoreChange::Close(reason) => self.rendezvous.close(&job, generation, &reason),
                },
                Effect::Publish(status) => {
                    if let Some(run) = self.runs.get(&JobId(status.id.clone())) {
                        run.status.send_replace(*status);
                    }
                }
                Effect::Release(job) => {
                    let Some(run) = self.runs.get_mut(&job) else { continue };
                    (run.hooks, run.exports) = (None, None);
                    if run.io.as_ref().is_some_and(|io| io.send(IoRequest::Release).is_err()) {
                        info!(%job, "the run directory's task had ended");
                    }
                }
                Effect::Leave(job) => {
                    if let Some(run) = self.runs.get_mut(&job) {
                        run.io = None;
                    }
                }
            }
        }
    }

    /// The journal precedes the effect: without it nothing that follows may happen, so a full disk is waited out here while
    /// trainers go on and leases are extended by the time lost.
    fn write(&mut self, key: &str, mut put: impl FnMut(&mut dyn Journal) -> Result<(), journal::Error>) {
        let journal = &mut *self.journal;
        tokio::task::block_in_place(|| {
            while let Err(error) = put(journal) {
                error!(key, %error, "the journal cannot be written: trying again");
                std::thread::sleep(JOURNAL_RETRY);
            }
        });
    }

    fn send(&mut self, session: SessionId, message: v1::coordinator_message::Body) {
        let Some(outbox) = self.sessions.get(&session) else { return };
        if let Err(error) = outbox.try_send(Ok(v1::CoordinatorMessage { body: Some(message) })) {
            // A worker that does not read must dial again and say where it is.
            info!(session, %error, "closing a stream that does not drain");
            self.sessions.remove(&session);
        }
    }
}

fn moment(clock: &dyn Clock) -> Moment {
    Moment { now: clock.now(), wall_ms: clock.wall_ms() }
}
