//! Coordinator and workers started by hand, and the verbs that talk to them.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use serde_json::Value;
use trainctl_runtime::endpoint::{self, Endpoint};

use crate::process::Process;
use crate::scratch::Scratch;
use crate::wait;

/// How often the status is asked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A coordinator by hand.
pub struct Coordinator {
    /// Its process.
    pub process: Process,
    /// Its state directory.
    pub state_dir: PathBuf,
}

impl Coordinator {
    /// Starts one and waits until it has published its endpoint.
    pub fn start(scratch: &Scratch, state_dir: &Path) -> Self {
        Self::launch(scratch, state_dir, None).ready()
    }

    /// Starts one with these arguments and variables too, and waits until it has published its endpoint.
    pub fn start_with(scratch: &Scratch, state_dir: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = scratch.command("trainctl-coordinator");
        command.arg("--state-dir").arg(state_dir).args(arguments).envs(environment.iter().copied());
        Self { process: scratch.start(command, "coordinator"), state_dir: state_dir.to_owned() }.ready()
    }

    /// Starts one, with `TRAINCTL_FAULT` where a fault is given.
    pub fn launch(scratch: &Scratch, state_dir: &Path, fault: Option<&str>) -> Self {
        let mut command = Self::command(scratch, state_dir);
        if let Some(fault) = fault {
            command.env("TRAINCTL_FAULT", fault);
        }
        Self { process: scratch.start(command, "coordinator"), state_dir: state_dir.to_owned() }
    }

    /// Starts one that other machines reach, by somebody else.
    pub fn launch_by(
        scratch: &Scratch,
        state_dir: &Path,
        address: IpAddr,
        spawn: impl FnOnce(Command) -> std::io::Result<Child>,
    ) -> Self {
        let mut command = Self::command(scratch, state_dir);
        command.arg("--listen").arg(SocketAddr::new(address, 0).to_string());
        Self { process: scratch.start_by(command, "coordinator", spawn), state_dir: state_dir.to_owned() }
    }

    fn command(scratch: &Scratch, state_dir: &Path) -> Command {
        let mut command = scratch.command("trainctl-coordinator");
        command.arg("--state-dir").arg(state_dir);
        command
    }

    /// Waits until it has published its endpoint.
    ///
    /// # Panics
    /// If it ends before.
    #[must_use]
    pub fn ready(mut self) -> Self {
        wait::until("the coordinator's endpoint", || {
            assert!(self.process.is_running(), "the coordinator ended:\n{}", self.process.stderr());
            self.has_published().then_some(())
        });
        self
    }

    /// Whether `endpoint.json` names this process.
    pub fn has_published(&self) -> bool {
        endpoint::read(&self.state_dir).is_ok_and(|endpoint| endpoint.pid == self.process.pid())
    }

    /// What it published.
    ///
    /// # Panics
    /// If it published nothing.
    pub fn endpoint(&self) -> Endpoint {
        endpoint::read(&self.state_dir).unwrap()
    }
}

/// Starts a worker by hand with the state directory `w<index>`.
pub fn start_worker(scratch: &Scratch, coordinator: &Path, index: u32, trainer: Option<&Path>) -> Process {
    scratch.start(worker_command(scratch, coordinator, index, trainer), &format!("worker-{index}"))
}

/// The command of such a worker.
pub fn worker_command(scratch: &Scratch, coordinator: &Path, index: u32, trainer: Option<&Path>) -> Command {
    let mut command = scratch.command("trainctl-worker");
    command.arg("--state-dir").arg(scratch.join(&format!("w{index}"))).arg("--coordinator").arg(coordinator);
    if let Some(trainer) = trainer {
        command.arg("--trainer").arg(trainer);
    }
    command
}

/// Submits a spec and gives the job's id.
pub fn submit(scratch: &Scratch, coordinator: &Path, spec: &Path) -> String {
    let coordinator = coordinator.to_str().unwrap();
    let ended = scratch.trainctl(["submit", spec.to_str().unwrap(), "--coordinator", coordinator]).wait();
    ended.expect_code(0).stdout.trim().to_owned()
}

/// `trainctl status JOB --output json`; `None` while no coordinator answers.
pub fn status(scratch: &Scratch, coordinator: &Path, job: &str) -> Option<Value> {
    let coordinator = coordinator.to_str().unwrap();
    let ended = scratch.trainctl(["status", job, "--coordinator", coordinator, "--output", "json"]).wait();
    if ended.code == Some(69) {
        return None;
    }
    Some(serde_json::from_str(&ended.expect_code(0).stdout).unwrap())
}

/// Waits until the job's status satisfies `condition`, and gives it.
pub fn wait_for_status(
    scratch: &Scratch,
    coordinator: &Path,
    job: &str,
    what: &str,
    condition: impl Fn(&Value) -> bool,
) -> Value {
    // Each look is a process.
    wait::within_every(LOOK_EVERY, wait::PATIENCE, what, || status(scratch, coordinator, job).filter(&condition))
}

/// Waits until the job has ended.
pub fn wait_for_end(scratch: &Scratch, coordinator: &Path, job: &str) -> Value {
    let is_over = |status: &Value| ["succeeded", "failed", "cancelled"].iter().any(|phase| status["phase"] == *phase);
    wait_for_status(scratch, coordinator, job, "the job's end", is_over)
}

/// Waits until the job has ended, and asserts that it succeeded.
///
/// # Panics
/// If it did not.
pub fn wait_for_success(scratch: &Scratch, coordinator: &Path, job: &str) -> Value {
    let status = wait_for_end(scratch, coordinator, job);
    assert_eq!(status["phase"], "succeeded", "{status:#}");
    status
}

/// `trainctl cancel`: the job saves and stops. Waits for that.
///
/// # Panics
/// If it ends in another way.
pub fn cancel(scratch: &Scratch, coordinator: &Path, job: &str) -> Value {
    scratch.trainctl(["cancel", job, "--coordinator", coordinator.to_str().unwrap()]).wait().expect_code(0);
    let status = wait_for_end(scratch, coordinator, job);
    assert_eq!(status["phase"], "cancelled", "{status:#}");
    status
}
