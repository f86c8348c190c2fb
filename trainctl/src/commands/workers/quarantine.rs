//! `trainctl workers quarantine` and `release`

use clap::Args;
use trainctl_proto::v1;

use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, note};
use crate::worker_view::{WorkerView, carried};

/// Give a worker no further rank until it is released; what it runs goes on, unless --now is given
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl workers quarantine node7-0 --reason 'fan 3 is slow, ticket 4711'")]
pub(super) struct Quarantine {
    /// Worker id
    worker: String,
    /// Why; shown wherever the worker is
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Give up the rank that it carries too: the job forms again without it, from its newest checkpoint
    #[arg(long)]
    now: bool,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Quarantine {
    pub(super) async fn run(self) -> Outcome {
        let mut client = self.coordinator.connect().await?;
        let request = v1::QuarantineWorkerRequest { worker: self.worker, reason: self.reason, now: self.now };
        let answer = client.quarantine_worker(request).await.map_err(|status| client::failure(&status))?;
        let worker = answer.into_inner();
        let goes_on = match carried(&worker) {
            Some(rank) => format!("; {rank} goes on there (--now gives it up)"),
            None => String::new(),
        };
        note(&format!("{} takes no further rank{goes_on}", worker.id));
        if self.output.is_json() {
            json(&WorkerView::from(worker))?;
        }
        Ok(Exit::Ok)
    }
}

/// Lift a worker's quarantine
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl workers release node7-0")]
pub(super) struct Release {
    /// Worker id
    worker: String,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Release {
    pub(super) async fn run(self) -> Outcome {
        let mut client = self.coordinator.connect().await?;
        let request = v1::ReleaseWorkerRequest { worker: self.worker };
        let answer = client.release_worker(request).await.map_err(|status| client::failure(&status))?;
        let worker = answer.into_inner();
        note(&format!("{} may take ranks", worker.id));
        if self.output.is_json() {
            json(&WorkerView::from(worker))?;
        }
        Ok(Exit::Ok)
    }
}
