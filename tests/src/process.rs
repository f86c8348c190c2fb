//! Children whose output goes to files.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use trainctl_runtime::proc;

use crate::wait;

/// A child that is killed when this is dropped.
pub struct Process {
    label: String,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

/// How a child ended, and what it said.
#[derive(Debug)]
pub struct Ended {
    /// Exit code.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
}

impl Process {
    /// Starts `command` with its output in `<folder>/<label>.out` and `.err`. It dies with this process.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(command: Command, folder: &std::path::Path, label: &str) -> Self {
        Self::start_by(command, folder, label, |mut command| command.spawn())
    }

    /// The same, spawned by somebody else: it dies with the thread that does so.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start_by(
        mut command: Command,
        folder: &std::path::Path,
        label: &str,
        spawn: impl FnOnce(Command) -> std::io::Result<Child>,
    ) -> Self {
        fs::create_dir_all(folder).unwrap();
        let [stdout, stderr] = ["out", "err"].map(|end| folder.join(format!("{label}.{end}")));
        command
            .env(proc::PARENT_VARIABLE, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(&stderr).unwrap());
        let child = spawn(command).unwrap_or_else(|error| panic!("start {label}: {error}"));
        Self { label: label.to_owned(), child, stdout, stderr }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said so far on standard error.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stderr).unwrap()).into_owned()
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// `kill -9`, and waits until it is gone.
    pub fn kill9(&mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().unwrap();
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn wait(&mut self) -> Ended {
        self.wait_within(wait::PATIENCE)
    }

    /// Waits for its end at most so long.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn wait_within(&mut self, limit: Duration) -> Ended {
        let what = format!("the end of {}", self.label);
        let status: ExitStatus = wait::within(limit, &what, || self.child.try_wait().unwrap());
        let read = |path: &PathBuf| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
        let (stdout, stderr) = (read(&self.stdout), read(&self.stderr));
        Ended { code: status.code(), signal: status.signal(), stdout, stderr }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.is_running() {
            self.kill9();
        }
    }
}

impl Ended {
    /// Itself, if it ended with this code.
    ///
    /// # Panics
    /// If it did not; shows all that it said.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(
            (self.code, self.signal),
            (Some(code), None),
            "exit code\n--- stdout\n{}\n--- stderr\n{}",
            self.stdout,
            self.stderr
        );
        self
    }

    /// Itself, if standard output or error contain `text`.
    ///
    /// # Panics
    /// If they do not.
    #[track_caller]
    pub fn expect_said(self, text: &str) -> Self {
        let said = self.stdout.contains(text) || self.stderr.contains(text);
        assert!(said, "did not say `{text}`\n--- stdout\n{}\n--- stderr\n{}", self.stdout, self.stderr);
        self
    }
}

/// Sends a signal to a process that may be gone.
pub fn send(pid: u32, signal: Signal) {
    // ESRCH: it ended before the signal, which every caller must live with.
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap_or_default();
}

/// Whether a process runs (a zombie does not).
pub fn exists(pid: u32) -> bool {
    proc::stat(pid).is_some_and(|stat| stat.state != 'Z')
}

/// Whether a process is stopped (SIGSTOP).
pub fn is_stopped(pid: u32) -> bool {
    proc::stat(pid).is_some_and(|stat| stat.state == 'T')
}
