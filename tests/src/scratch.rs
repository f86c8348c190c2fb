//! A test's folder, and the processes that it started.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nix::sys::signal::Signal;
use trainctl_runtime::proc;

use crate::process::{self, Process};
use crate::programs;

/// Every process of a test carries this variable, so that what is left can be found.
const MARKER: &str = "TRAINCTL_TEST_MARK";
/// Keeps the folders of tests that pass, too.
const KEEP: &str = "TRAINCTL_KEEP";
/// Lines of each log that a failure prints.
const TAIL_LINES: usize = 12;
/// Bytes of each log that are read for that.
const TAIL_BYTES: usize = 8 << 10;

/// A folder of its own. When it is dropped, all processes of the test are killed; the folder is removed if the test passed,
/// and otherwise kept, with its path and the end of every log printed.
pub struct Scratch {
    dir: PathBuf,
    mark: String,
    count: Cell<u32>,
    bin_dir: PathBuf,
    environment: Vec<(&'static str, String)>,
    desk: Option<Spawn>,
}

/// How processes are spawned that are not simply children of this thread.
pub type Spawn = Box<dyn Fn(Command) -> std::io::Result<Child>>;

impl Scratch {
    /// A folder named after the test.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(test: &str) -> Self {
        let mark = format!("{test}-{}", std::process::id());
        let dir = programs::scratch_root().join(&mark);
        if dir.exists() {
            fs::remove_dir_all(&dir).unwrap();
        }
        fs::create_dir_all(dir.join("home")).unwrap();
        Self {
            dir: dir.canonicalize().unwrap(),
            mark,
            count: Cell::new(0),
            bin_dir: programs::dir(),
            environment: Vec::new(),
            desk: None,
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// A path in the folder.
    pub fn join(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A command that runs a program under test: in this folder, without the caller's settings.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin_dir.join(program));
        for (key, _) in std::env::vars_os() {
            if key.to_str().is_some_and(|key| key.starts_with("TRAINCTL_") || key.starts_with("SLURM_")) {
                command.env_remove(key);
            }
        }
        command
            .current_dir(&self.dir)
            .env(MARKER, &self.mark)
            .env("HOME", self.join("home"))
            .env_remove("XDG_STATE_HOME")
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// From now on commands have these variables too.
    pub fn set_environment(&mut self, environment: Vec<(&'static str, String)>) {
        self.environment = environment;
    }

    /// From now on `trainctl` is spawned by this, as on another machine.
    pub fn set_desk(&mut self, spawn: Spawn) {
        self.desk = Some(spawn);
    }

    /// Starts a command; its output is `logs/<number>-<label>.{out,err}`.
    pub fn start(&self, command: Command, label: &str) -> Process {
        self.start_by(command, label, |mut command| command.spawn())
    }

    /// The same, spawned by somebody else.
    pub fn start_by(
        &self,
        command: Command,
        label: &str,
        spawn: impl FnOnce(Command) -> std::io::Result<Child>,
    ) -> Process {
        let number = self.count.replace(self.count.get() + 1);
        Process::start_by(command, &self.join("logs"), &format!("{number:02}-{label}"), spawn)
    }

    /// Starts `trainctl`.
    pub fn trainctl<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Process {
        let mut command = self.command("trainctl");
        command.args(arguments);
        let verb = command.get_args().next().map_or_else(String::new, |verb| verb.to_string_lossy().into_owned());
        match &self.desk {
            Some(spawn) => self.start_by(command, &verb, spawn),
            None => self.start(command, &verb),
        }
    }

    /// From now on the programs are those of a folder of this test, whose trainer is a script that ends by `exec`ing the
    /// real one, `$TRAINER`.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn wrap_trainer(&mut self, script: &str) {
        let bin = self.join("bin");
        fs::create_dir_all(&bin).unwrap();
        for name in ["trainctl", "trainctl-coordinator", "trainctl-worker"] {
            // A program finds its siblings beside itself, so a symbolic link would lead back to the real ones.
            let (from, to) = (programs::path(name), bin.join(name));
            fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(|_| ())).unwrap();
        }
        self.write_trainer(&bin.join("trainctl-trainer"), script);
        self.bin_dir = bin;
    }

    /// From now on the programs are those of a folder of this test, where the first starts of `program` meet a fault each
    /// (`TRAINCTL_FAULT`, one entry for a start; empty = none), and no other process does. [`Scratch::times_passed`] tells
    /// whether a start came so far.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn inject(&mut self, program: &str, faults: &[&str]) {
        let (bin, real) = (self.join("bin"), self.join("bin/real"));
        fs::create_dir_all(&real).unwrap();
        for name in ["trainctl", "trainctl-coordinator", "trainctl-worker", "trainctl-trainer"] {
            let folder = if name == program { &real } else { &bin };
            let (from, to) = (programs::path(name), folder.join(name));
            fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(|_| ())).unwrap();
        }
        let wrapped = real.join(program);
        let starts = faults.iter().enumerate().map(|(start, fault)| {
            let trace = self.start_folder(start).display().to_string();
            let set = if fault.is_empty() { String::new() } else { format!("TRAINCTL_FAULT='{fault}' ") };
            let run = format!("{set}TRAINCTL_FAULT_TRACE='{trace}' exec '{}' \"$@\"", wrapped.display());
            format!("if mkdir '{trace}' 2>/dev/null; then {run}; fi\n")
        });
        let starts: String = starts.collect();
        write_script(&bin.join(program), &format!("{starts}exec '{}' \"$@\"", wrapped.display()));
        if program == "trainctl-worker" {
            // A worker starts the trainer that lies beside it, with its own environment.
            let trainer = programs::path("trainctl-trainer");
            let script = format!("unset TRAINCTL_FAULT TRAINCTL_FAULT_TRACE\nexec '{}' \"$@\"", trainer.display());
            write_script(&real.join("trainctl-trainer"), &script);
        }
        self.bin_dir = bin;
    }

    /// How often one of the starts that [`Scratch::inject`] counts came to a place, which is written before a fault acts.
    ///
    /// # Panics
    /// If what it wrote cannot be read.
    pub fn times_passed(&self, start: usize, place: &str) -> usize {
        let Ok(files) = fs::read_dir(self.start_folder(start)) else { return 0 };
        let texts = files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
        texts.map(|text| text.lines().filter(|line| *line == place).count()).sum()
    }

    fn start_folder(&self, start: usize) -> PathBuf {
        self.join(&format!("start-{start}"))
    }

    /// A trainer's script for `trainctl-worker --trainer`. See [`Scratch::wrap_trainer`].
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn write_trainer(&self, path: &Path, script: &str) {
        let trainer = programs::path("trainctl-trainer");
        write_script(path, &format!("TRAINER='{}'\n{script}", trainer.display()));
    }

    /// Pids of all living processes that this test's commands started, directly or not.
    pub fn processes(&self) -> Vec<u32> {
        proc::processes_with_env_marker(MARKER, &self.mark).into_iter().map(|stat| stat.pid).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("\nthe folder of this test is kept: {}", self.dir.display());
            let mut logs = Vec::new();
            collect(&self.dir, &mut logs);
            logs.sort();
            logs.iter().for_each(|log| print_tail(&self.dir, log));
        }
        // Until a look finds none: one that is killed may have forked a moment before.
        loop {
            let left = self.processes();
            if left.is_empty() {
                break;
            }
            left.into_iter().for_each(|pid| process::send(pid, Signal::SIGKILL));
            std::thread::yield_now();
        }
        if !std::thread::panicking() && std::env::var_os(KEEP).is_none() {
            fs::remove_dir_all(&self.dir).unwrap_or_else(|error| eprintln!("{}: {error}", self.dir.display()));
        }
    }
}

fn write_script(path: &Path, script: &str) {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Logs and rows below a folder.
fn collect(dir: &Path, logs: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let is_log = path.extension().is_some_and(|end| ["out", "err", "log", "jsonl"].iter().any(|log| end == *log));
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => collect(&path, logs),
            Ok(kind) if kind.is_file() && is_log => logs.push(path),
            _ => {}
        }
    }
}

fn print_tail(root: &Path, log: &Path) {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
    let lines: Vec<&str> = text.lines().collect();
    if !lines.is_empty() {
        eprintln!("--- {}", log.strip_prefix(root).unwrap_or(log).display());
        lines[lines.len().saturating_sub(TAIL_LINES)..].iter().for_each(|line| eprintln!("{line}"));
    }
}
