//! What a worker measures of itself, and what it looks at before it carries a rank.
//!
//! Nothing here runs on the session's task: a file system that hangs holds up a blocking thread and no heartbeat. The worker
//! judges nothing; the coordinator does (`decide/health.rs`, `decide/probes.rs`).

mod device;
mod disk;
mod memory;
mod probe;

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use trainctl_proto::v1::Health;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};

pub use probe::Prober;

use crate::session::machine::Event;

/// Time between two measurements.
const EVERY: Duration = Duration::from_secs(60);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Measure {
    /// Where the spool is.
    pub state_dir: PathBuf,
    /// "cpu" or "cuda".
    pub device: String,
}

impl Measure {
    /// All figures, now. Blocks.
    pub fn now(&self) -> Health {
        let mut health = Health::default();
        match memory::read() {
            Ok(memory) => {
                health.memory_available = Some(memory.available);
                health.memory_total = Some(memory.total);
            }
            Err(error) => health.errors.push(format!("memory: {error}")),
        }
        match disk::free(&self.state_dir) {
            Ok(free) => health.state_free = Some(free),
            Err(error) => health.errors.push(format!("free space of {}: {error}", self.state_dir.display())),
        }
        if self.device != "cpu" {
            match device::read(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()) {
                Ok(devices) => health.devices = devices,
                Err(error) => health.device_error = error,
            }
        }
        health
    }

    /// Measures at once and then every minute.
    pub fn start(self, events: mpsc::Sender<Event>, shutdown: &Shutdown) {
        let kind = TaskKind { name: "measure", on_cancel: OnCancel::Abort, on_error: OnError::Log };
        drop(spawn(kind, shutdown, async move {
            loop {
                let measure = self.clone();
                let health = tokio::task::spawn_blocking(move || measure.now()).await?;
                if events.send(Event::Measured(health)).await.is_err() {
                    return Ok::<(), tokio::task::JoinError>(());
                }
                tokio::time::sleep(EVERY).await;
            }
        }));
    }
}
