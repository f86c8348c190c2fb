//! Enrolment over real sockets and TLS, with a coordinator whose first certificate is over before it is given.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use trainctl_proto::v1::workers_server::{Workers, WorkersServer};
use trainctl_proto::v1::{
    CoordinatorMessage, EnrollRequest, EnrollResponse, Hello, Welcome, WorkerMessage, coordinator_message::Body,
};
use trainctl_runtime::auth::{self, Access, AuthLayer, Caller, Gate, Grants};
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_runtime::connections::{Incoming, Limits};
use trainctl_runtime::endpoint::{self, Endpoint};
use trainctl_runtime::tasks::Shutdown;
use trainctl_runtime::tls::{self, Authority};
use trainctl_runtime::{certificates, rpc};

use super::transport::{Grpc, Transport, Wire};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Signs, and welcomes whoever has a certificate.
struct Coordinator {
    authority: Authority,
    signed: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Workers for Coordinator {
    type SessionStream = ReceiverStream<Result<CoordinatorMessage, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let incarnation = Caller::of(&request)?.worker.ok_or_else(|| Status::permission_denied("no certificate"))?;
        let (sender, messages) = mpsc::channel(1);
        let body = Some(Body::Welcome(Welcome { incarnation, ..Welcome::default() }));
        sender.send(Ok(CoordinatorMessage { body })).await.unwrap();
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn enroll(&self, request: Request<EnrollRequest>) -> Result<Response<EnrollResponse>, Status> {
        let EnrollRequest { worker_id, certificate_request } = request.into_inner();
        let now_ms = SystemClock::new().wall_ms();
        let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap();
        let is_first = self.signed.fetch_add(1, Ordering::Relaxed) == 0;
        let from = if is_first { now_ms - ms(certificates::LIFE + DAY) } else { now_ms };
        let signed = self.authority.sign(&worker_id, &certificate_request, from, certificates::LIFE);
        let certificate_pem = signed.map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(EnrollResponse { certificate_pem, valid_ms: ms(certificates::LIFE) }))
    }
}

fn access(path: &str) -> Access {
    if path.ends_with("/Enroll") { Access::Enroll } else { Access::Work }
}

/// Serves on loopback, over TLS all the same, and publishes the way there in `dir`.
fn serve(dir: &Path, signed: Arc<AtomicU64>) {
    let tls = tls::load_or_create(dir).unwrap();
    let listener = rpc::bind_or_fallback(([127, 0, 0, 1], 0).into(), None).unwrap();
    let endpoint = Endpoint {
        addresses: vec!["127.0.0.1".to_owned()],
        port: listener.local_addr().unwrap().port(),
        incarnation: "c1".to_owned(),
        host: "test".to_owned(),
        pid: std::process::id(),
        ca_pem: Some(tls.ca_pem.clone()),
        state_dir: None,
    };
    let tokens = auth::load_or_create(dir).unwrap();
    let gate = Gate { tokens, grants: Arc::new(Grants::load(dir, 1).unwrap()), is_tls: true, access };
    let workers = WorkersServer::new(Coordinator { authority: tls.authority.clone(), signed });
    let server = rpc::server(Some(&tls)).unwrap().layer(AuthLayer::new(gate)).add_service(workers);
    endpoint::publish(&endpoint, dir).unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test's own server")]
    tokio::spawn(server.serve_with_incoming(Incoming::new(listener, Limits::of(64))));
}

async fn welcome(wire: Result<Wire, String>) -> String {
    match wire.unwrap().incoming.recv().await.unwrap().unwrap() {
        Body::Welcome(welcome) => welcome.incarnation,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_worker_whose_certificate_is_refused_enrols_anew_and_keeps_one_that_is_good() {
    let dir = tempfile::tempdir().unwrap();
    let signed = Arc::new(AtomicU64::new(0));
    serve(dir.path(), signed.clone());
    let shutdown = Shutdown::new();
    let (transport, gateway) = Grpc::new(dir.path().to_owned(), "w 1".to_owned(), shutdown.clone());
    let refused = transport.dial(Hello::default()).await.unwrap_err();
    // Mostly "received fatal alert: CertificateExpired"; the reset that follows the alert may overtake it.
    assert!(refused.ends_with("enrolling anew"), "{refused}");
    assert!(gateway.borrow().is_none());
    assert_eq!(welcome(transport.dial(Hello::default()).await).await, "w 1");
    assert!(gateway.borrow().is_some());
    assert_eq!(welcome(transport.dial(Hello::default()).await).await, "w 1");
    assert_eq!(signed.load(Ordering::Relaxed), 2, "the second one is kept");

    // Another CA in its place: the certificate is not shown to it.
    std::fs::remove_dir_all(dir.path().join("ca")).unwrap();
    serve(dir.path(), signed.clone());
    assert_eq!(welcome(transport.dial(Hello::default()).await).await, "w 1");
    assert_eq!(signed.load(Ordering::Relaxed), 3);
    shutdown.trigger("the test is over");
}
