//! One file per verb.

mod auth;
mod cancel;
mod checkpoints;
mod coordinator;
mod data;
mod events;
mod explain;
mod export;
mod fork;
mod list;
mod logs;
mod metrics;
mod resume;
mod run;
mod status;
pub(crate) mod submission;
mod submit;
mod validate;
mod worker;
mod workers;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::client::{self, Client, CoordinatorArgs, PlaceArgs};
use crate::exit::{Failure, Outcome};
use crate::supervise::tied;

/// Trains language models and keeps the run alive.
#[derive(Debug, Parser)]
#[command(name = "trainctl", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Examples:\n  trainctl run job.yaml                 train on this machine\n  trainctl submit job.yaml --follow     train on a running coordinator\n  trainctl resume --from LATEST         go on after a stop\n\nExit codes: 0 ok, 1 the job failed, 2 internal error, 64 usage or bad spec, 69 no coordinator or a live holder, 75 queue again"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Validate(validate::Validate),
    Run(run::Run),
    Coordinator(coordinator::Coordinator),
    Worker(worker::Worker),
    Submit(submit::Submit),
    List(list::List),
    Status(status::Status),
    Workers(workers::Workers),
    Cancel(cancel::Cancel),
    Logs(logs::Logs),
    Metrics(metrics::Metrics),
    Events(events::Events),
    Explain(explain::Explain),
    Auth(auth::Auth),
    Resume(resume::Resume),
    Fork(fork::Fork),
    Checkpoints(checkpoints::Checkpoints),
    Export(export::Export),
    Data(data::Data),
    #[command(name = tied::VERB, hide = true)]
    Tied(tied::Tied),
}

impl Cli {
    /// Whether the command supervises daemons, whose troubles a person should see.
    pub(crate) fn is_attached(&self) -> bool {
        match &self.command {
            Command::Run(_) | Command::Resume(_) => true,
            Command::Fork(verb) => verb.is_attached(),
            _ => false,
        }
    }

    /// The verb that must run before anything else in the process.
    pub(crate) fn tied(&self) -> Option<&tied::Tied> {
        match &self.command {
            Command::Tied(tied) => Some(tied),
            _ => None,
        }
    }

    /// Runs the verb.
    pub(crate) async fn run(self) -> Outcome {
        match self.command {
            Command::Validate(verb) => verb.run(),
            Command::Run(verb) => verb.run().await,
            Command::Coordinator(verb) => verb.run(),
            Command::Worker(verb) => verb.run(),
            Command::Submit(verb) => verb.run().await,
            Command::List(verb) => verb.run().await,
            Command::Status(verb) => verb.run().await,
            Command::Workers(verb) => verb.run().await,
            Command::Cancel(verb) => verb.run().await,
            Command::Logs(verb) => verb.run().await,
            Command::Metrics(verb) => verb.run().await,
            Command::Events(verb) => verb.run().await,
            Command::Explain(verb) => verb.run().await,
            Command::Auth(verb) => verb.run().await,
            Command::Resume(verb) => verb.run().await,
            Command::Fork(verb) => verb.run().await,
            Command::Checkpoints(verb) => verb.run().await,
            Command::Export(verb) => verb.run().await,
            Command::Data(verb) => verb.run(),
            Command::Tied(verb) => verb.run(),
        }
    }
}

/// Which job: an id, a run directory, or nothing for the coordinator's latest.
#[derive(Debug, Args)]
struct JobArgs {
    /// Job id or run directory; default: the run in the current folder, else the coordinator's latest job
    job: Option<String>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

impl JobArgs {
    /// The run directory, when that is what was named (or nothing was and the current folder is one).
    fn run_dir(&self) -> Option<PathBuf> {
        match &self.job {
            Some(job) => Some(PathBuf::from(job)).filter(|path| path.is_dir()),
            None if self.coordinator.place.coordinator.is_some() => None,
            None => Some(PathBuf::from(".")).filter(|path| path.join("control").is_dir()),
        }
    }

    /// Dials the coordinator and gives the job's id ("" = latest). A run directory names its coordinator.
    async fn connect(&self) -> Result<(Client, String), Failure> {
        match self.run_dir() {
            Some(run_dir) if self.coordinator.place.coordinator.is_none() => {
                let coordinator = CoordinatorArgs {
                    place: PlaceArgs { coordinator: Some(run_dir.to_string_lossy().into_owned()) },
                    ..self.coordinator.clone()
                };
                let mut client = coordinator.connect().await?;
                let job = latest_in(&mut client, &run_dir).await?;
                Ok((client, job))
            }
            _ => Ok((self.coordinator.connect().await?, self.job.clone().unwrap_or_default())),
        }
    }
}

/// The newest job of a run directory.
async fn latest_in(client: &mut Client, run_dir: &std::path::Path) -> Result<String, Failure> {
    let run_dir = std::fs::canonicalize(run_dir)?;
    let jobs = client.list(trainctl_proto::v1::ListRequest {}).await.map_err(|status| client::failure(&status))?;
    let same = |job: &&trainctl_proto::v1::Job| std::fs::canonicalize(&job.run_dir).is_ok_and(|dir| dir == run_dir);
    let newest = jobs.get_ref().jobs.iter().filter(same).max_by_key(|job| job.submitted_at_ms);
    newest.map(|job| job.id.clone()).ok_or_else(|| {
        Failure::usage(format!(
            "the coordinator knows no job in {}; `trainctl list` shows what it knows",
            run_dir.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    use super::*;

    fn walk(command: &Command, path: &str, visit: &mut dyn FnMut(&str, &Command)) {
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let path = format!("{path} {}", sub.get_name()).trim_start().to_owned();
            if sub.has_subcommands() {
                walk(sub, &path, visit);
            } else {
                visit(&path, sub);
            }
        }
    }

    /// The names are a contract: a new flag or a lost one must show up in a review.
    #[test]
    fn verbs_and_flags_are_these() {
        let mut lines = Vec::new();
        walk(&Cli::command(), "", &mut |path, command| {
            let name = |arg: &clap::Arg| match arg.get_long() {
                Some(long) => format!("--{long}"),
                None => format!("<{}>", arg.get_id()),
            };
            let flags: Vec<String> = command.get_arguments().filter(|arg| !arg.is_hide_set()).map(name).collect();
            lines.push(format!("{path}: {}", flags.join(" ")));
        });
        insta::assert_snapshot!(lines.join("\n"), @r"
        validate: <spec> --set --output
        run: <spec> --set --workers --run-dir --until-step --fresh --weights-only
        coordinator: --state-dir --listen
        worker: --state-dir --coordinator --trainer --device
        submit: <spec> --set --run-dir --coordinator --token-file --until-step --fresh --weights-only --follow --output
        list: --coordinator --token-file --output
        status: <job> --coordinator --token-file --output
        workers list: --coordinator --token-file --output
        workers quarantine: <worker> --reason --now --coordinator --token-file --output
        workers release: <worker> --coordinator --token-file --output
        cancel: <job> --now --coordinator --token-file --output
        logs: <job> --coordinator --token-file --rank --follow --output
        metrics: <job> --coordinator --token-file --output
        events: <job> --coordinator --token-file --output
        explain: <job> --coordinator --token-file --output
        auth grant: <name> --expires --file --coordinator --token-file --output
        auth list: --coordinator --token-file --output
        auth revoke: <name> --coordinator --token-file --output
        resume: <target> --set --from --allow-older --workers --until-step --coordinator --token-file --follow --output
        fork: <parent> <spec> --set --keep --run-dir --run --output
        checkpoints list: <run> --output
        checkpoints show: <from> --output
        checkpoints verify: <run> <checkpoint> --output
        checkpoints diff: <first> <second> --tolerance --weights-only --output
        checkpoints prune: <run> --keep --dry-run --output
        checkpoints pin: <run> <checkpoint> --why --who
        checkpoints unpin: <run> <checkpoint> --who
        export: --from --to --dtype --max-shard-size --tokenizer --output
        data tokenizer train: <input> --output-path --vocab-size --json-key --sample-bytes --replace --output
        data preprocess: <input> --tokenizer --output-prefix --json-key --append-eod --replace --output
        data inspect: <prefix> --tokenizer --documents --scan --output
        data corpus: --manifest --output-path --max-bytes --replace --output
        ");
    }

    #[test]
    fn every_verb_shows_an_example_of_itself() {
        Cli::command().debug_assert();
        walk(&Cli::command(), "", &mut |path, command| {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains(&format!("trainctl {path}")), "{path}: no example in\n{help}");
        });
    }
}
