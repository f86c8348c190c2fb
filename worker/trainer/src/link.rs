//! The connection to the worker: gRPC over the socketpair that is standard input, on threads of its own.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::runtime::{Builder, Handle, Runtime};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;
use trainctl_proto::v1::rank_report::Report;
use trainctl_proto::v1::trainer_control::Request;
use trainctl_proto::v1::trainer_link_client::TrainerLinkClient;
use trainctl_proto::v1::{self, Assignment, AssignmentRequest, ControlRequest, RankReport};
use trainctl_runtime::rpc::MAX_MESSAGE_BYTES;

use crate::ending::Ending;
use crate::requests::Pending;
use crate::whereabouts::Whereabouts;

/// Environment variable that names the descriptor of the link. Only standard input is used, so that no `unsafe` is needed.
const LINK_FD: &str = "TRAINCTL_LINK_FD";

/// How often it is written that the process runs.
const BEAT: Duration = Duration::from_secs(1);
/// Longest flight record that is told.
const MAX_RECORD: usize = MAX_MESSAGE_BYTES / 2;
/// How long a thread may take to say where it is.
const ANSWER: Duration = Duration::from_secs(2);

/// The link. Dropping it ends its threads.
pub(crate) struct Link {
    runtime: Runtime,
    channel: Channel,
}

impl Link {
    /// Takes the socket that the worker left as standard input.
    pub(crate) fn connect() -> Result<Self, Ending> {
        if std::env::var(LINK_FD).as_deref() != Ok("0") {
            return Err(Ending::usage(&format!("{LINK_FD} is not 0: it was not started by trainctl-worker")));
        }
        let socket = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
        let socket = socket.and_then(|socket| socket.peer_addr().map(|_| socket));
        let socket =
            socket.map_err(|error| Ending::usage(&format!("standard input is no connected socket: {error}")))?;
        Self::over(socket)
    }

    /// A link over a connected socket.
    pub(crate) fn over(socket: UnixStream) -> Result<Self, Ending> {
        let failed = |error: io::Error| Ending::error(format!("open the link to the worker: {error}"));
        socket.set_nonblocking(true).map_err(failed)?;
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("link").enable_all().build().map_err(failed)?;
        let socket = {
            let _context = runtime.enter();
            tokio::net::UnixStream::from_std(socket).map_err(failed)?
        };
        // One socket, one connection: when it breaks the worker is gone, and there is nothing to dial.
        let once = Arc::new(Mutex::new(Some(socket)));
        let connector = service_fn(move |_| {
            let socket = once.lock().unwrap_or_else(PoisonError::into_inner).take();
            std::future::ready(socket.map(TokioIo::new).ok_or_else(|| io::Error::other("the worker closed the link")))
        });
        let channel = runtime.block_on(Endpoint::from_static("http://worker").connect_with_connector(connector));
        let channel = channel.map_err(|error| Ending::peer_lost(format!("open the link to the worker: {error}")))?;
        Ok(Self { runtime, channel })
    }

    /// The threads' runtime.
    pub(crate) fn handle(&self) -> Handle {
        self.runtime.handle().clone()
    }

    /// The connection, for further services.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// The trainer's service.
    pub(crate) fn client(&self) -> TrainerLinkClient<Channel> {
        TrainerLinkClient::new(self.channel()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Asks what to do.
    pub(crate) fn assignment(&self) -> Result<Assignment, Ending> {
        let mut client = self.client();
        let request = AssignmentRequest { pid: std::process::id() };
        let answer = self.runtime.block_on(client.get_assignment(request));
        let answer = answer.map_err(|status| Ending::peer_lost(format!("get the assignment: {}", status.message())))?;
        Ok(answer.into_inner())
    }

    /// Notes the worker's requests as they come, until the link ends.
    pub(crate) fn follow_requests(&self, pending: Arc<Pending>) {
        let (mut client, runtime) = (self.client(), self.handle());
        self.runtime.spawn(async move {
            let outcome = async {
                let mut stream = client.control(ControlRequest {}).await?.into_inner();
                while let Some(control) = stream.message().await? {
                    match control.request {
                        Some(Request::DumpStacks(_)) => drop(runtime.spawn(report_stacks(client.clone()))),
                        _ => pending.take(&control),
                    }
                }
                Ok::<(), tonic::Status>(())
            };
            match outcome.await {
                Ok(()) => tracing::debug!("the worker sends no more requests"),
                Err(status) => tracing::warn!(%status, "no more requests from the worker"),
            }
        });
    }

    /// Writes once a second that the process runs, until the link ends. It comes from the link's own thread: when it stops
    /// the process is frozen, whatever the engine does.
    pub(crate) fn keep_beating(&self, whereabouts: Arc<Whereabouts>) {
        self.runtime.spawn(async move {
            let mut ticks = tokio::time::interval(BEAT);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                whereabouts.beat();
            }
        });
    }
}

/// A report; the worker fills in whose it is.
fn report(report: Report) -> RankReport {
    RankReport { fence: None, rank: 0, report: Some(report) }
}

/// Writes down what every thread does, and what the last collectives were, and tells the worker.
async fn report_stacks(mut client: TrainerLinkClient<Channel>) {
    let record = tokio::time::timeout(ANSWER, tokio::task::spawn_blocking(trainctl_collective::flight_record));
    let taken = tokio::task::spawn_blocking(|| trainctl_collective::thread_stacks(ANSWER));
    let (record, taken) = tokio::join!(record, taken);
    let taken = taken.map_err(io::Error::other).flatten();
    let threads = taken.unwrap_or_else(|error| {
        tracing::error!(%error, "the threads cannot be asked where they are");
        Vec::new()
    });
    let threads = threads.into_iter().map(|thread| v1::ThreadStack {
        tid: thread.tid,
        name: thread.name,
        addresses: thread.addresses,
        ..v1::ThreadStack::default()
    });
    let flight_record = match record {
        Ok(Ok(Ok(record))) if record.len() <= MAX_RECORD => record,
        Ok(Ok(Ok(record))) => {
            tracing::warn!(bytes = record.len(), "c10d's flight record is too long: lower TORCH_FR_BUFFER_SIZE");
            String::new()
        }
        Ok(Ok(Err(error))) => {
            tracing::warn!(%error, "no flight record");
            String::new()
        }
        // It hangs or has panicked: the stacks say where.
        Ok(Err(_)) | Err(_) => String::new(),
    };
    let stacks = v1::Stacks { threads: threads.collect(), flight_record, ..v1::Stacks::default() };
    if let Err(status) = client.report(report(Report::Stacks(stacks))).await {
        tracing::warn!(%status, "the worker does not take the stacks");
    }
}
