//! The key-value stores of rendezvous: one per (job, generation), in memory.
//!
//! A store is open while its generation forms, sealed once every rank is formed, and over when the generation is: every
//! waiting call then ends at once with that reason. Keys need no durability: a coordinator that dies while a generation
//! forms abandons it, and a running generation needs no key.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use trainctl_spec::{Generation, JobId};

/// A call on a store failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The generation is over, or was never opened here.
    #[error("generation {generation} of job {job} is over: {reason}")]
    Over {
        /// Job.
        job: JobId,
        /// Generation of the call.
        generation: Generation,
        /// Why it ended.
        reason: String,
    },
    /// The generation is formed; no key is needed any more.
    #[error("the rendezvous store of generation {0} is sealed: every rank is formed")]
    Sealed(Generation),
    /// The store holds too much.
    #[error("the rendezvous store holds its {0} bytes of keys and values: no more can be set")]
    Full(usize),
    /// A key did not come in time.
    #[error("no value for key {key:?} within {waited:?}")]
    Timeout {
        /// First key that is missing.
        key: String,
        /// The call's own timeout.
        waited: Duration,
    },
}

/// Bytes of keys and values that one store holds at most.
const MAX_BYTES: usize = 256 << 20;

/// The keys of one store, within a bound.
#[derive(Debug)]
pub struct Keys {
    values: BTreeMap<String, Vec<u8>>,
    bytes: usize,
    limit: usize,
}

impl Default for Keys {
    fn default() -> Self {
        Self { values: BTreeMap::new(), bytes: 0, limit: MAX_BYTES }
    }
}

impl Keys {
    /// A key's value.
    pub fn get(&self, key: &str) -> Option<&Vec<u8>> {
        self.values.get(key)
    }

    /// Whether all of these are there.
    pub fn has_all(&self, keys: &[String]) -> bool {
        keys.iter().all(|key| self.values.contains_key(key))
    }

    /// Number of keys.
    pub fn count(&self) -> usize {
        self.values.len()
    }

    /// Sets a key.
    ///
    /// # Errors
    /// [`Error::Full`]: nothing has changed.
    pub fn set(&mut self, key: String, value: Vec<u8>) -> Result<(), Error> {
        let old = self.values.get(&key).map_or(0, |old| key.len() + old.len());
        let bytes = self.bytes - old + key.len() + value.len();
        if bytes > self.limit {
            return Err(Error::Full(self.limit));
        }
        self.bytes = bytes;
        self.values.insert(key, value);
        Ok(())
    }

    /// Removes a key. False: there was none.
    pub fn remove(&mut self, key: &str) -> bool {
        let removed = self.values.remove(key);
        self.bytes -= removed.as_ref().map_or(0, |value| key.len() + value.len());
        removed.is_some()
    }
}

#[derive(Debug, Default)]
struct State {
    keys: Keys,
    sealed: bool,
    over: Option<String>,
}

#[derive(Debug, Default)]
struct Store {
    state: Mutex<State>,
    changed: Notify,
}

type Stores = HashMap<(JobId, Generation), Arc<Store>>;

/// All open stores. Cloning shares them.
#[derive(Clone, Debug, Default)]
pub struct Rendezvous {
    stores: Arc<Mutex<Stores>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held leaves plain maps behind, which are valid at every point.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rendezvous {
    /// Opens the store of a generation that begins to form.
    pub fn open(&self, job: &JobId, generation: Generation) {
        lock(&self.stores).insert((job.clone(), generation), Arc::default());
    }

    /// Seals the store: every rank is formed.
    pub fn seal(&self, job: &JobId, generation: Generation) {
        if let Some(store) = lock(&self.stores).get(&(job.clone(), generation)) {
            let mut state = lock(&store.state);
            state.sealed = true;
            state.keys = Keys::default();
            store.changed.notify_waiters();
        }
    }

    /// Ends the store: waiting calls fail at once with `reason`.
    pub fn close(&self, job: &JobId, generation: Generation, reason: &str) {
        if let Some(store) = lock(&self.stores).remove(&(job.clone(), generation)) {
            lock(&store.state).over = Some(reason.to_owned());
            store.changed.notify_waiters();
        }
    }

    fn store(&self, job: &JobId, generation: Generation) -> Result<Arc<Store>, Error> {
        lock(&self.stores).get(&(job.clone(), generation)).cloned().ok_or_else(|| Error::Over {
            job: job.clone(),
            generation,
            reason: "its rendezvous store is closed".to_owned(),
        })
    }

    /// Runs `act` on the keys of an open store and wakes the waiting calls.
    pub fn with_keys<T>(
        &self,
        job: &JobId,
        generation: Generation,
        act: impl FnOnce(&mut Keys) -> T,
    ) -> Result<T, Error> {
        let store = self.store(job, generation)?;
        let mut state = lock(&store.state);
        usable(&state, job, generation)?;
        let answer = act(&mut state.keys);
        store.changed.notify_waiters();
        Ok(answer)
    }

    /// Waits until all `keys` are there, then answers what `take` takes of them.
    pub async fn wait<T>(
        &self,
        job: &JobId,
        generation: Generation,
        keys: &[String],
        patience: Duration,
        take: impl Fn(&Keys) -> T,
    ) -> Result<T, Error> {
        let store = self.store(job, generation)?;
        let deadline = Instant::now() + patience;
        loop {
            // Registered before the look, so that a change between look and wait is not missed.
            let changed = store.changed.notified();
            let missing = {
                let state = lock(&store.state);
                usable(&state, job, generation)?;
                match keys.iter().find(|key| state.keys.get(key).is_none()) {
                    None => return Ok(take(&state.keys)),
                    Some(key) => key.clone(),
                }
            };
            if timeout_at(deadline, changed).await.is_err() {
                return Err(Error::Timeout { key: missing, waited: patience });
            }
        }
    }
}

fn usable(state: &State, job: &JobId, generation: Generation) -> Result<(), Error> {
    match &state.over {
        Some(reason) => Err(Error::Over { job: job.clone(), generation, reason: reason.clone() }),
        None if state.sealed => Err(Error::Sealed(generation)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened() -> (Rendezvous, JobId) {
        let (rendezvous, job) = (Rendezvous::default(), JobId("a".to_owned()));
        rendezvous.open(&job, Generation(3));
        (rendezvous, job)
    }

    #[tokio::test]
    async fn a_waiting_call_gets_the_value_that_comes_later() {
        let (rendezvous, job) = opened();
        let keys = ["k".to_owned()];
        let minute = Duration::from_secs(60);
        let wait = rendezvous.wait(&job, Generation(3), &keys, minute, |keys| keys.get("k").cloned());
        let set = async { rendezvous.with_keys(&job, Generation(3), |keys| keys.set("k".to_owned(), vec![7])) };
        let (answer, set) = tokio::join!(wait, set);
        set.unwrap().unwrap();
        assert_eq!(answer.unwrap(), Some(vec![7]));
    }

    #[tokio::test]
    async fn closing_ends_a_waiting_call_with_the_reason() {
        let (rendezvous, job) = opened();
        let keys = ["never".to_owned()];
        let wait = rendezvous.wait(&job, Generation(3), &keys, Duration::from_secs(60), |_| ());
        let close = async { rendezvous.close(&job, Generation(3), "rank 1 died") };
        let (answer, ()) = tokio::join!(wait, close);
        assert!(answer.unwrap_err().to_string().contains("rank 1 died"));
        assert!(matches!(rendezvous.with_keys(&job, Generation(3), |_| ()), Err(Error::Over { .. })));
    }

    #[tokio::test]
    async fn a_sealed_store_refuses_and_a_timeout_names_the_key() {
        let (rendezvous, job) = opened();
        let late = rendezvous.wait(&job, Generation(3), &["k".to_owned()], Duration::from_millis(1), |_| ()).await;
        assert!(matches!(late, Err(Error::Timeout { key, .. }) if key == "k"));
        rendezvous.seal(&job, Generation(3));
        assert_eq!(rendezvous.with_keys(&job, Generation(3), |_| ()), Err(Error::Sealed(Generation(3))));
    }

    #[test]
    fn a_store_is_bounded_and_what_is_removed_or_replaced_is_free_again() {
        let mut keys = Keys { limit: 10, ..Keys::default() };
        keys.set("a".to_owned(), vec![0; 4]).unwrap();
        keys.set("b".to_owned(), vec![0; 4]).unwrap();
        assert_eq!(keys.set("c".to_owned(), Vec::new()), Err(Error::Full(10)));
        assert_eq!(keys.set("a".to_owned(), vec![0; 5]), Err(Error::Full(10)));
        assert_eq!((keys.count(), keys.get("a")), (2, Some(&vec![0; 4])), "a refusal changes nothing");
        keys.set("a".to_owned(), vec![1; 3]).unwrap();
        keys.set("c".to_owned(), Vec::new()).unwrap();
        assert!(keys.remove("b") && !keys.remove("b"));
        keys.set("d".to_owned(), vec![0; 4]).unwrap();
        assert_eq!(keys.bytes, 10);
    }

    #[test]
    fn j3_an_old_generation_has_no_store() {
        let (rendezvous, job) = opened();
        assert!(matches!(rendezvous.with_keys(&job, Generation(2), |_| ()), Err(Error::Over { .. })));
    }
}
