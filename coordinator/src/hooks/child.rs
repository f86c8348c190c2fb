//! One running command.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::time::Instant;
use tracing::warn;
use trainctl_runtime::proc;

use super::{Hook, Outcome};

/// Our own variables are not the command's: whose daemon's child it is, where a coordinator is, faults under test.
const OURS: &str = "TRAINCTL_";
/// How often a command that was asked to leave is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A command that was started and not yet waited for.
pub(super) struct Running {
    /// What it is.
    pub(super) hook: Hook,
    /// Its process, which leads its group.
    pub(super) pid: u32,
    /// When it was started.
    pub(super) started: Instant,
    /// When its group is asked to leave.
    pub(super) deadline: Option<Instant>,
    child: Child,
    asked_to_leave: bool,
}

impl Running {
    /// `sh -c command` in `folder`, in a process group of its own, with its output appended to `log`.
    pub(super) async fn start(
        command: &str,
        variables: &[(&'static str, String)],
        folder: &Path,
        log: &Path,
        hook: Hook,
    ) -> std::io::Result<Self> {
        if let Some(parent) = log.parent() {
            tokio::fs::create_dir_all(parent).await?;
        }
        let log = tokio::fs::OpenOptions::new().create(true).append(true).open(log).await?.into_std().await;
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(command).current_dir(folder).process_group(0);
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with(OURS)) {
                shell.env_remove(name);
            }
        }
        shell.envs(variables.iter().map(|(name, value)| (name, value)));
        shell.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = shell.spawn()?;
        // Only a child that was waited for has none.
        let pid = child.id().unwrap_or_default();
        Ok(Self { hook, pid, started: Instant::now(), deadline: None, child, asked_to_leave: false })
    }

    /// Waits for its end; past its deadline its group is asked to leave, and `grace` later killed. Cancel-safe. Pends without a
    /// command.
    pub(super) async fn ended(running: &mut Option<Self>, grace: Duration) -> Outcome {
        let Some(running) = running else { return std::future::pending().await };
        loop {
            let Some(deadline) = running.deadline else { return outcome(running.child.wait().await) };
            tokio::select! {
                biased;
                ended = running.child.wait() => return outcome(ended),
                () = tokio::time::sleep_until(deadline) => {
                    if running.asked_to_leave {
                        proc::kill_group(running.pid);
                        running.deadline = None;
                    } else {
                        warn!(pid = running.pid, hook = running.hook.label(), "the command has run out of time");
                        proc::terminate_group(running.pid);
                        running.asked_to_leave = true;
                        running.deadline = Some(deadline + grace);
                    }
                }
            }
        }
    }

    /// Ends it with its group: SIGTERM, and SIGKILL once it has left or `grace` is over.
    pub(super) async fn end(mut self, grace: Duration) {
        proc::terminate_group(self.pid);
        let until = Instant::now() + grace;
        // The command is not waited for before its group is gone: until then its process id is nobody else's.
        while proc::start_time(self.pid).is_some() && Instant::now() < until {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        proc::kill_group(self.pid);
        if let Err(error) = self.child.wait().await {
            warn!(pid = self.pid, %error, "the command cannot be waited for");
        }
    }
}

fn outcome(ended: std::io::Result<std::process::ExitStatus>) -> Outcome {
    match ended.map(|status| (status.code(), status.signal())) {
        Ok((Some(code), _)) => Outcome::Code(code),
        Ok((None, signal)) => Outcome::Signal(signal.unwrap_or_default()),
        Err(error) => Outcome::Failed(error.to_string()),
    }
}
