//! `trainctl auth`: who else may look.

mod grant;
mod list;
mod revoke;

use clap::{Args, Subcommand};
use serde::Serialize;
use trainctl_proto::v1;
use trainctl_proto::v1::grants_client::GrantsClient;
use trainctl_runtime::rpc::{self, AuthedChannel};

use crate::client::CoordinatorArgs;
use crate::exit::{Failure, Outcome};

/// Let a colleague look at a coordinator's jobs, and take that back
///
/// A grant reads: list, status, logs, metrics, events, explain, workers list. It changes nothing.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl auth grant ann --expires 30d --file ann.json\n  trainctl auth revoke ann")]
pub(super) struct Auth {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Grant(grant::Grant),
    List(list::List),
    Revoke(revoke::Revoke),
}

impl Auth {
    pub(super) async fn run(self) -> Outcome {
        match self.verb {
            Verb::Grant(verb) => verb.run().await,
            Verb::List(verb) => verb.run().await,
            Verb::Revoke(verb) => verb.run().await,
        }
    }
}

async fn connect(coordinator: &CoordinatorArgs) -> Result<GrantsClient<AuthedChannel>, Failure> {
    Ok(GrantsClient::new(coordinator.channel().await?).max_decoding_message_size(rpc::MAX_REQUEST_BYTES))
}

/// A grant as programs read it.
#[derive(Debug, Serialize)]
struct GrantView {
    name: String,
    created_at_ms: u64,
    expires_at_ms: u64,
    expired: bool,
    /// Only when it was just made, and not written to a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl From<v1::Grant> for GrantView {
    fn from(grant: v1::Grant) -> Self {
        let v1::Grant { name, created_at_ms, expires_at_ms, expired } = grant;
        Self { name, created_at_ms, expires_at_ms, expired, token: None }
    }
}
