//! `trainctl auth list`

use clap::Args;
use trainctl_proto::v1;

use super::GrantView;
use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, line, moment, table};

/// List who may look, and until when
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl auth list --output json")]
pub(super) struct List {
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl List {
    pub(super) async fn run(self) -> Outcome {
        let mut client = super::connect(&self.coordinator).await?;
        let answer = client.list_grants(v1::ListGrantsRequest {}).await.map_err(|status| client::failure(&status))?;
        let grants = answer.into_inner().grants;
        if self.output.is_json() {
            json(&grants.into_iter().map(GrantView::from).collect::<Vec<_>>())?;
            return Ok(Exit::Ok);
        }
        let row = |grant: &v1::Grant| {
            let state = if grant.expired { "expired" } else { "valid" };
            vec![grant.name.clone(), state.to_owned(), moment(grant.created_at_ms), moment(grant.expires_at_ms)]
        };
        let rows: Vec<_> = grants.iter().map(row).collect();
        line(&table(&["NAME", "STATE", "GRANTED", "UNTIL"], &rows))?;
        Ok(Exit::Ok)
    }
}
