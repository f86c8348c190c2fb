//! The run directories that this coordinator holds.
//!
//! A tenure (J2) is taken once per control directory and kept until the coordinator ends: a coordinator whose state
//! directory is a run's `control/` (as under `trainctl run`) holds both by one term.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tracing::{error, warn};
use trainctl_proto::v1::jobs_client::JobsClient;
use trainctl_runtime::endpoint::Endpoint;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};
use trainctl_runtime::{auth, endpoint, proc, rpc};
use trainctl_store::io::Io;
use trainctl_store::numbers::Taker;
use trainctl_store::tenure::{AcquireError, BEAT_EVERY, Holder, HolderInfo, Policy, Probe, TokioClock, read_holder};
use trainctl_store::{Standing, Tenure};

/// Header in which every answer names the coordinator's incarnation, so that a looker can tell a frozen or replaced holder
/// from the one that `holder.json` names.
pub const INCARNATION_HEADER: &str = "x-trainctl-incarnation";

const BEAT: TaskKind = TaskKind { name: "tenure", on_cancel: OnCancel::Finish, on_error: OnError::Shutdown };

/// All tenures of this coordinator.
pub struct Runs {
    /// How others reach it.
    pub endpoint: Endpoint,
    /// Its tokens, published to the runs' workers.
    pub tokens: auth::Tokens,
    /// Triggered when the state directory is taken over.
    pub shutdown: Shutdown,
    state_dir: PathBuf,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    tenures: HashMap<PathBuf, Arc<Tenure>>,
    /// Incarnation that held the state directory before us: what was waited out there need not be waited out again.
    predecessor: Option<String>,
}

/// A run directory could not be made ready.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else holds it, or it cannot be read or written.
    #[error(transparent)]
    Tenure(#[from] AcquireError),
    /// The endpoint could not be published.
    #[error("publish the coordinator's endpoint: {0}")]
    Endpoint(#[from] endpoint::Error),
    /// The workers' token could not be published.
    #[error("publish the workers' token: {0}")]
    Token(#[from] auth::Error),
    /// The directory could not be made.
    #[error("make {path}: {source}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
}

impl Runs {
    /// No tenures yet.
    pub fn new(state_dir: PathBuf, endpoint: Endpoint, tokens: auth::Tokens, shutdown: Shutdown) -> Self {
        Self { endpoint, tokens, shutdown, state_dir, held: Mutex::default() }
    }

    /// Takes the tenure over a control directory, or answers the one that is held, and publishes the way here.
    pub async fn hold(&self, control: &Path) -> Result<Arc<Tenure>, Error> {
        let made = std::fs::create_dir_all(control).and_then(|()| std::fs::canonicalize(control));
        let control = made.map_err(|source| Error::Directory { path: control.to_owned(), source })?;
        let mut held = self.held.lock().await;
        if let Some(tenure) = held.tenures.get(&control) {
            return Ok(tenure.clone());
        }
        let clock = TokioClock::default();
        let io = Io::new(&control);
        let before = read_holder(&io).await.map_err(AcquireError::Store)?.map(|holder| holder.info.incarnation);
        // One process holds all directories of a coordinator: it is gone from this one too.
        let is_gone = before.is_some() && before == held.predecessor;
        let policy = if is_gone { Policy { lease: Duration::ZERO, ..Policy::default() } } else { Policy::default() };
        let probe = Answers { control: control.clone(), own: self.endpoint.clone() };
        let tenure = Tenure::acquire(io, self.holder(), &probe, &clock, &policy).await?;
        let tenure = Arc::new(tenure);
        endpoint::publish(&self.endpoint, &control)?;
        auth::publish_join(&self.tokens, &control)?;
        let is_state = std::fs::canonicalize(&self.state_dir).is_ok_and(|state| state == control);
        if is_state {
            held.predecessor = before;
        }
        self.beat(&control, is_state, tenure.clone());
        held.tenures.insert(control, tenure.clone());
        Ok(tenure)
    }

    /// Who we are, for `holder.json`.
    fn holder(&self) -> HolderInfo {
        let pid = std::process::id();
        let process = Taker {
            host: proc::host_name(),
            pid,
            boot_id: proc::boot_id().unwrap_or_default(),
            start_time: proc::start_time(pid).unwrap_or_default(),
        };
        HolderInfo {
            process,
            addresses: self.endpoint.addresses.clone(),
            port: self.endpoint.port,
            incarnation: self.endpoint.incarnation.clone(),
            slurm_job: std::env::var("SLURM_JOB_ID").ok(),
        }
    }

    /// Shows every 2 s that we live, until shutdown; then says that we leave.
    fn beat(&self, control: &Path, is_state: bool, tenure: Arc<Tenure>) {
        let shutdown = self.shutdown.clone();
        let control = control.to_owned();
        drop(spawn(BEAT, &self.shutdown, async move {
            loop {
                tokio::select! {
                    () = shutdown.cancelled() => break,
                    () = tokio::time::sleep(BEAT_EVERY) => {}
                }
                match tenure.beat().await {
                    Ok(Standing::Mine) => {}
                    Ok(Standing::Superseded { term }) => {
                        error!(control = %control.display(), term = term.0, "a higher term holds this directory");
                        if is_state {
                            shutdown.trigger("a higher term holds the state directory");
                        }
                        return Ok::<(), std::convert::Infallible>(());
                    }
                    Err(error) => warn!(control = %control.display(), %error, "the tenure's beat failed"),
                }
            }
            if let Err(error) = tenure.release().await {
                warn!(control = %control.display(), %error, "the tenure could not be released");
            }
            Ok(())
        }));
    }
}

/// Asks a holder whether it is the one that its file names.
struct Answers {
    control: PathBuf,
    own: Endpoint,
}

#[tonic::async_trait]
impl Probe for Answers {
    async fn answers(&self, holder: &Holder) -> bool {
        // We have bound its port since: it is gone, and we would wait for our own answer.
        if holder.info.port == self.own.port && holder.info.addresses == self.own.addresses {
            return false;
        }
        // The file beside holder.json has what TLS needs; it may be newer or older than the holder.
        let published = endpoint::read(&self.control).ok().filter(|e| e.incarnation == holder.info.incarnation);
        let endpoint = Endpoint {
            addresses: holder.info.addresses.clone(),
            port: holder.info.port,
            incarnation: holder.info.incarnation.clone(),
            host: holder.info.process.host.clone(),
            pid: holder.info.process.pid,
            ca_pem: published.and_then(|e| e.ca_pem),
            state_dir: None,
        };
        let ask = async {
            let channel = rpc::connect(&endpoint, "probe").await.ok()?;
            // Without a token it refuses, which is an answer, and names its incarnation.
            let refused = JobsClient::new(channel).list(trainctl_proto::v1::ListRequest {}).await.err()?;
            let name = refused.metadata().get(INCARNATION_HEADER)?.to_str().ok()?.to_owned();
            Some(name == holder.info.incarnation)
        };
        tokio::time::timeout(Duration::from_secs(3), ask).await.ok().flatten().unwrap_or(false)
    }

    fn lives(&self, pid: u32, start_time: u64) -> bool {
        proc::is_running(pid, start_time)
    }
}
