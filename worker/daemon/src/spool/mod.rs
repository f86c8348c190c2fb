//! What must not be lost lies here until the coordinator has acknowledged it (P5).
//!
//! One append-only file per worker. A record is on disk before the trainer's report is answered and is sent, in order
//! and again after every reconnect, until an acknowledgement covers it.
//!
//! - **S1** Sequence numbers of one spool id only rise; they may have gaps. They are never given to two records.
//! - **S2** A torn or damaged tail is cut at the last whole frame. Where records that had been sent may be lost with it
//!   (the machine restarted, or a frame was damaged), numbering goes on after a gap, so S1 holds.
//! - **S3** The file is replaced by an empty one only when every record is acknowledged.
//! - **S4** A withdrawn record was never sent and never will be, not by a successor either. Only reports of durable shards are
//!   withdrawn: those of a save that a later one has superseded while no coordinator could be told.
//!
//! [`file`] is the format, [`Spool`] the synchronous core, [`SpoolHandle`] the thread that owns it: no disk ever blocks
//! the daemon's owner task.

mod file;
mod thread;

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Duration;

use prost::Message as _;
use trainctl_proto::v1::{RankReport, rank_report::Report};

use file::{Frame, FrameKind, LogFile};
pub use thread::{SpoolHandle, Status};

/// Above this size a fully acknowledged spool is replaced by an empty one, bytes.
const TRUNCATE_ABOVE: u64 = 4 << 20;
/// Acknowledged records after which the position is noted in the file although not all are acknowledged.
const NOTE_EVERY: u64 = 1_000;
/// Distance that numbering jumps where sent records may have been lost (S2).
const GAP: u64 = 1 << 32;

/// Why the spool failed.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The disk refused.
    #[error("{action} spool {path}: {source}; free space on the worker's state directory or move it with --state-dir")]
    Io {
        /// Verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The spool's thread has ended.
    #[error("the spool is closed: the worker is shutting down")]
    Closed,
    /// A stored record is not the message that was written.
    #[error("record {seq} of spool {path} cannot be decoded: {reason}")]
    Record {
        /// The file.
        path: PathBuf,
        /// Its number.
        seq: u64,
        /// What the decoder said.
        reason: String,
    },
}

/// A record on its way to the coordinator.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Number within the spool.
    pub seq: u64,
    /// Time since it was appended.
    pub age: Duration,
    /// What was reported.
    pub report: RankReport,
}

/// When a record was appended: on this incarnation's monotonic clock, or by wall time when a predecessor wrote it.
#[derive(Clone, Copy, Debug)]
enum Written {
    Here(Duration),
    Before { wall_ms: u64 },
}

/// A save that a report of durable shards is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveOf {
    /// The job's id.
    pub job: String,
    /// The generation.
    pub generation: u64,
    /// A `v1::SaveKind`.
    pub kind: i32,
    /// Zero-based.
    pub step: u64,
}

#[derive(Clone, Debug)]
struct Pending {
    seq: u64,
    offset: u64,
    written: Written,
    /// What may be withdrawn; absent for what a predecessor wrote, which it may have sent.
    save: Option<Box<SaveOf>>,
}

/// Both clocks at one instant.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic, since the clock's origin.
    pub monotonic: Duration,
    /// Milliseconds since the Unix epoch.
    pub wall_ms: u64,
}

/// The spool's synchronous core.
#[derive(Debug)]
pub struct Spool {
    log: LogFile,
    pending: VecDeque<Pending>,
    next_seq: u64,
    acked: u64,
    noted: u64,
    /// The highest number that was read, to be sent.
    sent: u64,
    last_exit: Option<(String, u64, u32)>,
    boot_id: String,
}

impl Spool {
    /// Opens the spool or makes a new one. `fresh_id` is used when there is none or its header is damaged.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn open(path: &Path, fresh_id: &str, boot_id: &str, now: Now) -> Result<Self, SpoolError> {
        let (mut log, loaded) = LogFile::open(path, fresh_id)?;
        let (mut pending, mut withdrawn) = (VecDeque::new(), BTreeSet::new());
        let (mut last_seq, mut acked, mut last_boot, mut last_exit) = (0, 0, None, None);
        for frame in &loaded.frames {
            match frame.kind {
                FrameKind::Opened => {
                    last_seq = last_seq.max(frame.seq);
                    last_boot = Some(String::from_utf8_lossy(&frame.payload).into_owned());
                }
                FrameKind::Acked => acked = acked.max(frame.seq),
                FrameKind::Record => {
                    last_seq = last_seq.max(frame.seq);
                    last_exit = exit_of(&frame.payload).or(last_exit);
                    let written = Written::Before { wall_ms: frame.wall_ms };
                    pending.push_back(Pending { seq: frame.seq, offset: frame.offset, written, save: None });
                }
                FrameKind::Withdrawn => {
                    withdrawn.insert(frame.seq);
                }
            }
        }
        last_seq = last_seq.max(acked);
        pending.retain(|record| record.seq > acked && !withdrawn.contains(&record.seq));
        let lost_sent = loaded.damaged || last_boot.as_deref().is_some_and(|boot| boot != boot_id);
        if lost_sent {
            tracing::warn!(
                path = %path.display(),
                damaged = loaded.damaged,
                "the spool may have lost records: the machine restarted or a frame is damaged; numbering skips ahead"
            );
            last_seq += GAP;
        }
        log.append(&Frame::new(FrameKind::Opened, last_seq, now.wall_ms, boot_id.as_bytes().to_vec()))?;
        log.sync()?;
        let (next_seq, noted, boot_id) = (last_seq + 1, acked, boot_id.to_owned());
        Ok(Self { log, pending, next_seq, acked, noted, sent: last_seq, last_exit, boot_id })
    }

    /// The spool's id.
    pub fn id(&self) -> &str {
        self.log.id()
    }

    /// Number of the last record that is held, else of the last that was acknowledged; 0 = none. Gaps (S2) do not count:
    /// nobody waits for a number that no record has.
    pub fn last_seq(&self) -> u64 {
        self.pending.back().map_or(self.acked, |record| record.seq)
    }

    /// Highest number acknowledged so far.
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// Records that wait for an acknowledgement.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether everything is acknowledged.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether the exit of this trainer is in the file (job, generation, rank): the last exit only.
    pub fn knows_exit(&self, job: &str, generation: u64, rank: u32) -> bool {
        self.last_exit.as_ref().is_some_and(|(j, g, r)| j == job && *g == generation && *r == rank)
    }

    /// Appends a record; what [`must_sync`] names is on the disk when this returns, the rest survives the daemon's
    /// death but not the machine's.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; the record is then not in the spool.
    pub fn append(&mut self, report: &RankReport, now: Now) -> Result<u64, SpoolError> {
        let seq = self.next_seq;
        let payload = report.encode_to_vec();
        let exit = exit_key(report);
        let offset = self.log.append(&Frame::new(FrameKind::Record, seq, now.wall_ms, payload))?;
        if must_sync(report)
            && let Err(error) = self.log.sync()
        {
            self.log.cut_to(offset)?;
            return Err(error);
        }
        self.next_seq += 1;
        self.last_exit = exit.or(self.last_exit.take());
        let save = save_of(report).map(Box::new);
        self.pending.push_back(Pending { seq, offset, written: Written::Here(now.monotonic), save });
        Ok(seq)
    }

    /// Withdraws the reports of these saves, as far as they were never read (S4), durably. Returns those saves.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; then nothing is withdrawn.
    pub fn withdraw(&mut self, saves: &[SaveOf], now: Now) -> Result<Vec<SaveOf>, SpoolError> {
        let (sent, before) = (self.sent, self.log.len());
        let is_wanted = |record: &Pending| record.seq > sent && record.save.as_ref().is_some_and(|s| saves.contains(s));
        let wanted: Vec<u64> = self.pending.iter().filter(|r| is_wanted(r)).map(|record| record.seq).collect();
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut frames = wanted.iter().map(|seq| Frame::new(FrameKind::Withdrawn, *seq, now.wall_ms, Vec::new()));
        let log = &mut self.log;
        let noted = frames.try_for_each(|frame| log.append(&frame).map(drop)).and_then(|()| log.sync());
        if let Err(error) = noted {
            self.log.cut_to(before)?;
            return Err(error);
        }
        let is_gone = |record: &Pending| wanted.contains(&record.seq);
        let (gone, left): (VecDeque<Pending>, _) = self.pending.drain(..).partition(is_gone);
        self.pending = left;
        Ok(gone.into_iter().filter_map(|record| record.save).map(|save| *save).collect())
    }

    /// Up to `max_records` records after `after`, and no more than about `max_bytes`, in order; at least one when there
    /// is one.
    ///
    /// # Errors
    /// [`SpoolError::Io`], or [`SpoolError::Record`] when the file changed under us.
    pub fn read(
        &mut self,
        after: u64,
        max_records: usize,
        max_bytes: usize,
        now: Now,
    ) -> Result<Vec<Record>, SpoolError> {
        let first = self.pending.partition_point(|record| record.seq <= after);
        let mut records = Vec::new();
        let mut bytes = 0;
        for index in first..self.pending.len() {
            if records.len() >= max_records || bytes >= max_bytes {
                break;
            }
            let Pending { seq, offset, written, .. } = self.pending[index];
            // Whoever reads it may send it.
            self.sent = self.sent.max(seq);
            let payload = self.log.read_at(offset, seq)?;
            bytes += payload.len();
            let report = RankReport::decode(payload.as_slice()).map_err(|error| SpoolError::Record {
                path: self.log.path().to_path_buf(),
                seq,
                reason: error.to_string(),
            })?;
            let age = match written {
                Written::Here(at) => now.monotonic.saturating_sub(at),
                Written::Before { wall_ms } => Duration::from_millis(now.wall_ms.saturating_sub(wall_ms)),
            };
            records.push(Record { seq, age, report });
        }
        Ok(records)
    }

    /// Notes that the coordinator has everything up to `up_to`. An acknowledgement of another spool id changes nothing.
    ///
    /// # Errors
    /// [`SpoolError::Io`] when the note or the replacement (S3) failed; the acknowledgement holds in memory.
    pub fn ack(&mut self, spool: &str, up_to: u64, now: Now) -> Result<(), SpoolError> {
        if spool != self.id() || up_to <= self.acked {
            return Ok(());
        }
        self.acked = up_to.min(self.last_seq());
        while self.pending.front().is_some_and(|record| record.seq <= self.acked) {
            self.pending.pop_front();
        }
        if self.pending.is_empty() && self.log.len() > TRUNCATE_ABOVE {
            let opened =
                Frame::new(FrameKind::Opened, self.next_seq - 1, now.wall_ms, self.boot_id.as_bytes().to_vec());
            let acked = Frame::new(FrameKind::Acked, self.acked, now.wall_ms, Vec::new());
            self.log.replace(&[opened, acked])?;
            self.noted = self.acked;
        } else if self.acked - self.noted >= NOTE_EVERY || (self.pending.is_empty() && self.acked > self.noted) {
            self.log.append(&Frame::new(FrameKind::Acked, self.acked, now.wall_ms, Vec::new()))?;
            self.noted = self.acked;
        }
        Ok(())
    }

    /// Forces everything to the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn flush(&mut self) -> Result<(), SpoolError> {
        self.log.sync()
    }
}

/// Whether a report must be on the disk itself before it is answered: what a commit, a verdict or an end rests on.
/// Metric rows are left to the kernel's write-back: they survive the daemon, and a fsync per step would cost the step.
pub fn must_sync(report: &RankReport) -> bool {
    matches!(report.report, Some(Report::Shards(_) | Report::Finished(_) | Report::Exited(_)))
}

/// Whether a report is spooled at all; the others are lost when the stream breaks.
pub fn is_spooled(report: &RankReport) -> bool {
    matches!(
        report.report,
        Some(
            Report::Started(_)
                | Report::TrainRow(_)
                | Report::ValidationRow(_)
                | Report::Shards(_)
                | Report::SaveFailed(_)
                | Report::SaveSkipped(_)
                | Report::BurnIn(_)
                | Report::Finished(_)
                | Report::Exited(_)
        )
    )
}

fn save_of(report: &RankReport) -> Option<SaveOf> {
    match (&report.report, &report.fence) {
        (Some(Report::Shards(shards)), Some(fence)) => {
            let (job, generation) = (fence.job.clone(), fence.generation);
            Some(SaveOf { job, generation, kind: shards.kind, step: shards.step })
        }
        _ => None,
    }
}

fn exit_key(report: &RankReport) -> Option<(String, u64, u32)> {
    match (&report.report, &report.fence) {
        (Some(Report::Exited(_)), Some(fence)) => Some((fence.job.clone(), fence.generation, report.rank)),
        _ => None,
    }
}

fn exit_of(payload: &[u8]) -> Option<(String, u64, u32)> {
    RankReport::decode(payload).ok().as_ref().and_then(exit_key)
}

#[cfg(test)]
mod tests;
