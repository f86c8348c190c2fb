//! The words of the core: what happens to it, and what it wants done.

use trainctl_proto::v1;
use trainctl_spec::{Generation, JobId, JobSpec};
use trainctl_store::layout::CheckpointName;

use super::SessionId;
use crate::exports::ExportResult;
use crate::hooks::{HookRequest, HookResult};
use crate::record::{JobRecord, WorkerRecord};
use crate::run_io::{IoRequest, IoResult};

/// What happens to a coordinator.
#[derive(Debug)]
pub enum Event {
    /// A job was admitted and its run directory is ours.
    Admitted {
        /// The new job.
        record: Box<JobRecord>,
        /// Its resolved spec.
        spec: Box<JobSpec>,
    },
    /// A person stops a job.
    Cancel {
        /// Job.
        job: JobId,
        /// Save first.
        save: bool,
    },
    /// A person takes a worker out of service.
    Quarantine {
        /// The worker.
        worker: String,
        /// For people.
        reason: String,
        /// Give up the rank that it carries too.
        now: bool,
    },
    /// A person lets a worker take ranks again.
    Release {
        /// The worker.
        worker: String,
    },
    /// A worker's stream opened.
    Hello {
        /// The stream.
        session: SessionId,
        /// What the worker said of itself.
        hello: Box<v1::Hello>,
    },
    /// Any later message of a stream.
    Message {
        /// The stream.
        session: SessionId,
        /// The message.
        message: Box<v1::WorkerMessage>,
    },
    /// A stream ended.
    Gone {
        /// The stream.
        session: SessionId,
    },
    /// The run directory's task did something.
    Io {
        /// Job.
        job: JobId,
        /// What came of it.
        result: Box<IoResult>,
    },
    /// One of a person's commands is over.
    Hook {
        /// Job.
        job: JobId,
        /// What came of it.
        result: HookResult,
    },
    /// An export is over.
    Exported {
        /// Job.
        job: JobId,
        /// What came of it.
        result: ExportResult,
    },
    /// Time passed.
    Tick,
}

/// What the owner task must do, in order.
#[derive(Debug)]
pub enum Effect {
    /// Write the record durably before anything that follows.
    Journal(Box<JobRecord>),
    /// The same of a worker.
    JournalWorker(Box<WorkerRecord>),
    /// Send to a worker.
    Send {
        /// The stream.
        session: SessionId,
        /// The message.
        message: Box<v1::coordinator_message::Body>,
    },
    /// End a stream.
    Close {
        /// The stream.
        session: SessionId,
    },
    /// Hand to the run directory's task.
    Io {
        /// Job.
        job: JobId,
        /// The request.
        request: Box<IoRequest>,
    },
    /// Hand to the task that runs the job's commands.
    Hook {
        /// Job.
        job: JobId,
        /// The request.
        request: HookRequest,
    },
    /// Write a Hugging Face directory into a checkpoint.
    Export {
        /// Job.
        job: JobId,
        /// The checkpoint.
        checkpoint: CheckpointName,
    },
    /// Open, seal or end a rendezvous store.
    Rendezvous {
        /// Job.
        job: JobId,
        /// Generation.
        generation: Generation,
        /// What to do.
        change: StoreChange,
    },
    /// Show the job's state to those who watch it.
    Publish(Box<v1::Job>),
    /// The job is over: release its run directory, and stop what it still exports.
    Release(JobId),
    /// The run directory is released: nothing more is asked of its task.
    Leave(JobId),
}

/// What becomes of a rendezvous store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreChange {
    /// A generation begins to form.
    Open,
    /// Every rank is formed.
    Seal,
    /// The generation is over.
    Close(String),
}
