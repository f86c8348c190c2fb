//! A server, a run directory, and children that work on both.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use trainctl_s3::{Program, SECRET_KEY, Server};
use trainctl_store::fault::ENV;

use crate::child;

pub(crate) const BUCKET: &str = "checkpoints";

/// Folders are removed with it.
pub(crate) struct Scene {
    folder: tempfile::TempDir,
    pub(crate) server: Server,
}

/// What a child left.
pub(crate) struct Ended {
    pub(crate) signal: Option<i32>,
    pub(crate) success: bool,
    /// All that it said.
    pub(crate) said: String,
}

impl Scene {
    pub(crate) fn new() -> Self {
        // In memory where there is a tmpfs: neither kills nor faults of the network concern the disk.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let program = Program::Path(env!("CARGO_BIN_EXE_trainctl-s3").into());
        let server = Server::start(program, &folder.path().join("s3"), BUCKET);
        Self { folder, server }
    }

    /// A path in the test's folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The run `run`: control files in a directory, checkpoints below `s3://checkpoints/<run>`.
    pub(crate) fn command(&self, task: &str, run: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child", "--nocapture", "--test-threads", "1"])
            .env_clear()
            .envs(std::env::vars().filter(|(name, _)| name == "PATH" || name == "TMPDIR"))
            .envs(self.server.environment())
            .env("HOME", self.folder.path())
            .env(child::TASK, task)
            .env(child::URL, self.server.url(run))
            .env(child::CONTROL, self.path(run).join("control"))
            .stdin(Stdio::null());
        command
    }

    /// Starts a child with its output in a file.
    pub(crate) fn spawn(&self, mut command: Command) -> Running {
        let said = tempfile::NamedTempFile::new_in(self.folder.path()).unwrap().into_temp_path();
        let file = std::fs::File::create(&said).unwrap();
        let child = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        Running { child, said }
    }

    /// Runs a task to its end.
    pub(crate) fn run(&self, task: &str, run: &str) -> Ended {
        self.spawn(self.command(task, run)).wait()
    }

    /// Runs a task with a fault.
    pub(crate) fn run_with(&self, task: &str, run: &str, fault: &str) -> Ended {
        let mut command = self.command(task, run);
        command.env(ENV, fault);
        self.spawn(command).wait()
    }

    /// Runs a task that must succeed.
    #[track_caller]
    pub(crate) fn must(&self, task: &str, run: &str) -> String {
        let ended = self.run(task, run);
        assert!(ended.success, "{task} of {run} failed:\n{}", tail(&ended.said));
        ended.said
    }
}

/// A child at work; killed when this is dropped.
pub(crate) struct Running {
    child: Child,
    said: tempfile::TempPath,
}

impl Running {
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Waits until it has stopped itself.
    pub(crate) fn wait_until_stopped(&self, context: &str) {
        let status = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).unwrap();
        let said = std::fs::read_to_string(&self.said).unwrap();
        assert!(matches!(status, WaitStatus::Stopped(..)), "{context}: {status:?}\n{}", tail(&said));
    }

    pub(crate) fn signal(&self, signal: Signal) {
        nix::sys::signal::kill(self.pid(), signal).unwrap();
    }

    /// Waits for its end. Whatever it did, it did not say the secret.
    pub(crate) fn wait(mut self) -> Ended {
        let status = self.child.wait().unwrap();
        let said = String::from_utf8_lossy(&std::fs::read(&self.said).unwrap()).into_owned();
        assert!(!said.contains(SECRET_KEY), "the secret was logged:\n{said}");
        Ended { signal: status.signal(), success: status.success(), said }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }
}

pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains(" TRACE ")).collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}
