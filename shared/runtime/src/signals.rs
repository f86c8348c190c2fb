//! SIGINT and SIGTERM as a count: the first asks for an orderly end, the second for an end now.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};

/// How often SIGINT or SIGTERM came. Clones see the same count.
#[derive(Clone, Debug)]
pub struct Signals {
    count: watch::Receiver<u32>,
}

impl Signals {
    /// Starts listening. From here on the process no longer dies of SIGINT and SIGTERM by itself.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn listen(shutdown: &Shutdown) -> std::io::Result<Self> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let (sender, count) = watch::channel(0_u32);
        let kind = TaskKind { name: "signals", on_cancel: OnCancel::Abort, on_error: OnError::Log };
        let listener = async move {
            loop {
                let name = tokio::select! {
                    Some(()) = interrupt.recv() => "SIGINT",
                    Some(()) = terminate.recv() => "SIGTERM",
                    else => return Ok::<(), std::convert::Infallible>(()),
                };
                sender.send_modify(|count| *count = count.saturating_add(1));
                tracing::info!(signal = name, "signal received");
            }
        };
        drop(spawn(kind, shutdown, listener));
        Ok(Self { count })
    }

    /// How many have come.
    #[must_use]
    pub fn count(&self) -> u32 {
        *self.count.borrow()
    }

    /// Returns once one signal has come. Cancel-safe.
    pub async fn first(&mut self) {
        self.at_least(1).await;
    }

    /// Returns once one more has come than at the call. Cancel-safe.
    pub async fn another(&mut self) {
        self.at_least(self.count().saturating_add(1)).await;
    }

    /// Returns once two signals have come. Cancel-safe.
    pub async fn second(&mut self) {
        self.at_least(2).await;
    }

    async fn at_least(&mut self, wanted: u32) {
        if self.count.wait_for(|count| *count >= wanted).await.is_err() {
            // The listener ended with the runtime: no signal can come any more.
            std::future::pending::<()>().await;
        }
    }
}
