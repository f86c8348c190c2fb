//! What the trainer is served over its inherited socketpair: its assignment, a place for its reports, the requests of
//! its coordinator, and rendezvous.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use futures::StreamExt as _;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use trainctl_proto::v1::rendezvous_server::RendezvousServer;
use trainctl_proto::v1::trainer_link_server::{TrainerLink, TrainerLinkServer};
use trainctl_proto::v1::{
    Assignment, AssignmentRequest, ControlRequest, Phase, Place, RankReport, ReportReply, Stacks, TrainerControl,
    WithdrawReply, WithdrawRequest, rank_report::Report, trainer_control,
};
use trainctl_runtime::page::Page;
use trainctl_runtime::rpc::MAX_MESSAGE_BYTES;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};

use super::lock;
use super::rendezvous::Forward;
use crate::session::machine::Event;
use crate::session::transport::Gateway;
use crate::spool::{self, SaveOf, SpoolHandle};

/// Requests that may wait for a trainer; all of them are repeatable, so what does not fit is dropped.
const CONTROL_QUEUE: usize = 64;

/// One trainer's line to its worker: what both sides of it share.
pub(super) struct Line {
    assignment: Assignment,
    spool: SpoolHandle,
    events: mpsc::Sender<Event>,
    phase: Mutex<Phase>,
    /// What the trainer writes where it is.
    page: Page,
    control: mpsc::Sender<TrainerControl>,
    controls: Mutex<Option<mpsc::Receiver<TrainerControl>>>,
    /// Whether it may have its assignment, and the log that it takes up if it was loaded before it had one.
    open: watch::Sender<Option<String>>,
    over: watch::Sender<Option<String>>,
    sealed: watch::Sender<bool>,
    stacks: Mutex<Option<oneshot::Sender<Stacks>>>,
    stepped: watch::Sender<bool>,
}

impl Line {
    /// # Errors
    /// The system gives no page.
    pub(super) fn new(assignment: Assignment, spool: SpoolHandle, events: mpsc::Sender<Event>) -> io::Result<Self> {
        let (control, controls) = mpsc::channel(CONTROL_QUEUE);
        Ok(Self {
            assignment,
            spool,
            events,
            phase: Mutex::new(Phase::Starting),
            page: Page::new()?,
            control,
            controls: Mutex::new(Some(controls)),
            open: watch::Sender::new(None),
            over: watch::Sender::new(None),
            sealed: watch::Sender::new(false),
            stacks: Mutex::default(),
            stepped: watch::Sender::new(false),
        })
    }

    /// The trainer's next answer about its threads. Who waited for an earlier one hears nothing more.
    pub(super) fn expect_stacks(&self) -> oneshot::Receiver<Stacks> {
        let (answer, expected) = oneshot::channel();
        *lock(&self.stacks) = Some(answer);
        expected
    }

    /// The start is reported: the trainer may have its assignment.
    pub(super) fn open(&self, log: Option<PathBuf>) {
        self.open.send_replace(Some(log.map(|log| log.display().to_string()).unwrap_or_default()));
    }

    /// Ends every waiting rendezvous call with this reason, now and from now on. The first reason stays.
    pub(super) fn over(&self, reason: &str) {
        self.over.send_if_modified(|over| {
            let first = over.is_none();
            if first {
                *over = Some(reason.to_owned());
            }
            first
        });
    }

    /// Whether it has done a step.
    pub(super) fn watch_stepped(&self) -> watch::Receiver<bool> {
        self.stepped.subscribe()
    }

    pub(super) fn watch_over(&self) -> watch::Receiver<Option<String>> {
        self.over.subscribe()
    }

    pub(super) fn is_sealed(&self) -> bool {
        *self.sealed.borrow()
    }

    /// Hands a request to the trainer.
    pub(super) fn control(&self, control: TrainerControl) {
        if matches!(control.request, Some(trainer_control::Request::Sealed(_))) {
            self.sealed.send_replace(true);
        }
        if let Err(error) = self.control.try_send(control) {
            tracing::warn!(%error, "the trainer takes no requests: one is dropped");
        }
    }

    /// Phase and last step.
    pub(super) fn progress(&self) -> (Phase, Option<u64>) {
        (*lock(&self.phase), self.place().filter(|place| place.steps > 0).map(|place| place.step))
    }

    /// Where the trainer is, once it has said so.
    pub(super) fn place(&self) -> Option<Place> {
        let record = self.page.read()?;
        let place = Place::decode(record.as_slice());
        let place = place.inspect_err(|error| tracing::warn!(%error, "the trainer's page is not understood")).ok()?;
        if place.steps > 0 && !*self.stepped.borrow() {
            self.stepped.send_replace(true);
        }
        Some(place)
    }

    pub(super) fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// A report of this rank. The worker, not the trainer, says whose it is.
    pub(super) fn report(&self, report: Report) -> RankReport {
        RankReport { fence: self.assignment.fence.clone(), rank: self.assignment.rank, report: Some(report) }
    }

    fn note(&self, report: &Report) {
        match report {
            Report::Phase(changed) => *lock(&self.phase) = changed.phase(),
            Report::Finished(_) => *lock(&self.phase) = Phase::Finished,
            _ => {}
        }
    }
}

/// Serves until dropped.
pub(super) struct Served {
    task: JoinHandle<()>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves the trainer at the other end of `socket`.
pub(super) fn serve(
    socket: UnixStream,
    line: Arc<Line>,
    gateway: Gateway,
    shutdown: &Shutdown,
) -> std::io::Result<Served> {
    let socket = tokio::net::UnixStream::from_std(socket)?;
    // One connection, and no end of the listener: its end would end the server.
    let incoming = futures::stream::iter([Ok::<_, std::io::Error>(socket)]).chain(futures::stream::pending());
    let link = TrainerLinkServer::new(Link(line.clone())).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let rendezvous = RendezvousServer::new(Forward::new(line, gateway)).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let server = tonic::transport::Server::builder().add_service(link).add_service(rendezvous);
    let kind = TaskKind { name: "trainer link", on_cancel: OnCancel::Finish, on_error: OnError::Log };
    Ok(Served { task: spawn(kind, shutdown, server.serve_with_incoming(incoming)) })
}

struct Link(Arc<Line>);

#[tonic::async_trait]
impl TrainerLink for Link {
    async fn get_assignment(&self, _: Request<AssignmentRequest>) -> Result<Response<Assignment>, Status> {
        let mut open = self.0.open.subscribe();
        let given_up = |_| Status::unavailable("the worker gave this trainer up");
        let log = open.wait_for(Option::is_some).await.map_err(given_up)?.clone().unwrap_or_default();
        let page = self.0.page.path().display().to_string();
        Ok(Response::new(Assignment { log, page, ..self.0.assignment.clone() }))
    }

    async fn report(&self, request: Request<RankReport>) -> Result<Response<ReportReply>, Status> {
        let Some(report) = request.into_inner().report else {
            return Err(Status::invalid_argument("RankReport.report is empty"));
        };
        if matches!(report, Report::Started(_) | Report::Exited(_)) {
            return Err(Status::invalid_argument("start and exit are the worker's to report"));
        }
        if let Report::Stacks(stacks) = report {
            let expected = lock(&self.0.stacks).take();
            if expected.is_none_or(|expected| expected.send(stacks).is_err()) {
                tracing::info!("stacks that nobody waits for any more");
            }
            return Ok(Response::new(ReportReply {}));
        }
        self.0.note(&report);
        let report = self.0.report(report);
        if spool::is_spooled(&report) {
            self.0.spool.append(report).await.map_err(|error| Status::resource_exhausted(error.to_string()))?;
        } else if self.0.events.send(Event::Said(report)).await.is_err() {
            return Err(Status::unavailable("the worker is shutting down"));
        }
        Ok(Response::new(ReportReply {}))
    }

    async fn withdraw(&self, request: Request<WithdrawRequest>) -> Result<Response<WithdrawReply>, Status> {
        let WithdrawRequest { kind, steps } = request.into_inner();
        let fence = self.0.assignment.fence.clone().unwrap_or_default();
        let save = |step| SaveOf { job: fence.job.clone(), generation: fence.generation, kind, step };
        let withdrawn = self.0.spool.withdraw(steps.into_iter().map(save).collect()).await;
        let withdrawn = withdrawn.map_err(|error| Status::resource_exhausted(error.to_string()))?;
        Ok(Response::new(WithdrawReply { steps: withdrawn.into_iter().map(|save| save.step).collect() }))
    }

    type ControlStream = futures::stream::BoxStream<'static, Result<TrainerControl, Status>>;

    async fn control(&self, _: Request<ControlRequest>) -> Result<Response<Self::ControlStream>, Status> {
        let controls = lock(&self.0.controls).take();
        let controls = controls.ok_or_else(|| Status::failed_precondition("Control was called before"))?;
        Ok(Response::new(ReceiverStream::new(controls).map(Ok).boxed()))
    }
}
