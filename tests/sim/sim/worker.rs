//! A worker: the real session machine, with a spool, a trainer and a stream that are modelled.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use trainctl_proto::v1;
use trainctl_worker::session::machine::Machine;
use trainctl_worker::state::Fences;

use crate::training::End;
use crate::world::Tag;

/// A record that must not be lost.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) seq: u64,
    pub(crate) at: u64,
    pub(crate) report: v1::RankReport,
}

/// The trainer that a worker runs.
#[derive(Clone, Debug)]
pub(crate) struct Trainer {
    pub(crate) tag: Tag,
    pub(crate) fence: v1::Fence,
    pub(crate) rank: u32,
    /// Last step that it did.
    pub(crate) step: Option<u64>,
    /// How many it has done.
    pub(crate) steps: u64,
    /// How it has ended, while it is cleaned up after.
    pub(crate) end: Option<End>,
}

/// What a worker has done by order: kept by the world, to hold the worker against it.
#[derive(Debug, Default)]
pub(crate) struct Deeds {
    /// The highest term of a command that was carried out, by run.
    pub(crate) term: BTreeMap<String, u64>,
    /// The generation that was started last, by run.
    pub(crate) generation: BTreeMap<String, u64>,
    /// The first answer to each command of this life (W1).
    pub(crate) answers: BTreeMap<String, v1::CommandResult>,
    /// Commands that have started a trainer.
    pub(crate) starts: BTreeSet<String>,
}

/// One worker.
pub(crate) struct Worker {
    pub(crate) id: String,
    pub(crate) machine: Machine,
    /// New at each start; events of an earlier one are dropped.
    pub(crate) incarnation: u64,
    pub(crate) is_up: bool,
    /// It will not come back.
    pub(crate) is_gone: bool,
    /// The stream that it dials or has.
    pub(crate) stream: Option<u64>,
    pub(crate) is_connected: bool,
    pub(crate) trainer: Option<Trainer>,
    /// An assignment whose trainer is about to exist.
    pub(crate) starting: Option<v1::Assignment>,
    /// It does nothing before.
    pub(crate) frozen_until: u64,
    /// Nothing passes from a coordinator to it before.
    pub(crate) cut_to_until: u64,
    /// Nor from it to a coordinator.
    pub(crate) cut_from_until: u64,
    /// Its clock began so long before the world's.
    pub(crate) offset: u64,
    pub(crate) heard_at: u64,
    /// When it last ticked, and since when it has had no stream.
    pub(crate) ticked_at: u64,
    pub(crate) idle_since: u64,
    pub(crate) deeds: Deeds,
    // What survives a kill of the daemon.
    pub(crate) fences: Fences,
    pub(crate) spool: Vec<Record>,
    pub(crate) last_seq: u64,
    pub(crate) acked: u64,
    /// Records that were sent over the present stream; absent before its Welcome.
    pub(crate) sent: Option<u64>,
    pub(crate) retry_ms: u64,
}

/// The run directory of an assignment, by its job.
pub(crate) fn run_of(assignment: &v1::Assignment) -> Result<String, String> {
    let job = assignment.fence.as_ref().map(|fence| fence.job.clone());
    job.ok_or_else(|| "an assignment without a fence".to_owned())
}

impl Worker {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            id: format!("w{number:02}"),
            machine: Machine::new(Fences::default(), run_of),
            incarnation: 1,
            is_up: true,
            is_gone: false,
            stream: None,
            is_connected: false,
            trainer: None,
            starting: None,
            frozen_until: 0,
            cut_to_until: 0,
            cut_from_until: 0,
            offset: 7_000 * number as u64,
            heard_at: 0,
            ticked_at: 0,
            idle_since: 0,
            deeds: Deeds::default(),
            fences: Fences::default(),
            spool: Vec::new(),
            last_seq: 0,
            acked: 0,
            sent: None,
            retry_ms: 100,
        }
    }

    /// The daemon starts again with what its predecessor had made durable.
    pub(crate) fn restart(&mut self, now: u64) {
        self.machine = Machine::new(self.fences.clone(), run_of);
        self.is_up = true;
        (self.stream, self.is_connected, self.sent, self.retry_ms) = (None, false, None, 100);
        self.deeds.answers.clear();
        (self.ticked_at, self.idle_since) = (now, now);
    }

    pub(crate) fn hello(&self, dialled_at_ms: u64) -> v1::Hello {
        v1::Hello {
            dialled_at_ms,
            worker_id: self.id.clone(),
            incarnation: format!("{}-{}", self.id, self.incarnation),
            host: "h".to_owned(),
            boot_id: "m".to_owned(),
            address: "127.0.0.1".to_owned(),
            spool: format!("{}-spool", self.id),
            running: self.machine.running(),
            spooled_up_to: self.last_seq,
            acked_up_to: self.acked,
            term: self.machine.fences().latest_term(),
            ..v1::Hello::default()
        }
    }

    /// Makes a record durable.
    pub(crate) fn append(&mut self, at: u64, report: v1::RankReport) {
        self.last_seq += 1;
        self.spool.push(Record { seq: self.last_seq, at, report });
    }

    /// Records to send now, if the stream is welcome.
    pub(crate) fn pumped(&mut self, now: u64) -> Vec<v1::WorkerMessage> {
        let Some(sent) = self.sent else { return Vec::new() };
        let records = self.spool.iter().filter(|record| record.seq > sent);
        let message = |record: &Record| v1::WorkerMessage {
            seq: record.seq,
            age_ms: now - record.at,
            body: Some(v1::worker_message::Body::RankReport(record.report.clone())),
        };
        let messages = records.map(message).collect();
        self.sent = Some(self.last_seq);
        messages
    }

    pub(crate) fn acknowledge(&mut self, up_to: u64) {
        assert!(up_to <= self.last_seq, "S: an acknowledgement of what was never sent");
        self.acked = self.acked.max(up_to);
        self.spool.retain(|record| record.seq > up_to);
    }

    /// Back-off of dials: a second at most.
    pub(crate) fn next_retry(&mut self) -> Duration {
        let now = self.retry_ms;
        self.retry_ms = (2 * now).min(1000);
        Duration::from_millis(now)
    }
}
