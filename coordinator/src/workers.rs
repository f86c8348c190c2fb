//! The services that workers call: their session, and the rendezvous stores of their trainers.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};
use tracing::{debug, info, warn};
use trainctl_proto::convert::Fence;
use trainctl_proto::v1;
use trainctl_runtime::auth::Caller;
use trainctl_runtime::certificates;
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_runtime::connections::Peer;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};
use trainctl_runtime::tls::Authority;

use crate::core::Event;
use crate::owner::{Gone, Handle};
use crate::rendezvous::{Error, Keys, Rendezvous};

/// Messages to one worker that may wait; a worker that lets more pile up must dial again.
const OUTBOX: usize = 256;
/// How long a session may wait for its first message.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Longest that a rendezvous call may wait, whatever it asks for.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// Bytes of one rendezvous value.
const MAX_VALUE: usize = 4 << 20;
/// Bytes of one rendezvous message: a value, its key and its fence.
pub const MAX_RENDEZVOUS: usize = MAX_VALUE + (64 << 10);

const SESSION: TaskKind = TaskKind { name: "worker session", on_cancel: OnCancel::Abort, on_error: OnError::Log };

/// `Workers`: one stream each way per worker.
pub struct WorkersService {
    /// The owner task.
    pub owner: Handle,
    /// Signs certificates; absent on loopback, where the join token is all that a worker needs.
    pub authority: Option<Authority>,
    /// Ends the streams.
    pub shutdown: Shutdown,
}

#[tonic::async_trait]
impl v1::workers_server::Workers for WorkersService {
    type SessionStream = Pin<Box<dyn Stream<Item = Result<v1::CoordinatorMessage, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let peer = Peer::of(request.extensions()).and_then(|peer| peer.address);
        let caller = Caller::of(&request)?;
        let mut inbound = request.into_inner();
        let first = tokio::time::timeout(HELLO_LIMIT, inbound.next()).await;
        let first = first.map_err(|_| Status::deadline_exceeded(format!("no Hello within {HELLO_LIMIT:?}")))?;
        let Some(first) = first.transpose()? else {
            return Err(Status::invalid_argument("the stream ended before Hello"));
        };
        let Some(v1::worker_message::Body::Hello(mut hello)) = first.body else {
            return Err(Status::invalid_argument("the first message of a session must be Hello"));
        };
        if hello.worker_id.is_empty() || hello.incarnation.is_empty() {
            return Err(Status::invalid_argument("Hello without worker_id or incarnation"));
        }
        if let Some(certified) = caller.worker.filter(|worker| *worker != hello.worker_id) {
            let claimed = hello.worker_id;
            warn!(certified, claimed, peer = ?peer, "a worker claims another one's id: refused");
            let text = format!("the certificate is worker {certified:?}'s, and Hello says {claimed:?}");
            return Err(Status::permission_denied(text));
        }
        if hello.address.is_empty() {
            hello.address = peer.map(|peer| peer.ip().to_string()).unwrap_or_default();
        }
        let (outbox, messages) = mpsc::channel(OUTBOX);
        let session = self.owner.open(outbox).await.map_err(unavailable)?;
        self.owner.event(Event::Hello { session, hello: Box::new(hello) }).await.map_err(unavailable)?;
        let owner = self.owner.clone();
        drop(spawn(SESSION, &self.shutdown, async move {
            loop {
                match inbound.next().await {
                    Some(Ok(message)) => owner.event(Event::Message { session, message: Box::new(message) }).await?,
                    Some(Err(error)) => {
                        debug!(session, %error, "worker's stream broke");
                        break;
                    }
                    None => break,
                }
            }
            owner.event(Event::Gone { session }).await
        }));
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }

    async fn enroll(&self, request: Request<v1::EnrollRequest>) -> Result<Response<v1::EnrollResponse>, Status> {
        let Some(authority) = self.authority.clone() else {
            let text = "this listener speaks no TLS: workers use the token of join.json here, and no certificate";
            return Err(Status::failed_precondition(text));
        };
        let peer = Peer::of(request.extensions()).and_then(|peer| peer.address);
        let v1::EnrollRequest { worker_id, certificate_request } = request.into_inner();
        let now_ms = SystemClock::new().wall_ms();
        let signed = authority.sign(&worker_id, &certificate_request, now_ms, certificates::LIFE);
        let certificate_pem = signed.map_err(|error| match error {
            certificates::Error::Make(_) => Status::internal(error.to_string()),
            _ => Status::invalid_argument(error.to_string()),
        })?;
        info!(worker = %worker_id, peer = ?peer, "a worker enrolled");
        let valid_ms = u64::try_from(certificates::LIFE.as_millis()).unwrap_or(u64::MAX);
        Ok(Response::new(v1::EnrollResponse { certificate_pem, valid_ms }))
    }
}

/// `Rendezvous`: the key-value stores of forming generations.
pub struct RendezvousService {
    /// The stores.
    pub stores: Rendezvous,
}

impl RendezvousService {
    fn with_keys<T>(&self, fence: Option<v1::Fence>, act: impl FnOnce(&mut Keys) -> T) -> Result<T, Status> {
        let fence = Fence::try_from(fence)?;
        Ok(self.stores.with_keys(&fence.job, fence.generation, act)?)
    }

    async fn wait<T>(
        &self,
        fence: Option<v1::Fence>,
        keys: &[String],
        timeout_ms: u64,
        take: impl Fn(&Keys) -> T,
    ) -> Result<T, Status> {
        let fence = Fence::try_from(fence)?;
        let patience = Duration::from_millis(timeout_ms).min(LONGEST_WAIT);
        Ok(self.stores.wait(&fence.job, fence.generation, keys, patience, take).await?)
    }
}

#[tonic::async_trait]
impl v1::rendezvous_server::Rendezvous for RendezvousService {
    async fn set(&self, request: Request<v1::KvSet>) -> Result<Response<v1::KvEmpty>, Status> {
        let v1::KvSet { fence, key, value } = request.into_inner();
        if value.len() > MAX_VALUE {
            return Err(Status::invalid_argument(format!("value of {key:?} is larger than {MAX_VALUE} bytes")));
        }
        self.with_keys(fence, |keys| keys.set(key, value))??;
        Ok(Response::new(v1::KvEmpty {}))
    }

    async fn get(&self, request: Request<v1::KvGet>) -> Result<Response<v1::KvValue>, Status> {
        let v1::KvGet { fence, key, timeout_ms } = request.into_inner();
        let wanted = [key];
        let value = self.wait(fence, &wanted, timeout_ms, |keys| keys.get(&wanted[0]).cloned()).await?;
        Ok(Response::new(v1::KvValue { value: value.unwrap_or_default() }))
    }

    async fn add(&self, request: Request<v1::KvAdd>) -> Result<Response<v1::KvNumber>, Status> {
        let v1::KvAdd { fence, key, amount } = request.into_inner();
        // c10d's stores keep counters as decimal text, and read them back with get.
        let sum = self.with_keys(fence, |keys| {
            let old = keys.get(&key).map_or(Some(0), |v| std::str::from_utf8(v).ok()?.trim().parse::<i64>().ok());
            let Some(sum) = old.and_then(|old| old.checked_add(amount)) else { return Ok(None) };
            keys.set(key.clone(), sum.to_string().into_bytes()).map(|()| Some(sum))
        })??;
        match sum {
            Some(value) => Ok(Response::new(v1::KvNumber { value })),
            None => Err(Status::invalid_argument(format!(
                "key {key:?} does not hold a number that {amount} can be added to"
            ))),
        }
    }

    async fn check(&self, request: Request<v1::KvKeys>) -> Result<Response<v1::KvFlag>, Status> {
        let v1::KvKeys { fence, keys: wanted, .. } = request.into_inner();
        let value = self.with_keys(fence, |keys| keys.has_all(&wanted))?;
        Ok(Response::new(v1::KvFlag { value }))
    }

    async fn wait(&self, request: Request<v1::KvKeys>) -> Result<Response<v1::KvEmpty>, Status> {
        let v1::KvKeys { fence, keys, timeout_ms } = request.into_inner();
        self.wait(fence, &keys, timeout_ms, |_| ()).await?;
        Ok(Response::new(v1::KvEmpty {}))
    }

    async fn delete(&self, request: Request<v1::KvGet>) -> Result<Response<v1::KvFlag>, Status> {
        let v1::KvGet { fence, key, .. } = request.into_inner();
        let value = self.with_keys(fence, |keys| keys.remove(&key))?;
        Ok(Response::new(v1::KvFlag { value }))
    }

    async fn compare_set(&self, request: Request<v1::KvCompareSet>) -> Result<Response<v1::KvValue>, Status> {
        let v1::KvCompareSet { fence, key, expected, desired } = request.into_inner();
        // As c10d's stores answer: the new value if it was set, else the one that is there (or what was expected, if none).
        let value = self.with_keys(fence, |keys| match keys.get(&key) {
            None if expected.is_empty() => keys.set(key, desired.clone()).map(|()| desired),
            None => Ok(expected),
            Some(old) if *old == expected => keys.set(key, desired.clone()).map(|()| desired),
            Some(old) => Ok(old.clone()),
        })??;
        Ok(Response::new(v1::KvValue { value }))
    }

    async fn num_keys(&self, request: Request<v1::Fence>) -> Result<Response<v1::KvNumber>, Status> {
        let value = self.with_keys(Some(request.into_inner()), |keys| keys.count() as i64)?;
        Ok(Response::new(v1::KvNumber { value }))
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        match error {
            Error::Over { .. } => Self::aborted(error.to_string()),
            Error::Full(_) => Self::resource_exhausted(error.to_string()),
            Error::Sealed(_) => Self::failed_precondition(error.to_string()),
            Error::Timeout { .. } => Self::deadline_exceeded(error.to_string()),
        }
    }
}

fn unavailable(_: Gone) -> Status {
    Status::unavailable("the coordinator is shutting down")
}
