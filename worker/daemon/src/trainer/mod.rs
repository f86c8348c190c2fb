//! The one trainer that a worker runs: start, link, end.
//!
//! - **T1** Trainers are spawned from one thread that lives as long as the daemon: the kernel's death signal follows the
//!   thread that forked.
//! - **T2** A trainer leads its own process group and carries the daemon's incarnation in its environment; all that
//!   descends from it inherits the mark.
//! - **T3** Its end is noticed by wait. Then everything that descends from it or carries the mark is killed and reaped
//!   until `/proc` shows none; then its exit is spooled; then it is forgotten (`running.json`); then the session learns.
//! - **T4** What cannot be killed within 30 s is reported; the worker starts nothing more until it is gone.

mod exit;
mod link;
mod log;
mod rendezvous;
mod spawn;
mod stacks;
mod standby;

use std::convert::Infallible;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use trainctl_proto::v1::{
    Assignment, Phase, Place, RankReport, TrainerControl, TrainerExit, TrainerStarted, rank_report::Report,
};
use trainctl_runtime::proc;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn as spawn_task};
use trainctl_spec::JobSpec;

pub use exit::OomCounter;
pub(crate) use spawn::kill_marked;
pub use spawn::{Launcher, MARKER};

use crate::session::machine::Event;
use crate::session::owner::Processes;
use crate::session::transport::Gateway;
use crate::spool::{SpoolError, SpoolHandle};
use crate::state::{Remembered, StateDir, StoredFence};
use link::Line;
use spawn::{Child, Order};
use standby::Standby;

/// After this long what still runs is reported (T4).
const KILL_LIMIT: Duration = Duration::from_secs(30);
/// How long a worker is without a trainer before it loads one for the next start.
const IDLE: Duration = Duration::from_secs(1);
/// Time between tries to spool an exit while the disk refuses.
const SPOOL_RETRY: Duration = Duration::from_secs(1);

/// What a daemon needs to run trainers.
#[derive(Clone)]
pub struct Setup {
    /// The trainer's program.
    pub program: PathBuf,
    /// This daemon's incarnation: the mark of its processes.
    pub incarnation: String,
    /// The state directory.
    pub state: StateDir,
    /// Where reports go.
    pub spool: SpoolHandle,
    /// The coordinator, for rendezvous calls.
    pub gateway: Gateway,
    /// The session's owner.
    pub events: mpsc::Sender<Event>,
    /// Children that are not the trainer's and must not be killed with it: the keeper.
    pub keep: Arc<Mutex<Vec<u32>>>,
    /// The thread that forks (T1).
    pub launcher: Launcher,
    /// Keep a trainer loaded for the next start.
    pub has_standby: bool,
    /// The daemon's shutdown.
    pub shutdown: Shutdown,
}

/// The trainer that runs now.
struct Current {
    child: Option<Child>,
    log: PathBuf,
    line: Arc<Line>,
    killed: Option<String>,
}

/// Real processes.
pub struct Trainers {
    setup: Setup,
    current: Arc<Mutex<Option<Current>>>,
    standby: Standby,
}

impl Trainers {
    /// No trainer yet, but one that is being loaded.
    pub fn new(setup: Setup) -> Self {
        let standby = Standby::default();
        prepare(&setup, &standby);
        Self { setup, current: Arc::default(), standby }
    }
}

impl Processes for Trainers {
    fn start(&mut self, assignment: Assignment) {
        let line = match Line::new(assignment, self.setup.spool.clone(), self.setup.events.clone()) {
            Ok(line) => Arc::new(line),
            Err(error) => {
                return self.cannot_start(format!("make the page in which the trainer says where it is: {error}"));
            }
        };
        *lock(&self.current) = Some(Current { child: None, log: PathBuf::new(), line: line.clone(), killed: None });
        let (setup, current, standby) = (self.setup.clone(), self.current.clone(), self.standby.clone());
        self.load_the_next(line.watch_stepped());
        let kind = TaskKind { name: "trainer", on_cancel: OnCancel::Finish, on_error: OnError::Shutdown };
        let life = async move { run(&setup, current, line, &standby).await };
        drop(spawn_task(kind, &self.setup.shutdown, life));
    }

    fn kill(&mut self, reason: &str) {
        let mut current = lock(&self.current);
        let Some(current) = current.as_mut() else { return };
        current.line.over(reason);
        current.killed = Some(reason.to_owned());
        if let Some(child) = &current.child {
            child.kill();
        }
    }

    fn control(&mut self, control: TrainerControl) {
        if let Some(current) = lock(&self.current).as_ref() {
            current.line.control(control);
        }
    }

    fn place(&self) -> Option<Place> {
        lock(&self.current).as_ref()?.line.place()
    }

    fn dump_stacks(&mut self) {
        let subject = lock(&self.current).as_ref().and_then(|current| {
            let (line, log) = (current.line.clone(), current.log.clone());
            let pid = current.child.as_ref()?.pid();
            Some(stacks::Subject { run_dir: run_dir(line.assignment()).ok()?, line, pid, log })
        });
        let Some(subject) = subject else { return };
        let setup = self.setup.clone();
        let kind = TaskKind { name: "stacks", on_cancel: OnCancel::Finish, on_error: OnError::Log };
        let dump = async move {
            let line = subject.line.clone();
            let report = line.report(stacks::dump(subject).await);
            tell(&setup, Event::Said(report)).await;
            Ok::<(), SpoolError>(())
        };
        drop(spawn_task(kind, &self.setup.shutdown, dump));
    }
}

impl Trainers {
    fn cannot_start(&self, reason: String) {
        tracing::error!(%reason, "the trainer could not be started");
        let setup = self.setup.clone();
        let kind = TaskKind { name: "refused start", on_cancel: OnCancel::Abort, on_error: OnError::Log };
        let tell = async move {
            tell(&setup, Event::StartFailed { reason }).await;
            Ok::<(), Infallible>(())
        };
        drop(spawn_task(kind, &self.setup.shutdown, tell));
    }

    /// Loads the trainer of the next start. Not before this one's first step, since it would take time from a start that is
    /// under way; after one that ended without a step, once nothing has been started for a while.
    fn load_the_next(&self, mut stepped: watch::Receiver<bool>) {
        let (setup, standby, current) = (self.setup.clone(), self.standby.clone(), self.current.clone());
        let kind = TaskKind { name: "standby", on_cancel: OnCancel::Abort, on_error: OnError::Log };
        let load = async move {
            let has_stepped = stepped.wait_for(|stepped| *stepped).await.is_ok();
            if !has_stepped {
                tokio::time::sleep(IDLE).await;
            }
            if has_stepped || lock(&current).is_none() {
                prepare(&setup, &standby);
            }
            Ok::<(), Infallible>(())
        };
        drop(spawn_task(kind, &self.setup.shutdown, load));
    }
}

/// Has a standby started, on a thread that may block.
fn prepare(setup: &Setup, standby: &Standby) {
    let (setup, standby) = (setup.clone(), standby.clone());
    drop(tokio::task::spawn_blocking(move || standby.prepare(&setup)));
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One trainer's life.
async fn run(
    setup: &Setup,
    current: Arc<Mutex<Option<Current>>>,
    line: Arc<Line>,
    standby: &Standby,
) -> Result<(), SpoolError> {
    let ours = match begin(setup, line.assignment(), standby).await {
        Ok(begun) => begun,
        Err(reason) => {
            tracing::error!(%reason, "the trainer could not be started");
            lock(&current).take();
            if let Err(error) = setup.state.forget_running() {
                tracing::warn!(%error, "cannot forget a trainer that did not start");
            }
            tell(setup, Event::StartFailed { reason }).await;
            return Ok(());
        }
    };
    let Begun { child, socket, remembered, log } = ours;
    let (pid, start_time) = (child.pid(), child.start_time());
    tracing::info!(pid, rank = line.assignment().rank, generation = remembered.fence.generation, "trainer started");
    let oom = OomCounter::read();
    let served = link::serve(socket, line.clone(), setup.gateway.clone(), &setup.shutdown);
    if let Err(error) = &served {
        // The trainer sees a closed link and ends; its exit is reported like any other.
        tracing::error!(%error, "the trainer's link cannot be served");
    }
    // Told before the first report of the trainer itself can arrive: it needs its assignment first, and gets it after.
    let started = Report::Started(TrainerStarted { pid, start_time });
    if let Err(error) = setup.spool.append(line.report(started)).await {
        tracing::error!(%error, "the start could not be spooled");
    }
    tell(setup, Event::Started { pid, start_time }).await;
    line.open(log);
    {
        let mut current = lock(&current);
        if let Some(current) = current.as_mut() {
            if current.killed.is_some() {
                child.kill();
            }
            current.child = Some(child.clone());
            current.log.clone_from(&remembered.log);
        }
    }
    let ending = Ending { setup: setup.clone(), child, line, current, remembered, oom };
    let ended = tokio::task::spawn_blocking(move || ending.run()).await;
    drop(served);
    match ended {
        Ok(result) => result?,
        Err(error) => tracing::error!(%error, "the thread that waits for the trainer failed"),
    }
    tell(setup, Event::Gone).await;
    Ok(())
}

async fn tell(setup: &Setup, event: Event) {
    if setup.events.send(event).await.is_err() {
        tracing::debug!("the session's owner has ended");
    }
}

struct Begun {
    child: Child,
    socket: UnixStream,
    remembered: Remembered,
    /// The log that a standby is to take up.
    log: Option<PathBuf>,
}

/// Everything up to a running process; the error is for the coordinator.
async fn begin(setup: &Setup, assignment: &Assignment, standby: &Standby) -> Result<Begun, String> {
    let (setup, assignment, standby) = (setup.clone(), assignment.clone(), standby.clone());
    let begun = tokio::task::spawn_blocking(move || {
        let fence = assignment.fence.clone().unwrap_or_default();
        let run_dir = run_dir(&assignment)?;
        let log = log::open(&run_dir, fence.generation, assignment.rank)?;
        let remembered = Remembered {
            fence: StoredFence::from(&fence),
            rank: assignment.rank,
            incarnation: setup.incarnation.clone(),
            log: log.path.clone(),
            log_start: log.start,
        };
        setup.state.save_running(&remembered).map_err(|error| error.to_string())?;
        if let Some((child, socket)) = standby.take(&setup) {
            return Ok(Begun { child, socket, log: Some(remembered.log.clone()), remembered });
        }
        let (ours, theirs) = UnixStream::pair().map_err(|error| format!("make the trainer's link: {error}"))?;
        ours.set_nonblocking(true).map_err(|error| format!("make the trainer's link: {error}"))?;
        let order =
            Order { program: setup.program.clone(), stdin: theirs, log: log.file, incarnation: setup.incarnation };
        let child = setup.launcher.launch(order)?;
        Ok(Begun { child, socket: ours, remembered, log: None })
    });
    begun.await.map_err(|error| format!("start the trainer: {error}"))?
}

/// The run directory of an assignment, from its spec.
///
/// # Errors
/// What is wrong with the spec.
pub fn run_dir(assignment: &Assignment) -> Result<PathBuf, String> {
    let spec = JobSpec::from_yaml(&assignment.spec_yaml)
        .map_err(|faults| format!("the assignment's spec is not a resolved one: {faults}"))?;
    if spec.run_dir.is_absolute() {
        Ok(spec.run_dir)
    } else {
        Err(format!("the assignment's run_dir {} is not absolute: the spec is not resolved", spec.run_dir.display()))
    }
}

/// What happens after the start, on a thread that may block.
struct Ending {
    setup: Setup,
    child: Child,
    line: Arc<Line>,
    current: Arc<Mutex<Option<Current>>>,
    remembered: Remembered,
    oom: OomCounter,
}

impl Ending {
    /// T3, T4.
    fn run(self) -> Result<(), SpoolError> {
        let status = self.child.wait();
        self.line.over("the trainer has ended");
        if self.setup.events.blocking_send(Event::Ended).is_err() {
            tracing::debug!("the session's owner has ended");
        }
        let stopped_by_us = lock(&self.current).as_ref().is_some_and(|current| current.killed.is_some());
        let mut facts = exit::facts(status.as_ref().ok(), stopped_by_us, self.oom.has_risen());
        let cleaned = clean(&self.setup, KILL_LIMIT);
        facts.stderr_tail = last_words(&self.setup.state, &self.remembered);
        if let Err(error) = &status {
            facts.stderr_tail.push(format!("trainctl-worker: the trainer's exit status is unknown: {error}"));
        }
        if let Err(reason) = &cleaned {
            facts.stderr_tail.push(format!("trainctl-worker: {reason}"));
        }
        let (phase, step) = self.line.progress();
        facts.phase = phase.into();
        facts.step = step;
        tracing::info!(pid = self.child.pid(), code = ?facts.code, signal = ?facts.signal, stopped_by_us, "trainer ended");
        spool_exit(&self.setup.spool, &self.line.report(Report::Exited(facts)))?;
        if let Err(error) = self.setup.state.forget_running() {
            tracing::error!(%error, "the ended trainer cannot be forgotten; its exit may be reported twice");
        }
        if let Err(reason) = cleaned {
            tracing::error!(%reason, "quarantined: no trainer starts before they are gone");
            if self.setup.events.blocking_send(Event::Stuck { reason }).is_err() {
                return Ok(());
            }
            while clean(&self.setup, KILL_LIMIT).is_err() {
                if self.setup.shutdown.is_triggered() {
                    return Ok(());
                }
            }
        }
        lock(&self.current).take();
        Ok(())
    }
}

/// The last lines of a trainer's log; of one that was a standby and has written nothing since, those from before.
fn last_words(state: &StateDir, remembered: &Remembered) -> Vec<String> {
    let tail = log::tail(&remembered.log, remembered.log_start);
    let before = state.path().join(standby::LOG);
    if tail.is_empty() && before.exists() { log::tail(&before, 0) } else { tail }
}

/// Kills and reaps what descends from this daemon (but what it keeps) and what carries its mark.
fn clean(setup: &Setup, limit: Duration) -> Result<(), String> {
    let keep = lock(&setup.keep).clone();
    let descendants = proc::kill_descendants(&keep, limit).map_err(|error| error.to_string());
    spawn::kill_marked(&setup.incarnation, &keep, limit)?;
    descendants.map(drop)
}

/// An exit must reach the spool: on it rests that the generation ends. A full disk is waited for.
fn spool_exit(spool: &SpoolHandle, report: &RankReport) -> Result<(), SpoolError> {
    loop {
        match spool.append_blocking(report.clone()) {
            Ok(_) => return Ok(()),
            Err(SpoolError::Closed) => return Err(SpoolError::Closed),
            Err(error) => {
                tracing::error!(%error, "the trainer's exit cannot be spooled; trying again");
                std::thread::sleep(SPOOL_RETRY);
            }
        }
    }
}

/// Reports the end of a predecessor's trainer: the predecessor was killed and its trainer with it. Call it before the
/// first session, from a thread that may block. Returns whether there was one.
///
/// # Errors
/// A process of the predecessor cannot be killed, or the disk refuses.
pub fn settle_predecessor(
    state: &StateDir,
    spool: &SpoolHandle,
    was_reported: impl Fn(&Remembered) -> bool,
) -> anyhow::Result<bool> {
    let Some(remembered) = state.load_running()? else { return Ok(false) };
    spawn::kill_marked(&remembered.incarnation, &[], KILL_LIMIT).map_err(anyhow::Error::msg)?;
    if !was_reported(&remembered) {
        let mut tail = last_words(state, &remembered);
        tail.push("trainctl-worker: the worker was killed, and its trainer with it".to_owned());
        let facts = TrainerExit {
            signal: Some(nix::sys::signal::Signal::SIGKILL as i32),
            stderr_tail: tail,
            phase: Phase::Unspecified.into(),
            ..TrainerExit::default()
        };
        let fence = Some((&remembered.fence).into());
        spool.append_blocking(RankReport { fence, rank: remembered.rank, report: Some(Report::Exited(facts)) })?;
        tracing::warn!(
            rank = remembered.rank,
            generation = remembered.fence.generation,
            "spooled the end of the last trainer"
        );
    }
    state.forget_running()?;
    Ok(true)
}
