//! The file beside a rank's log that holds the stacks of all its threads.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use trainctl_proto::v1::ThreadStack;

/// Writes `rank-00003.stacks` beside `rank-00003.log`; an older one of the same generation is replaced.
pub(super) fn write(log: &Path, threads: &[ThreadStack]) -> io::Result<PathBuf> {
    let text = text(threads).map_err(io::Error::other)?;
    put(log.with_extension("stacks"), &text)
}

/// Writes `rank-00003.collectives.json`, as [`write`].
pub(super) fn write_record(log: &Path, record: &str) -> io::Result<PathBuf> {
    put(log.with_extension("collectives.json"), record)
}

fn put(path: PathBuf, text: &str) -> io::Result<PathBuf> {
    fs::write(&path, text).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
    Ok(path)
}

fn text(threads: &[ThreadStack]) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    for thread in threads {
        write!(text, "thread {} {:?}", thread.tid, thread.name)?;
        if !thread.state.is_empty() {
            write!(text, " did not answer: {}", thread.state)?;
        }
        text.push('\n');
        for (depth, frame) in thread.frames.iter().enumerate() {
            writeln!(text, "  {depth:>3} {frame}")?;
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_its_frames_or_its_state() {
        let answered = ThreadStack {
            tid: 7,
            name: "main".to_owned(),
            frames: vec!["read".to_owned(), "load (data.rs:12)".to_owned()],
            ..ThreadStack::default()
        };
        let silent =
            ThreadStack { tid: 8, name: "io".to_owned(), state: "state D".to_owned(), ..ThreadStack::default() };
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir.path().join("rank-00003.log"), &[answered, silent]).unwrap();
        assert!(path.ends_with("rank-00003.stacks"));
        assert_eq!(
            fs::read_to_string(path).unwrap(),
            "thread 7 \"main\"\n    0 read\n    1 load (data.rs:12)\nthread 8 \"io\" did not answer: state D\n"
        );
    }
}
