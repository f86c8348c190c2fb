//! A trainer of the tests that speaks the real link over its standard input. It is this test program, started again by a
//! shell script with the name of one ignored test.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message as _;
use tokio_stream::StreamExt as _;
use tonic::transport::{Channel, Endpoint};
use trainctl_proto::v1::rank_report::Report;
use trainctl_proto::v1::rendezvous_client::RendezvousClient;
use trainctl_proto::v1::trainer_link_client::TrainerLinkClient;
use trainctl_proto::v1::{
    AssignmentRequest, ControlRequest, FinishCause, Finished, KvGet, KvSet, Phase, PhaseChanged, Place as Whereabouts,
    RankReport, TrainRow, trainer_control,
};

use trainctl_runtime::page::Writer;

use super::Place;

/// What the trainer does.
pub const MODE: &str = "TRAINCTL_TEST_MODE";
/// The test's folder.
pub const PLACE: &str = "TRAINCTL_TEST_PLACE";
/// Name of the ignored test.
const ENTRY: &str = "trainer_of_the_tests";

/// The program for `--trainer`.
pub fn program(place: &Place) -> PathBuf {
    let this = std::env::current_exe().unwrap();
    place.script(&format!("exec {} {ENTRY} --exact --ignored --nocapture", this.display()))
}

async fn connect() -> Channel {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    socket.set_nonblocking(true).unwrap();
    let socket = Mutex::new(Some(tokio::net::UnixStream::from_std(socket).unwrap()));
    let connector = tower::service_fn(move |_| {
        let socket = socket.lock().unwrap().take();
        std::future::ready(socket.map(TokioIo::new).ok_or_else(|| std::io::Error::other("gone")))
    });
    Endpoint::from_static("http://worker").connect_with_connector(connector).await.unwrap()
}

/// The trainer's life.
pub async fn main() {
    let channel = connect().await;
    let mut link = TrainerLinkClient::new(channel.clone());
    let assignment = link.get_assignment(AssignmentRequest { pid: std::process::id() }).await.unwrap().into_inner();
    let place = PathBuf::from(std::env::var(PLACE).unwrap());
    let mode = std::env::var(MODE).unwrap();
    let (mode, number) = mode.split_once(' ').unwrap_or((&mode, "0"));
    let number: u64 = number.parse().unwrap();
    match mode {
        // N rows at once, then the finish.
        "rows" => {
            for step in 0..number {
                report(&mut link, row(step)).await;
            }
            finish(&mut link, number).await;
        }
        // A row at each step until stopped in band; the link's file tells how far it is.
        "steps" => {
            let mut controls = link.control(ControlRequest {}).await.unwrap().into_inner();
            let page = Writer::open(assignment.page.as_ref()).unwrap();
            report(&mut link, Report::Phase(PhaseChanged { phase: Phase::Stepping.into() })).await;
            for step in 0.. {
                report(&mut link, row(step)).await;
                let whereabouts = Whereabouts { steps: step + 1, step, ..Whereabouts::default() };
                page.write(&whereabouts.encode_to_vec()).unwrap();
                std::fs::write(place.join("step"), format!("{step}\n")).unwrap();
                let control = tokio::time::timeout(Duration::from_millis(2), controls.next()).await;
                if let Ok(Some(Ok(control))) = control
                    && matches!(control.request, Some(trainer_control::Request::Stop(_)))
                {
                    return finish(&mut link, step + 1).await;
                }
            }
        }
        // Sets a key, then waits for another and repeats its value.
        "keys" => {
            let mut keys = RendezvousClient::new(channel);
            let fence = assignment.fence.clone();
            let set =
                |key: &str, value: &[u8]| KvSet { fence: fence.clone(), key: key.to_owned(), value: value.to_vec() };
            keys.set(set("from-trainer", b"hello")).await.unwrap();
            let get = KvGet { fence: fence.clone(), key: "to-trainer".to_owned(), timeout_ms: 60_000 };
            let outcome = keys.get(get).await;
            let value =
                outcome.map_or_else(|status| status.to_string().into_bytes(), |answer| answer.into_inner().value);
            keys.set(set("echo", &value)).await.unwrap();
            let mut old = set("late", b"x");
            old.fence.as_mut().unwrap().generation -= 1;
            let refused = keys.set(old).await.unwrap_err();
            keys.set(set("refused", format!("{:?}", refused.code()).as_bytes())).await.unwrap();
            finish(&mut link, 0).await;
        }
        other => panic!("unknown mode {other}"),
    }
}

async fn report(link: &mut TrainerLinkClient<Channel>, report: Report) {
    link.report(RankReport { fence: None, rank: 0, report: Some(report) }).await.unwrap();
}

async fn finish(link: &mut TrainerLinkClient<Channel>, steps_done: u64) {
    report(link, Report::Finished(Finished { steps_done, cause: FinishCause::Stopped.into() })).await;
}

fn row(step: u64) -> Report {
    Report::TrainRow(TrainRow {
        step,
        loss: 2.5,
        timestamp: "2026-11-29T22:31:14.123Z".to_owned(),
        ..TrainRow::default()
    })
}
