//! A key-value store in this process's memory: for a world of one, and for ranks that a test starts.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::{KeyValue, KvError};

#[derive(Default)]
struct State {
    values: BTreeMap<String, Vec<u8>>,
    closed: Option<String>,
    waiting: usize,
}

/// See the module. [`close`](Self::close) ends it as the end of a generation does.
#[derive(Default)]
pub struct MemoryStore {
    state: Mutex<State>,
    changed: Condvar,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Answers every call from now on, and every call that waits, with `reason` (K-1).
    pub fn close(&self, reason: &str) {
        self.lock().closed = Some(reason.to_owned());
        self.changed.notify_all();
    }

    /// Blocks until at least `count` calls wait for a key, up to `timeout`; whether they do.
    pub fn until_waiting(&self, count: usize, timeout: Duration) -> bool {
        let guard = self.lock();
        let waited = self.changed.wait_timeout_while(guard, timeout, |state| state.waiting < count);
        let (_guard, result) = waited.unwrap_or_else(PoisonError::into_inner);
        !result.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> Result<MutexGuard<'_, State>, KvError> {
        let state = self.lock();
        match &state.closed {
            Some(reason) => Err(KvError::closed(reason.clone())),
            None => Ok(state),
        }
    }

    /// The state once all `keys` are there.
    fn with_keys(&self, keys: &[&str], timeout: Duration) -> Result<MutexGuard<'_, State>, KvError> {
        let started = Instant::now();
        let mut state = self.lock();
        state.waiting += 1;
        self.changed.notify_all();
        loop {
            let missing = keys.iter().find(|key| !state.values.contains_key(**key));
            let left = timeout.saturating_sub(started.elapsed());
            let outcome = match (&state.closed, missing) {
                (Some(reason), _) => Some(Err(KvError::closed(reason.clone()))),
                (None, None) => Some(Ok(())),
                (None, Some(key)) if left.is_zero() => {
                    Some(Err(KvError::timeout(format!("key {key} did not appear within {timeout:?}"))))
                }
                (None, Some(_)) => None,
            };
            if let Some(outcome) = outcome {
                state.waiting -= 1;
                return outcome.map(|()| state);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl KeyValue for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.open()?.values.insert(key.to_owned(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        let state = self.with_keys(&[key], timeout)?;
        Ok(state.values.get(key).cloned().unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, KvError> {
        let mut state = self.open()?;
        let before = match state.values.get(key) {
            None => 0,
            Some(bytes) => str::from_utf8(bytes)
                .ok()
                .and_then(|text| text.parse::<i64>().ok())
                .ok_or_else(|| KvError::other(format!("key {key} holds no number")))?,
        };
        let sum = before
            .checked_add(amount)
            .ok_or_else(|| KvError::other(format!("key {key}: {before} + {amount} does not fit into 64 bits")))?;
        state.values.insert(key.to_owned(), sum.to_string().into_bytes());
        self.changed.notify_all();
        Ok(sum)
    }

    fn check(&self, keys: &[&str]) -> Result<bool, KvError> {
        let state = self.open()?;
        Ok(keys.iter().all(|key| state.values.contains_key(*key)))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), KvError> {
        self.with_keys(keys, timeout).map(drop)
    }

    fn delete(&self, key: &str) -> Result<bool, KvError> {
        Ok(self.open()?.values.remove(key).is_some())
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, KvError> {
        let mut state = self.open()?;
        let swap = match state.values.get(key) {
            Some(value) if value == expected => true,
            Some(value) => return Ok(value.clone()),
            None => expected.is_empty(),
        };
        if !swap {
            return Ok(expected.to_vec());
        }
        state.values.insert(key.to_owned(), desired.to_vec());
        self.changed.notify_all();
        Ok(desired.to_vec())
    }

    fn num_keys(&self) -> Result<i64, KvError> {
        Ok(i64::try_from(self.open()?.values.len()).unwrap_or(i64::MAX))
    }
}
