//! Memory that a trainer could have: the machine's, or what is left of a cgroup's limit, whichever is less.
//!
//! A limit may stand on any group above the worker's own, so all of them are looked at. Pages of files that the kernel would
//! drop first (`inactive_file`) count as available, as in `MemAvailable`.

use std::io;
use std::path::{Path, PathBuf};

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) available: u64,
    pub(super) total: u64,
}

/// Reads it.
///
/// # Errors
/// `/proc/meminfo` cannot be read or has no such lines.
pub(super) fn read() -> io::Result<Memory> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    of(&meminfo, &cgroups, Path::new("/sys/fs/cgroup"))
}

fn of(meminfo: &str, cgroups: &str, mounted: &Path) -> io::Result<Memory> {
    let missing = |name| io::Error::other(format!("/proc/meminfo has no line {name}"));
    let of_machine = |name: &'static str| field(meminfo, name).map(|kib| kib << 10).ok_or_else(|| missing(name));
    let mut memory = Memory { available: of_machine("MemAvailable:")?, total: of_machine("MemTotal:")? };
    for group in groups(cgroups, mounted) {
        // No limit is a huge number in v1, "max" in v2.
        let Some(limit) = group.number("memory.max", "memory.limit_in_bytes") else { continue };
        let used = group.number("memory.current", "memory.usage_in_bytes").unwrap_or_default();
        let stat = std::fs::read_to_string(group.dir.join("memory.stat")).unwrap_or_default();
        let droppable = field(&stat, if group.is_v2 { "inactive_file" } else { "total_inactive_file" });
        let left = limit.saturating_sub(used.saturating_sub(droppable.unwrap_or_default()));
        memory.available = memory.available.min(left);
        memory.total = memory.total.min(limit);
    }
    Ok(memory)
}

/// The number behind a name at a line's start.
fn field(text: &str, name: &str) -> Option<u64> {
    let words = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok()).flatten()
    };
    text.lines().find_map(words)
}

struct Group {
    dir: PathBuf,
    is_v2: bool,
}

impl Group {
    fn number(&self, v2: &str, v1: &str) -> Option<u64> {
        std::fs::read_to_string(self.dir.join(if self.is_v2 { v2 } else { v1 })).ok()?.trim().parse().ok()
    }
}

/// The groups that this process is in, from its own to the top, by the lines `hierarchy:controllers:path` of
/// `/proc/self/cgroup`.
fn groups(cgroups: &str, mounted: &Path) -> Vec<Group> {
    let mut found = Vec::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (is_v2, top) = match controllers {
            "" => (true, mounted.to_owned()),
            names if names.split(',').any(|name| name == "memory") => (false, mounted.join("memory")),
            _ => continue,
        };
        let own = top.join(path.trim_start_matches('/'));
        let up = own.ancestors().take_while(|dir| dir.starts_with(&top)).map(Path::to_owned).collect::<Vec<_>>();
        found.extend(up.into_iter().map(|dir| Group { dir, is_v2 }));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n";

    fn write(dir: &Path, files: &[(&str, &str)]) {
        std::fs::create_dir_all(dir).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(dir.join(name), text).unwrap());
    }

    #[test]
    fn without_a_limit_it_is_the_machines() {
        let mounted = tempfile::tempdir().unwrap();
        write(mounted.path(), &[("memory.max", "max\n"), ("memory.current", "5\n")]);
        let memory = of(MEMINFO, "0::/\n", mounted.path()).unwrap();
        assert_eq!(memory, Memory { available: 600 << 10, total: 1000 << 10 });
        assert!(read().unwrap().available > 0, "of this machine");
        assert!(of("MemTotal: 1 kB\n", "", mounted.path()).unwrap_err().to_string().contains("MemAvailable"));
    }

    #[test]
    fn a_limit_of_a_group_above_counts_and_droppable_pages_are_available() {
        let mounted = tempfile::tempdir().unwrap();
        let job = mounted.path().join("job");
        let limited = [("memory.max", "300000"), ("memory.current", "200000")];
        write(&job, &limited);
        write(&job, &[("memory.stat", "anon 5\ninactive_file 50000\n")]);
        write(&job.join("step"), &[("memory.max", "max"), ("memory.current", "1")]);
        let memory = of(MEMINFO, "0::/job/step\n", mounted.path()).unwrap();
        assert_eq!(memory, Memory { available: 150_000, total: 300_000 });
    }

    #[test]
    fn the_older_kind_of_cgroup_is_read_too() {
        let mounted = tempfile::tempdir().unwrap();
        let files = [("memory.limit_in_bytes", "4096"), ("memory.usage_in_bytes", "4000")];
        write(&mounted.path().join("memory/a"), &files);
        write(&mounted.path().join("memory/a"), &[("memory.stat", "inactive_file 9\ntotal_inactive_file 1000\n")]);
        let memory = of(MEMINFO, "5:cpu:/a\n4:memory:/a\n", mounted.path()).unwrap();
        assert_eq!(memory, Memory { available: 1096, total: 4096 });
    }
}
