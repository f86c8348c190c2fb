//! The log of a rank: `<run>/logs/g0007/rank-00003.log`, standard output and error of the trainer, appended.
//!
//! The trainer writes the file itself rather than through a pipe of ours: nothing is lost when the daemon is killed, and
//! a slow disk never makes the daemon hold the trainer's output. The last lines are read back at its end.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Lines of an exit report.
const TAIL_LINES: usize = 40;
/// Bytes read for them.
const TAIL_BYTES: u64 = 64 << 10;
/// How a trainer's own last word begins. Threads of it may still log behind it while it ends.
const LAST_WORD: &str = "trainctl-trainer: error: ";
/// Longer lines are cut, characters.
const LINE_CHARS: usize = 1_000;

/// An open log.
pub(super) struct Log {
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// Its length before the trainer started, bytes.
    pub(super) start: u64,
}

/// Path of a rank's log.
pub(super) fn path(run_dir: &Path, generation: u64, rank: u32) -> PathBuf {
    run_dir.join("logs").join(format!("g{generation:04}")).join(format!("rank-{rank:05}.log"))
}

/// Opens the log of a rank for appending, making its directories.
pub(super) fn open(run_dir: &Path, generation: u64, rank: u32) -> Result<Log, String> {
    let path = path(run_dir, generation, rank);
    let failed = |error| {
        format!(
            "open the trainer's log {}: {error}; the worker must be able to write in the run directory",
            path.display()
        )
    };
    if !run_dir.is_dir() {
        // Never made here: on a machine that does not see the shared directory it would be another one.
        return Err(format!("run directory {} does not exist on this machine", run_dir.display()));
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(failed)?;
    }
    let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
    let start = file.metadata().map_err(failed)?.len();
    Ok(Log { file, path, start })
}

/// The last lines that were written after `start`, the trainer's own last word at the end where it said one; empty when
/// the log cannot be read.
pub(super) fn tail(path: &Path, start: u64) -> Vec<String> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let from = file.metadata()?.len().saturating_sub(TAIL_BYTES).max(start);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Ok(bytes) => last_lines(&bytes),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the trainer's log cannot be read back");
            Vec::new()
        }
    }
}

fn last_lines(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let first = lines.len().saturating_sub(TAIL_LINES);
    let mut lines = lines[first..].to_vec();
    if let Some(at) = lines.iter().rposition(|line| line.starts_with(LAST_WORD)) {
        let word = lines.remove(at);
        lines.push(word);
    }
    lines.iter().map(|line| line.chars().take(LINE_CHARS).collect()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn only_the_last_lines_of_this_start_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = open(dir.path(), 7, 3).unwrap();
        assert!(first.path.ends_with("logs/g0007/rank-00003.log"));
        writeln!(first.file, "from the start before").unwrap();
        let mut second = open(dir.path(), 7, 3).unwrap();
        for line in 0..100 {
            writeln!(second.file, "line {line}").unwrap();
        }
        write!(second.file, "\nunfinished \u{fffd}").unwrap();
        let lines = tail(&second.path, second.start);
        assert_eq!(lines.len(), TAIL_LINES);
        assert_eq!(lines[0], "line 61");
        assert_eq!(lines[TAIL_LINES - 1], "unfinished \u{fffd}");
        write!(second.file, "\ntrainctl-trainer: error: lost\na thread that was still there\n").unwrap();
        let lines = tail(&second.path, second.start);
        assert_eq!(lines[TAIL_LINES - 2..], ["a thread that was still there", "trainctl-trainer: error: lost"]);
        std::fs::write(&second.path, "cut").unwrap();
        assert!(tail(&second.path, second.start).is_empty());
    }
}
