//! The one small runtime on which all requests to object stores run, for callers that block.
//!
//! A request is a task of its own and the caller waits for its answer on a channel. So it does not matter on what kind of
//! thread the caller is: nothing is ever blocked on inside another runtime, which tokio answers with a panic.

use std::future::Future;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, sync_channel};

use tokio::runtime::{Builder, Runtime};

use crate::error::{Error, Result};

/// Requests wait for the network most of the time; hashing for their signatures is what needs a processor.
const THREADS: usize = 2;

/// An answer that is on its way.
#[derive(Debug)]
pub(super) struct Pending<T>(Receiver<T>);

impl<T> Pending<T> {
    /// Waits for it.
    pub(super) fn wait(self) -> Result<T> {
        self.0.recv().map_err(|_| Error::Stopped("a request to the object store ended without an answer".into()))
    }
}

/// Starts work on the runtime.
pub(super) fn start<T, F>(work: F) -> Result<Pending<T>>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let (sender, receiver) = sync_channel(1);
    runtime()?.spawn(async move {
        let answer = work.await;
        if sender.send(answer).is_err() {
            tracing::debug!("nobody waits for the answer of a request any more");
        }
    });
    Ok(Pending(receiver))
}

/// Runs work on the runtime and waits for it.
pub(super) fn wait<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    start(work)?.wait()
}

fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    let made = RUNTIME.get_or_init(|| {
        Builder::new_multi_thread().worker_threads(THREADS).thread_name("object-store").enable_all().build()
    });
    made.as_ref().map_err(|e| Error::Stopped(format!("no runtime for the object store can be made: {e}")))
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn waiting_inside_another_runtime_does_not_panic() {
        assert_eq!(super::wait(async { 7 }).unwrap(), 7);
    }

    #[test]
    fn a_panic_of_the_work_is_an_error_of_the_caller() {
        let error = super::wait(async { panic!("on purpose") }).unwrap_err().to_string();
        assert!(error.contains("without an answer"), "{error}");
    }
}
