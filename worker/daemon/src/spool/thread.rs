//! The thread that owns the spool, and the handle that everybody else holds.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use trainctl_proto::v1::RankReport;
use trainctl_runtime::clock::Clock;

use super::{Now, Record, SaveOf, Spool, SpoolError};

/// Requests that may wait for the disk before callers wait too.
const QUEUE: usize = 1_024;

/// Where the spool stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Highest number given.
    pub last: u64,
    /// Highest number acknowledged.
    pub acked: u64,
    /// Records that wait for an acknowledgement.
    pub waiting: usize,
}

enum Request {
    Append(Box<RankReport>, oneshot::Sender<Result<u64, SpoolError>>),
    Read { after: u64, max_records: usize, max_bytes: usize, reply: oneshot::Sender<Result<Vec<Record>, SpoolError>> },
    Ack { spool: String, up_to: u64 },
    Withdraw(Vec<SaveOf>, oneshot::Sender<Result<Vec<SaveOf>, SpoolError>>),
    Flush(oneshot::Sender<Result<(), SpoolError>>),
}

/// Handle of the spool's thread. The thread ends when the last handle is dropped.
#[derive(Clone)]
pub struct SpoolHandle {
    requests: mpsc::Sender<Request>,
    status: watch::Receiver<Status>,
    id: Arc<str>,
}

impl SpoolHandle {
    /// Opens the spool and starts its thread.
    ///
    /// # Errors
    /// [`SpoolError::Io`] when it cannot be opened or the thread cannot be made.
    pub fn start(
        path: &Path,
        fresh_id: &str,
        boot_id: &str,
        clock: Arc<dyn Clock>,
    ) -> Result<(Self, Spooled), SpoolError> {
        let spool = Spool::open(path, fresh_id, boot_id, now(clock.as_ref()))?;
        let spooled = Spooled { last_exit: spool.last_exit.clone() };
        let (requests, mut receiver) = mpsc::channel(QUEUE);
        let (status_tx, status) = watch::channel(status_of(&spool));
        let id = Arc::from(spool.id());
        let thread = std::thread::Builder::new().name("spool".to_owned());
        thread
            .spawn(move || serve(spool, &mut receiver, &status_tx, clock.as_ref()))
            .map_err(|source| SpoolError::Io { action: "start the thread of", path: path.to_path_buf(), source })?;
        Ok((Self { requests, status, id }, spooled))
    }

    /// The spool's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Where the spool stands now.
    pub fn status(&self) -> Status {
        *self.status.borrow()
    }

    /// Follows where the spool stands.
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Appends a report; it is stored when this returns.
    ///
    /// # Errors
    /// As [`Spool::append`], or [`SpoolError::Closed`].
    pub async fn append(&self, report: RankReport) -> Result<u64, SpoolError> {
        let (reply, answer) = oneshot::channel();
        self.request(Request::Append(Box::new(report), reply)).await?;
        answer.await.map_err(|_| SpoolError::Closed)?
    }

    /// [`append`](Self::append) for a thread outside the async runtime.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn append_blocking(&self, report: RankReport) -> Result<u64, SpoolError> {
        let (reply, answer) = oneshot::channel();
        self.requests.blocking_send(Request::Append(Box::new(report), reply)).map_err(|_| SpoolError::Closed)?;
        answer.blocking_recv().map_err(|_| SpoolError::Closed)?
    }

    /// As [`Spool::read`].
    ///
    /// # Errors
    /// As [`Spool::read`], or [`SpoolError::Closed`].
    pub async fn read(&self, after: u64, max_records: usize, max_bytes: usize) -> Result<Vec<Record>, SpoolError> {
        let (reply, answer) = oneshot::channel();
        self.request(Request::Read { after, max_records, max_bytes, reply }).await?;
        answer.await.map_err(|_| SpoolError::Closed)?
    }

    /// Notes an acknowledgement. When the disk's queue is full it is dropped: a later one covers it.
    pub fn ack(&self, spool: String, up_to: u64) {
        if self.requests.try_send(Request::Ack { spool, up_to }).is_err() {
            tracing::debug!(up_to, "spool busy: acknowledgement dropped, a later one covers it");
        }
    }

    /// As [`Spool::withdraw`].
    ///
    /// # Errors
    /// As [`Spool::withdraw`], or [`SpoolError::Closed`].
    pub async fn withdraw(&self, saves: Vec<SaveOf>) -> Result<Vec<SaveOf>, SpoolError> {
        let (reply, answer) = oneshot::channel();
        self.request(Request::Withdraw(saves, reply)).await?;
        answer.await.map_err(|_| SpoolError::Closed)?
    }

    /// Forces everything to the disk.
    ///
    /// # Errors
    /// [`SpoolError`].
    pub async fn flush(&self) -> Result<(), SpoolError> {
        let (reply, answer) = oneshot::channel();
        self.request(Request::Flush(reply)).await?;
        answer.await.map_err(|_| SpoolError::Closed)?
    }

    async fn request(&self, request: Request) -> Result<(), SpoolError> {
        self.requests.send(request).await.map_err(|_| SpoolError::Closed)
    }
}

/// What an opened spool remembers of a predecessor.
#[derive(Clone, Debug, Default)]
pub struct Spooled {
    last_exit: Option<(String, u64, u32)>,
}

impl Spooled {
    /// Whether this trainer's exit was spooled.
    pub fn knows_exit(&self, job: &str, generation: u64, rank: u32) -> bool {
        self.last_exit.as_ref().is_some_and(|(j, g, r)| j == job && *g == generation && *r == rank)
    }
}

fn serve(mut spool: Spool, requests: &mut mpsc::Receiver<Request>, status: &watch::Sender<Status>, clock: &dyn Clock) {
    while let Some(request) = requests.blocking_recv() {
        let now = now(clock);
        match request {
            Request::Append(report, reply) => {
                let result = spool.append(&report, now);
                if let Err(error) = &result {
                    tracing::error!(%error, "a report could not be spooled");
                }
                status.send_replace(status_of(&spool));
                answer(reply, result);
            }
            Request::Read { after, max_records, max_bytes, reply } => {
                answer(reply, spool.read(after, max_records, max_bytes, now));
            }
            Request::Ack { spool: id, up_to } => {
                if let Err(error) = spool.ack(&id, up_to, now) {
                    tracing::warn!(%error, "an acknowledgement could not be noted; records may be sent twice");
                }
                status.send_replace(status_of(&spool));
            }
            Request::Withdraw(saves, reply) => {
                let withdrawn = spool.withdraw(&saves, now);
                status.send_replace(status_of(&spool));
                answer(reply, withdrawn);
            }
            Request::Flush(reply) => answer(reply, spool.flush()),
        }
    }
    if let Err(error) = spool.flush() {
        tracing::error!(%error, "the spool could not be flushed");
    }
}

/// The asker may have gone; then nobody wants the answer.
fn answer<T>(reply: oneshot::Sender<T>, value: T) {
    drop(reply.send(value));
}

fn status_of(spool: &Spool) -> Status {
    Status { last: spool.last_seq(), acked: spool.acked(), waiting: spool.len() }
}

fn now(clock: &dyn Clock) -> Now {
    Now { monotonic: clock.now(), wall_ms: clock.wall_ms() }
}
