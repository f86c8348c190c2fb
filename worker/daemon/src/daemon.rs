//! Puts the daemon together and takes it apart in order.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::mpsc;
use trainctl_proto::v1::{Assignment, Hello};
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_runtime::signals::Signals;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};
use trainctl_runtime::{auth, proc};

use crate::health::{Measure, Prober};
use crate::keeper::Keeper;
use crate::session::machine::Machine;
use crate::session::owner::{EVENT_QUEUE, Owner, Parts};
use crate::session::transport::Grpc;
use crate::spool::SpoolHandle;
use crate::state::StateDir;
use crate::trainer::{self, Launcher, Setup, Trainers};

/// How long tasks may take to end after the owner has.
const DRAIN: Duration = Duration::from_secs(5);
/// How often the keeper is looked after.
const KEEPER_CHECK: Duration = Duration::from_secs(1);

/// What a person chooses.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory of this worker's own.
    pub state_dir: PathBuf,
    /// Where `endpoint.json` and `join.json` lie.
    pub coordinator: PathBuf,
    /// The trainer's program.
    pub trainer: PathBuf,
    /// Worker id; kept in the state directory.
    pub name: Option<String>,
    /// "cpu" or "cuda".
    pub device: String,
    /// Keep a trainer loaded for the next start.
    pub has_standby: bool,
}

/// Runs a daemon until it is told to end.
///
/// # Errors
/// The state directory is taken or unusable, or something of the daemon's own failed.
pub async fn run(options: Options, state: StateDir) -> anyhow::Result<()> {
    proc::become_subreaper().context("become a child subreaper")?;
    let shutdown = Shutdown::new();
    let mut signals = Signals::listen(&shutdown).context("listen to signals")?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let incarnation = auth::random_hex(8)?;
    let boot_id = proc::boot_id().context("read the boot id")?;
    let host = proc::host_name();
    let worker_id = state.worker_id(options.name.as_deref(), &host, &incarnation[..8])?;
    tracing::info!(worker = %worker_id, %incarnation, state_dir = %state.path().display(), "worker starts");
    let (spool, spooled) = SpoolHandle::start(&state.spool(), &auth::random_hex(8)?, &boot_id, clock.clone())?;
    let fences = state.load_fences()?;
    let (settle_state, settle_spool) = (state.clone(), spool.clone());
    tokio::task::spawn_blocking(move || {
        trainer::settle_predecessor(&settle_state, &settle_spool, |last| {
            spooled.knows_exit(&last.fence.job, last.fence.generation, last.rank)
        })
    })
    .await
    .context("settle the last trainer")??;

    let keep = Arc::new(Mutex::new(Vec::new()));
    let launcher = Launcher::start().context("start the launcher thread")?;
    let keeper = Keeper::start(&incarnation, keep.clone()).context("start the keeper")?;
    let (stop_keeper, keeper_stopped) = channel::<()>();
    let keeper = std::thread::Builder::new().name("keeper".to_owned()).spawn(move || watch(keeper, &keeper_stopped))?;

    let (events_tx, events) = mpsc::channel(EVENT_QUEUE);
    let (transport, gateway) = Grpc::new(options.coordinator.clone(), worker_id.clone(), shutdown.clone());
    let measure = Measure { state_dir: state.path().to_owned(), device: options.device.clone() };
    measure.clone().start(events_tx.clone(), &shutdown);
    let prober = Prober::new(worker_id.clone(), measure, events_tx.clone(), shutdown.clone());
    let setup = Setup {
        program: options.trainer.clone(),
        incarnation: incarnation.clone(),
        state: state.clone(),
        spool: spool.clone(),
        gateway,
        events: events_tx,
        keep,
        launcher,
        has_standby: options.has_standby,
        shutdown: shutdown.clone(),
    };
    let hello = Hello {
        worker_id,
        incarnation,
        host,
        boot_id,
        pid: std::process::id(),
        cores: std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1)),
        device: options.device,
        ..Hello::default()
    };
    let parts = Parts {
        transport: Arc::new(transport),
        clock,
        processes: Trainers::new(setup),
        probes: Box::new(prober),
        spool,
        fences: Arc::new(state),
        hello,
        events,
    };
    let stop = shutdown.clone();
    let kind = TaskKind { name: "stop on signal", on_cancel: OnCancel::Abort, on_error: OnError::Log };
    drop(spawn(kind, &shutdown, async move {
        signals.first().await;
        stop.trigger("signal");
        Ok::<(), std::convert::Infallible>(())
    }));
    let owned = Owner::new(Machine::new(fences, run_of), parts, shutdown.clone()).run().await;
    shutdown.trigger("the session's owner has ended");
    if !shutdown.wait(DRAIN).await {
        tracing::warn!("some tasks did not end in time");
    }
    drop(stop_keeper);
    let joined = tokio::task::spawn_blocking(move || keeper.join()).await;
    if !matches!(joined, Ok(Ok(()))) {
        tracing::warn!("the keeper was not let go in order");
    }
    owned.context("run the session")
}

/// Looks after the keeper until told to let it go. A thread of its own: a keeper's death signal, like a trainer's, would
/// follow the thread that forked it, and nothing here may hold up the runtime.
fn watch(mut keeper: Keeper, stopped: &Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(KEEPER_CHECK) {
        if let Err(error) = keeper.check() {
            tracing::error!(%error, "the keeper cannot be started");
        }
    }
    keeper.release();
}

fn run_of(assignment: &Assignment) -> Result<String, String> {
    trainer::run_dir(assignment).map(|dir| dir.display().to_string())
}
