//! One coordinator from start to end: take the state directory, adopt what the journal holds, serve, leave.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::Mutex;
use tower::util::MapResponseLayer;
use tracing::{info, warn};
use trainctl_proto::v1::grants_server::GrantsServer;
use trainctl_proto::v1::jobs_server::JobsServer;
use trainctl_proto::v1::rendezvous_server::RendezvousServer;
use trainctl_proto::v1::workers_server::WorkersServer;
use trainctl_runtime::auth::{self, AuthLayer, Gate, Grants};
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_runtime::connections::{Incoming, Limits};
use trainctl_runtime::endpoint::{self, Endpoint};
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};
use trainctl_runtime::{proc, rpc, tls};
use trainctl_spec::{JobSpec, Term};
use trainctl_store::RunDir;

use crate::access::access;
use crate::core::{Core, Policy};
use crate::grants::GrantsService;
use crate::jobs::{JobsService, Watches, run_task, start, watch_only};
use crate::journal::{Journal, SqliteJournal};
use crate::owner::{Handle, Owner};
use crate::rendezvous::Rendezvous;
use crate::runs::{INCARNATION_HEADER, Runs};
use crate::workers::{MAX_RENDEZVOUS, RendezvousService, WorkersService};

const OWNER: TaskKind = TaskKind { name: "owner", on_cancel: OnCancel::Finish, on_error: OnError::Shutdown };
/// How long tasks may take to end after shutdown began.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);
/// How long a reader of a stream may stand still.
const SLOW_READER: Duration = Duration::from_secs(60);
/// Another time for that, in milliseconds, for tests that cannot wait for the usual one.
const SLOW_READER_VARIABLE: &str = "TRAINCTL_READER_MS";

/// Where and how to serve.
#[derive(Debug)]
pub struct Options {
    /// Holds journal, tokens, CA, endpoint.
    pub state_dir: PathBuf,
    /// Address to listen on; port 0 = the last start's, else any.
    pub listen: SocketAddr,
}

/// Runs a coordinator until `shutdown`.
///
/// # Errors
/// The state directory is held by a live coordinator ([`crate::runs::Error`]), or something cannot be read, written or
/// bound.
pub async fn run(options: Options, shutdown: Shutdown) -> Result<()> {
    let Options { state_dir, listen } = options;
    std::fs::create_dir_all(&state_dir).with_context(|| format!("make {}", state_dir.display()))?;
    let state_dir = std::fs::canonicalize(&state_dir).with_context(|| format!("open {}", state_dir.display()))?;
    let tls = tls::for_listener(listen.ip(), &state_dir)?;
    tls::check_listener(listen.ip(), tls.as_ref())?;
    // The same port as last time, so that workers that cannot read the endpoint again find us.
    let last_port = endpoint::read(&state_dir).ok().map(|endpoint| endpoint.port);
    let listener = rpc::bind_or_fallback(listen, last_port)?;
    let bound = listener.local_addr()?;
    let endpoint = Endpoint {
        addresses: rpc::published_addresses(bound.ip()),
        port: bound.port(),
        incarnation: auth::random_hex(8)?,
        host: proc::host_name(),
        pid: std::process::id(),
        ca_pem: tls.as_ref().map(|tls| tls.ca_pem.clone()),
        state_dir: Some(state_dir.clone()),
    };
    let tokens = auth::load_or_create(&state_dir)?;
    let lease = std::env::var(Policy::LEASE_VARIABLE).ok();
    let policy = Policy::with_lease(lease.as_deref()).map_err(anyhow::Error::msg)?;
    let patience = match std::env::var(SLOW_READER_VARIABLE) {
        Err(_) => SLOW_READER,
        Ok(text) => Duration::from_millis(text.parse().with_context(|| format!("{SLOW_READER_VARIABLE}={text}"))?),
    };
    let runs = Arc::new(Runs::new(state_dir.clone(), endpoint.clone(), tokens.clone(), shutdown.clone()));
    let tenure = runs.hold(&state_dir).await?;
    // Only now: whoever held the directory before may have changed them until then.
    let grants = Arc::new(Grants::load(&state_dir, tenure.term().0)?);
    let journal = SqliteJournal::open(&state_dir, tenure.term())?;
    info!(term = tenure.term().0, address = %bound, "coordinator");

    let watches = Watches::default();
    let stores = Rendezvous::default();
    let owner = start_owner(journal, policy, stores.clone(), &runs, &watches, &endpoint, &shutdown).await?;
    let jobs = JobsService {
        owner: owner.clone(),
        runs,
        shutdown: shutdown.clone(),
        watches,
        submitting: Mutex::new(()),
        patience,
    };
    let authority = tls.as_ref().map(|tls| tls.authority.clone());
    let gate = Gate { tokens, grants: grants.clone(), is_tls: tls.is_some(), access };
    let services = Services {
        jobs,
        grants: GrantsService { grants, tenure: tenure.clone() },
        workers: WorkersService { owner, authority, shutdown: shutdown.clone() },
        rendezvous: RendezvousService { stores },
    };
    serve(listener, tls, gate, &endpoint, services, shutdown.clone()).await?;
    if !shutdown.wait(SHUTDOWN_LIMIT).await {
        warn!("tasks did not end in {SHUTDOWN_LIMIT:?}");
    }
    Ok(())
}

/// The owner task, with every job of the journal adopted.
async fn start_owner(
    journal: SqliteJournal,
    policy: Policy,
    stores: Rendezvous,
    runs: &Arc<Runs>,
    watches: &Watches,
    endpoint: &Endpoint,
    shutdown: &Shutdown,
) -> Result<Handle> {
    let (records, workers) = (journal.jobs()?, journal.workers()?);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let seed = u64::from_str_radix(&auth::random_hex(8)?, 16).unwrap_or_default();
    let mut core = Core::new(policy, clock.now(), seed);
    core.probe(endpoint.incarnation.clone());
    let (mut owner, handle) = Owner::new(core, clock, Box::new(journal), stores);
    workers.into_iter().for_each(|worker| owner.know(worker));
    for record in records {
        let spec = match JobSpec::from_yaml(&record.spec_yaml) {
            Ok(spec) => spec,
            Err(faults) => {
                warn!(job = %record.id, %faults, "a job of the journal cannot be read: left alone");
                owner.leave_alone(record.id);
                continue;
            }
        };
        let id = record.id.clone();
        if record.phase.is_terminal() {
            // Nothing of its run is read: there may be many of them, and their places may be away.
            let ports = watch_only(watches, &record, &spec);
            owner.adopt(id, ports, |core, at| core.adopt(record, spec, Term(0), at));
            continue;
        }
        let control = RunDir::new(&spec.run_dir).control();
        let tenure = match runs.hold(&control).await {
            Ok(tenure) => tenure,
            Err(error) => {
                warn!(job = %id, %error, "a job's run directory cannot be held: left alone until the next start");
                owner.leave_alone(id);
                continue;
            }
        };
        let term = tenure.term();
        let (ports, task) = run_task(&handle, watches, tenure, &record, &spec);
        owner.adopt(id, ports, |core, at| core.adopt(record, spec, term, at));
        start(task, shutdown);
    }
    drop(spawn(OWNER, shutdown, owner.run(shutdown.clone(), policy.liveness.tick)));
    Ok(handle)
}

struct Services {
    jobs: JobsService,
    grants: GrantsService,
    workers: WorkersService,
    rendezvous: RendezvousService,
}

async fn serve(
    listener: tokio::net::TcpListener,
    tls: Option<tls::ServerTls>,
    gate: Gate,
    endpoint: &Endpoint,
    services: Services,
    shutdown: Shutdown,
) -> Result<()> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<JobsServer<JobsService>>().await;
    reporter.set_serving::<WorkersServer<WorkersService>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(trainctl_proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let incarnation: tonic::codegen::http::HeaderValue = endpoint.incarnation.parse()?;
    // Outermost, so that refusals carry it too: a looker has no token (J2).
    let name_us = MapResponseLayer::new(move |mut response: tonic::codegen::http::Response<tonic::body::Body>| {
        response.headers_mut().insert(INCARNATION_HEADER, incarnation.clone());
        response
    });
    let limits = Limits::of(proc::raise_open_files().context("raise the limit of open files")?);
    info!(connections = limits.connections, "listening");
    let jobs = JobsServer::new(services.jobs)
        .max_decoding_message_size(rpc::MAX_REQUEST_BYTES)
        .max_encoding_message_size(rpc::MAX_ANSWER_BYTES);
    let grants = GrantsServer::new(services.grants)
        .max_decoding_message_size(rpc::MAX_SMALL_BYTES)
        .max_encoding_message_size(rpc::MAX_REQUEST_BYTES);
    let workers = WorkersServer::new(services.workers)
        .max_decoding_message_size(rpc::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(rpc::MAX_MESSAGE_BYTES);
    let rendezvous = RendezvousServer::new(services.rendezvous)
        .max_decoding_message_size(MAX_RENDEZVOUS)
        .max_encoding_message_size(MAX_RENDEZVOUS);
    rpc::server(tls.as_ref())?
        .layer(name_us)
        .layer(AuthLayer::new(gate))
        .add_service(health)
        .add_service(reflection)
        .add_service(jobs)
        .add_service(grants)
        .add_service(workers)
        .add_service(rendezvous)
        .serve_with_incoming_shutdown(Incoming::new(listener, limits), async move { shutdown.cancelled().await })
        .await
        .context("serve")
}
