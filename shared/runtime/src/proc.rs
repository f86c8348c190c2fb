//! Process hygiene through `/proc` and prctl, without `unsafe`.
//!
//! A supervisor here is a child subreaper: what its children leave behind (double forks too) becomes its own child, is
//! found in `/proc`, killed and reaped. A child asks the kernel to be killed when its parent ends, and then checks that
//! the parent is still the one that started it, since it may have died before the request.

use std::collections::{HashMap, HashSet};
use std::io;
use std::time::{Duration, Instant};

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// Environment variable in which a supervisor tells a child its own pid. See [`die_with_parent`].
pub const PARENT_VARIABLE: &str = "TRAINCTL_PARENT_PID";

/// What `/proc/<pid>/stat` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The process.
    pub pid: u32,
    /// `Z` = dead and not reaped yet.
    pub state: char,
    /// Its parent.
    pub parent: u32,
    /// Clock ticks since boot (field 22). With the pid it names a process for the life of a boot.
    pub start_time: u64,
}

/// Reads `/proc/<pid>/stat`; `None` when there is no such process.
#[must_use]
pub fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The name in parentheses may hold spaces and parentheses itself: fields count from the last `)`.
fn parse_stat(text: &str) -> Option<Stat> {
    let (head, tail) = text.rsplit_once(')')?;
    let pid = head.split_once(" (")?.0.parse().ok()?;
    let mut fields = tail.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    // `fields` is now at field 5; field 22 is 17 further.
    let start_time = fields.nth(17)?.parse().ok()?;
    Some(Stat { pid, state, parent, start_time })
}

/// Start time of a process, clock ticks since boot; `None` when it is gone or dead and not reaped.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    stat(pid).filter(|stat| stat.state != 'Z').map(|stat| stat.start_time)
}

/// Whether exactly this process still runs.
#[must_use]
pub fn is_running(pid: u32, started_at: u64) -> bool {
    start_time(pid) == Some(started_at)
}

/// The kernel's boot id: equal on two processes exactly when they share a running kernel.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Time since the machine booted, suspension included: orders what processes of one machine do, over their restarts too.
///
/// # Errors
/// When the system has no such clock.
pub fn since_boot() -> io::Result<Duration> {
    Ok(nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)?.into())
}

/// This machine's name; "unknown" when it has none.
#[must_use]
pub fn host_name() -> String {
    nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_else(|| "unknown".to_owned())
}

/// Every process that `/proc` shows.
fn all() -> Vec<Stat> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter_map(stat).collect()
}

/// Every descendant of `pid`, dead ones that wait to be reaped included; `pid` itself is not among them. Parents come
/// before their children.
#[must_use]
pub fn descendants(pid: u32) -> Vec<Stat> {
    let mut children: HashMap<u32, Vec<Stat>> = HashMap::new();
    for stat in all() {
        children.entry(stat.parent).or_default().push(stat);
    }
    let mut found = Vec::new();
    let mut next = vec![pid];
    let mut seen = HashSet::from([pid]);
    while let Some(parent) = next.pop() {
        for stat in children.remove(&parent).unwrap_or_default() {
            if seen.insert(stat.pid) {
                next.push(stat.pid);
                found.push(stat);
            }
        }
    }
    found
}

/// Living processes whose environment at their start held `key=value`. Only those whose environment we may read.
#[must_use]
pub fn processes_with_env_marker(key: &str, value: &str) -> Vec<Stat> {
    let wanted = format!("{key}={value}").into_bytes();
    let is_marked = |stat: &Stat| {
        std::fs::read(format!("/proc/{}/environ", stat.pid))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|entry| entry == wanted))
    };
    all().into_iter().filter(|stat| stat.state != 'Z' && is_marked(stat)).collect()
}

/// Processes that did not die in time.
#[derive(Debug, thiserror::Error)]
#[error("processes {pids:?} still run {seconds:.1} s after SIGKILL")]
pub struct StillRunning {
    /// What is left.
    pub pids: Vec<u32>,
    /// How long we tried.
    pub seconds: f64,
}

/// Kills every descendant of this process but `keep` and what descends from those, and reaps those that are our
/// children, until `/proc` shows none. The caller must be a subreaper, or double forks get away. Returns how many it
/// killed. Blocks: call it from a blocking thread.
///
/// `keep` must hold the children that somebody else waits for: reaping them here would steal their exit status.
///
/// # Errors
/// [`StillRunning`] when some are left after `limit` (uninterruptible sleep).
pub fn kill_descendants(keep: &[u32], limit: Duration) -> Result<usize, StillRunning> {
    let own = std::process::id();
    let started = Instant::now();
    let mut killed = HashSet::new();
    loop {
        let kept: HashSet<u32> =
            keep.iter().flat_map(|pid| descendants(*pid).into_iter().map(|stat| stat.pid).chain([*pid])).collect();
        let left: Vec<Stat> = descendants(own).into_iter().filter(|stat| !kept.contains(&stat.pid)).collect();
        if left.is_empty() {
            return Ok(killed.len());
        }
        for stat in &left {
            if stat.state != 'Z' && send(stat.pid, Signal::SIGKILL) {
                killed.insert((stat.pid, stat.start_time));
            }
            if stat.parent == own {
                reap(stat.pid);
            }
        }
        if started.elapsed() > limit {
            let pids = left.iter().map(|stat| stat.pid).collect();
            return Err(StillRunning { pids, seconds: started.elapsed().as_secs_f64() });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills the process group that `leader` leads. False: there is none.
pub fn kill_group(leader: u32) -> bool {
    pid_of(leader).is_some_and(|pid| nix::sys::signal::killpg(pid, Signal::SIGKILL).is_ok())
}

/// Asks the process group that `leader` leads to leave. False: there is none.
pub fn terminate_group(leader: u32) -> bool {
    pid_of(leader).is_some_and(|pid| nix::sys::signal::killpg(pid, Signal::SIGTERM).is_ok())
}

/// Kills exactly this process: not one that took its pid over. False: it is gone.
pub fn kill_process(pid: u32, started_at: u64) -> bool {
    is_running(pid, started_at) && send(pid, Signal::SIGKILL)
}

/// Sends a signal. False: no such process, or not ours.
pub fn send(pid: u32, signal: Signal) -> bool {
    pid_of(pid).is_some_and(|pid| kill(pid, signal).is_ok())
}

/// Pids 0 and 1 are never meant, and kill(0) would hit our own group.
fn pid_of(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().filter(|pid| *pid > 1).map(Pid::from_raw)
}

fn reap(pid: u32) {
    if let Some(pid) = pid_of(pid) {
        // ECHILD: somebody else reaped it, which is as good.
        if let Err(error) = waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
            tracing::trace!(%pid, %error, "not reaped");
        }
    }
}

/// Orphans among this process's descendants become its children from now on.
///
/// # Errors
/// When the kernel refuses.
pub fn become_subreaper() -> io::Result<()> {
    prctl::set_child_subreaper(true).map_err(io::Error::from)
}

/// Why a process cannot be tied to its parent's life.
#[derive(Debug, thiserror::Error)]
pub enum ParentError {
    /// The kernel refused.
    #[error("ask to be killed with the parent: {0}")]
    Prctl(#[from] nix::errno::Errno),
    /// The parent ended before we asked.
    #[error("the process that started this one (pid {expected}) has ended already")]
    Gone {
        /// What [`PARENT_VARIABLE`] said.
        expected: u32,
    },
    /// The variable holds no pid.
    #[error("{PARENT_VARIABLE}={0:?} is not a process id")]
    Malformed(String),
}

/// Ties this process to its parent's life when the parent asked for it by [`PARENT_VARIABLE`]: SIGKILL when it ends.
/// Returns whether it did. Call it first in `main`, on the main thread: the kernel keeps the request per thread, and ours
/// must live as long as the process. The parent must have spawned us from a thread that lives as long as it does.
///
/// # Errors
/// [`ParentError::Gone`]: the parent has ended already; the caller exits at once.
pub fn die_with_parent() -> Result<bool, ParentError> {
    let Ok(value) = std::env::var(PARENT_VARIABLE) else { return Ok(false) };
    let expected: u32 = value.parse().map_err(|_| ParentError::Malformed(value))?;
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    if u32::try_from(nix::unistd::getppid().as_raw()) == Ok(expected) {
        Ok(true)
    } else {
        Err(ParentError::Gone { expected })
    }
}

/// Raises the number of files that this process may open to what the system allows, and answers it. Sockets are files.
///
/// # Errors
/// The system's answer.
pub fn raise_open_files() -> std::io::Result<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let text = "17 (a) b (c)) S 1 17 17 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 98765 1000 2 3";
        assert_eq!(parse_stat(text), Some(Stat { pid: 17, state: 'S', parent: 1, start_time: 98765 }));
        assert_eq!(parse_stat("17 (torn) S 1"), None);
    }

    #[test]
    fn this_process_is_found_and_pid_reuse_is_told_apart() {
        let own = std::process::id();
        let started = start_time(own).expect("own start time");
        assert!(is_running(own, started));
        assert!(!is_running(own, started + 1));
        assert!(!send(0, Signal::SIGTERM) && !send(1, Signal::SIGKILL), "pids 0 and 1 are never signalled");
        assert!(!boot_id().expect("boot id").is_empty());
    }

    /// A grandchild that its parent left behind and that ignores SIGTERM is killed and reaped; a kept child is not.
    #[test]
    fn double_forks_do_not_get_away() {
        become_subreaper().expect("subreaper");
        let mut kept = Command::new("sleep").arg("600").spawn().expect("spawn");
        let mut child = Command::new("sh")
            .args(["-c", "(trap '' TERM; setsid sleep 600 & echo $!) & wait"])
            .env("TRAINCTL_TEST_MARKER", "double-fork")
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let mut line = String::new();
        io::BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("read");
        let grandchild: u32 = line.trim().parse().expect("pid");
        child.wait().expect("wait");
        let marked = processes_with_env_marker("TRAINCTL_TEST_MARKER", "double-fork");
        assert_eq!(marked.iter().map(|stat| stat.pid).collect::<Vec<_>>(), [grandchild]);
        assert!(descendants(std::process::id()).iter().any(|stat| stat.pid == grandchild));
        let killed = kill_descendants(&[kept.id()], Duration::from_secs(30)).expect("killed");
        assert!(killed >= 1);
        assert_eq!(stat(grandchild), None, "not reaped");
        assert_eq!(kept.try_wait().expect("wait"), None, "the kept child was killed");
        kept.kill().expect("kill");
        kept.wait().expect("wait");
    }
}
