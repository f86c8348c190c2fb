//! Reports to the worker, in the order in which the engine makes them.
//!
//! The engine's calls only queue. One task sends each report and waits for its reply before the next, so the order holds
//! and a spooled report is on the worker's disk before anything later is said. While the worker's disk is full a report is
//! tried again: a metric row is the last thing to be dropped (P5). Only a queue that is full makes the engine wait. Steps are
//! no reports: they stand in a page that the worker reads ([`Whereabouts`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tonic::Code;
use trainctl_engine::{Error, FailedSave, Finished, Link as EngineLink, Requests};
use trainctl_proto::v1::{self, PhaseChanged, RankReport, rank_report::Report};
use trainctl_spec::Step;
use trainctl_spec::report::{BurnInReport, Phase, SaveKind, ShardReport, TrainRow, ValidationRow};

use crate::ending::Ending;
use crate::link::Link;
use crate::requests::Pending;
use crate::whereabouts::Whereabouts;

/// Reports that may wait for the worker: some thousand steps.
const QUEUE: usize = 8_192;
/// Pause before a report is tried again that the worker could not store.
const RETRY: Duration = Duration::from_secs(1);

/// How long a save that is under way may take after the engine has failed.
const LAST_SAVE: Duration = Duration::from_secs(30);
/// How long the worker may take to withdraw reports; files of which it says nothing stay until the next commit.
const WITHDRAW: Duration = Duration::from_secs(5);
/// Pause between two looks whether it has ended.
const POLL: Duration = Duration::from_millis(2);

enum Item {
    Report(Box<Report>),
    /// Answered once everything before it is delivered, or with why it cannot be.
    Flush(oneshot::Sender<Result<(), String>>),
}

/// The engine's link to its worker.
pub(crate) struct Reporter {
    queue: mpsc::Sender<Item>,
    client: Client,
    runtime: Handle,
    requests: Arc<Pending>,
    whereabouts: Arc<Whereabouts>,
    closed: AtomicBool,
    /// The phase that was reported last.
    phase: AtomicI32,
}

impl Reporter {
    /// Starts the sending task on the link's threads.
    pub(crate) fn start(link: &Link, requests: Arc<Pending>, whereabouts: Arc<Whereabouts>) -> Self {
        let (queue, items) = mpsc::channel(QUEUE);
        let (client, runtime) = (link.client(), link.handle());
        runtime.spawn(send_all(client.clone(), items));
        let (closed, phase) = (AtomicBool::new(false), AtomicI32::default());
        Self { queue, client, runtime, requests, whereabouts, closed, phase }
    }

    /// Reports the finish; returns once the worker has it and everything before.
    pub(crate) fn finish(&self, finished: &Finished) -> Result<(), Ending> {
        let cause = v1::FinishCause::from(finished.cause).into();
        self.report(Report::Finished(v1::Finished { steps_done: finished.next_step.0, cause }));
        self.flush()
    }

    /// After the engine has failed: waits for threads of it that still hold the link (a save that is under way, whose
    /// shards are worth a report), for 30 s at most, and delivers what was reported. Were the process to end under such a
    /// thread, libtorch's own destructors would pull the tensors from under it, and a consequence would look like a crash.
    pub(crate) fn close(self: &Arc<Self>) -> Result<(), Ending> {
        let started = Instant::now();
        while Arc::strong_count(self) > 1 && started.elapsed() < LAST_SAVE {
            std::thread::sleep(POLL);
        }
        self.closed.store(true, Ordering::Release);
        self.flush()
    }

    /// Returns once the worker has everything that was reported.
    pub(crate) fn flush(&self) -> Result<(), Ending> {
        let lost = |why: &str| Ending::peer_lost(format!("the worker does not take reports any more: {why}"));
        let (reply, answer) = oneshot::channel();
        self.queue.blocking_send(Item::Flush(reply)).map_err(|_| lost("the link has ended"))?;
        answer.blocking_recv().map_err(|_| lost("the link has ended"))?.map_err(|why| lost(&why))
    }

    fn report(&self, report: Report) {
        if self.queue.blocking_send(Item::Report(Box::new(report))).is_err() {
            if self.closed.load(Ordering::Acquire) {
                tracing::debug!("a late report was dropped: the link has ended");
            } else {
                tracing::error!("a report was dropped: the link has ended");
            }
        }
    }
}

impl EngineLink for Reporter {
    fn phase(&self, phase: Phase, _: Step) {
        let phase = v1::Phase::from(phase).into();
        // The engine names it at each step; the worker is told of changes.
        if self.phase.swap(phase, Ordering::AcqRel) != phase {
            self.report(Report::Phase(PhaseChanged { phase }));
        }
    }

    fn save_begins(&self) {
        self.requests.save_begins();
    }

    fn formed(&self) {
        self.report(Report::Formed(v1::Formed {}));
    }

    fn burned_in(&self, report: BurnInReport) {
        self.report(Report::BurnIn((&report).into()));
    }

    fn step_done(&self, step: Step, compute: Duration) {
        self.whereabouts.step_done(step, compute);
    }

    fn train_row(&self, row: TrainRow) {
        self.report(Report::TrainRow((&row).into()));
    }

    fn validation_row(&self, row: ValidationRow) {
        self.report(Report::ValidationRow((&row).into()));
    }

    fn shards_durable(&self, report: ShardReport) {
        match v1::ShardsDurable::try_from(&report) {
            Ok(shards) => self.report(Report::Shards(shards)),
            Err(error) => tracing::error!(%error, checkpoint = report.checkpoint, "the shards cannot be reported"),
        }
    }

    fn save_failed(&self, failed: FailedSave) {
        let FailedSave { kind, step, attempt, is_tried_again: tried_again, why } = failed;
        tracing::error!(?kind, step = step.0, attempt, why, "save failed; the run goes on on the last commit");
        let kind = v1::SaveKind::from(kind).into();
        self.report(Report::SaveFailed(v1::SaveFailed { step: step.0, error: why, kind, attempt, tried_again }));
    }

    fn withdraw(&self, kind: SaveKind, steps: &[Step]) -> Vec<Step> {
        let steps = steps.iter().map(|step| step.0).collect();
        let request = v1::WithdrawRequest { kind: v1::SaveKind::from(kind).into(), steps };
        let (mut client, (reply, answer)) = (self.client.clone(), std::sync::mpsc::sync_channel(1));
        self.runtime.spawn(async move {
            // Nobody waits any more after the time is over.
            drop(reply.send(client.withdraw(request).await));
        });
        match answer.recv_timeout(WITHDRAW) {
            Ok(Ok(withdrawn)) => withdrawn.into_inner().steps.into_iter().map(Step).collect(),
            Ok(Err(status)) => {
                tracing::warn!(why = status.message(), "the worker withdraws no reports");
                Vec::new()
            }
            Err(_) => {
                tracing::warn!("the worker does not say whether it withdraws reports");
                Vec::new()
            }
        }
    }

    fn save_skipped(&self, kind: SaveKind, step: Step, why: &str) {
        tracing::warn!(?kind, step = step.0, why, "save left out");
        let kind = v1::SaveKind::from(kind).into();
        self.report(Report::SaveSkipped(v1::SaveSkipped { step: step.0, reason: why.to_owned(), kind }));
    }

    fn requests(&self) -> Requests {
        self.requests.now()
    }

    fn failed(&self, error: Option<&Error>) {
        // What was reported before counts too.
        if let Err(lost) = self.flush() {
            tracing::error!(?lost, "the last reports are lost");
        }
        error.map_or_else(Ending::panicked, Ending::from).end_at_once()
    }
}

type Client = v1::trainer_link_client::TrainerLinkClient<tonic::transport::Channel>;

async fn send_all(mut client: Client, mut items: mpsc::Receiver<Item>) {
    let mut broken: Option<String> = None;
    while let Some(item) = items.recv().await {
        match item {
            Item::Report(report) => {
                if broken.is_none()
                    && let Err(why) = send(&mut client, *report).await
                {
                    tracing::error!(%why, "the worker takes no more reports");
                    broken = Some(why);
                }
            }
            Item::Flush(reply) => {
                let outcome = broken.clone().map_or(Ok(()), Err);
                if reply.send(outcome).is_err() {
                    tracing::debug!("nobody waits for the reports any more");
                }
            }
        }
    }
}

/// Sends one report until the worker has it. The worker fills in whose it is.
async fn send(client: &mut Client, report: Report) -> Result<(), String> {
    let message = RankReport { fence: None, rank: 0, report: Some(report) };
    loop {
        match client.report(message.clone()).await {
            Ok(_) => return Ok(()),
            Err(status) if status.code() == Code::ResourceExhausted => {
                tracing::warn!(why = status.message(), "the worker cannot store a report; trying again");
                tokio::time::sleep(RETRY).await;
            }
            Err(status) => return Err(format!("{:?}: {}", status.code(), status.message())),
        }
    }
}
