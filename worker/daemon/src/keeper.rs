//! The keeper: a tiny process that outlives a `kill -9` of its daemon by the time it takes to clean up after it.
//!
//! The kernel's death signal kills a daemon's trainer with it, but not what the trainer has forked off. The keeper holds
//! the reading end of a pipe whose writing end only the daemon has. When the pipe ends, the daemon has: the keeper then
//! kills every process that carries the daemon's mark until none is left, and ends.

use std::io::{PipeWriter, Read, pipe};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use trainctl_runtime::proc;

use crate::trainer::{MARKER, kill_marked};

/// Name of the hidden subcommand.
pub const SUBCOMMAND: &str = "keeper";
/// How long the keeper goes on killing: longer than anything but uninterruptible sleep takes.
const LIMIT: Duration = Duration::from_secs(120);

/// The daemon's side: a running keeper.
#[derive(Debug)]
pub struct Keeper {
    incarnation: String,
    child: Child,
    /// Closed by the kernel when the daemon ends, in whatever way.
    pipe: Option<PipeWriter>,
    keep: Arc<Mutex<Vec<u32>>>,
}

impl Keeper {
    /// Starts the keeper and notes its pid in `keep`, so that the daemon's own cleaning spares it.
    ///
    /// # Errors
    /// When this program cannot be started again.
    pub fn start(incarnation: &str, keep: Arc<Mutex<Vec<u32>>>) -> std::io::Result<Self> {
        // Held over the fork: cleaning must not see a keeper that it does not know.
        let mut kept = keep.lock().unwrap_or_else(PoisonError::into_inner);
        let (reader, writer) = pipe()?;
        let child = Command::new("/proc/self/exe")
            .arg0("trainctl-worker")
            .args([SUBCOMMAND, incarnation])
            .stdin(Stdio::from(OwnedFd::from(reader)))
            .stdout(Stdio::null())
            .env_remove(MARKER)
            .env_remove(proc::PARENT_VARIABLE)
            .process_group(0)
            .spawn()?;
        *kept = vec![child.id()];
        drop(kept);
        Ok(Self { incarnation: incarnation.to_owned(), child, pipe: Some(writer), keep })
    }

    /// Starts it again if somebody killed it. Call it now and then.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn check(&mut self) -> std::io::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            tracing::warn!(%status, "the keeper ended; starting another");
            *self = Self::start(&self.incarnation, self.keep.clone())?;
        }
        Ok(())
    }

    /// Lets it go and waits for its end.
    pub fn release(mut self) {
        drop(self.pipe.take());
        if let Err(error) = self.child.wait() {
            tracing::debug!(%error, "the keeper was not waited for");
        }
    }
}

/// The keeper's side: waits for the end of the pipe on standard input, then cleans up. Returns what could not be killed.
///
/// # Errors
/// As said.
pub fn main(incarnation: &str) -> Result<(), String> {
    // Blocked on the only thread there is: a Ctrl-C or an orderly SIGTERM of the daemon's group must not end it.
    let mut spared = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        spared.add(signal);
    }
    spared.thread_block().map_err(|error| format!("block signals: {error}"))?;
    let mut byte = [0];
    let mut pipe = std::io::stdin().lock();
    loop {
        match pipe.read(&mut byte) {
            Ok(0) => break,
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => break,
            Ok(_) | Err(_) => {}
        }
    }
    kill_marked(incarnation, &[], LIMIT)
}
