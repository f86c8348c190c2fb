//! The key-value store of a rendezvous, as c10d asks for it.

use std::sync::Arc;
use std::time::Duration;

/// What kind of failure a [`KeyValue`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvErrorKind {
    /// The key did not appear in time.
    Timeout,
    /// The generation is over, the store is sealed, or it cannot be reached: asking again is of no use.
    Closed,
    /// Anything else.
    Other,
}

/// An error of a [`KeyValue`]. The text is what the user reads, so it says which key and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct KvError {
    /// The kind, for code that branches.
    pub kind: KvErrorKind,
    /// The text.
    pub message: String,
}

impl KvError {
    /// The key did not appear in time.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self { kind: KvErrorKind::Timeout, message: message.into() }
    }

    /// The store answers no more.
    pub fn closed(message: impl Into<String>) -> Self {
        Self { kind: KvErrorKind::Closed, message: message.into() }
    }

    /// Any other failure.
    pub fn other(message: impl Into<String>) -> Self {
        Self { kind: KvErrorKind::Other, message: message.into() }
    }
}

/// A key-value store shared by the ranks of one generation. Keys are UTF-8, values are bytes.
///
/// Calls come from the thread that makes a process group and, with NCCL, from c10d's own threads; several at once. They block.
/// An implementation must answer [`get`](Self::get) and [`wait`](Self::wait) with an error as soon as it knows that the
/// key can no longer come (K-1): nobody else ends that wait before its timeout.
pub trait KeyValue: Send + Sync {
    /// Sets `key` to `value`, replacing what was there.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError>;

    /// The value of `key`; waits for it up to `timeout`.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError>;

    /// Adds `amount` to the decimal number in `key` (0 if absent) and returns the sum. The value is stored as decimal text,
    /// as c10d's own stores do.
    fn add(&self, key: &str, amount: i64) -> Result<i64, KvError>;

    /// Whether all `keys` are present now.
    fn check(&self, keys: &[&str]) -> Result<bool, KvError>;

    /// Waits until all `keys` are present, up to `timeout`.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), KvError>;

    /// Removes `key`; whether it was there.
    fn delete(&self, key: &str) -> Result<bool, KvError>;

    /// Sets `key` to `desired` if its value equals `expected` (or if it is absent and `expected` is empty); returns the value
    /// that `key` has afterwards, or `expected` if it is absent.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, KvError>;

    /// The number of keys.
    fn num_keys(&self) -> Result<i64, KvError>;
}

/// A part of a store: every key carries a prefix. Gives each process group of a generation keys of its own.
pub struct Prefixed {
    inner: Arc<dyn KeyValue>,
    prefix: String,
}

impl Prefixed {
    /// The keys of `inner` that begin with `prefix` and a slash.
    pub fn new(inner: Arc<dyn KeyValue>, prefix: &str) -> Self {
        Self { inner, prefix: prefix.to_owned() }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl KeyValue for Prefixed {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.inner.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        self.inner.get(&self.key(key), timeout)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, KvError> {
        self.inner.add(&self.key(key), amount)
    }

    fn check(&self, keys: &[&str]) -> Result<bool, KvError> {
        let keys: Vec<_> = keys.iter().map(|key| self.key(key)).collect();
        self.inner.check(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), KvError> {
        let keys: Vec<_> = keys.iter().map(|key| self.key(key)).collect();
        self.inner.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), timeout)
    }

    fn delete(&self, key: &str) -> Result<bool, KvError> {
        self.inner.delete(&self.key(key))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, KvError> {
        self.inner.compare_set(&self.key(key), expected, desired)
    }

    /// The number of keys of the whole store, as c10d's own prefix store answers.
    fn num_keys(&self) -> Result<i64, KvError> {
        self.inner.num_keys()
    }
}
