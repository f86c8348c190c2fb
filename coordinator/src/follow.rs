//! Answer streams: rows, events, states and logs, as they come.
//!
//! Rows and events are read from their files, which every row reaches before anyone is told: a slow reader loses nothing and
//! holds nobody up. A restart cuts a file back; when the last line that was read is not where it was, the file is read again
//! from its beginning, skipping what was sent.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use trainctl_proto::v1;
use trainctl_proto::v1::watch_event::Kind;
use trainctl_spec::report::{TrainRow, ValidationRow};

use crate::answers::{Answers, Error};
use crate::jobs::Watched;

/// Logs grow without telling anyone: how often they are looked at.
const LOG_LOOK: Duration = Duration::from_millis(200);
/// Bytes of one log chunk.
const CHUNK: usize = 64 << 10;
/// Bytes of a file that are read at once, unless a line has more: files grow without end, readers are many.
const PIECE: u64 = 1 << 20;

/// A file that is read line by line as it grows.
struct Lines {
    path: PathBuf,
    /// Bytes that were taken in: whole lines.
    offset: u64,
    /// The last line, which must still end at `offset`.
    last: Vec<u8>,
    seen: (u64, u64),
    /// Whether the last read stopped before the file's end.
    has_more: bool,
}

impl Lines {
    /// Begins at the file's start, or after its present last line.
    fn new(path: PathBuf, from_start: bool) -> Self {
        let mut lines = Self { path, offset: 0, last: Vec::new(), seen: (0, 0), has_more: !from_start };
        while lines.has_more {
            lines.read();
        }
        lines
    }

    /// Complete lines since the last call, or a piece of them. A file that cannot be read has none: it may not exist before its
    /// first row.
    fn read(&mut self) -> Vec<String> {
        self.has_more = false;
        let Ok(mut file) = std::fs::File::open(&self.path) else { return Vec::new() };
        if !self.last_is_there(&mut file) {
            self.offset = 0;
        }
        if file.seek(SeekFrom::Start(self.offset)).is_err() {
            return Vec::new();
        }
        let mut bytes = Vec::new();
        let end = loop {
            let Ok(read) = file.by_ref().take(PIECE).read_to_end(&mut bytes) else { return Vec::new() };
            self.has_more = read as u64 == PIECE;
            match bytes.iter().rposition(|byte| *byte == b'\n') {
                Some(end) => break end,
                None if self.has_more => {}
                None => return Vec::new(),
            }
        };
        bytes.truncate(end + 1);
        self.offset += bytes.len() as u64;
        self.last = bytes.split_inclusive(|byte| *byte == b'\n').next_back().unwrap_or_default().to_vec();
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }

    fn last_is_there(&self, file: &mut std::fs::File) -> bool {
        let mut found = vec![0; self.last.len()];
        let start = self.offset - self.last.len() as u64;
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut found));
        read.is_ok() && found == self.last
    }

    /// Rows since the last call; after a cut, those of the new generation only.
    fn rows<T: serde::de::DeserializeOwned>(&mut self, place: impl Fn(&T) -> (u64, u64)) -> Vec<T> {
        let rows = self.read().into_iter().filter_map(|line| serde_json::from_str(&line).ok());
        let mut fresh = Vec::new();
        for row in rows {
            // (generation, step) + 1, so that nothing seen is (0, 0).
            let at = place(&row);
            let at = (at.0, at.1 + 1);
            if at > self.seen {
                self.seen = at;
                fresh.push(row);
            }
        }
        fresh
    }
}

/// Sends states, rows and events until the job is over (or once, what there is).
pub async fn watch(
    mut watched: Watched,
    from_start: bool,
    once: bool,
    answers: &Answers<v1::WatchEvent>,
) -> Result<(), Error> {
    let mut training = Lines::new(watched.run_dir.training_rows(), from_start);
    let mut events = Lines::new(watched.run_dir.events(), from_start);
    let mut validations: Vec<(String, Lines)> = watched
        .validations
        .iter()
        .map(|name| (name.clone(), Lines::new(watched.run_dir.validation_rows(name), from_start)))
        .collect();
    let mut gone = false;
    loop {
        // The state is taken before the files are read, so that the last rows of a job that is over are not missed.
        watched.changed.mark_unchanged();
        let status = watched.status.borrow_and_update().clone();
        let over = is_over(&status);
        loop {
            let mut kinds: Vec<Kind> = events.read().into_iter().map(Kind::EventJson).collect();
            let rows = training.rows(|row: &TrainRow| (row.generation, row.step));
            kinds.extend(rows.into_iter().map(|row| Kind::Train((&row).into())));
            for (name, lines) in &mut validations {
                let rows = lines.rows(|row: &ValidationRow| (row.generation, row.step));
                kinds.extend(
                    rows.into_iter().map(|row| Kind::Validation((&ValidationRow { name: name.clone(), ..row }).into())),
                );
            }
            for kind in kinds {
                answers.send(v1::WatchEvent { kind: Some(kind) }).await?;
            }
            let have_more = events.has_more || training.has_more || validations.iter().any(|(_, lines)| lines.has_more);
            if !have_more {
                break;
            }
        }
        answers.send(v1::WatchEvent { kind: Some(Kind::Job(status)) }).await?;
        if over || once || gone {
            return Ok(());
        }
        // A run directory's task that has ended has written its last row: one more look, then the end.
        gone = tokio::select! {
            changed = watched.changed.changed() => changed.is_err(),
            changed = watched.status.changed() => changed.is_err(),
            () = answers.closed() => return Err(Error::HungUp),
        };
    }
}

/// Sends the logs of the newest generation, and of later ones while following.
pub async fn logs(
    watched: Watched,
    rank: Option<u32>,
    follow: bool,
    answers: &Answers<v1::LogChunk>,
) -> Result<(), Error> {
    let mut offsets = std::collections::BTreeMap::new();
    let first = watched.status.borrow().generation;
    loop {
        let status = watched.status.borrow().clone();
        let over = is_over(&status);
        for generation in first..=status.generation {
            for number in (0..status.world_size).filter(|number| rank.is_none_or(|rank| rank == *number)) {
                let path = watched.run_dir.rank_log(generation, number);
                let offset = offsets.entry((generation, number)).or_insert(0);
                while let Some(data) = chunk(&path, offset) {
                    let chunk = v1::LogChunk { rank: number, generation, data };
                    answers.send(chunk).await?;
                }
            }
        }
        if over || !follow {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(LOG_LOOK) => {}
            () = answers.closed() => return Err(Error::HungUp),
        }
    }
}

fn chunk(path: &Path, offset: &mut u64) -> Option<Vec<u8>> {
    let mut file = std::fs::File::open(path).ok()?;
    file.seek(SeekFrom::Start(*offset)).ok()?;
    let mut data = Vec::new();
    file.take(CHUNK as u64).read_to_end(&mut data).ok()?;
    *offset += data.len() as u64;
    (!data.is_empty()).then_some(data)
}

fn is_over(job: &v1::Job) -> bool {
    matches!(job.phase(), v1::JobPhase::Succeeded | v1::JobPhase::Failed | v1::JobPhase::Cancelled)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(generation: u64, step: u64) -> String {
        let row = TrainRow {
            step,
            epoch: 0,
            timestamp: String::new(),
            loss: 1.0,
            grad_norm: 1.0,
            lr: 1.0,
            mem: 1.0,
            tps: 1.0,
            tps_per_gpu: 1.0,
            mfu: None,
            num_tokens_per_step: 1,
            num_label_tokens: 1,
            generation,
        };
        serde_json::to_string(&row).unwrap() + "\n"
    }

    fn read(lines: &mut Lines) -> Vec<(u64, u64)> {
        lines.rows(|row: &TrainRow| (row.generation, row.step)).iter().map(|row| (row.generation, row.step)).collect()
    }

    #[test]
    fn a_torn_line_is_sent_when_it_is_whole_and_a_cut_file_sends_only_what_is_new() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("training.jsonl");
        let mut lines = Lines::new(path.clone(), true);
        assert_eq!(read(&mut lines), []);
        let (first, second) = (row(1, 0), row(1, 1));
        std::fs::write(&path, format!("{first}{}", &second[..10])).unwrap();
        assert_eq!(read(&mut lines), [(1, 0)]);
        std::fs::write(&path, format!("{first}{second}")).unwrap();
        assert_eq!(read(&mut lines), [(1, 1)]);
        // A restart from step 0 cuts step 1 away, and the file has grown again before anyone looks.
        std::fs::write(&path, format!("{first}{}", row(2, 1))).unwrap();
        assert_eq!(read(&mut lines), [(2, 1)]);
    }

    #[test]
    fn a_long_file_is_read_piece_by_piece() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let long = "x".repeat(2 * PIECE as usize + 7);
        let short = "y".repeat(PIECE as usize / 3);
        let wanted = [long, short.clone(), short.clone(), short.clone(), short];
        std::fs::write(&path, wanted.join("\n") + "\nunfinished").unwrap();
        let mut lines = Lines::new(path.clone(), true);
        let (mut found, mut pieces) = (Vec::new(), 0);
        loop {
            let piece = lines.read();
            assert!(pieces == 0 || piece.iter().map(String::len).sum::<usize>() <= PIECE as usize);
            found.extend(piece);
            pieces += 1;
            if !lines.has_more {
                break;
            }
        }
        assert!(pieces > 1);
        assert!(found == wanted, "{:?}", found.iter().map(String::len).collect::<Vec<_>>());
        assert_eq!(Lines::new(path, false).read(), Vec::<String>::new(), "all of it is skipped");
    }
}
