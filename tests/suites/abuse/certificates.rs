//! Certificates that are over, of another CA, or another worker's; and bytes on the port that are no TLS.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rand::RngCore;
use tonic::codegen::tokio_stream;
use tonic::{Code, Status};
use trainctl_proto::v1;
use trainctl_proto::v1::jobs_client::JobsClient;
use trainctl_proto::v1::workers_client::WorkersClient;
use trainctl_runtime::certificates::{Certified, LIFE};
use trainctl_runtime::rpc::{self, Credentials};
use trainctl_runtime::tls;
use trainctl_tests::daemons::Coordinator;
use trainctl_tests::{seed, wait};

use super::{Place, TLS, certificate, connect, runtime};

const HOUR: Duration = Duration::from_secs(3600);

/// What becomes of a session as worker `id`, opened with this certificate.
async fn session(place: &Place, certified: &Certified, id: &str) -> Result<(), Status> {
    let channel = rpc::connect(&place.endpoint(), Credentials::Certificate(certified)).await;
    let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
    let hello = v1::Hello { worker_id: id.to_owned(), incarnation: "i1".to_owned(), ..v1::Hello::default() };
    let body = Some(v1::worker_message::Body::Hello(hello));
    let messages = tokio_stream::iter([v1::WorkerMessage { body, ..v1::WorkerMessage::default() }]);
    WorkersClient::new(channel).session(messages).await.map(drop)
}

/// TLS would not have it: the connection ended with an alert (or with the reset that follows one), not with an answer.
fn assert_no_handshake(answer: Result<(), Status>, what: &str) {
    let status = answer.unwrap_err();
    assert!(matches!(status.code(), Code::Unknown | Code::Unavailable | Code::Internal), "{what}: {status}");
    let is_of_the_connection = std::error::Error::source(&status).is_some() || status.code() == Code::Unavailable;
    assert!(is_of_the_connection, "{what}: {status}");
}

async fn refused_certificates(place: &Place, stranger: &std::path::Path) {
    let (ours, theirs) = (place.authority(), tls::load_or_create(stranger).unwrap());
    let none = Duration::ZERO;
    let expired = certificate(&ours, "w1", LIFE + HOUR, none);
    assert_no_handshake(session(place, &expired, "w1").await, "expired");
    let early = certificate(&ours, "w1", none, HOUR);
    assert_no_handshake(session(place, &early, "w1").await, "early");
    let foreign = certificate(&theirs, "w1", none, none);
    assert_no_handshake(session(place, &foreign, "w1").await, "foreign");

    let good = certificate(&ours, "w1", none, none);
    let status = session(place, &good, "w2").await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert_eq!(status.message(), "the certificate is worker \"w1\"'s, and Hello says \"w2\"");
    let mut jobs = JobsClient::new(connect(&place.endpoint(), Credentials::Certificate(&good)).await);
    let status = jobs.list(v1::ListRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(status.message().starts_with("a worker may not call trainctl.v1.Jobs/List"), "{status}");
    session(place, &good, "w1").await.unwrap();
}

#[test]
fn a_certificate_that_is_over_or_foreign_or_anothers_is_refused() {
    let Some(mut place) = Place::start("abuse-certificates", TLS, &[]) else { return };
    let trainers = place.run.trainers();
    assert_eq!(place.said("a worker enrolled"), 2);
    let stranger = place.scratch.join("stranger");
    runtime().block_on(refused_certificates(&place, &stranger));
    // TLS's own words, a line for each connection (a client may have tried twice).
    for why in ["expired", "not valid yet", "BadSignature"] {
        let line = |text: &&str| text.contains("tls accept error") && text.contains(why);
        wait::until_true(why, || place.coordinator.process.stderr().lines().filter(line).count() > 0);
    }
    place.assert_undisturbed(&trainers, "certificates");
    place.finish();
}

#[test]
fn certificates_outlive_the_coordinator_and_a_new_ca_makes_workers_enrol_anew() {
    let Some(mut place) = Place::start("abuse-new-ca", TLS, &[]) else { return };
    let trainers = place.run.trainers();
    let sessions = |place: &Place| {
        let listed = place.trainctl(&["workers", "list", "--output", "json"]).wait();
        let workers: serde_json::Value = serde_json::from_str(&listed.stdout).unwrap_or_default();
        workers.as_array().map_or(0, |all| all.iter().filter(|worker| worker["state"] == "running").count())
    };
    let back = |place: &Place| {
        wait::within_every(Duration::from_millis(200), wait::PATIENCE, "both workers", || {
            (sessions(place) == 2).then_some(())
        });
    };
    place.coordinator.process.kill9();
    place.coordinator = Coordinator::start_with(&place.scratch, &place.state, TLS, &[]);
    back(&place);
    assert_eq!(place.said("a worker enrolled"), 0, "the certificates are good for the next coordinator");
    place.assert_undisturbed(&trainers, "a restart");

    place.coordinator.process.kill9();
    std::fs::remove_dir_all(place.state.join("ca")).unwrap();
    place.coordinator = Coordinator::start_with(&place.scratch, &place.state, TLS, &[]);
    back(&place);
    assert_eq!(place.said("a worker enrolled"), 2);
    place.assert_undisturbed(&trainers, "a new CA");
    place.finish();
}

/// What a stranger sends to a port that speaks TLS.
fn noises() -> Vec<(&'static str, Vec<u8>)> {
    let mut random = seed::seeded();
    let mut noise = |length: usize| {
        let mut bytes = vec![0; length];
        random.fill_bytes(&mut bytes);
        bytes
    };
    vec![
        ("nothing", Vec::new()),
        ("one byte", noise(1)),
        ("noise", noise(5000)),
        ("much noise", noise(1 << 20)),
        ("HTTP/2 in the clear", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec()),
        ("half a ClientHello", [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &noise(200)].concat()),
        ("a record of 16 KiB of noise", [&[0x16, 3, 3, 0x40, 0][..], &noise(1 << 14)].concat()),
        ("an alert", vec![0x15, 3, 3, 0, 2, 2, 40]),
    ]
}

/// Sends bytes and half-closes: the other side must close too, in its own time.
fn send(address: (&str, u16), bytes: &[u8]) -> Result<(), String> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let sent = stream.write_all(bytes).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
    let mut sink = vec![0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::NotConnected) => return Ok(()),
            Err(error) => return Err(format!("the connection stays open: {error} (sent: {sent:?})")),
        }
    }
}

#[test]
fn bytes_that_are_no_tls_close_their_connection_with_one_line() {
    let Some(mut place) = Place::start("abuse-noise", TLS, &[]) else { return };
    let trainers = place.run.trainers();
    let endpoint = place.endpoint();
    let address = (endpoint.addresses[0].as_str(), endpoint.port);
    // This one says nothing and stays: it has ten seconds.
    let mut silent = TcpStream::connect(address).unwrap();
    for (title, bytes) in noises() {
        let before = place.said("tls accept error");
        send(address, &bytes).unwrap_or_else(|error| panic!("{title}: {error}"));
        wait::until_true(&format!("a line about {title}"), || place.said("tls accept error") > before);
    }
    silent.set_read_timeout(Some(wait::PATIENCE)).unwrap();
    assert_eq!(silent.read(&mut [0; 1]).unwrap_or_default(), 0, "a silent stranger is closed");
    wait::until_true("its line", || place.said("no call that was let in, in the time for it") == 1);
    let (lines, connections) = (|| place.said("tls accept error"), noises().len() + 1);
    wait::until_true("a line for each connection", || lines() >= connections);
    assert_eq!(lines(), connections, "one line for each connection");
    place.assert_undisturbed(&trainers, "noise");
    place.finish();
}
