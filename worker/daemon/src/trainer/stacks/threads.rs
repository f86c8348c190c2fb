//! What `/proc` says of a thread that does not answer: its state, the kernel function that holds it, its system call.

use std::fs;

use trainctl_proto::v1::ThreadStack;

/// What is seen of one thread.
pub(super) struct Seen {
    /// In words.
    pub(super) text: String,
    /// Where it left for the kernel, unless it runs.
    pub(super) left: Option<Left>,
}

/// The registers of a thread that the kernel holds, as far as it shows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// Program counter.
    pub(super) pc: u64,
    /// Stack pointer.
    pub(super) sp: u64,
}

/// Every thread of a process, without stacks.
pub(super) fn all(pid: u32) -> Vec<ThreadStack> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let tids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    tids.map(|tid| ThreadStack { tid, name: read(pid, tid, "comm"), ..ThreadStack::default() }).collect()
}

/// Looks at one thread. What may not be read is left out.
pub(super) fn look(pid: u32, tid: u32) -> Seen {
    let mut words = Vec::new();
    let stat = read(pid, tid, "stat");
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    words.extend(state.map(|state| format!("state {state} ({})", state_in_words(state))));
    let wchan = read(pid, tid, "wchan");
    words.extend((!matches!(wchan.as_str(), "" | "0")).then(|| format!("in the kernel's {wchan}")));
    let call = Syscall::parse(&read(pid, tid, "syscall"));
    words.extend(call.as_ref().map(|call| call.text(pid)));
    Seen { text: words.join(", "), left: call.map(|call| call.left).filter(|left| left.pc != 0) }
}

fn read(pid: u32, tid: u32, what: &str) -> String {
    fs::read_to_string(format!("/proc/{pid}/task/{tid}/{what}")).unwrap_or_default().trim_end().to_owned()
}

fn state_in_words(state: char) -> &'static str {
    match state {
        'R' => "running",
        'S' => "sleeping",
        'D' => "waiting for a device or file system that does not answer",
        'T' => "stopped by a signal",
        't' => "stopped by a debugger",
        'Z' | 'X' => "dead",
        'I' => "idle",
        _ => "unknown",
    }
}

/// `/proc/<pid>/task/<tid>/syscall` of a thread that is in one: number, six arguments, stack pointer, program counter.
#[derive(Debug, PartialEq, Eq)]
struct Syscall {
    number: i64,
    first: u64,
    left: Left,
}

impl Syscall {
    fn parse(text: &str) -> Option<Self> {
        let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let [number, first, .., sp, pc] = words[..] else {
            // In no system call: without its arguments.
            let [number, sp, pc] = words[..] else { return None };
            return Some(Self { number: number.parse().ok()?, first: 0, left: Left { pc: hex(pc)?, sp: hex(sp)? } });
        };
        let left = Left { pc: hex(pc)?, sp: hex(sp)? };
        Some(Self { number: number.parse().ok()?, first: hex(first).unwrap_or_default(), left })
    }

    /// With the file, where the call's first argument is a descriptor.
    fn text(&self, pid: u32) -> String {
        if self.number < 0 {
            return "in a page fault or interrupt".to_owned();
        }
        match name(self.number) {
            Some((name, true)) => {
                let file = fs::read_link(format!("/proc/{pid}/fd/{}", self.first));
                let file = file.map_or_else(|_| self.first.to_string(), |file| file.display().to_string());
                format!("system call {name} of {file}")
            }
            Some((name, false)) => format!("system call {name}"),
            None => format!("system call {}", self.number),
        }
    }
}

/// Name of a system call in which programs stand still, and whether its first argument is a file descriptor.
#[cfg(target_arch = "x86_64")]
fn name(number: i64) -> Option<(&'static str, bool)> {
    Some(match number {
        0 => ("read", true),
        1 => ("write", true),
        5 => ("fstat", true),
        7 => ("poll", false),
        8 => ("lseek", true),
        17 => ("pread64", true),
        18 => ("pwrite64", true),
        23 => ("select", false),
        34 => ("pause", false),
        35 => ("nanosleep", false),
        42 => ("connect", true),
        44 => ("sendto", true),
        45 => ("recvfrom", true),
        46 => ("sendmsg", true),
        47 => ("recvmsg", true),
        61 => ("wait4", false),
        72 => ("fcntl", true),
        73 => ("flock", true),
        74 => ("fsync", true),
        75 => ("fdatasync", true),
        202 => ("futex", false),
        217 => ("getdents64", true),
        230 => ("clock_nanosleep", false),
        232 => ("epoll_wait", true),
        257 => ("openat", false),
        262 => ("newfstatat", false),
        281 => ("epoll_pwait", true),
        _ => return None,
    })
}

/// Numbers differ between architectures: elsewhere they are shown as they are.
#[cfg(not(target_arch = "x86_64"))]
fn name(_: i64) -> Option<(&'static str, bool)> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_is_read_with_its_place() {
        let text = "0 0x7 0x7f00 0x1000 0x0 0x0 0x0 0x7ffc9d 0x7f41ab";
        let left = Left { pc: 0x7f_41ab, sp: 0x7f_fc9d };
        assert_eq!(Syscall::parse(text), Some(Syscall { number: 0, first: 7, left }));
        let in_none = Syscall::parse("-1 0x7ffc9d 0x7f41ab").unwrap();
        assert_eq!((in_none.text(1).as_str(), in_none.left), ("in a page fault or interrupt", left));
        assert_eq!(Syscall::parse("running"), None);
        assert_eq!(Syscall::parse(""), None);
    }

    #[test]
    fn a_stopped_process_shows_its_state_and_its_call() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        let signal = |signal| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), signal).unwrap();
        signal(nix::sys::signal::Signal::SIGSTOP);
        let mut seen = look(pid, pid);
        while !seen.text.starts_with("state T (stopped by a signal)") {
            std::thread::yield_now();
            seen = look(pid, pid);
        }
        assert_eq!(all(pid).len(), 1);
        assert_eq!(all(pid)[0].name, "sleep");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
