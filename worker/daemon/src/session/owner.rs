//! The one task that owns the session's state and carries out what the machine decides. It never waits for a disk, a
//! peer or a process: those have tasks and threads of their own and come back as events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use trainctl_proto::v1::{
    Assignment, Heartbeat, Hello, Place, Probe, TrainerControl, WorkerMessage, worker_message::Body,
};
use trainctl_runtime::backoff::Backoff;
use trainctl_runtime::clock::Clock;
use trainctl_runtime::proc;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};

use super::machine::{Effect, Event, Machine, Outgoing};
use super::pump::pump;
use super::transport::{Transport, Wire};
use crate::spool::SpoolHandle;
use crate::state::{Fences, StateDir, StateError};

/// Events that may wait for the owner.
pub const EVENT_QUEUE: usize = 1_024;
/// Pause before fences that could not be stored are tried again.
const REMEMBER_RETRY: Duration = Duration::from_secs(1);
/// Delays between dials: never more than a second (W5).
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// On shutdown: how long the trainer may take to be gone; a little more than trying to kill it takes (T4).
const KILLING: Duration = Duration::from_secs(35);
/// On shutdown: how long the coordinator may take to acknowledge what the spool holds.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Starts and ends trainers. Calls return at once; what becomes of them arrives as [`Event`]s.
pub trait Processes: Send {
    /// Starts a trainer: [`Event::Started`] or [`Event::StartFailed`], later [`Event::Gone`] (W4).
    fn start(&mut self, assignment: Assignment);
    /// Kills the trainer and everything of it. Waiting rendezvous calls end with `reason`.
    fn kill(&mut self, reason: &str);
    /// Hands a request to the trainer.
    fn control(&mut self, control: TrainerControl);
    /// Where the trainer is by its page; `None` before it wrote it, and while none runs.
    fn place(&self) -> Option<Place>;
    /// Finds out what the trainer's threads are doing; [`Event::Said`] brings it.
    fn dump_stacks(&mut self);
}

/// Looks at run directories and peers. Calls return at once; what was found arrives as [`Event::Probed`].
pub trait Probes: Send {
    /// Takes a step of a round.
    fn probe(&mut self, probe: Probe);
}

/// Keeps the fences. A trait because a simulator has no disk.
pub trait FenceStore: Send + Sync + 'static {
    /// Stores them durably.
    ///
    /// # Errors
    /// As the state directory.
    fn save(&self, fences: &Fences) -> Result<(), StateError>;
}

impl FenceStore for StateDir {
    fn save(&self, fences: &Fences) -> Result<(), StateError> {
        self.save_fences(fences)
    }
}

/// What the owner works with.
pub struct Parts<P> {
    /// How to reach the coordinator.
    pub transport: Arc<dyn Transport>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// The trainer.
    pub processes: P,
    /// Looks at run directories and peers.
    pub probes: Box<dyn Probes>,
    /// Records to send.
    pub spool: SpoolHandle,
    /// Where fences are kept.
    pub fences: Arc<dyn FenceStore>,
    /// Hello without what changes: trainer, spool position, address, term.
    pub hello: Hello,
    /// Events from the trainer's side.
    pub events: mpsc::Receiver<Event>,
}

/// The owner task.
pub struct Owner<P> {
    machine: Machine,
    parts: Parts<P>,
    backoff: Backoff,
    wire: Option<Wire>,
    dialling: Option<BoxFuture<'static, Result<Wire, String>>>,
    pump: Option<JoinHandle<()>>,
    shutdown: Shutdown,
    killed: bool,
    last_refusal: String,
}

impl<P: Processes> Owner<P> {
    /// An owner that has not dialled yet.
    pub fn new(machine: Machine, parts: Parts<P>, shutdown: Shutdown) -> Self {
        let backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        let last_refusal = String::new();
        Self { machine, parts, backoff, wire: None, dialling: None, pump: None, shutdown, killed: false, last_refusal }
    }

    /// Runs until the shutdown, then kills the trainer, waits until it is gone (35 s at most: then it cannot be killed)
    /// and until the coordinator knows (2 s at most).
    ///
    /// # Errors
    /// [`StateError`] when the fences cannot be stored: going on would break W3.
    pub async fn run(mut self) -> Result<(), StateError> {
        let mut tick_at = tokio::time::Instant::now();
        let shutdown = self.shutdown.clone();
        let (mut leave_at, mut give_up_at) = (None, None);
        loop {
            if shutdown.is_triggered() && leave_at.is_none() && !self.machine.has_trainer() {
                leave_at = Some(self.parts.clock.now() + LAST_WORDS);
            }
            if give_up_at.is_some_and(|at| self.parts.clock.now() >= at) {
                tracing::error!("the trainer cannot be killed; leaving without it");
                break;
            }
            let told = self.wire.is_none() || self.parts.spool.status().waiting == 0;
            if leave_at.is_some_and(|at| told || self.parts.clock.now() >= at) {
                break;
            }
            // Biased: what happened here goes before what the coordinator says of it. Ticks are rare and hold nothing up.
            let event = tokio::select! {
                biased;
                () = shutdown.cancelled(), if !self.killed => {
                    self.parts.processes.kill("the worker is shutting down");
                    self.killed = true;
                    give_up_at = Some(self.parts.clock.now() + KILLING + LAST_WORDS);
                    continue;
                }
                () = tokio::time::sleep_until(tick_at) => {
                    tick_at = tokio::time::Instant::now() + self.machine.next_tick();
                    if let Some(place) = self.parts.processes.place() {
                        self.handle(Event::Place(place)).await?;
                    }
                    Event::Tick
                }
                Some(event) = self.parts.events.recv() => event,
                outcome = dialled(&mut self.dialling) => {
                    self.dialling = None;
                    self.dialled(outcome)
                }
                heard = heard(&mut self.wire) => match heard {
                    Ok(command) => Event::Heard(command),
                    Err(reason) => self.hang_up(reason),
                },
            };
            self.handle(event).await?;
            tick_at = tick_at.min(tokio::time::Instant::now() + self.machine.next_tick());
        }
        if let Some(pump) = self.pump.take() {
            pump.abort();
        }
        drop(self.wire.take());
        if let Err(error) = self.parts.spool.flush().await {
            tracing::error!(%error, "the spool could not be flushed");
        }
        Ok(())
    }

    async fn handle(&mut self, event: Event) -> Result<(), StateError> {
        let mut effects = VecDeque::from(self.machine.on(self.parts.clock.now(), event));
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Dial => self.dialling = Some(self.parts.transport.dial(self.hello())),
                Effect::HangUp { reason } => {
                    let event = self.hang_up(reason);
                    effects.extend(self.machine.on(self.parts.clock.now(), event));
                }
                Effect::Send(message) => self.send(message),
                Effect::Pump => self.start_pump(),
                // A full disk must not end a healthy trainer with this daemon: what follows waits, as for the spool.
                Effect::Remember => {
                    while let Err(error) = self.remember().await {
                        tracing::error!(%error, "the fences cannot be stored: trying again");
                        tokio::time::sleep(REMEMBER_RETRY).await;
                    }
                }
                Effect::Start(_) if self.killed => {
                    let event = Event::StartFailed { reason: "the worker is shutting down".to_owned() };
                    effects.extend(self.machine.on(self.parts.clock.now(), event));
                }
                Effect::Start(assignment) => self.parts.processes.start(*assignment),
                Effect::Kill { reason } => self.parts.processes.kill(&reason),
                Effect::Control(control) => self.parts.processes.control(control),
                Effect::DumpStacks => self.parts.processes.dump_stacks(),
                Effect::Probe(probe) => self.parts.probes.probe(probe),
                Effect::Acked(ack) => self.parts.spool.ack(ack.spool, ack.up_to),
            }
        }
        Ok(())
    }

    fn hello(&self) -> Hello {
        let spooled = self.parts.spool.status();
        let since_boot = proc::since_boot().unwrap_or_default();
        Hello {
            dialled_at_ms: u64::try_from(since_boot.as_millis()).unwrap_or(u64::MAX),
            running: self.machine.running(),
            spool: self.parts.spool.id().to_owned(),
            spooled_up_to: spooled.last,
            acked_up_to: spooled.acked,
            term: self.machine.fences().latest_term(),
            ..self.parts.hello.clone()
        }
    }

    fn dialled(&mut self, outcome: Result<Wire, String>) -> Event {
        match outcome {
            Ok(wire) => {
                tracing::info!("session open");
                self.backoff.reset();
                self.last_refusal.clear();
                self.wire = Some(wire);
                Event::Connected
            }
            Err(reason) => {
                if reason != self.last_refusal {
                    tracing::warn!(%reason, "no session with the coordinator; retrying");
                    self.last_refusal.clone_from(&reason);
                }
                Event::Disconnected { reason, retry_in: self.backoff.next_delay() }
            }
        }
    }

    fn hang_up(&mut self, reason: String) -> Event {
        tracing::warn!(%reason, "session lost; the trainer goes on");
        self.wire = None;
        if let Some(pump) = self.pump.take() {
            pump.abort();
        }
        Event::Disconnected { reason, retry_in: self.backoff.next_delay() }
    }

    fn start_pump(&mut self) {
        let Some(wire) = &self.wire else { return };
        if let Some(old) = self.pump.take() {
            old.abort();
        }
        let kind = TaskKind { name: "spool pump", on_cancel: OnCancel::Finish, on_error: OnError::Shutdown };
        self.pump = Some(spawn(kind, &self.shutdown, pump(self.parts.spool.clone(), wire.outgoing.clone())));
    }

    /// Lossy on purpose: a full stream means that the coordinator does not read, and its lease will end the stream. A
    /// lost result is asked for again (J7).
    fn send(&self, message: Outgoing) {
        let body = match message {
            Outgoing::Heartbeat(heartbeat) => {
                Body::Heartbeat(Heartbeat { wall_ms: Some(self.parts.clock.wall_ms()), ..heartbeat })
            }
            Outgoing::Health(health) => Body::Health(health),
            Outgoing::Probed(result) => Body::ProbeResult(result),
            Outgoing::Result(result) => {
                tracing::info!(command = %result.command_id, error = %result.error, stale = result.stale, "command answered");
                Body::CommandResult(result)
            }
            Outgoing::Report(report) => Body::RankReport(*report),
        };
        if let Some(wire) = &self.wire
            && wire.outgoing.try_send(WorkerMessage { seq: 0, age_ms: 0, body: Some(body) }).is_err()
        {
            tracing::debug!("the stream is full or closed: message dropped");
        }
    }

    /// W3: waits until the fence is on the disk. Terms and generations change rarely, and nothing may follow before.
    async fn remember(&self) -> Result<(), StateError> {
        let (store, fences) = (self.parts.fences.clone(), self.machine.fences().clone());
        match tokio::task::spawn_blocking(move || store.save(&fences)).await {
            Ok(saved) => saved,
            Err(error) => {
                let source = std::io::Error::other(error.to_string());
                Err(StateError::Io { action: "store fences in", path: "fences.json".into(), source })
            }
        }
    }
}

/// The dial's outcome; never ready when there is none. Cancel-safe: the future stays where it is.
async fn dialled(dialling: &mut Option<BoxFuture<'static, Result<Wire, String>>>) -> Result<Wire, String> {
    match dialling {
        Some(dial) => dial.as_mut().await,
        None => std::future::pending().await,
    }
}

/// The next message; never ready when there is no stream. Cancel-safe.
async fn heard(wire: &mut Option<Wire>) -> Result<trainctl_proto::v1::coordinator_message::Body, String> {
    match wire {
        Some(wire) => wire.incoming.recv().await.unwrap_or_else(|| Err("the session's reader has ended".to_owned())),
        None => std::future::pending().await,
    }
}
