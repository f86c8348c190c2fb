//! `trainctl workers list`

use clap::Args;
use trainctl_proto::v1;

use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, line, table};
use crate::worker_view::{HEADER, WorkerView, notes, row};

/// List a coordinator's workers: state, what they carry, how they are
///
/// UNKNOWN is a worker that was not heard for half its lease: it is lost when the lease is over, and alive if it is heard
/// before.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl workers list --output json")]
pub(super) struct List {
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl List {
    pub(super) async fn run(self) -> Outcome {
        let mut client = self.coordinator.connect().await?;
        let answer = client.list_workers(v1::ListWorkersRequest {}).await.map_err(|status| client::failure(&status))?;
        let workers = answer.into_inner().workers;
        if self.output.is_json() {
            json(&workers.into_iter().map(WorkerView::from).collect::<Vec<_>>())?;
            return Ok(Exit::Ok);
        }
        line(&table(&HEADER, &workers.iter().map(row).collect::<Vec<_>>()))?;
        workers.iter().flat_map(notes).try_for_each(|note| line(&note))?;
        Ok(Exit::Ok)
    }
}
