//! `trainctl-worker`: see the library.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use trainctl_runtime::{proc, telemetry};
use trainctl_worker::daemon::{self, Options};
use trainctl_worker::keeper;
use trainctl_worker::state::{StateDir, StateError};

/// Internal error.
const INTERNAL: u8 = 2;
/// Wrong flags, or a state directory that cannot be used.
const USAGE: u8 = 64;

/// How long threads may take to end after the daemon has.
const LAST_WAIT: std::time::Duration = std::time::Duration::from_secs(1);

/// Runs trainers on one GPU (or CPU slot) for a coordinator.
///
/// Example: trainctl-worker --state-dir /tmp/worker0 --coordinator runs/gpt2-124m/control
#[derive(Debug, Parser)]
#[command(name = "trainctl-worker", version)]
struct Flags {
    /// Directory of this worker's own: its id, what it has not delivered yet. One daemon per directory.
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
    /// Where the coordinator's endpoint.json and join.json lie; read again before every dial.
    #[arg(long, value_name = "DIR|FILE", env = "TRAINCTL_COORDINATOR")]
    coordinator: PathBuf,
    /// The trainer's program [default: trainctl-trainer beside this program].
    #[arg(long, value_name = "PATH")]
    trainer: Option<PathBuf>,
    /// Id of this worker [default: the one of the last start, else host name and a random number].
    #[arg(long, value_name = "ID")]
    name: Option<String>,
    /// What the trainer computes on.
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda"])]
    device: String,
    /// Keep no trainer loaded for the next start: saves its memory (libtorch's, a few hundred MB), costs every restart the
    /// time that loading takes.
    #[arg(long)]
    no_standby: bool,
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(keeper::SUBCOMMAND) {
        return match keeper::main(&arguments.next().unwrap_or_default()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(INTERNAL, &format!("keeper: {error}")),
        };
    }
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            return if error.print().is_ok() { ExitCode::from(code) } else { ExitCode::from(INTERNAL) };
        }
    };
    if let Err(error) = proc::die_with_parent() {
        return fail(INTERNAL, &error.to_string());
    }
    if let Err(error) = telemetry::init("trainctl-worker") {
        return fail(USAGE, &error.to_string());
    }
    let trainer = match flags.trainer.map_or_else(beside, Ok).and_then(|path| check(&path)) {
        Ok(trainer) => trainer,
        Err(error) => return fail(USAGE, &error),
    };
    let state = match StateDir::open(&flags.state_dir) {
        Ok(state) => state,
        Err(error @ (StateError::Locked(_) | StateError::Io { .. })) => return fail(USAGE, &error.to_string()),
        Err(error) => return fail(INTERNAL, &error.to_string()),
    };
    let options = Options {
        state_dir: flags.state_dir,
        coordinator: flags.coordinator,
        trainer,
        name: flags.name,
        device: flags.device,
        has_standby: !flags.no_standby,
    };
    // One thread: nothing blocks on it, and a second one would be woken at every message that the first takes.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(INTERNAL, &format!("start the async runtime: {error}")),
    };
    let outcome = runtime.block_on(daemon::run(options, state));
    // A thread that waits for a process in uninterruptible sleep must not hold this one.
    runtime.shutdown_timeout(LAST_WAIT);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(INTERNAL, &format!("{error:#}")),
    }
}

#[expect(clippy::print_stderr, reason = "the program's last word, also when logging is not set up")]
fn fail(code: u8, error: &str) -> ExitCode {
    eprintln!("trainctl-worker: error: {error}");
    ExitCode::from(code)
}

fn beside() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("find this program: {error}"))?;
    Ok(program.with_file_name("trainctl-trainer"))
}

fn check(path: &Path) -> Result<PathBuf, String> {
    let found = path.canonicalize().map_err(|error| {
        format!("trainer {}: {error}; install trainctl-trainer beside trainctl-worker or use --trainer", path.display())
    })?;
    if found.is_file() { Ok(found) } else { Err(format!("trainer {}: not a file", found.display())) }
}
