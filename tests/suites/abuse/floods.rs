//! Too much: connections that say nothing, messages that are too long, readers that do not read. The coordinator's memory and
//! files stay bounded, and others are served.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use tonic::service::Interceptor;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use trainctl_proto::v1;
use trainctl_proto::v1::jobs_client::JobsClient;
use trainctl_proto::v1::workers_client::WorkersClient;
use trainctl_runtime::proc;
use trainctl_runtime::rpc::Credentials;
use trainctl_tests::wait;

use super::{Place, TLS, certificate, connect, runtime};

const IDLE: u64 = 10_000;
/// Files that this process needs beside the connections.
const OWN_FILES: u64 = 500;
const GIB: usize = 1 << 30;

#[test]
fn ten_thousand_idle_connections_shut_nobody_out() {
    let Some(mut place) = Place::start("abuse-idle", TLS, &[]) else { return };
    let trainers = place.run.trainers();
    let (files, memory) = (place.open_files(), place.memory_kib("VmHWM"));
    let allowed = proc::raise_open_files().unwrap();
    let count = IDLE.min(allowed.saturating_sub(OWN_FILES));
    if count < IDLE {
        eprintln!("only {count} idle connections: this process may have {allowed} open files");
    }
    let endpoint = place.endpoint();
    let address = (endpoint.addresses[0].as_str(), endpoint.port);
    let began = Instant::now();
    let idle: Vec<TcpStream> = (0..count).map(|_| TcpStream::connect(address).unwrap()).collect();
    let opened = began.elapsed();
    let most = place.open_files();
    place.assert_undisturbed(&trainers, "idle connections");
    let grown = place.memory_kib("VmHWM") - memory;
    eprintln!(
        "{count} idle connections in {opened:.1?}: {files} open files before, {most} after; peak memory grew by {grown} KiB"
    );
    // 8,192 at most, and those that made room and are about to close.
    assert!(most < 9_500, "{most} open files");
    assert!(grown < 200 << 10, "{grown} KiB more");
    // All of them still stand on this side. Strangers have ten seconds.
    wait::until_true("the strangers' end", || place.open_files() < files + 50);
    place.assert_undisturbed(&trainers, "idle connections that are over");
    drop(idle);
    place.finish();
}

/// Messages of a GiB, by somebody who may call. None is held in memory there.
async fn long_messages(place: &Place) {
    let endpoint = place.endpoint();
    let owner = place.owner();
    let mut jobs = JobsClient::new(connect(&endpoint, &owner).await).max_encoding_message_size(usize::MAX);
    let status = jobs.get(v1::GetRequest { job: "x".repeat(GIB) }).await.unwrap_err();
    assert!(matches!(status.code(), Code::OutOfRange | Code::Unknown | Code::Internal | Code::Cancelled), "{status}");

    let certified = certificate(&place.authority(), "w-long", Duration::ZERO, Duration::ZERO);
    let channel = connect(&endpoint, Credentials::Certificate(&certified)).await;
    let mut workers = WorkersClient::new(channel).max_encoding_message_size(usize::MAX);
    let hello = v1::Hello {
        worker_id: "w-long".to_owned(),
        incarnation: "i1".to_owned(),
        host: "x".repeat(GIB),
        ..v1::Hello::default()
    };
    let body = Some(v1::worker_message::Body::Hello(hello));
    let messages = tonic::codegen::tokio_stream::iter([v1::WorkerMessage { body, ..v1::WorkerMessage::default() }]);
    assert!(workers.session(messages).await.is_err(), "too long");
}

#[test]
fn a_message_of_a_gibibyte_is_refused_before_it_is_read() {
    let Some(mut place) = Place::start("abuse-long", TLS, &[]) else { return };
    let trainers = place.run.trainers();
    let memory = place.memory_kib("VmHWM");
    runtime().block_on(long_messages(&place));
    let grown = place.memory_kib("VmHWM") - memory;
    eprintln!("two messages of 1 GiB: peak memory grew by {grown} KiB");
    assert!(grown < 64 << 10, "{grown} KiB more");
    place.assert_undisturbed(&trainers, "long messages");
    place.finish();
}

#[derive(Clone)]
struct Bearer(String);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let value = format!("Bearer {}", self.0).parse().map_err(|_| Status::internal("token"))?;
        request.metadata_mut().insert("authorization", value);
        Ok(request)
    }
}

/// Opens the log's stream, takes one chunk and stands still until the coordinator has given up; then reads what comes.
async fn slow_reader(place: &Place) -> Status {
    let endpoint = place.endpoint();
    let dial = Channel::from_shared(format!("http://{}:{}", endpoint.addresses[0], endpoint.port)).unwrap();
    // No more than this is on the way.
    let window = 65_535;
    let dial = dial.initial_stream_window_size(window).initial_connection_window_size(window);
    let mut jobs = JobsClient::with_interceptor(dial.connect().await.unwrap(), Bearer(place.owner()));
    let request = v1::LogsRequest { job: place.job.clone(), rank: Some(0), follow: true };
    let mut stream = jobs.logs(request).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    wait::until_true("a slow reader", || place.said("a slow reader") == 1);
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended as if all had been read"),
            Err(status) => return status,
        }
    }
}

#[test]
fn a_reader_that_stands_still_is_dropped_with_the_reason() {
    // In the clear, where this test can choose the window.
    let Some(mut place) = Place::start("abuse-slow", &[], &[("TRAINCTL_READER_MS", "3000")]) else { return };
    let trainers = place.run.trainers();
    // More than waits in queue and window together: chunks have 64 KiB, and 64 of them may wait.
    let log = place.run.dir().join(format!("logs/g{:04}/rank-00000.log", trainers[0].generation));
    let mut text = std::fs::OpenOptions::new().append(true).open(&log).unwrap();
    std::io::Write::write_all(&mut text, &vec![b'\n'; 64 << 20]).unwrap();
    let memory = place.memory_kib("VmHWM");
    let status = runtime().block_on(slow_reader(&place));
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("nothing was read from this stream for 3s"), "{status}");
    let grown = place.memory_kib("VmHWM") - memory;
    eprintln!("a reader of 64 MiB that stands still: peak memory grew by {grown} KiB");
    assert!(grown < 16 << 10, "{grown} KiB more");
    place.assert_undisturbed(&trainers, "a slow reader");
    place.finish();
}
