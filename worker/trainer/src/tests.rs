//! The trainer's side of the link against a real server at the other end of a real socketpair.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use futures::stream::BoxStream;
use prost::Message as _;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};
use trainctl_collective::{KeyValue, KvErrorKind};
use trainctl_engine::{Finished, Link as _, Requests};
use trainctl_proto::v1;
use trainctl_proto::v1::rank_report::Report;
use trainctl_proto::v1::rendezvous_server::{Rendezvous, RendezvousServer};
use trainctl_proto::v1::trainer_link_server::{TrainerLink, TrainerLinkServer};
use trainctl_proto::v1::{
    Assignment, AssignmentRequest, ControlRequest, Fence, KvAdd, KvCompareSet, KvEmpty, KvFlag, KvGet, KvKeys,
    KvNumber, KvSet, KvValue, RankReport, ReportReply, SaveRequest, Sealed, StopRequest, TrainerControl, WithdrawReply,
    WithdrawRequest, trainer_control,
};
use trainctl_runtime::page::Page;
use trainctl_spec::Step;
use trainctl_spec::report::{FinishCause, Phase, SaveKind, TrainRow};

use crate::ending::Ending;
use crate::link::Link;
use crate::rendezvous::Forwarded;
use crate::reporter::Reporter;
use crate::requests::Pending;
use crate::whereabouts::Whereabouts;

const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Shared {
    reports: Vec<Report>,
    /// So many reports are refused first, as by a full disk.
    refuse: usize,
    over: bool,
}

#[derive(Clone)]
struct Worker {
    shared: Arc<(Mutex<Shared>, Condvar)>,
    controls: Arc<Mutex<Option<mpsc::Receiver<TrainerControl>>>>,
}

/// A worker and the trainer's link to it.
struct Pair {
    worker: Worker,
    control: mpsc::Sender<TrainerControl>,
    server: Option<Runtime>,
    link: Link,
    requests: Arc<Pending>,
    page: Page,
}

fn fence() -> Option<Fence> {
    Some(Fence { job: "j".to_owned(), generation: 7, term: 5 })
}

fn pair() -> Pair {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let (control, controls) = mpsc::channel(8);
    let worker = Worker { shared: Arc::default(), controls: Arc::new(Mutex::new(Some(controls))) };
    let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let service = worker.clone();
    server.spawn(async move {
        let socket = tokio::net::UnixStream::from_std(ours).unwrap();
        let incoming = futures::stream::iter([Ok::<_, std::io::Error>(socket)]).chain(futures::stream::pending());
        let builder = tonic::transport::Server::builder().add_service(TrainerLinkServer::new(service.clone()));
        builder.add_service(RendezvousServer::new(service)).serve_with_incoming(incoming).await.unwrap();
    });
    let link = Link::over(theirs).map_err(|ending| format!("{ending:?}")).unwrap();
    let requests = Arc::new(Pending::default());
    link.follow_requests(requests.clone());
    Pair { worker, control, server: Some(server), link, requests, page: Page::new().unwrap() }
}

impl Pair {
    fn rendezvous(&self) -> Forwarded {
        let assignment = self.link.assignment().unwrap();
        Forwarded::new(&self.link, &assignment, self.requests.clone())
    }

    fn reporter(&self) -> Reporter {
        let whereabouts = Whereabouts::open(&self.page.path(), Arc::default()).map_err(|ending| format!("{ending:?}"));
        Reporter::start(&self.link, self.requests.clone(), Arc::new(whereabouts.unwrap()))
    }

    fn ask(&self, request: trainer_control::Request) {
        self.control.blocking_send(TrainerControl { fence: fence(), request: Some(request) }).unwrap();
    }

    fn reports(&self) -> Vec<Report> {
        self.worker.shared.0.lock().unwrap().reports.clone()
    }
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn row(step: u64) -> TrainRow {
    TrainRow {
        step,
        epoch: 0,
        timestamp: "2026-11-29T22:31:14.123Z".to_owned(),
        loss: 2.5,
        grad_norm: 1.0,
        lr: 1e-3,
        mem: 0.0,
        tps: 10.0,
        tps_per_gpu: 5.0,
        mfu: None,
        num_tokens_per_step: 64,
        num_label_tokens: 64,
        generation: 7,
    }
}

#[test]
fn reports_arrive_in_order_and_a_full_disk_is_waited_for() {
    let pair = pair();
    pair.worker.shared.0.lock().unwrap().refuse = 1;
    let reporter = pair.reporter();
    reporter.phase(Phase::Stepping, Step(0));
    for step in 0..200 {
        reporter.train_row(row(step));
    }
    let finished = Finished { cause: FinishCause::Complete, next_step: Step(200), last_loss: Some(2.5) };
    reporter.finish(&finished).unwrap();
    let reports = pair.reports();
    assert_eq!(reports.len(), 202, "finish returns when the worker has everything");
    assert!(matches!(reports[0], Report::Phase(_)));
    for step in 0..200 {
        let at = 1 + usize::try_from(step).unwrap();
        assert!(matches!(&reports[at], Report::TrainRow(row) if row.step == step), "{at}");
    }
    assert!(matches!(&reports[201], Report::Finished(finished) if finished.steps_done == 200));
}

#[test]
fn j5_the_page_has_the_newest_step_before_anything_else_happens() {
    let pair = pair();
    let place = || v1::Place::decode(pair.page.read().unwrap().as_slice()).unwrap();
    let reporter = pair.reporter();
    for step in 3..43 {
        reporter.step_done(Step(step), Duration::from_millis(step));
        assert_eq!((place().step, place().steps), (step, step - 2));
    }
    let times = place().compute_seconds;
    assert_eq!((times.len(), times.first().copied(), times.last().copied()), (32, Some(0.011), Some(0.042)));
    assert_eq!((place().beats, place().progress), (0, None));
    let whereabouts = Arc::new(Whereabouts::open(&pair.page.path(), Arc::default()).map_err(drop).unwrap());
    pair.link.keep_beating(whereabouts);
    eventually("a second beat of the link's own thread", || place().beats == 2);
    assert!(place().progress.is_some());
}

#[test]
fn a_lost_worker_is_a_lost_peer() {
    let mut pair = pair();
    let reporter = pair.reporter();
    reporter.train_row(row(0));
    reporter.flush().unwrap();
    pair.server.take().unwrap().shutdown_timeout(Duration::from_millis(100));
    reporter.train_row(row(1));
    let ending = reporter.flush().unwrap_err();
    assert_eq!(ending, Ending::peer_lost(ending.message().to_owned()));
    assert!(ending.message().contains("the worker does not take reports"), "{ending:?}");
}

#[test]
fn the_worker_says_which_reports_it_withdraws() {
    let mut pair = pair();
    let reporter = pair.reporter();
    let steps = [Step(9), Step(19)];
    assert_eq!(reporter.withdraw(SaveKind::Full, &steps), [Step(19)]);
    assert_eq!(reporter.withdraw(SaveKind::Weights, &steps), [], "a worker that can not");
    pair.server.take().unwrap().shutdown_timeout(Duration::from_millis(100));
    assert_eq!(reporter.withdraw(SaveKind::Full, &steps), [], "a worker that is gone");
}

/// A save that was under way when the engine failed is waited for and its report delivered.
#[test]
fn what_still_runs_after_a_failure_is_waited_for() {
    let pair = pair();
    let reporter = Arc::new(pair.reporter());
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let saving: Arc<dyn trainctl_engine::Link> = reporter.clone();
    let save = std::thread::spawn(move || {
        wait.recv().unwrap();
        saving.train_row(row(7));
    });
    let closing = std::thread::spawn(move || reporter.close());
    go.send(()).unwrap();
    closing.join().unwrap().unwrap();
    save.join().unwrap();
    assert!(matches!(&pair.reports()[..], [Report::TrainRow(row)] if row.step == 7), "{:?}", pair.reports());
}

#[test]
fn requests_come_in_band_and_a_save_answers_the_save_request() {
    let pair = pair();
    let reporter = pair.reporter();
    assert_eq!(reporter.requests(), Requests::default());
    pair.ask(trainer_control::Request::Save(SaveRequest {}));
    eventually("the save request", || reporter.requests() == Requests { stop: false, save: true });
    pair.ask(trainer_control::Request::Stop(StopRequest {}));
    eventually("the stop request", || reporter.requests() == Requests { stop: true, save: true });
    reporter.phase(Phase::Saving, Step(3));
    assert!(reporter.requests().save, "a save of weights alone answers nothing");
    reporter.save_begins();
    assert_eq!(reporter.requests(), Requests { stop: true, save: false });
}

#[test]
fn keys_go_through_the_worker_until_the_store_is_sealed() {
    let pair = pair();
    let keys = pair.rendezvous();
    keys.set("a", b"1").unwrap();
    assert_eq!(keys.get("a", PATIENCE).unwrap(), b"a at 30000 ms of generation 7");
    assert_eq!(keys.add("n", 5).unwrap(), 6);
    assert!(keys.check(&["a", "b"]).unwrap());
    keys.wait(&["a"], PATIENCE).unwrap();
    assert!(keys.delete("a").unwrap());
    assert_eq!(keys.compare_set("a", b"", b"2").unwrap(), b"2");
    assert_eq!(keys.num_keys().unwrap(), 4);
    let late = keys.get("never", PATIENCE).unwrap_err();
    assert_eq!((late.kind, late.message.as_str()), (KvErrorKind::Timeout, "get never: not in time"));

    pair.worker.shared.0.lock().unwrap().over = true;
    let over = keys.get("a", PATIENCE).unwrap_err();
    assert_eq!(over.kind, KvErrorKind::Closed);
    assert!(over.message.contains("generation 7 is over"), "{over}");

    pair.worker.shared.0.lock().unwrap().over = false;
    pair.ask(trainer_control::Request::Sealed(Sealed {}));
    eventually("the seal", || pair.requests.is_sealed());
    for refused in [
        keys.set("a", b"1"),
        keys.get("a", PATIENCE).map(drop),
        keys.add("n", 1).map(drop),
        keys.wait(&["a"], PATIENCE),
    ] {
        let error = refused.unwrap_err();
        assert!(error.kind == KvErrorKind::Closed && error.message.contains("sealed"), "{error}");
    }
    assert!(!keys.check(&["a"]).unwrap());
}

#[tonic::async_trait]
impl TrainerLink for Worker {
    async fn get_assignment(&self, _: Request<AssignmentRequest>) -> Result<Response<Assignment>, Status> {
        Ok(Response::new(Assignment { fence: fence(), ..Assignment::default() }))
    }

    async fn report(&self, request: Request<RankReport>) -> Result<Response<ReportReply>, Status> {
        let mut shared = self.shared.0.lock().unwrap();
        if shared.refuse > 0 {
            shared.refuse -= 1;
            return Err(Status::resource_exhausted("disk full"));
        }
        shared.reports.extend(request.into_inner().report);
        Ok(Response::new(ReportReply {}))
    }

    async fn withdraw(&self, request: Request<WithdrawRequest>) -> Result<Response<WithdrawReply>, Status> {
        let WithdrawRequest { kind, steps } = request.into_inner();
        if kind != i32::from(v1::SaveKind::Full) {
            return Err(Status::resource_exhausted("disk full"));
        }
        // The first one was sent.
        Ok(Response::new(WithdrawReply { steps: steps[1..].to_vec() }))
    }

    type ControlStream = BoxStream<'static, Result<TrainerControl, Status>>;

    async fn control(&self, _: Request<ControlRequest>) -> Result<Response<Self::ControlStream>, Status> {
        let controls = self.controls.lock().unwrap().take().unwrap();
        let stream = futures::stream::unfold(controls, |mut controls| async move {
            controls.recv().await.map(|control| (Ok(control), controls))
        });
        Ok(Response::new(stream.boxed()))
    }
}

#[tonic::async_trait]
impl Rendezvous for Worker {
    async fn set(&self, _: Request<KvSet>) -> Result<Response<KvEmpty>, Status> {
        Ok(Response::new(KvEmpty {}))
    }

    async fn get(&self, request: Request<KvGet>) -> Result<Response<KvValue>, Status> {
        let KvGet { fence, key, timeout_ms } = request.into_inner();
        let generation = fence.unwrap().generation;
        if self.shared.0.lock().unwrap().over {
            return Err(Status::aborted(format!("generation {generation} is over")));
        }
        if key == "never" {
            return Err(Status::deadline_exceeded("not in time"));
        }
        Ok(Response::new(KvValue {
            value: format!("{key} at {timeout_ms} ms of generation {generation}").into_bytes(),
        }))
    }

    async fn add(&self, request: Request<KvAdd>) -> Result<Response<KvNumber>, Status> {
        Ok(Response::new(KvNumber { value: request.into_inner().amount + 1 }))
    }

    async fn check(&self, request: Request<KvKeys>) -> Result<Response<KvFlag>, Status> {
        Ok(Response::new(KvFlag { value: request.into_inner().keys == ["a", "b"] }))
    }

    async fn wait(&self, _: Request<KvKeys>) -> Result<Response<KvEmpty>, Status> {
        Ok(Response::new(KvEmpty {}))
    }

    async fn delete(&self, _: Request<KvGet>) -> Result<Response<KvFlag>, Status> {
        Ok(Response::new(KvFlag { value: true }))
    }

    async fn compare_set(&self, request: Request<KvCompareSet>) -> Result<Response<KvValue>, Status> {
        Ok(Response::new(KvValue { value: request.into_inner().desired }))
    }

    async fn num_keys(&self, _: Request<Fence>) -> Result<Response<KvNumber>, Status> {
        Ok(Response::new(KvNumber { value: 4 }))
    }
}
