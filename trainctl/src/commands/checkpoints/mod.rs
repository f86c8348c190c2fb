//! `trainctl checkpoints`: what a run has saved, and what happens to it. Needs no coordinator.

mod diff;
mod list;
mod pin;
mod prune;
mod show;
mod verify;

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use trainctl_store::CheckpointStore;
use trainctl_store::checkpoints::{Listing, Pin};
use trainctl_store::layout::{LATEST, LOWEST_VAL};

use crate::exit::{Failure, Outcome};
use crate::run_place::failure;

/// List, show, verify, compare, prune and pin the checkpoints of a run; needs no coordinator
///
/// RUN is a run directory; where its checkpoints lie elsewhere (checkpoint.checkpoint_dir) they are looked for there.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  trainctl checkpoints list runs/gpt2-124m\n  trainctl checkpoints verify runs/gpt2-124m LATEST"
)]
pub(super) struct Checkpoints {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    List(list::List),
    Show(show::Show),
    Verify(verify::Verify),
    Diff(diff::Diff),
    Prune(prune::Prune),
    Pin(pin::PinVerb),
    Unpin(pin::Unpin),
}

impl Checkpoints {
    pub(super) async fn run(self) -> Outcome {
        match self.verb {
            Verb::List(verb) => verb.run().await,
            Verb::Show(verb) => verb.run().await,
            Verb::Verify(verb) => verb.run().await,
            Verb::Diff(verb) => verb.run().await,
            Verb::Prune(verb) => verb.run().await,
            Verb::Pin(verb) => verb.run().await,
            Verb::Unpin(verb) => verb.run().await,
        }
    }
}

/// Where the pointers point now.
struct Pointers {
    latest: Option<String>,
    lowest_val: Option<String>,
}

impl Pointers {
    async fn read(store: &CheckpointStore) -> Result<Self, Failure> {
        let latest = store.io().read_link(LATEST).await.map_err(failure)?;
        let lowest_val = store.io().read_link(LOWEST_VAL).await.map_err(failure)?;
        Ok(Self { latest, lowest_val })
    }

    /// A store without pointers.
    fn none() -> Self {
        Self { latest: None, lowest_val: None }
    }

    fn naming(&self, name: &str) -> Vec<&'static str> {
        let both = [(LATEST, &self.latest), (LOWEST_VAL, &self.lowest_val)];
        both.into_iter().filter(|(_, target)| target.as_deref() == Some(name)).map(|(pointer, _)| pointer).collect()
    }
}

async fn listing(store: &CheckpointStore) -> Result<Listing, Failure> {
    store.list().await.map_err(failure)
}

/// The pins that retention honours now, by checkpoint and claimant.
async fn pins(store: &CheckpointStore) -> Result<Vec<Pin>, Failure> {
    let mut pins = store.pins().await.map_err(failure)?;
    pins.retain(Pin::is_honoured);
    pins.sort_by(|a, b| (a.name, &a.who).cmp(&(b.name, &b.who)));
    Ok(pins)
}

/// Who, until when, why.
fn pin_text(pin: &Pin) -> String {
    let until = if pin.for_good { "for good" } else { "for a day" };
    let why = if pin.why.is_empty() { String::new() } else { format!(": {}", pin.why) };
    format!("{} ({until}, since {}){why}", pin.who, pin.at)
}

/// A bar over bytes; hidden by indicatif when stderr is not a terminal.
pub(super) fn bar(bytes: u64, name: &str) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:24} {bytes}/{total_bytes}  {bytes_per_sec}  ETA {eta}")
    {
        bar.set_style(style);
    }
    bar.set_message(name.to_owned());
    bar
}
