//! What can be known of an ended process.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::sys::signal::Signal;
use trainctl_proto::v1::TrainerExit;

/// How often the kernel's out-of-memory killer struck, at the start of a trainer: in this process's memory cgroup, or on
/// the machine when the cgroup does not say.
#[derive(Clone, Copy, Debug)]
pub struct OomCounter {
    at_start: Option<u64>,
}

impl OomCounter {
    /// Reads the counter.
    pub fn read() -> Self {
        Self { at_start: oom_kills() }
    }

    /// Whether it struck since.
    pub fn has_risen(&self) -> bool {
        matches!((self.at_start, oom_kills()), (Some(before), Some(now)) if now > before)
    }
}

fn oom_kills() -> Option<u64> {
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let counter =
        cgroup_files(&cgroups).into_iter().find_map(|file| oom_kill_line(&std::fs::read_to_string(file).ok()?));
    counter.or_else(|| oom_kill_line(&std::fs::read_to_string("/proc/vmstat").ok()?))
}

/// Files that may hold the counter: cgroup v2's and v1's, by the lines `hierarchy:controllers:path` of
/// `/proc/self/cgroup`.
fn cgroup_files(cgroups: &str) -> Vec<String> {
    let mut files = Vec::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let path = path.trim_end_matches('/');
        if controllers.is_empty() {
            files.push(format!("/sys/fs/cgroup{path}/memory.events"));
        } else if controllers.split(',').any(|name| name == "memory") {
            files.push(format!("/sys/fs/cgroup/memory{path}/memory.oom_control"));
        }
    }
    files
}

/// The line `oom_kill N`, which all three files have.
fn oom_kill_line(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")).and_then(|count| count.trim().parse().ok())
}

/// Code, signal, core and the out-of-memory sign. SIGKILL that we did not send while the killer struck is its work.
pub(super) fn facts(status: Option<&ExitStatus>, stopped_by_us: bool, oom_struck: bool) -> TrainerExit {
    let signal = status.and_then(ExitStatusExt::signal);
    let killed = signal == Some(Signal::SIGKILL as i32);
    TrainerExit {
        code: status.and_then(ExitStatus::code),
        signal,
        core: status.is_some_and(ExitStatusExt::core_dumped),
        oom: killed && !stopped_by_us && oom_struck,
        stopped_by_us: stopped_by_us && killed,
        ..TrainerExit::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_told_apart() {
        let facts_of = |raw, by_us, oom| {
            let facts = facts(Some(&ExitStatus::from_raw(raw)), by_us, oom);
            (facts.code, facts.signal, facts.core, facts.oom, facts.stopped_by_us)
        };
        assert_eq!(facts_of(0, false, false), (Some(0), None, false, false, false));
        assert_eq!(facts_of(77 << 8, true, true), (Some(77), None, false, false, false), "it ended before our signal");
        assert_eq!(facts_of(9, false, false), (None, Some(9), false, false, false));
        assert_eq!(facts_of(9, false, true), (None, Some(9), false, true, false));
        assert_eq!(facts_of(9, true, true), (None, Some(9), false, false, true));
        assert_eq!(facts_of(11 | 0x80, false, true), (None, Some(11), true, false, false));
    }

    #[test]
    fn the_counter_is_looked_for_in_both_kinds_of_cgroup() {
        let text = "4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n";
        assert_eq!(
            cgroup_files(text),
            ["/sys/fs/cgroup/memory/a/b/memory.oom_control", "/sys/fs/cgroup/memory.events"]
        );
        assert_eq!(oom_kill_line("low 0\nhigh 2\noom 1\noom_kill 3\n"), Some(3));
        assert_eq!(oom_kill_line("oom_kill_disable 0\n"), None);
    }
}
