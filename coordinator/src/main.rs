//! `trainctl-coordinator`: one per run, or one per user.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use trainctl_coordinator::{runs, server};
use trainctl_runtime::signals::Signals;
use trainctl_runtime::tasks::Shutdown;
use trainctl_runtime::{proc, telemetry};
use trainctl_store::tenure::AcquireError;

/// Exit code for a state directory that a live coordinator holds.
const HELD: u8 = 69;
/// Internal error.
const INTERNAL: u8 = 2;
/// Wrong flags.
const USAGE: u8 = 64;

/// How long threads that block may take to end after all else has.
const THREADS_LIMIT: Duration = Duration::from_secs(2);

/// tonic says at this level, and nothing else there, why it closed a connection: a stranger's bytes get one line each.
const LOG: &str = "info,tonic::transport::server=debug";

/// The coordinator: takes jobs, forms worlds, commits checkpoints, restarts what fails.
#[derive(Parser)]
#[command(version, after_help = "Example: trainctl-coordinator --state-dir ~/.local/state/trainctl")]
struct Args {
    /// Directory for journal, tokens, certificate authority and endpoint.json
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
    /// Address to listen on; port 0 takes the last start's port, else any. A non-loopback address speaks TLS
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
}

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            return if error.print().is_ok() { ExitCode::from(code) } else { ExitCode::from(INTERNAL) };
        }
    };
    // Under `trainctl run` this process does not outlive its supervisor.
    if let Err(error) = proc::die_with_parent() {
        return fail(&error.into());
    }
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Logs the error and chooses the exit code: whoever started us tells a held directory from a fault by it.
fn fail(error: &anyhow::Error) -> ExitCode {
    tracing::error!(error = format!("{error:#}"), "failed");
    let held = error
        .chain()
        .any(|cause| matches!(cause.downcast_ref(), Some(runs::Error::Tenure(AcquireError::LiveHolder { .. }))));
    ExitCode::from(if held { HELD } else { INTERNAL })
}

fn serve(args: Args) -> anyhow::Result<()> {
    telemetry::init_with_default("trainctl-coordinator", LOG)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let served = runtime.block_on(async {
        let shutdown = Shutdown::new();
        let mut signals = Signals::listen(&shutdown)?;
        let options = server::Options { state_dir: args.state_dir, listen: args.listen };
        let served = server::run(options, shutdown.clone());
        tokio::pin!(served);
        tokio::select! {
            served = &mut served => served,
            // Trainers go on without us; the next start adopts them.
            () = signals.first() => {
                shutdown.trigger("signal");
                served.await
            }
        }
    });
    // What a thread does in a file system that hangs is no reason to stay: tasks have had their time in `server::run`.
    runtime.shutdown_timeout(THREADS_LIMIT);
    served
}
