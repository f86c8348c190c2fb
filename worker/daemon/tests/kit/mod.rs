//! What the tests of the real daemon share: a coordinator stub on a real socket, the daemon's process, trainers.

pub mod stub;
pub mod trainer;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use trainctl_proto::v1::{Assignment, Fence, StartTrainer, StopTrainer, coordinator_message::Body as Command_};
use trainctl_runtime::proc;

/// How long a condition may take before a test fails. Never waited for in full when the condition holds.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for a condition.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process with this pid lives.
pub fn lives(pid: u32) -> bool {
    proc::start_time(pid).is_some()
}

/// A pid that a script wrote into a file, with a line break behind it.
pub fn pid_in(file: &Path) -> u32 {
    eventually(&format!("a pid in {}", file.display()), || {
        let text = std::fs::read_to_string(file).ok()?;
        text.strip_suffix('\n')?.lines().last()?.trim().parse().ok()
    })
}

/// The folders of one test.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        std::fs::create_dir_all(place.control()).unwrap();
        std::fs::create_dir_all(place.run()).unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn control(&self) -> PathBuf {
        self.path("run/control")
    }

    pub fn run(&self) -> PathBuf {
        self.path("run")
    }

    /// A program whose lines a shell runs.
    pub fn script(&self, lines: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path("trainer.sh");
        std::fs::write(&path, format!("#!/bin/sh\ncd {}\n{lines}\n", self.dir.path().display())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    pub fn start(&self, command_id: &str, generation: u64, term: u64) -> Command_ {
        let spec_yaml = format!(
            "name: tiny\nrun_dir: {}\nmodel:\n  config: {{model_type: gpt2, n_layer: 2}}\ndataset:\n  paths: data/a\n  \
             seq_length: 64\nstep_scheduler:\n  max_steps: 40\n",
            self.run().display()
        );
        let fence = Some(fence(generation, term));
        let assignment = Assignment { fence, rank: 3, world_size: 4, spec_yaml, ..Assignment::default() };
        Command_::StartTrainer(StartTrainer { command_id: command_id.to_owned(), assignment: Some(assignment) })
    }
}

pub fn fence(generation: u64, term: u64) -> Fence {
    Fence { job: "tiny-00000001".to_owned(), generation, term }
}

pub fn stop(command_id: &str, generation: u64, term: u64) -> Command_ {
    Command_::StopTrainer(StopTrainer { command_id: command_id.to_owned(), fence: Some(fence(generation, term)) })
}

/// A running daemon; killed with everything of it when dropped.
pub struct Daemon {
    child: Child,
}

impl Daemon {
    pub fn start(place: &Place, trainer: &Path, mode: &str) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_trainctl-worker"))
            .args(["--name", "w0", "--state-dir"])
            .arg(place.path("state"))
            .arg("--coordinator")
            .arg(place.control())
            .arg("--trainer")
            .arg(trainer)
            .env(trainer::MODE, mode)
            .env(trainer::PLACE, place.path(""))
            .env_remove(proc::PARENT_VARIABLE)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { child }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        assert!(proc::send(self.pid(), signal));
    }

    /// `kill -9`, reaped.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn wait(mut self) -> ExitStatus {
        eventually("the daemon ends", || self.child.try_wait().unwrap())
    }

    /// Children of the daemon whose command line holds `text`.
    pub fn children_with(&self, text: &str) -> Vec<u32> {
        let has = |pid: u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(text)
        };
        proc::descendants(self.pid()).into_iter().map(|stat| stat.pid).filter(|pid| has(*pid)).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Its keeper cleans up what it leaves.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
