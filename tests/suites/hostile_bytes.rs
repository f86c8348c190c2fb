//! Whatever arrives on the coordinator's port, in the clear: a closed connection or an error, one log line, and a running job that
//! does not notice. `abuse` has the same with TLS.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, RngCore};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use trainctl_proto::v1;
use trainctl_proto::v1::jobs_client::JobsClient;
use trainctl_runtime::endpoint::Endpoint;
use trainctl_runtime::{auth, rpc};
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::run::Run;
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, seed, wait};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// An empty SETTINGS frame.
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

/// What a stranger sends before it hangs up.
fn attacks(random: &mut StdRng) -> Vec<(&'static str, Vec<u8>)> {
    let mut noise = |length: usize| {
        let mut bytes = vec![0; length];
        random.fill_bytes(&mut bytes);
        bytes
    };
    let after_preface = |rest: &[u8]| [PREFACE, SETTINGS, rest].concat();
    vec![
        ("nothing", Vec::new()),
        ("one byte", noise(1)),
        ("noise", noise(500)),
        ("much noise", noise(1 << 20)),
        ("half a preface", PREFACE[..10].to_vec()),
        ("a preface and half a frame header", after_preface(&[0, 0])),
        ("a frame that ends early", after_preface(&[0, 1, 0, 1, 4, 0, 0, 0, 1, 0x82])),
        ("a frame of 16 MiB", after_preface(&[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1])),
        ("headers that do not decompress", after_preface(&[0, 0, 4, 1, 4, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff])),
        ("data for a stream that was never opened", after_preface(&[0, 0, 1, 0, 0, 0, 0, 0, 9, 0])),
        ("noise after a preface", after_preface(&noise(5000))),
        ("HTTP/1.1", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("the beginning of TLS", [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &noise(200)].concat()),
    ]
}

/// Sends bytes and half-closes: the server must close too, in its own time.
fn send_and_wait_for_close(port: u16, title: &str, bytes: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // It may close before it has read all.
    let sent = stream.write_all(bytes).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let mut sink = vec![0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::NotConnected) => break,
            Err(error) => panic!("{title}: the connection stays open: {error} (sent: {sent:?})"),
        }
    }
}

async fn call<C>(channel: C, path: &'static str) -> Result<(), Status>
where
    C: tonic::client::GrpcService<tonic::body::Body>,
    C::Error: std::fmt::Display,
    C::ResponseBody: tonic::codegen::Body<Data = tonic::codegen::Bytes> + Send + 'static,
    <C::ResponseBody as tonic::codegen::Body>::Error: Into<tonic::codegen::StdError> + Send,
{
    let mut client = Grpc::new(channel);
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    // Field 1 as a number, where each method of ours has a string or a message there.
    let request = Request::new(v1::ShardsDurable { step: 7, ..v1::ShardsDurable::default() });
    let codec: ProstCodec<v1::ShardsDurable, v1::Job> = ProstCodec::default();
    client.unary(request, PathAndQuery::from_static(path), codec).await.map(drop)
}

/// Every kind of call that must be refused.
async fn refused_calls(endpoint: &Endpoint, state: &std::path::Path) {
    let (owner, worker) = (auth::read_owner(state).unwrap(), auth::read_join(state).unwrap());
    let with = async |token: &str| rpc::connect(endpoint, token).await.unwrap();
    let code = |answer: Result<(), Status>| answer.unwrap_err().code();

    assert_eq!(code(call(with(&owner).await, "/trainctl.v1.Jobs/NoSuchMethod").await), Code::Unimplemented);
    assert_eq!(code(call(with(&owner).await, "/no.such.Service/Get").await), Code::Unimplemented);
    for path in ["/trainctl.v1.Jobs/Submit", "/trainctl.v1.Jobs/Get", "/trainctl.v1.Jobs/Cancel"] {
        assert!(call(with(&owner).await, path).await.is_err(), "{path} took a message that is not its own");
        assert_eq!(code(call(with("wrong").await, path).await), Code::Unauthenticated, "{path}");
        assert_eq!(code(call(with(&worker).await, path).await), Code::PermissionDenied, "{path}");
    }
    let bare = Channel::from_shared(format!("http://127.0.0.1:{}", endpoint.port)).unwrap().connect().await.unwrap();
    assert_eq!(code(call(bare, "/trainctl.v1.Jobs/Get").await), Code::Unauthenticated);

    let mut jobs = JobsClient::new(with(&owner).await).max_encoding_message_size(usize::MAX);
    let request = v1::GetRequest { job: "x".repeat(rpc::MAX_REQUEST_BYTES + 1) };
    assert!(jobs.get(request).await.is_err(), "a message over the limit");
    let request = v1::SubmitRequest { spec_yaml: "\0: [".to_owned(), ..v1::SubmitRequest::default() };
    assert_eq!(jobs.submit(request).await.unwrap_err().code(), Code::InvalidArgument);
    assert!(jobs.list(v1::ListRequest {}).await.is_ok(), "the right token still works");
}

#[test]
fn strangers_on_the_port_change_nothing() {
    if !programs::have_trainer() {
        return;
    }
    let mut random = seed::seeded();
    let scratch = Scratch::new("hostile-bytes");
    let job = Job { steps: 100_000, ckpt_every: 20, ..Job::new(scratch.join("run")) };
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    let mut coordinator = Coordinator::start(&scratch, &state);
    let _workers: Vec<Process> = (0..2).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
    let id = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));
    let endpoint = coordinator.endpoint();
    run.wait_for_step(5);
    let trainers = run.trainers();

    for (title, bytes) in attacks(&mut random) {
        let lines = coordinator.process.stderr().lines().count();
        send_and_wait_for_close(endpoint.port, title, &bytes);
        let said = || {
            let log = coordinator.process.stderr();
            log.lines().skip(lines).filter(|line| line.contains("failed serving connection")).count()
        };
        wait::until_true(&format!("a log line about {title}"), || said() > 0);
        assert_eq!(said(), 1, "{title}: one line for each connection");
    }
    // These say nothing and stay, until the coordinator closes them.
    let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(("127.0.0.1", endpoint.port)).unwrap()).collect();
    for _ in 0..20 {
        let mut bytes = vec![0; random.random_range(1..3000)];
        random.fill_bytes(&mut bytes);
        send_and_wait_for_close(endpoint.port, "noise", &bytes);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(refused_calls(&endpoint, &state));

    let step = run.last_step().unwrap();
    run.wait_for_step(step + 5);
    assert!(coordinator.process.is_running());
    assert_eq!(run.trainers(), trainers, "the job did not notice");
    assert_eq!(daemons::cancel(&scratch, &state, &id)["restarts"], 0);
    assert_eq!(run.generations().len(), 1);
    let log = coordinator.process.stderr();
    let bad: Vec<&str> = log.lines().filter(|line| line.contains("panicked") || line.contains(" ERROR ")).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    drop(silent);
}
