//! Callers without leave: no token, a wrong one, one of another role, and messages that were true once (J3).

use std::time::Duration;

use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body as Command;
use trainctl_proto::v1::jobs_client::JobsClient;
use trainctl_proto::v1::rendezvous_client::RendezvousClient;
use trainctl_proto::v1::worker_message::Body;
use trainctl_proto::v1::workers_client::WorkersClient;
use trainctl_runtime::rpc::Credentials;
use trainctl_tests::job::Job;
use trainctl_tests::{daemons, wait};

use super::{Place, TLS, certificate, connect, runtime};

fn code<T>(answer: Result<T, Status>) -> Code {
    answer.err().map_or(Code::Ok, |status| status.code())
}

/// What the coordinator says to Hello of worker `id`.
async fn hello<'a>(place: &Place, credentials: impl Into<Credentials<'a>>, id: &str) -> Result<(), Status> {
    let (sender, messages) = tokio::sync::mpsc::channel(4);
    let hello = v1::Hello { worker_id: id.to_owned(), incarnation: "i1".to_owned(), ..v1::Hello::default() };
    sender.send(message(0, Body::Hello(hello))).await.unwrap();
    let mut client = WorkersClient::new(connect(&place.endpoint(), credentials).await);
    client.session(ReceiverStream::new(messages)).await.map(drop)
}

async fn calls(place: &Place, observer: &str) {
    let endpoint = place.endpoint();
    let jobs = async |token: &str| JobsClient::new(connect(&endpoint, token).await);
    let cancel = || v1::CancelRequest { job: place.job.clone(), mode: v1::CancelMode::Now.into() };
    for token in ["", "wrong", &"0".repeat(64)] {
        let mut client = jobs(token).await;
        assert_eq!(code(client.list(v1::ListRequest {}).await), Code::Unauthenticated, "{token:?}");
        assert_eq!(code(client.cancel(cancel()).await), Code::Unauthenticated, "{token:?}");
        assert_eq!(code(hello(place, token, "w").await), Code::Unauthenticated, "{token:?}");
    }
    // The workers' token asks for a certificate, and that is all.
    let join = place.join();
    let mut client = jobs(&join).await;
    assert_eq!(code(client.list(v1::ListRequest {}).await), Code::PermissionDenied);
    assert_eq!(code(client.cancel(cancel()).await), Code::PermissionDenied);
    assert_eq!(code(hello(place, &join, "w").await), Code::PermissionDenied);
    assert_eq!(code(hello(place, &place.owner(), "w").await), Code::PermissionDenied, "nor is the owner a worker");
    let fence = Some(v1::Fence { job: place.job.clone(), generation: 1, term: 1 });
    let set = v1::KvSet { fence, key: "k".to_owned(), value: vec![1] };
    let mut client = RendezvousClient::new(connect(&endpoint, &join).await);
    assert_eq!(code(client.set(set).await), Code::PermissionDenied);

    let mut client = jobs(observer).await;
    assert_eq!(code(client.list(v1::ListRequest {}).await), Code::Ok);
    let status = client.cancel(cancel()).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    let said = status.message();
    assert!(said.starts_with("an observer may not call trainctl.v1.Jobs/Cancel"), "{said}");
    let submit = v1::SubmitRequest { spec_yaml: "name: a".to_owned(), ..v1::SubmitRequest::default() };
    assert_eq!(code(client.submit(submit).await), Code::PermissionDenied);
    assert_eq!(code(hello(place, observer, "w").await), Code::PermissionDenied);
    let mut client = v1::grants_client::GrantsClient::new(connect(&endpoint, observer).await);
    let more = v1::AddGrantRequest { name: "more".to_owned(), life_ms: 5000 };
    assert_eq!(code(client.add_grant(more).await), Code::PermissionDenied);
}

#[test]
fn a_caller_may_do_what_its_role_may_and_no_more() {
    let Some(mut place) = Place::start("abuse-callers", TLS, &[]) else { return };
    let trainers = place.run.trainers();
    let ann = place.grant("ann");
    let token = trainctl_runtime::auth::read_file(ann.as_ref()).unwrap();
    runtime().block_on(calls(&place, &token));

    // The same by hand, as people do it.
    let observe = |arguments: &[&str]| place.trainctl(&[arguments, &["--token-file", &ann]].concat()).wait();
    observe(&["status", &place.job]).expect_code(0).expect_said("running");
    observe(&["workers", "list"]).expect_code(0);
    observe(&["metrics", &place.job]).expect_code(0);
    observe(&["cancel", &place.job]).expect_code(64).expect_said("an observer may not call trainctl.v1.Jobs/Cancel");
    observe(&["auth", "grant", "bob"]).expect_code(64).expect_said("an observer may not call");
    place.trainctl(&["auth", "grant", "ann"]).wait().expect_code(64).expect_said("there is a grant \"ann\"");
    place.trainctl(&["auth", "list"]).wait().expect_code(0).expect_said("ann");

    // What is taken back ends at once, streams too.
    let log = ["logs", &place.job, "--follow", "--token-file", &ann];
    let mut following = place.trainctl(&log);
    wait::until_true("rows of the log", || following.is_running() && place.run.last_step() > Some(10));
    place.trainctl(&["auth", "revoke", "ann"]).wait().expect_code(0);
    following.wait().expect_code(64).expect_said("no valid token");
    place.trainctl(&["list", "--token-file", &ann]).wait().expect_code(64).expect_said("no valid token");
    let short = place.scratch.join("short.json").to_str().unwrap().to_owned();
    place.trainctl(&["auth", "grant", "cid", "--expires", "1s", "--file", &short]).wait().expect_code(0);
    wait::within_every(Duration::from_millis(200), wait::PATIENCE, "the grant's end", || {
        let ended = place.trainctl(&["list", "--token-file", &short]).wait();
        (ended.code == Some(64)).then(|| ended.expect_said("\"cid\" has expired"))
    });

    place.assert_undisturbed(&trainers, "callers without leave");
    place.finish();
}

/// A worker of the test's own: it answers probes, and says what it is told to.
struct Fake {
    sender: tokio::sync::mpsc::Sender<v1::WorkerMessage>,
    stream: tonic::Streaming<v1::CoordinatorMessage>,
}

impl Fake {
    async fn open(place: &Place, id: &str) -> Self {
        let certified = certificate(&place.authority(), id, Duration::ZERO, Duration::ZERO);
        let (sender, messages) = tokio::sync::mpsc::channel(16);
        let hello = v1::Hello {
            worker_id: id.to_owned(),
            incarnation: "i1".to_owned(),
            spool: "s1".to_owned(),
            device: "cpu".to_owned(),
            cores: 1,
            ..v1::Hello::default()
        };
        let channel = connect(&place.endpoint(), Credentials::Certificate(&certified)).await;
        sender.send(message(0, Body::Hello(hello))).await.unwrap();
        let stream = WorkersClient::new(channel).session(ReceiverStream::new(messages)).await.unwrap().into_inner();
        Self { sender, stream }
    }

    async fn say(&self, seq: u64, body: Body) {
        self.sender.send(message(seq, body)).await.unwrap();
    }

    /// The next message that `wanted` takes.
    async fn hear<T>(&mut self, wanted: impl Fn(&Command) -> Option<T>) -> T {
        let heard = async {
            loop {
                let message = self.stream.message().await.unwrap().unwrap();
                let body = message.body.unwrap();
                if let Some(found) = wanted(&body) {
                    return found;
                }
                match body {
                    Command::Probe(probe) => self.answer(probe).await,
                    // Whatever is said keeps the lease.
                    Command::Beat(_) => self.say(0, Body::Heartbeat(v1::Heartbeat::default())).await,
                    _ => {}
                }
            }
        };
        tokio::time::timeout(wait::PATIENCE, heard).await.unwrap()
    }

    async fn answer(&self, probe: v1::Probe) {
        let result = match probe.step {
            Some(v1::probe::Step::Begin(_)) => v1::probe_result::Result::Begun(v1::ProbeBegun::default()),
            Some(v1::probe::Step::Check(_)) => v1::probe_result::Result::Checked(v1::ProbeChecked::default()),
            _ => return,
        };
        self.say(0, Body::ProbeResult(v1::ProbeResult { round: probe.round, result: Some(result) })).await;
    }

    /// Sends a report and waits until it is acknowledged: it was looked at.
    async fn report(&mut self, seq: u64, report: v1::RankReport) {
        self.say(seq, Body::RankReport(report)).await;
        self.hear(|command| matches!(command, Command::Ack(ack) if ack.up_to >= seq).then_some(())).await;
    }

    /// Takes the next order to start a trainer, says that it has, and gives its fence.
    async fn start(&mut self, seq: u64) -> v1::Fence {
        let order =
            self.hear(|command| if let Command::StartTrainer(start) = command { Some(start.clone()) } else { None });
        let order = order.await;
        let done = v1::CommandResult { command_id: order.command_id, ..v1::CommandResult::default() };
        self.say(0, Body::CommandResult(done)).await;
        let fence = order.assignment.unwrap().fence.unwrap();
        let started = v1::rank_report::Report::Started(v1::TrainerStarted { pid: 1, ..v1::TrainerStarted::default() });
        self.report(seq, v1::RankReport { fence: Some(fence.clone()), rank: 0, report: Some(started) }).await;
        fence
    }
}

fn message(seq: u64, body: Body) -> v1::WorkerMessage {
    v1::WorkerMessage { seq, age_ms: 0, body: Some(body) }
}

/// A worker says that its trainer ended, twice: the second time when it carries the same rank of the next generation.
async fn replay_own(place: &Place, spec: &std::path::Path) {
    let mut fake = Fake::open(place, "w-replay").await;
    let submitted = place.trainctl(&["submit", spec.to_str().unwrap()]);
    let old = fake.start(1).await;
    let job = { submitted }.wait().expect_code(0).stdout.trim().to_owned();
    let exited = v1::rank_report::Report::Exited(v1::TrainerExit { signal: Some(9), ..v1::TrainerExit::default() });
    let exit = v1::RankReport { fence: Some(old.clone()), rank: 0, report: Some(exited) };
    fake.say(2, Body::RankReport(exit.clone())).await;
    let new = fake.start(3).await;
    assert!(new.generation > old.generation && new.job == job);
    let ignored = place.said("report of a generation that is not current: ignored");
    for seq in 4..8 {
        fake.report(seq, exit.clone()).await;
    }
    // As it was said the first time, number included: it was taken, and is acknowledged again.
    fake.say(2, Body::RankReport(exit)).await;
    assert_eq!(place.said("report of a generation that is not current: ignored"), ignored + 4);
    let status = daemons::status(&place.scratch, &place.state, &job).unwrap();
    assert_eq!((status["generation"].as_u64(), status["restarts"].as_u64()), (Some(new.generation), Some(1)));
    place.trainctl(&["cancel", "--now", &job]).wait().expect_code(0);
}

async fn replay(place: &Place, old: u64, new: u64) {
    let fence = |generation| Some(v1::Fence { job: place.job.clone(), generation, term: 1 });
    let exited = v1::rank_report::Report::Exited(v1::TrainerExit { signal: Some(11), ..v1::TrainerExit::default() });
    let exit = |generation| v1::RankReport { fence: fence(generation), rank: 0, report: Some(exited.clone()) };
    let mut fake = Fake::open(place, "w-other").await;
    fake.report(1, exit(old)).await;
    // Nor does a worker report for a rank that another one carries.
    fake.report(2, exit(new)).await;

    let certified = certificate(&place.authority(), "w-other", Duration::ZERO, Duration::ZERO);
    let mut keys = RendezvousClient::new(connect(&place.endpoint(), Credentials::Certificate(&certified)).await);
    let set = |generation| v1::KvSet { fence: fence(generation), key: "k".to_owned(), value: vec![1] };
    assert_eq!(code(keys.set(set(old)).await), Code::Aborted, "the generation is over");
    assert_eq!(code(keys.set(set(new)).await), Code::FailedPrecondition, "the store is sealed");
}

#[test]
fn j3_a_replayed_message_of_an_old_generation_changes_nothing() {
    let Some(mut place) = Place::start("abuse-replay", TLS, &[]) else { return };
    let old = place.run.trainers()[0].generation;
    place.run.trainers()[0].kill9();
    let trainers = place.run.wait_for_trainers(2, old);
    let new = trainers[0].generation;
    place.restarts = 1;
    daemons::wait_for_status(&place.scratch, &place.state, &place.job, "the restart", |status| {
        status["phase"] == "running" && status["generation"] == new
    });
    runtime().block_on(replay(&place, old, new));
    let other = Job { workers: 1, ..Job::new(place.scratch.join("other")) };
    let spec = other.write(place.scratch.join("other.yaml"));
    runtime().block_on(replay_own(&place, &spec));
    let ignored = place.said("report of a generation that is not current: ignored");
    assert!(ignored >= 2, "{ignored}");
    place.assert_undisturbed(&trainers, "replayed messages");
    place.finish();
}
