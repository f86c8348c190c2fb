//! `trainctl auth revoke`

use clap::Args;
use trainctl_proto::v1;

use super::GrantView;
use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, note};

/// Take a grant back, at once: streams that it has open end
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl auth revoke ann")]
pub(super) struct Revoke {
    /// Name of the grant
    name: String,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Revoke {
    pub(super) async fn run(self) -> Outcome {
        let mut client = super::connect(&self.coordinator).await?;
        let request = v1::RevokeGrantRequest { name: self.name };
        let grant = client.revoke_grant(request).await.map_err(|status| client::failure(&status))?.into_inner();
        note(&format!("{} may look no longer", grant.name));
        if self.output.is_json() {
            json(&GrantView::from(grant))?;
        }
        Ok(Exit::Ok)
    }
}
