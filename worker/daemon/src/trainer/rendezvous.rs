//! Forwards a trainer's rendezvous calls to the coordinator, over the session's channel.
//!
//! - **R1** While the coordinator is away a call waits and is tried again, within its own time limit.
//! - **R2** When the generation is over every waiting and later call fails at once with ABORTED and the reason.
//! - **R3** A call that must not be carried out twice (add, compare_set) is not repeated once it may have arrived.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Request, Response, Status};
use trainctl_proto::v1::rendezvous_client::RendezvousClient;
use trainctl_proto::v1::rendezvous_server::Rendezvous;
use trainctl_proto::v1::{Fence, KvAdd, KvCompareSet, KvEmpty, KvFlag, KvGet, KvKeys, KvNumber, KvSet, KvValue};
use trainctl_runtime::rpc::{AuthedChannel, MAX_MESSAGE_BYTES};

use super::link::Line;
use crate::session::transport::Gateway;

/// Limit of a call that does not wait for a key.
const PLAIN_LIMIT: Duration = Duration::from_secs(60);
/// What a waiting call may take beyond its own time limit: the coordinator's answer is better than ours.
const GRACE: Duration = Duration::from_secs(2);
/// Pause before a failed call is tried again on the same channel.
const RETRY: Duration = Duration::from_millis(200);

type Client = RendezvousClient<AuthedChannel>;

/// The service.
pub(super) struct Forward {
    line: Arc<Line>,
    gateway: Gateway,
}

/// Whether a call may be sent again when its answer was lost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Always,
    Never,
}

impl Forward {
    pub(super) fn new(line: Arc<Line>, gateway: Gateway) -> Self {
        Self { line, gateway }
    }

    async fn forward<T, F, R>(
        &self,
        fence: Option<&Fence>,
        limit: Duration,
        repeat: Repeat,
        call: F,
    ) -> Result<Response<T>, Status>
    where
        F: Fn(Client) -> R,
        R: Future<Output = Result<Response<T>, Status>>,
    {
        self.check(fence)?;
        let mut over = self.line.watch_over();
        tokio::select! {
            biased;
            reason = over.wait_for(Option::is_some) => {
                let reason = reason.ok().and_then(|reason| reason.clone());
                Err(Status::aborted(reason.unwrap_or_else(|| "the worker gave this trainer up".to_owned())))
            }
            answer = tokio::time::timeout(limit, self.attempts(repeat, call)) => match answer {
                Ok(answer) => answer,
                Err(_) => Err(Status::deadline_exceeded(format!(
                    "no answer from the coordinator within {:.0} s", limit.as_secs_f64()
                ))),
            },
        }
    }

    /// J3, and what is known here without asking: the store is sealed.
    fn check(&self, fence: Option<&Fence>) -> Result<(), Status> {
        let ours = self.line.assignment().fence.as_ref();
        let same = |a: &Fence, b: &Fence| a.job == b.job && a.generation == b.generation;
        if !matches!((fence, ours), (Some(fence), Some(ours)) if same(fence, ours)) {
            return Err(Status::aborted("the call carries another generation than this trainer's"));
        }
        if self.line.is_sealed() {
            return Err(Status::failed_precondition("the generation is formed and its store is sealed"));
        }
        Ok(())
    }

    async fn attempts<T, F, R>(&self, repeat: Repeat, call: F) -> Result<Response<T>, Status>
    where
        F: Fn(Client) -> R,
        R: Future<Output = Result<Response<T>, Status>>,
    {
        let mut gateway = self.gateway.clone();
        loop {
            let channel = gateway.borrow_and_update().clone();
            let Some(channel) = channel else {
                changed(&mut gateway).await?;
                continue;
            };
            let client = RendezvousClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
            let answer = tokio::select! {
                answer = call(client) => answer,
                // A new session: the old channel may hang for as long as its keep-alive.
                changed = changed(&mut gateway), if repeat == Repeat::Always => { changed?; continue }
            };
            match answer {
                Err(status) if is_transient(status.code()) => {
                    if repeat == Repeat::Never {
                        return Err(Status::unavailable(format!(
                            "the connection to the coordinator broke during the call ({}); it is not repeated, since it may have been carried out",
                            status.message()
                        )));
                    }
                    tracing::debug!(%status, "rendezvous call failed; trying again");
                    drop(tokio::time::timeout(RETRY, changed(&mut gateway)).await);
                }
                answer => return answer,
            }
        }
    }
}

async fn changed(gateway: &mut Gateway) -> Result<(), Status> {
    gateway.changed().await.map_err(|_| Status::unavailable("the worker is shutting down"))
}

/// What a broken connection looks like; an answer of the coordinator never has these codes.
fn is_transient(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled)
}

fn waiting(timeout_ms: u64) -> Duration {
    Duration::from_millis(timeout_ms).saturating_add(GRACE)
}

#[tonic::async_trait]
impl Rendezvous for Forward {
    async fn set(&self, request: Request<KvSet>) -> Result<Response<KvEmpty>, Status> {
        let message = request.into_inner();
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.set(message).await }
        };
        self.forward(message.fence.as_ref(), PLAIN_LIMIT, Repeat::Always, call).await
    }

    async fn get(&self, request: Request<KvGet>) -> Result<Response<KvValue>, Status> {
        let message = request.into_inner();
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.get(message).await }
        };
        self.forward(message.fence.as_ref(), waiting(message.timeout_ms), Repeat::Always, call).await
    }

    async fn add(&self, request: Request<KvAdd>) -> Result<Response<KvNumber>, Status> {
        let message = request.into_inner();
        // Adding nothing reads the number.
        let repeat = if message.amount == 0 { Repeat::Always } else { Repeat::Never };
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.add(message).await }
        };
        self.forward(message.fence.as_ref(), PLAIN_LIMIT, repeat, call).await
    }

    async fn check(&self, request: Request<KvKeys>) -> Result<Response<KvFlag>, Status> {
        let message = request.into_inner();
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.check(message).await }
        };
        self.forward(message.fence.as_ref(), PLAIN_LIMIT, Repeat::Always, call).await
    }

    async fn wait(&self, request: Request<KvKeys>) -> Result<Response<KvEmpty>, Status> {
        let message = request.into_inner();
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.wait(message).await }
        };
        self.forward(message.fence.as_ref(), waiting(message.timeout_ms), Repeat::Always, call).await
    }

    async fn delete(&self, request: Request<KvGet>) -> Result<Response<KvFlag>, Status> {
        let message = request.into_inner();
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.delete(message).await }
        };
        self.forward(message.fence.as_ref(), PLAIN_LIMIT, Repeat::Always, call).await
    }

    async fn compare_set(&self, request: Request<KvCompareSet>) -> Result<Response<KvValue>, Status> {
        let message = request.into_inner();
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.compare_set(message).await }
        };
        self.forward(message.fence.as_ref(), PLAIN_LIMIT, Repeat::Never, call).await
    }

    async fn num_keys(&self, request: Request<Fence>) -> Result<Response<KvNumber>, Status> {
        let message = request.into_inner();
        let call = |mut client: Client| {
            let message = message.clone();
            async move { client.num_keys(message).await }
        };
        self.forward(Some(&message), PLAIN_LIMIT, Repeat::Always, call).await
    }
}
