//! A few threads that share a list of work.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::error::Result;
use crate::io::Files;

/// All cores that this process may use.
pub(crate) fn all_cores() -> NonZeroUsize {
    thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// Threads that read: all cores from a directory, and from a bucket, where a thread mostly waits for the answer to a
/// request, at least eight.
pub(crate) fn readers(files: &Files) -> NonZeroUsize {
    const REQUESTS: NonZeroUsize = NonZeroUsize::new(8).unwrap();
    match files {
        Files::Disk(_) => all_cores(),
        Files::Objects(_) => all_cores().max(REQUESTS),
    }
}

/// Does `work` for every item on up to `threads` threads, the caller's among them. Items are begun in their order; each
/// thread keeps a state of its own. After an error no further item is begun, and the first error is returned.
pub(crate) fn for_each<T, S, F>(threads: NonZeroUsize, items: Vec<T>, work: F) -> Result<()>
where
    T: Send,
    S: Default,
    F: Fn(&mut S, T) -> Result<()> + Sync,
{
    let helpers = threads.get().min(items.len()).saturating_sub(1);
    let items = Mutex::new(items.into_iter());
    let failure = Mutex::new(None);
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        let mut state = S::default();
        while let Some(item) = next() {
            if let Err(error) = work(&mut state, item) {
                // Nobody begins another one.
                while next().is_some() {}
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..helpers {
            let started = thread::Builder::new().name("store".to_owned()).spawn_scoped(scope, run);
            if let Err(error) = started {
                tracing::warn!(%error, "a thread could not be started; the others do its work");
                break;
            }
        }
        run();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Error;

    #[test]
    fn every_item_is_done_once_and_the_first_error_ends_it() {
        let threads = NonZeroUsize::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        for_each(threads, (0..1000).collect(), |_: &mut (), n: usize| {
            sum.fetch_add(n, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert_eq!(sum.into_inner(), 499_500);
        let done = AtomicUsize::new(0);
        let result = for_each(threads, (0..1000).collect(), |_: &mut (), n: usize| {
            done.fetch_add(1, Ordering::Relaxed);
            if n == 10 { Err(Error::Stopped("here".into())) } else { Ok(()) }
        });
        assert!(matches!(result, Err(Error::Stopped(why)) if why == "here"));
        assert!(done.into_inner() < 1000);
    }
}
