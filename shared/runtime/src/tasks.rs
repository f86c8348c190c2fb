//! The one place that calls `tokio::spawn`. Every task has a name, an answer to "what on cancel" and an answer to "what
//! on error", so that no outcome is swallowed.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What happens to a task when the process shuts down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCancel {
    /// It is dropped at its next await.
    Abort,
    /// It watches [`Shutdown::cancelled`] itself and ends in order; [`Shutdown::wait`] waits for it.
    Finish,
}

/// What happens to the process when a task fails or panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// One warning; the process goes on.
    Log,
    /// One error; the process shuts down.
    Shutdown,
}

/// The name of a task and what its end means.
#[derive(Clone, Copy, Debug)]
pub struct TaskKind {
    /// Constant name, for logs.
    pub name: &'static str,
    /// On shutdown.
    pub on_cancel: OnCancel,
    /// On an error or a panic.
    pub on_error: OnError,
}

/// The process's shutdown switch and the list of tasks that it waits for. Clones are the same switch.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    token: CancellationToken,
    tracker: TaskTracker,
}

impl Shutdown {
    /// A switch that is off.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts the shutdown. Later calls do nothing.
    pub fn trigger(&self, reason: &str) {
        if !self.token.is_cancelled() {
            tracing::info!(reason, "shutting down");
            self.token.cancel();
        }
    }

    /// Whether the shutdown has started.
    #[must_use]
    pub fn is_triggered(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Returns once the shutdown has started. Cancel-safe.
    pub async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    /// A switch that goes off with this one, and that can be triggered alone.
    #[must_use]
    pub fn child(&self) -> Self {
        Self { token: self.token.child_token(), tracker: TaskTracker::new() }
    }

    /// Waits for every task spawned under this switch. False: `limit` passed first, and tasks still run.
    pub async fn wait(&self, limit: Duration) -> bool {
        self.tracker.close();
        tokio::time::timeout(limit, self.tracker.wait()).await.is_ok()
    }
}

/// Runs `future` as a task under `shutdown`.
///
/// Dropping the handle detaches the task; its errors are still logged and acted on. Aborting through the handle is not an
/// error.
#[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
pub fn spawn<F, E>(kind: TaskKind, shutdown: &Shutdown, future: F) -> JoinHandle<()>
where
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display + Send + 'static,
{
    tokio::spawn(supervised(kind, shutdown, future))
}

/// As [`spawn`], on a thread and a runtime of its own: the task may block in a file system that hangs and holds up no other
/// one, and what it does wakes no thread but that one.
pub fn spawn_on_thread<F, E>(kind: TaskKind, shutdown: &Shutdown, future: F)
where
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display + Send + 'static,
{
    let guard = PanicGuard { kind, shutdown: shutdown.clone(), armed: false };
    let task = supervised(kind, shutdown, future);
    let run = move || match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(task),
        Err(error) => guard.failed(&format!("no runtime: {error}")),
    };
    if let Err(error) = std::thread::Builder::new().name(kind.name.to_owned()).spawn(run) {
        PanicGuard { kind, shutdown: shutdown.clone(), armed: false }.failed(&format!("no thread: {error}"));
    }
}

/// `future` with what its kind says of its end, counted among the tasks that the shutdown waits for.
fn supervised<F, E>(kind: TaskKind, shutdown: &Shutdown, future: F) -> impl Future<Output = ()> + Send + use<F, E>
where
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display + Send + 'static,
{
    let switch = shutdown.clone();
    let guard = PanicGuard { kind, shutdown: shutdown.clone(), armed: true };
    shutdown.tracker.track_future(async move {
        let mut guard = guard;
        let outcome = match kind.on_cancel {
            OnCancel::Finish => Some(future.await),
            OnCancel::Abort => tokio::select! {
                biased;
                () = switch.cancelled() => None,
                outcome = future => Some(outcome),
            },
        };
        guard.armed = false;
        if let Some(Err(error)) = outcome {
            guard.failed(&format!("{error:#}"));
        }
    })
}

/// Notices a panic by being dropped while armed during unwinding.
struct PanicGuard {
    kind: TaskKind,
    shutdown: Shutdown,
    armed: bool,
}

impl PanicGuard {
    fn failed(&self, error: &str) {
        match self.kind.on_error {
            OnError::Log => tracing::warn!(task = self.kind.name, error, "task failed"),
            OnError::Shutdown => {
                tracing::error!(task = self.kind.name, error, "task failed");
                self.shutdown.trigger("a task failed");
            }
        }
    }
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if self.armed && std::thread::panicking() {
            self.failed("panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(on_cancel: OnCancel, on_error: OnError) -> TaskKind {
        TaskKind { name: "test", on_cancel, on_error }
    }

    #[tokio::test]
    async fn an_error_shuts_down_only_when_the_kind_says_so() {
        let shutdown = Shutdown::new();
        spawn(kind(OnCancel::Abort, OnError::Log), &shutdown, async { Err("disk full") }).await.expect("joined");
        assert!(!shutdown.is_triggered());
        spawn(kind(OnCancel::Abort, OnError::Shutdown), &shutdown, async { Err("disk full") }).await.expect("joined");
        assert!(shutdown.is_triggered());
    }

    #[tokio::test]
    async fn a_panic_counts_as_an_error() {
        let shutdown = Shutdown::new();
        let task = spawn(kind(OnCancel::Finish, OnError::Shutdown), &shutdown, async {
            if std::hint::black_box(true) {
                panic!("on purpose");
            }
            Ok::<(), &str>(())
        });
        assert!(task.await.is_err());
        assert!(shutdown.is_triggered());
    }

    #[tokio::test]
    async fn a_task_on_a_thread_of_its_own_may_block_and_is_waited_for() {
        let shutdown = Shutdown::new();
        let (go, wait) = std::sync::mpsc::channel();
        spawn_on_thread(kind(OnCancel::Finish, OnError::Shutdown), &shutdown, async move {
            wait.recv().map_err(|_| "nobody said go")?;
            Err("disk full")
        });
        // This runtime has one thread: it is not the one that is blocked.
        assert!(!shutdown.wait(Duration::from_millis(1)).await, "it ended before it was told to");
        go.send(()).expect("it waits");
        shutdown.cancelled().await;
        assert!(shutdown.wait(Duration::from_secs(10)).await, "a task is left");
    }

    #[tokio::test]
    async fn wait_waits_for_finishing_tasks_and_drops_the_others() {
        let shutdown = Shutdown::new();
        let (sender, mut receiver) = tokio::sync::oneshot::channel();
        let inner = shutdown.clone();
        drop(spawn(kind(OnCancel::Finish, OnError::Log), &shutdown, async move {
            inner.cancelled().await;
            tokio::task::yield_now().await;
            sender.send(()).map_err(|()| "nobody listens")
        }));
        drop(spawn(kind(OnCancel::Abort, OnError::Log), &shutdown, async {
            std::future::pending::<()>().await;
            Ok::<(), &str>(())
        }));
        shutdown.trigger("test");
        assert!(shutdown.wait(Duration::from_secs(10)).await, "a task is left");
        assert!(receiver.try_recv().is_ok(), "the finishing task was cut");
    }
}
