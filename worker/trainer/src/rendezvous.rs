//! The generation's rendezvous keys, through the worker. Blocks: c10d calls it from its own threads.
//!
//! After the store is sealed nothing may ask for a key any more: set, get, add and wait are answered here with an error,
//! check with false: a later call is a bug that tests look for.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};
use trainctl_collective::{KeyValue, KvError};
use trainctl_proto::v1::rendezvous_client::RendezvousClient;
use trainctl_proto::v1::{Assignment, Fence, KvAdd, KvCompareSet, KvGet, KvKeys, KvSet};
use trainctl_runtime::rpc::MAX_MESSAGE_BYTES;

use crate::link::Link;
use crate::requests::Pending;

/// Keys by way of the worker.
pub(crate) struct Forwarded {
    handle: Handle,
    client: RendezvousClient<Channel>,
    fence: Fence,
    requests: Arc<Pending>,
}

impl Forwarded {
    /// The keys of the assignment's generation.
    pub(crate) fn new(link: &Link, assignment: &Assignment, requests: Arc<Pending>) -> Self {
        let client = RendezvousClient::new(link.channel()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        Self { handle: link.handle(), client, fence: assignment.fence.clone().unwrap_or_default(), requests }
    }

    fn fence(&self) -> Option<Fence> {
        Some(self.fence.clone())
    }

    fn open(&self, operation: &str, key: &str) -> Result<(), KvError> {
        if self.requests.is_sealed() {
            let generation = self.fence.generation;
            let text = format!("{operation} {key}: sealed: generation {generation} is formed and its keys are closed");
            tracing::error!("{text}");
            return Err(KvError::closed(text));
        }
        Ok(())
    }

    fn call<T, R>(&self, operation: &str, key: &str, request: R) -> Result<T, KvError>
    where
        R: Future<Output = Result<Response<T>, Status>>,
    {
        let answer = self.handle.block_on(request);
        answer.map(Response::into_inner).map_err(|status| error_of(operation, key, &status))
    }
}

fn error_of(operation: &str, key: &str, status: &Status) -> KvError {
    let text = format!("{operation} {key}: {}", status.message());
    match status.code() {
        Code::DeadlineExceeded => KvError::timeout(text),
        Code::Aborted | Code::FailedPrecondition | Code::Unavailable => KvError::closed(text),
        _ => KvError::other(text),
    }
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

fn owned(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

impl KeyValue for Forwarded {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.open("set", key)?;
        let message = KvSet { fence: self.fence(), key: key.to_owned(), value: value.to_vec() };
        self.call("set", key, self.client.clone().set(message)).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        self.open("get", key)?;
        let message = KvGet { fence: self.fence(), key: key.to_owned(), timeout_ms: millis(timeout) };
        self.call("get", key, self.client.clone().get(message)).map(|answer| answer.value)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, KvError> {
        self.open("add", key)?;
        let message = KvAdd { fence: self.fence(), key: key.to_owned(), amount };
        self.call("add", key, self.client.clone().add(message)).map(|answer| answer.value)
    }

    fn check(&self, keys: &[&str]) -> Result<bool, KvError> {
        if self.requests.is_sealed() {
            return Ok(false);
        }
        let message = KvKeys { fence: self.fence(), keys: owned(keys), timeout_ms: 0 };
        self.call("check", &keys.join(", "), self.client.clone().check(message)).map(|answer| answer.value)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), KvError> {
        self.open("wait for", &keys.join(", "))?;
        let message = KvKeys { fence: self.fence(), keys: owned(keys), timeout_ms: millis(timeout) };
        self.call("wait for", &keys.join(", "), self.client.clone().wait(message)).map(drop)
    }

    fn delete(&self, key: &str) -> Result<bool, KvError> {
        self.open("delete", key)?;
        let message = KvGet { fence: self.fence(), key: key.to_owned(), timeout_ms: 0 };
        self.call("delete", key, self.client.clone().delete(message)).map(|answer| answer.value)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, KvError> {
        self.open("compare and set", key)?;
        let message = KvCompareSet {
            fence: self.fence(),
            key: key.to_owned(),
            expected: expected.to_vec(),
            desired: desired.to_vec(),
        };
        self.call("compare and set", key, self.client.clone().compare_set(message)).map(|answer| answer.value)
    }

    fn num_keys(&self) -> Result<i64, KvError> {
        self.open("count", "the keys")?;
        self.call("count", "the keys", self.client.clone().num_keys(self.fence.clone())).map(|answer| answer.value)
    }
}
