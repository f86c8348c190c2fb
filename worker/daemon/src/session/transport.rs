//! How a session reaches its coordinator. The simulator has its own transport; [`Grpc`] is the real one.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use trainctl_proto::v1::workers_client::WorkersClient;
use trainctl_proto::v1::{
    CoordinatorMessage, Hello, WorkerMessage, coordinator_message::Body as Command, worker_message::Body,
};
use trainctl_runtime::auth;
use trainctl_runtime::endpoint::{self, Endpoint};
use trainctl_runtime::rpc::{self, AuthedChannel};
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};

use super::identity::{Identity, describe};

/// Messages that may wait on either side of a stream.
const QUEUE: usize = 256;
/// How long the coordinator may take to answer the call that opens a stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// An open stream. Dropping it closes it.
#[derive(Debug)]
pub struct Wire {
    /// To the coordinator. The Hello is already in it.
    pub outgoing: mpsc::Sender<WorkerMessage>,
    /// From the coordinator; an error or the end of the channel is the end of the stream.
    pub incoming: mpsc::Receiver<Result<Command, String>>,
}

/// Opens streams.
pub trait Transport: Send + Sync {
    /// Opens one and sends `hello` on it; the transport fills in `hello.address`. Finds out anew where the coordinator
    /// is at every call. The error says what was tried.
    fn dial(&self, hello: Hello) -> BoxFuture<'static, Result<Wire, String>>;
}

/// The channel that is open now, for calls beside the session (rendezvous).
pub type Gateway = watch::Receiver<Option<AuthedChannel>>;

/// gRPC to the coordinator whose `endpoint.json` and `join.json` lie at `place`.
#[derive(Debug)]
pub struct Grpc {
    place: PathBuf,
    identity: Arc<Identity>,
    channel: watch::Sender<Option<AuthedChannel>>,
    shutdown: Shutdown,
}

impl Grpc {
    /// A transport and the gateway that follows it.
    pub fn new(place: PathBuf, worker_id: String, shutdown: Shutdown) -> (Self, Gateway) {
        let (channel, gateway) = watch::channel(None);
        let identity = Arc::new(Identity::new(worker_id));
        (Self { place, identity, channel, shutdown }, gateway)
    }
}

impl Transport for Grpc {
    fn dial(&self, hello: Hello) -> BoxFuture<'static, Result<Wire, String>> {
        let (place, channel, shutdown) = (self.place.clone(), self.channel.clone(), self.shutdown.clone());
        let identity = self.identity.clone();
        Box::pin(async move {
            let located = tokio::task::spawn_blocking(move || locate(&place)).await;
            let (endpoint, token) = located.map_err(|error| error.to_string())??;
            let authed = identity.connect(&endpoint, &token).await?;
            let wire = match open(authed.clone(), &endpoint, hello, &shutdown).await {
                Ok(wire) => wire,
                // Enrolling again costs little, and the refusal may have been the certificate's.
                Err(reason) if identity.forget().await => return Err(format!("{reason}; enrolling anew")),
                Err(reason) => return Err(reason),
            };
            channel.send_replace(Some(authed));
            Ok(wire)
        })
    }
}

/// Reads endpoint and token. Blocking: the files may lie on a shared file system.
fn locate(place: &std::path::Path) -> Result<(Endpoint, String), String> {
    let place_text = place.to_str().ok_or_else(|| format!("--coordinator {}: not UTF-8", place.display()))?;
    let located = endpoint::locate(Some(place_text)).map_err(|error| error.to_string())?;
    let token = auth::read_join(&located.dir).map_err(|error| error.to_string())?;
    Ok((located.endpoint, token))
}

async fn open(
    channel: AuthedChannel,
    endpoint: &Endpoint,
    mut hello: Hello,
    shutdown: &Shutdown,
) -> Result<Wire, String> {
    hello.address = local_address(endpoint).map(|ip| ip.to_string()).unwrap_or_default();
    let (outgoing, to_send) = mpsc::channel(QUEUE);
    let first = WorkerMessage { seq: 0, age_ms: 0, body: Some(Body::Hello(hello)) };
    outgoing.send(first).await.map_err(|error| error.to_string())?;
    let mut client = WorkersClient::new(channel).max_decoding_message_size(rpc::MAX_MESSAGE_BYTES);
    let call = client.session(ReceiverStream::new(to_send));
    let response = match tokio::time::timeout(OPEN_TIMEOUT, call).await {
        Ok(Ok(response)) => response,
        Ok(Err(status)) => return Err(describe(&status)),
        Err(_) => return Err(format!("the coordinator did not open a session within {OPEN_TIMEOUT:?}")),
    };
    let mut stream = response.into_inner();
    let (heard, incoming) = mpsc::channel(QUEUE);
    let kind = TaskKind { name: "session reader", on_cancel: OnCancel::Finish, on_error: OnError::Log };
    let reader = async move {
        loop {
            let message = tokio::select! {
                message = stream.message() => message,
                () = heard.closed() => break,
            };
            let item = match message {
                Ok(Some(CoordinatorMessage { body: Some(body) })) => Ok(body),
                Ok(Some(CoordinatorMessage { body: None })) => continue,
                Ok(None) => Err("the coordinator closed the session".to_owned()),
                Err(status) => Err(describe(&status)),
            };
            let last = item.is_err();
            if heard.send(item).await.is_err() || last {
                break;
            }
        }
        Ok::<(), std::convert::Infallible>(())
    };
    drop(spawn(kind, shutdown, reader));
    Ok(Wire { outgoing, incoming })
}

/// The address by which this machine reaches the coordinator: what the kernel chooses as the source of a datagram to it
/// (none is sent). Peers of this rank reach it there.
fn local_address(endpoint: &Endpoint) -> Option<IpAddr> {
    endpoint.addresses.iter().find_map(|address| {
        let to: IpAddr = address.parse().ok()?;
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
        socket.connect(SocketAddr::new(to, endpoint.port)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}
