//! A trainer that is loaded and waits: its start costs a restart no libtorch.
//!
//! The process is a trainer like any other, forked by the same thread (T1) with one end of a socketpair. It loads libtorch and
//! asks for its assignment; the answer is what turns it into a rank, so the question waits in the socket until then. What it
//! writes before that goes to `standby.log` in the worker's state directory; with its assignment it gets the path of the
//! rank's log. Whoever takes it looks whether it still lives, and forks anew if not: a standby is never more than a saving.

use std::fs::OpenOptions;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use trainctl_runtime::proc;

use super::spawn::{Child, Order};
use super::{Setup, lock};

/// What it writes before it is a rank, in the worker's state directory.
pub(super) const LOG: &str = "standby.log";

/// The standby of a worker, if there is one.
#[derive(Clone, Default)]
pub(super) struct Standby(Arc<Mutex<Option<Waiting>>>);

struct Waiting {
    child: Child,
    socket: UnixStream,
}

impl Standby {
    /// Starts one unless there is one. Blocks for a fork.
    pub(super) fn prepare(&self, setup: &Setup) {
        let mut waiting = lock(&self.0);
        if !setup.has_standby || waiting.is_some() || setup.shutdown.is_triggered() {
            return;
        }
        match fork(setup) {
            Ok(forked) => *waiting = Some(forked),
            Err(reason) => tracing::warn!(%reason, "no standby trainer: the next start will take longer"),
        }
    }

    /// Takes the one that waits, if it still does. From now on its process is one that the trainer's end cleans up.
    pub(super) fn take(&self, setup: &Setup) -> Option<(Child, UnixStream)> {
        let Waiting { child, socket } = lock(&self.0).take()?;
        lock(&setup.keep).retain(|pid| *pid != child.pid());
        if proc::is_running(child.pid(), child.start_time()) {
            return Some((child, socket));
        }
        match child.wait() {
            Ok(status) => tracing::warn!(%status, "the standby trainer has ended; see standby.log"),
            Err(error) => tracing::warn!(%error, "the standby trainer has ended"),
        }
        None
    }
}

fn fork(setup: &Setup) -> Result<Waiting, String> {
    let path = setup.state.path().join(LOG);
    let log = OpenOptions::new().create(true).write(true).truncate(true).open(&path);
    let log = log.map_err(|error| format!("open {}: {error}", path.display()))?;
    let (ours, theirs) = UnixStream::pair().map_err(|error| format!("make its link: {error}"))?;
    ours.set_nonblocking(true).map_err(|error| format!("make its link: {error}"))?;
    let (program, incarnation) = (setup.program.clone(), setup.incarnation.clone());
    // Under the lock: whoever cleans up after a trainer must not see the process before it is known as one to keep.
    let mut keep = lock(&setup.keep);
    let child = setup.launcher.launch(Order { program, stdin: theirs, log, incarnation })?;
    keep.push(child.pid());
    tracing::debug!(pid = child.pid(), "standby trainer started");
    Ok(Waiting { child, socket: ours })
}
