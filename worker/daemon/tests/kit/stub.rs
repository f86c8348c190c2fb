//! A coordinator of the tests: the real services on a real loopback socket with real tokens; it decides nothing.

#![allow(clippy::disallowed_methods, reason = "the stub's tasks end with the test")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};
use trainctl_proto::v1::coordinator_message::Body as Command;
use trainctl_proto::v1::rank_report::Report;
use trainctl_proto::v1::rendezvous_server::{Rendezvous, RendezvousServer};
use trainctl_proto::v1::worker_message::Body;
use trainctl_proto::v1::workers_server::{Workers, WorkersServer};
use trainctl_proto::v1::{
    Ack, Beat, CommandResult, CoordinatorMessage, EnrollRequest, EnrollResponse, Fence, Hello, KvAdd, KvCompareSet,
    KvEmpty, KvFlag, KvGet, KvKeys, KvNumber, KvSet, KvValue, RankReport, TrainerExit, TrainerStarted, Welcome,
    WorkerMessage,
};
use trainctl_runtime::auth;
use trainctl_runtime::endpoint::{self, Endpoint};
use trainctl_runtime::rpc::{self, MAX_MESSAGE_BYTES};

use super::PATIENCE;

/// A message and the session (counted from 1 over the stub's life) that it came in.
#[derive(Clone, Debug)]
pub struct Heard {
    pub session: usize,
    pub seq: u64,
    pub age_ms: u64,
    pub body: Body,
    pub at: Instant,
}

#[derive(Default)]
struct Shared {
    heard: Vec<Heard>,
    sessions: usize,
    commands: Option<mpsc::Sender<Result<CoordinatorMessage, Status>>>,
    keys: HashMap<String, Vec<u8>>,
    /// Calls of Get that wait for a key.
    waiting: usize,
    beats: bool,
}

type State = Arc<(Mutex<Shared>, Condvar)>;

/// The stub. Everything that it heard stays over `down` and `up`.
pub struct Stub {
    state: State,
    runtime: Option<(Runtime, oneshot::Sender<()>)>,
    dir: std::path::PathBuf,
}

impl Stub {
    pub fn start(dir: &Path) -> Self {
        let state = State::default();
        state.0.lock().unwrap().beats = true;
        let mut stub = Self { state, runtime: None, dir: dir.to_owned() };
        stub.up();
        stub
    }

    /// Listens on a new port and publishes it.
    pub fn up(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let gate = auth::Gate {
            tokens: auth::load_or_create(&self.dir).unwrap(),
            grants: Arc::new(auth::Grants::load(&self.dir, 1).unwrap()),
            is_tls: false,
            access: |_| auth::Access::Work,
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let state = self.state.clone();
        let port = runtime.block_on(async move {
            let listener = rpc::bind_or_fallback(([127, 0, 0, 1], 0).into(), None).unwrap();
            let port = listener.local_addr().unwrap().port();
            let workers = WorkersServer::new(Service(state.clone())).max_decoding_message_size(MAX_MESSAGE_BYTES);
            let server = rpc::server(None)
                .unwrap()
                .layer(auth::AuthLayer::new(gate))
                .add_service(workers)
                .add_service(RendezvousServer::new(Service(state)));
            tokio::spawn(async move {
                tokio::select! {
                    result = server.serve_with_incoming(TcpListenerStream::new(listener)) => result.unwrap(),
                    _ = stopped => {}
                }
            });
            port
        });
        let endpoint = Endpoint {
            addresses: vec!["127.0.0.1".to_owned()],
            port,
            incarnation: format!("stub-{port}"),
            host: "test".to_owned(),
            pid: std::process::id(),
            ca_pem: None,
            state_dir: None,
        };
        endpoint::publish(&endpoint, &self.dir).unwrap();
        self.runtime = Some((runtime, stop));
    }

    /// Dies with all its connections.
    pub fn down(&mut self) {
        let (runtime, stop) = self.runtime.take().unwrap();
        drop(stop);
        runtime.shutdown_timeout(Duration::from_millis(100));
        self.lock().commands = None;
    }

    /// Closes the session; the worker dials again.
    pub fn hang_up(&self) {
        let commands = self.lock().commands.take().unwrap();
        drop(commands.blocking_send(Err(Status::unavailable("hung up by the test"))));
    }

    /// Stops or resumes beats: a coordinator that is frozen keeps its connections.
    pub fn beat(&self, beats: bool) {
        self.lock().beats = beats;
    }

    pub fn send(&self, command: Command) {
        let commands = self.wait("a session", |shared| shared.commands.clone());
        commands.blocking_send(Ok(CoordinatorMessage { body: Some(command) })).unwrap();
    }

    pub fn ack(&self, up_to: u64) {
        let spool = self.hello(1).spool;
        self.send(Command::Ack(Ack { spool, up_to }));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.state.0.lock().unwrap()
    }

    fn wait<T>(&self, what: &str, look: impl Fn(&Shared) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        let mut shared = self.lock();
        loop {
            if let Some(found) = look(&shared) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "not within {PATIENCE:?}: {what}; heard last: {:#?}",
                shared.heard.iter().rev().take(5).collect::<Vec<_>>()
            );
            shared = self.state.1.wait_timeout(shared, left.min(Duration::from_millis(200))).unwrap().0;
        }
    }

    /// The Hello of the n-th session.
    pub fn hello(&self, session: usize) -> Hello {
        self.wait(&format!("session {session}"), |shared| {
            shared.heard.iter().find_map(|heard| match &heard.body {
                Body::Hello(hello) if heard.session == session => Some(hello.clone()),
                _ => None,
            })
        })
    }

    pub fn sessions(&self) -> usize {
        self.lock().sessions
    }

    pub fn result(&self, command_id: &str) -> CommandResult {
        self.wait(&format!("the result of {command_id}"), |shared| {
            shared.heard.iter().find_map(|heard| match &heard.body {
                Body::CommandResult(result) if result.command_id == command_id => Some(result.clone()),
                _ => None,
            })
        })
    }

    pub fn results(&self, command_id: &str) -> usize {
        let is_it = |body: &Body| matches!(body, Body::CommandResult(result) if result.command_id == command_id);
        self.lock().heard.iter().filter(|heard| is_it(&heard.body)).count()
    }

    pub fn wait_body<T>(&self, what: &str, pick: impl Fn(&Body) -> Option<T>) -> T {
        self.wait(what, |shared| shared.heard.iter().find_map(|heard| pick(&heard.body)))
    }

    pub fn wait_report<T>(&self, what: &str, pick: impl Fn(&Heard, &RankReport) -> Option<T>) -> T {
        self.wait(what, |shared| reports(shared).iter().find_map(|(heard, report)| pick(heard, report)))
    }

    pub fn started(&self, generation: u64) -> TrainerStarted {
        self.wait_report(&format!("the start of generation {generation}"), |_, report| match &report.report {
            Some(Report::Started(started)) if of(report, generation) => Some(*started),
            _ => None,
        })
    }

    pub fn exited(&self, generation: u64) -> (Heard, TrainerExit) {
        self.wait_report(&format!("the exit of generation {generation}"), |heard, report| match &report.report {
            Some(Report::Exited(exit)) if of(report, generation) => Some((heard.clone(), exit.clone())),
            _ => None,
        })
    }

    /// (sequence number, step) of the rows of one session, once there are `count` of them.
    pub fn rows(&self, session: usize, count: usize) -> Vec<(u64, u64)> {
        self.wait(&format!("{count} rows in session {session}"), |shared| {
            let rows = rows(shared, session);
            (rows.len() >= count).then_some(rows)
        })
    }

    pub fn set(&self, key: &str, value: &[u8]) {
        self.lock().keys.insert(key.to_owned(), value.to_vec());
        self.state.1.notify_all();
    }

    pub fn wait_for_a_waiting_get(&self) {
        self.wait("a waiting get", |shared| (shared.waiting > 0).then_some(()));
    }

    pub fn key(&self, key: &str) -> Vec<u8> {
        self.wait(&format!("key {key}"), |shared| shared.keys.get(key).cloned())
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if self.runtime.is_some() {
            self.down();
        }
    }
}

fn of(report: &RankReport, generation: u64) -> bool {
    report.fence.as_ref().is_some_and(|fence| fence.generation == generation)
}

fn reports(shared: &Shared) -> Vec<(Heard, RankReport)> {
    let report = |heard: &Heard| match &heard.body {
        Body::RankReport(report) => Some((heard.clone(), report.clone())),
        _ => None,
    };
    shared.heard.iter().filter_map(report).collect()
}

fn rows(shared: &Shared, session: usize) -> Vec<(u64, u64)> {
    let row = |heard: &Heard| match &heard.body {
        Body::RankReport(RankReport { report: Some(Report::TrainRow(row)), .. }) => Some((heard.seq, row.step)),
        _ => None,
    };
    shared.heard.iter().filter(|heard| heard.session == session).filter_map(row).collect()
}

struct Service(State);

#[tonic::async_trait]
impl Workers for Service {
    type SessionStream = ReceiverStream<Result<CoordinatorMessage, Status>>;

    async fn enroll(&self, _: Request<EnrollRequest>) -> Result<Response<EnrollResponse>, Status> {
        Err(Status::failed_precondition("no TLS here"))
    }

    async fn session(
        &self,
        request: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut messages = request.into_inner();
        let (commands, stream) = mpsc::channel(64);
        let session = {
            let mut shared = self.0.0.lock().unwrap();
            shared.sessions += 1;
            shared.commands = Some(commands.clone());
            shared.sessions
        };
        let welcome = Welcome { incarnation: "stub".to_owned(), lease_ms: 3_000 };
        commands.try_send(Ok(CoordinatorMessage { body: Some(Command::Welcome(welcome)) })).unwrap();
        let state = self.0.clone();
        tokio::spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                let WorkerMessage { seq, age_ms, body } = message;
                let Some(body) = body else { continue };
                state.0.lock().unwrap().heard.push(Heard { session, seq, age_ms, body, at: Instant::now() });
                state.1.notify_all();
            }
        });
        let (state, commands) = (self.0.clone(), commands.downgrade());
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(200)).await;
                let beats = state.0.lock().unwrap().beats;
                let Some(commands) = commands.upgrade() else { break };
                let beat = CoordinatorMessage { body: Some(Command::Beat(Beat::default())) };
                if beats && commands.send(Ok(beat)).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

#[tonic::async_trait]
impl Rendezvous for Service {
    async fn set(&self, request: Request<KvSet>) -> Result<Response<KvEmpty>, Status> {
        let KvSet { key, value, .. } = request.into_inner();
        self.0.0.lock().unwrap().keys.insert(key, value);
        self.0.1.notify_all();
        Ok(Response::new(KvEmpty {}))
    }

    async fn get(&self, request: Request<KvGet>) -> Result<Response<KvValue>, Status> {
        let KvGet { key, timeout_ms, .. } = request.into_inner();
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        self.0.0.lock().unwrap().waiting += 1;
        while Instant::now() < deadline {
            if let Some(value) = self.0.0.lock().unwrap().keys.get(&key) {
                return Ok(Response::new(KvValue { value: value.clone() }));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err(Status::deadline_exceeded(key))
    }

    async fn add(&self, _: Request<KvAdd>) -> Result<Response<KvNumber>, Status> {
        Err(Status::unimplemented("add"))
    }

    async fn check(&self, _: Request<KvKeys>) -> Result<Response<KvFlag>, Status> {
        Err(Status::unimplemented("check"))
    }

    async fn wait(&self, _: Request<KvKeys>) -> Result<Response<KvEmpty>, Status> {
        Err(Status::unimplemented("wait"))
    }

    async fn delete(&self, _: Request<KvGet>) -> Result<Response<KvFlag>, Status> {
        Err(Status::unimplemented("delete"))
    }

    async fn compare_set(&self, _: Request<KvCompareSet>) -> Result<Response<KvValue>, Status> {
        Err(Status::unimplemented("compare_set"))
    }

    async fn num_keys(&self, _: Request<Fence>) -> Result<Response<KvNumber>, Status> {
        Err(Status::unimplemented("num_keys"))
    }
}
