//! Forking trainers, waiting for them, and finding what they left behind.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use trainctl_runtime::proc;

/// Environment variable that holds the incarnation of the daemon whose process this is.
pub const MARKER: &str = "TRAINCTL_WORKER_INCARNATION";
/// Environment variable that names the file descriptor of a trainer's link.
const LINK_FD: &str = "TRAINCTL_LINK_FD";
/// Pause between two looks at `/proc`.
const SCAN_PAUSE: Duration = Duration::from_millis(10);

/// One trainer to start.
pub(super) struct Order {
    pub(super) program: PathBuf,
    pub(super) stdin: UnixStream,
    pub(super) log: File,
    pub(super) incarnation: String,
}

type Spawned = Result<Child, String>;

/// The thread that forks (T1). It ends with the last handle.
#[derive(Clone)]
pub struct Launcher {
    orders: mpsc::Sender<(Order, mpsc::SyncSender<Spawned>)>,
}

impl Launcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start() -> std::io::Result<Self> {
        let (orders, receiver) = mpsc::channel::<(Order, mpsc::SyncSender<Spawned>)>();
        std::thread::Builder::new().name("launcher".to_owned()).spawn(move || {
            while let Ok((order, reply)) = receiver.recv() {
                // The asker waits; if it has gone, the child is dropped and found by its mark.
                drop(reply.send(fork(order)));
            }
        })?;
        Ok(Self { orders })
    }

    /// Forks a trainer. Blocks until it exists.
    pub(super) fn launch(&self, order: Order) -> Spawned {
        let (reply, answer) = mpsc::sync_channel(1);
        self.orders.send((order, reply)).map_err(|_| "the launcher thread has ended".to_owned())?;
        answer.recv().map_err(|_| "the launcher thread has ended".to_owned())?
    }
}

fn fork(order: Order) -> Spawned {
    let program = order.program;
    let failed = |error: std::io::Error| {
        format!("start {}: {error}; install it beside trainctl-worker or name it with --trainer", program.display())
    };
    let errors = order.log.try_clone().map_err(failed)?;
    let spawned = Command::new(&program)
        .stdin(Stdio::from(OwnedFd::from(order.stdin)))
        .stdout(Stdio::from(order.log))
        .stderr(Stdio::from(errors))
        // Enough of them for a hang, and not so many that telling them takes long; a user's own number goes first.
        .env("TORCH_FR_BUFFER_SIZE", std::env::var_os("TORCH_FR_BUFFER_SIZE").unwrap_or_else(|| "256".into()))
        .env(MARKER, &order.incarnation)
        .env(LINK_FD, "0")
        .env(proc::PARENT_VARIABLE, std::process::id().to_string())
        .process_group(0)
        .spawn();
    let child = spawned.map_err(failed)?;
    let pid = child.id();
    // Our own unreaped child: its entry in /proc is there even when it has ended already.
    let start_time = proc::stat(pid).map_or(0, |stat| stat.start_time);
    Ok(Child { pid, start_time, child: Arc::new(Mutex::new(Waiting { child, reaped: false })) })
}

struct Waiting {
    child: std::process::Child,
    reaped: bool,
}

/// A forked trainer. Clones are the same process.
#[derive(Clone)]
pub(super) struct Child {
    pid: u32,
    start_time: u64,
    child: Arc<Mutex<Waiting>>,
}

impl Child {
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Kills the process and its group, unless it has been reaped: from then on the pid may be another's.
    pub(super) fn kill(&self) {
        let waiting = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        if !waiting.reaped {
            proc::kill_group(self.pid);
            proc::send(self.pid, nix::sys::signal::Signal::SIGKILL);
        }
    }

    /// Waits for the end and reaps.
    pub(super) fn wait(&self) -> std::io::Result<ExitStatus> {
        let pid = Pid::from_raw(i32::try_from(self.pid).map_err(std::io::Error::other)?);
        // Looks without reaping, so that the lock is not held for the trainer's life.
        while let Err(Errno::EINTR) = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {}
        let mut waiting = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.reaped = true;
        waiting.child.wait()
    }
}

/// Kills every process that carries the mark of `incarnation` but those of `keep`, until two looks in a row find none.
///
/// # Errors
/// What still runs after `limit`.
pub(crate) fn kill_marked(incarnation: &str, keep: &[u32], limit: Duration) -> Result<(), String> {
    let started = Instant::now();
    let mut empty_looks = 0;
    while empty_looks < 2 {
        let own = std::process::id();
        let is_kept = |pid: u32| pid == own || keep.contains(&pid);
        let marked = proc::processes_with_env_marker(MARKER, incarnation);
        let found: Vec<_> = marked.into_iter().filter(|stat| !is_kept(stat.pid)).collect();
        if found.is_empty() {
            empty_looks += 1;
        } else {
            empty_looks = 0;
            if started.elapsed() > limit {
                let pids: Vec<u32> = found.iter().map(|stat| stat.pid).collect();
                return Err(format!("processes {pids:?} still run {:.0} s after SIGKILL", limit.as_secs_f64()));
            }
            for stat in found {
                proc::kill_process(stat.pid, stat.start_time);
            }
        }
        if empty_looks < 2 {
            std::thread::sleep(SCAN_PAUSE);
        }
    }
    Ok(())
}
