//! `trainctl checkpoints pin` and `unpin`

use clap::Args;
use trainctl_store::checkpoints::{GENERATION_PIN, Pin, Selector};

use super::pin_text;
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{line, note};
use crate::run_place::{RunPlace, RunRef, failure};

/// Keep a checkpoint, whatever retention says, until it is unpinned
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl checkpoints pin runs/gpt2-124m LOWEST_VAL --why 'in the paper'")]
pub(super) struct PinVerb {
    /// The run
    #[arg(value_name = "RUN")]
    run: RunRef,
    /// LATEST, LOWEST_VAL (which are resolved now) or a checkpoint's name
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: Selector,
    /// Why it is kept
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    why: String,
    /// Who keeps it [default: your user name]
    #[arg(long, value_name = "NAME", value_parser = claimant)]
    who: Option<String>,
}

/// Let retention have a checkpoint again
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl checkpoints unpin runs/gpt2-124m epoch_0_step_999")]
pub(super) struct Unpin {
    /// The run
    #[arg(value_name = "RUN")]
    run: RunRef,
    /// LATEST, LOWEST_VAL or a checkpoint's name
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: Selector,
    /// Whose pin [default: your user name]
    #[arg(long, value_name = "NAME")]
    who: Option<String>,
}

fn claimant(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("must not be empty".to_owned()),
        name if name.starts_with(GENERATION_PIN) => {
            Err(format!("names that begin with `{GENERATION_PIN}` are the coordinator's"))
        }
        name => Ok(name.to_owned()),
    }
}

/// The name of whoever runs this, else the number.
fn user() -> String {
    let uid = nix::unistd::Uid::current();
    nix::unistd::User::from_uid(uid).ok().flatten().map_or_else(|| format!("user {uid}"), |user| user.name)
}

impl PinVerb {
    pub(super) async fn run(self) -> Outcome {
        let place = RunPlace::open(&self.run.run)?;
        place.run_dir()?;
        let wanted = name_once(self.run, self.checkpoint)?;
        let store = place.store(wanted.weights);
        let name = place.resolve(&wanted).await?.checkpoint.name();
        let pin = Pin::new(name, self.who.unwrap_or_else(user)).for_good().because(self.why);
        store.place_pin(&pin).await.map_err(failure)?;
        // Retention may have looked before there was a pin.
        if let Err(error) = store.read_manifest(name).await {
            store.unpin(name, &pin.who).await.map_err(failure)?;
            return Err(failure(error));
        }
        line(&format!("{name} is pinned by {}", pin_text(&pin)))?;
        Ok(Exit::Ok)
    }
}

impl Unpin {
    pub(super) async fn run(self) -> Outcome {
        let place = RunPlace::open(&self.run.run)?;
        place.run_dir()?;
        let wanted = name_once(self.run, self.checkpoint)?;
        let store = place.store(wanted.weights);
        let name = match self.checkpoint {
            // Also one that is no checkpoint any more.
            Selector::Name(name) => name,
            _ => place.resolve(&wanted).await?.checkpoint.name(),
        };
        let who = self.who.unwrap_or_else(user);
        let removed = store.unpin(name, &who).await.map_err(failure)?;
        let mut others = super::pins(&store).await?;
        others.retain(|pin| pin.name == name);
        if !removed {
            let others: Vec<String> = others.iter().map(pin_text).collect();
            let text = match others.is_empty() {
                true => format!("{name} is not pinned"),
                false => format!("{who} has no pin on {name}; there are: {} (--who removes one)", others.join("; ")),
            };
            return Err(Failure::usage(text));
        }
        line(&format!("{name} is no longer pinned by {who}"))?;
        others.iter().for_each(|pin| note(&format!("{name} stays pinned by {}", pin_text(pin))));
        Ok(Exit::Ok)
    }
}

fn name_once(run: RunRef, checkpoint: Selector) -> Result<RunRef, Failure> {
    match run.name {
        Some(_) => Err(Failure::usage("name the checkpoint once: RUN NAME")),
        None => Ok(RunRef { name: Some(checkpoint), ..run }),
    }
}
