//! Keeps child daemons running: starts them, restarts them with back-off and a bound, and leaves nothing behind.
//!
//! Every child leads a process group of its own, so that Ctrl-C at the terminal reaches only us, and is killed by the
//! kernel when we end, however we end ([`tied`]). We are a subreaper: what a dead worker leaves behind
//! becomes ours and is killed before the worker starts again.
//!
//! Children are spawned from the main thread only, since the kernel ties their lives to the thread that spawned them. So
//! everything here runs on a current-thread runtime.

mod policy;
pub(crate) mod tied;

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_runtime::proc;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};

use self::policy::{Decision, Restarts};

/// How long a daemon may take to end in order.
const GRACE: Duration = Duration::from_secs(10);
/// How long SIGKILL may take.
const KILL_LIMIT: Duration = Duration::from_secs(30);
/// Exit code of a daemon that found another holder in the run directory: another start changes nothing.
const LIVE_HOLDER: i32 = 69;

/// One daemon.
#[derive(Clone, Debug)]
pub(crate) struct Daemon {
    /// For messages: "coordinator", "worker 0".
    pub(crate) name: String,
    /// Its program.
    pub(crate) program: PathBuf,
    /// Its arguments.
    pub(crate) arguments: Vec<String>,
    /// Where its output goes; appended.
    pub(crate) log: PathBuf,
}

impl Daemon {
    /// The same daemon, started through [`tied`].
    pub(crate) fn tied(self) -> std::io::Result<Self> {
        let own = std::env::current_exe()?;
        let program = self.program.to_string_lossy().into_owned();
        let arguments = [tied::VERB.to_owned(), program].into_iter().chain(self.arguments).collect();
        Ok(Self { program: own, arguments, ..self })
    }
}

/// A daemon that we gave up on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GaveUp {
    /// Its name.
    pub(crate) name: String,
    /// How it ended last.
    pub(crate) how: String,
    /// Whether it ended because of another holder of the run directory.
    pub(crate) live_holder: bool,
    /// Its log, for the person.
    pub(crate) log: PathBuf,
    /// The log's last lines.
    pub(crate) tail: String,
}

/// All children. Ends them in order with [`Supervisor::stop`]; a crash of ours ends them through the kernel.
pub(crate) struct Supervisor {
    shutdown: Shutdown,
    /// Pids that somebody waits for. A pid leaves only after its wait has returned.
    children: Arc<Mutex<HashSet<u32>>>,
    gave_up: watch::Sender<Option<GaveUp>>,
    groups: Mutex<Vec<Shutdown>>,
}

impl Supervisor {
    /// Becomes a subreaper. Call on the main thread.
    pub(crate) fn new(shutdown: &Shutdown) -> std::io::Result<Self> {
        proc::become_subreaper()?;
        Ok(Self {
            shutdown: shutdown.clone(),
            children: Arc::default(),
            gave_up: watch::Sender::new(None),
            groups: Mutex::default(),
        })
    }

    /// Starts a daemon and keeps it running. The first start happens before this returns.
    ///
    /// Returns a view of its current pid; `None` between two starts.
    pub(crate) fn start(&self, daemon: Daemon) -> std::io::Result<watch::Receiver<Option<u32>>> {
        let child = launch(&daemon, &self.children)?;
        let (pid_sender, pid) = watch::channel(child.id());
        let group = self.shutdown.child();
        let keeper = Keeper {
            daemon,
            children: self.children.clone(),
            gave_up: self.gave_up.clone(),
            pid: pid_sender,
            stop: group.clone(),
        };
        let kind = TaskKind { name: "supervise", on_cancel: OnCancel::Finish, on_error: OnError::Log };
        drop(spawn(kind, &group, keeper.run(child)));
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).push(group);
        Ok(pid)
    }

    /// Returns when a daemon was given up. Cancel-safe.
    pub(crate) async fn gave_up(&self) -> GaveUp {
        let mut receiver = self.gave_up.subscribe();
        loop {
            if let Some(gave_up) = receiver.borrow_and_update().clone() {
                return gave_up;
            }
            if receiver.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Ends every daemon by SIGTERM, and by SIGKILL after 10 s (at once when `now`): first all that were started later,
    /// then the first, on which the others depend. Then kills and reaps all that is left under this process.
    pub(crate) async fn stop(self, now: bool) {
        let groups = std::mem::take(&mut *self.groups.lock().unwrap_or_else(PoisonError::into_inner));
        let (first, later) = groups.split_at(groups.len().min(1));
        if now {
            // Before the kill, so that no keeper takes it for a crash.
            groups.iter().for_each(|group| group.trigger("stop now"));
            for pid in self.pids() {
                proc::kill_group(pid);
            }
        }
        for stage in [later, first] {
            stage.iter().for_each(|group| group.trigger("the supervisor stops"));
            for group in stage {
                if !group.wait(GRACE + KILL_LIMIT).await {
                    tracing::error!("a daemon does not end");
                }
            }
        }
        if let Err(error) = proc::kill_descendants(&[], KILL_LIMIT) {
            tracing::error!(%error, "processes are left");
        }
    }

    fn pids(&self) -> Vec<u32> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }
}

/// Keeps one daemon running.
struct Keeper {
    daemon: Daemon,
    children: Arc<Mutex<HashSet<u32>>>,
    gave_up: watch::Sender<Option<GaveUp>>,
    pid: watch::Sender<Option<u32>>,
    stop: Shutdown,
}

impl Keeper {
    async fn run(self, mut child: Child) -> std::io::Result<()> {
        let clock = SystemClock::new();
        let mut restarts = Restarts::default();
        loop {
            let pid = child.id();
            let status = tokio::select! {
                status = child.wait() => status?,
                () = self.stop.cancelled() => {
                    self.end(&mut child).await?;
                    return Ok(());
                }
            };
            self.forget(pid);
            self.sweep();
            let how = describe(status);
            let decision =
                if status.code() == Some(LIVE_HOLDER) { Decision::GiveUp } else { restarts.decide(clock.now()) };
            match decision {
                Decision::GiveUp => {
                    self.give_up(how, status.code() == Some(LIVE_HOLDER));
                    return Ok(());
                }
                Decision::After(delay) => {
                    tracing::warn!(daemon = self.daemon.name, how, ?delay, "a daemon ended; starting it again");
                    tokio::select! {
                        () = tokio::time::sleep(delay) => {}
                        () = self.stop.cancelled() => return Ok(()),
                    }
                }
            }
            match launch(&self.daemon, &self.children) {
                Ok(started) => child = started,
                Err(error) => {
                    self.give_up(format!("cannot be started: {error}"), false);
                    return Ok(());
                }
            }
            self.pid.send_replace(child.id());
        }
    }

    fn give_up(&self, how: String, live_holder: bool) {
        let gave_up = GaveUp {
            name: self.daemon.name.clone(),
            how,
            live_holder,
            log: self.daemon.log.clone(),
            tail: tail(&self.daemon.log),
        };
        self.gave_up.send_replace(Some(gave_up));
    }

    async fn end(&self, child: &mut Child) -> std::io::Result<()> {
        let Some(pid) = child.id() else { return Ok(()) };
        proc::send(pid, Signal::SIGTERM);
        if tokio::time::timeout(GRACE, child.wait()).await.is_err() {
            tracing::warn!(daemon = self.daemon.name, "does not end by SIGTERM: killing it");
            proc::kill_group(pid);
            child.kill().await?;
        }
        self.forget(Some(pid));
        self.sweep();
        Ok(())
    }

    fn forget(&self, pid: Option<u32>) {
        if let Some(pid) = pid {
            self.children.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
        }
        self.pid.send_replace(None);
    }

    /// Kills what a dead daemon left behind. Blocks the only thread, so no child can be started meanwhile and be taken for
    /// a leftover.
    fn sweep(&self) {
        let keep: Vec<u32> = self.children.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        match proc::kill_descendants(&keep, Duration::from_secs(5)) {
            Ok(0) => {}
            Ok(killed) => tracing::info!(daemon = self.daemon.name, killed, "killed what it left behind"),
            Err(error) => tracing::error!(daemon = self.daemon.name, %error, "it left processes that do not die"),
        }
    }
}

fn launch(daemon: &Daemon, children: &Mutex<HashSet<u32>>) -> std::io::Result<Child> {
    let log = open_log(&daemon.log)?;
    let mut command = Command::new(&daemon.program);
    command
        .args(&daemon.arguments)
        .env(proc::PARENT_VARIABLE, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0);
    let child = command.spawn()?;
    if let Some(pid) = child.id() {
        children.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
    }
    Ok(child)
}

fn open_log(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The last lines of a log, at most 2 KiB.
fn tail(path: &Path) -> String {
    const LENGTH: u64 = 2048;
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(LENGTH)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        let whole = if size > LENGTH { text.split_once('\n').map_or("", |(_, rest)| rest) } else { &text };
        Ok(whole.trim_end().to_owned())
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn new_pid(pid: &mut watch::Receiver<Option<u32>>, old: Option<u32>) -> u32 {
        let changed = pid.wait_for(|pid| pid.is_some() && *pid != old);
        let pid =
            tokio::time::timeout(Duration::from_secs(60), changed).await.expect("started in time").expect("keeper");
        pid.expect("some")
    }

    async fn until(what: &str, condition: impl Fn() -> bool) {
        let wait = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// One test, since a supervisor takes every descendant of its process for its own.
    #[tokio::test]
    async fn a_killed_daemon_comes_back_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let log = dir.path().join("daemon.log");
        // The daemon double-forks a grandchild that ignores SIGTERM, in a session of its own.
        let script = "echo parent $TRAINCTL_PARENT_PID; (trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > \"$0\"; sleep 600' \"$1\" &) ; exec sleep 600";
        let pid_file = dir.path().join("grandchild");
        let daemon = Daemon {
            name: "test".into(),
            program: "/bin/sh".into(),
            arguments: ["-c", script, "daemon", pid_file.to_str().expect("UTF-8")].map(str::to_owned).to_vec(),
            log: log.clone(),
        };
        let grandchild = || std::fs::read_to_string(&pid_file).ok().and_then(|text| text.trim().parse::<u32>().ok());
        let shutdown = Shutdown::new();
        let supervisor = Supervisor::new(&shutdown).expect("subreaper");
        let mut pid = supervisor.start(daemon).expect("start");
        let first = new_pid(&mut pid, None).await;
        until("a grandchild", || grandchild().is_some()).await;
        let left = grandchild().expect("pid");
        assert!(proc::kill_group(first));
        let second = new_pid(&mut pid, Some(first)).await;
        assert!(proc::stat(left).is_none(), "the grandchild of the killed daemon lives");
        assert!(proc::start_time(second).is_some());
        until("a second grandchild", || grandchild().is_some_and(|pid| pid != left)).await;
        supervisor.stop(false).await;
        assert_eq!(proc::descendants(std::process::id()), [], "something is left");
        let text = std::fs::read_to_string(log).expect("log");
        assert_eq!(text.matches(&format!("parent {}", std::process::id())).count(), 2, "{text}");
    }
}
