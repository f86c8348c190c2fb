//! `trainctl workers`: who is there, and who takes no rank.

mod list;
mod quarantine;

use clap::{Args, Subcommand};

use crate::exit::Outcome;

/// List a coordinator's workers, take one out of service, let it in again
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  trainctl workers list\n  trainctl workers quarantine node7-0 --reason 'fan 3 is slow, ticket 4711'"
)]
pub(super) struct Workers {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    List(list::List),
    Quarantine(quarantine::Quarantine),
    Release(quarantine::Release),
}

impl Workers {
    pub(super) async fn run(self) -> Outcome {
        match self.verb {
            Verb::List(verb) => verb.run().await,
            Verb::Quarantine(verb) => verb.run().await,
            Verb::Release(verb) => verb.run().await,
        }
    }
}
