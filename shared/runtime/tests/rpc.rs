//! Token, TLS and port rules against a real server on a real socket.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "tests")]

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use trainctl_runtime::auth::{Access, AuthLayer, Gate, Grants, Tokens};
use trainctl_runtime::certificates::{Certified, Key, LIFE};
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_runtime::connections::{Incoming, Limits};
use trainctl_runtime::endpoint::Endpoint;
use trainctl_runtime::rpc::Credentials;
use trainctl_runtime::{rpc, tls};

fn tokens() -> Tokens {
    Tokens { owner: "o".repeat(64), worker: "w".repeat(64) }
}

/// As the coordinator's table has it, for three methods.
fn access(path: &str) -> Access {
    match path {
        "/grpc.health.v1.Health/Check" => Access::Anyone,
        "/trainctl.v1.Workers/Session" => Access::Work,
        "/trainctl.v1.Workers/Enroll" => Access::Enroll,
        _ => Access::Own,
    }
}

/// Serves health behind the token layer, over TLS when there is a state directory.
async fn serve(tls: Option<tls::ServerTls>) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let (_, health) = tonic_health::server::health_reporter();
    let nowhere = tempfile::tempdir().expect("temporary directory");
    let grants = Grants::load(nowhere.path(), 1).expect("none").into();
    let gate = Gate { tokens: tokens(), grants, is_tls: tls.is_some(), access };
    let server = rpc::server(tls.as_ref()).expect("server").layer(AuthLayer::new(gate)).add_service(health);
    tokio::spawn(server.serve_with_incoming(Incoming::new(listener, Limits::of(64))));
    Endpoint {
        addresses: vec!["127.0.0.1".into()],
        port: address.port(),
        incarnation: "test".into(),
        host: "localhost".into(),
        pid: std::process::id(),
        ca_pem: tls.map(|tls| tls.ca_pem),
        state_dir: None,
    }
}

async fn check(endpoint: &Endpoint, token: &str) -> Result<(), tonic::Status> {
    let channel = rpc::connect(endpoint, token).await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
    HealthClient::new(channel).check(HealthCheckRequest { service: String::new() }).await.map(drop)
}

/// A call of a path that nothing serves here: `Unimplemented` once it was let in.
async fn call<'a>(
    endpoint: &Endpoint,
    credentials: impl Into<Credentials<'a>>,
    path: &'static str,
) -> Result<Code, rpc::Error> {
    let mut client = tonic::client::Grpc::new(rpc::connect(endpoint, credentials).await?);
    client.ready().await.expect("ready");
    let path = tonic::codegen::http::uri::PathAndQuery::from_static(path);
    let request = tonic::Request::new(HealthCheckRequest::default());
    let answer: Result<tonic::Response<tonic_health::pb::HealthCheckResponse>, _> =
        client.unary(request, path, tonic_health_codec()).await;
    let status = answer.expect_err("no such service");
    let refused = std::error::Error::source(&status).map(rpc::innermost).unwrap_or_default();
    Ok(if refused.contains("fatal alert") { Code::Unauthenticated } else { status.code() })
}

async fn other(endpoint: &Endpoint, token: &str) -> Code {
    call(endpoint, token, "/trainctl.v1.Jobs/List").await.expect("connect")
}

fn tonic_health_codec() -> tonic_prost::ProstCodec<HealthCheckRequest, tonic_health::pb::HealthCheckResponse> {
    tonic_prost::ProstCodec::default()
}

#[tokio::test]
async fn every_call_but_health_needs_a_token() {
    let endpoint = serve(None).await;
    check(&endpoint, "wrong").await.expect("health is open");
    assert_eq!(other(&endpoint, "wrong").await, Code::Unauthenticated);
    assert_eq!(other(&endpoint, &tokens().worker).await, Code::PermissionDenied);
    // The owner gets through the layer, to a service that does not exist here.
    assert_eq!(other(&endpoint, &tokens().owner).await, Code::Unimplemented);
}

#[tokio::test]
async fn tls_holds_for_the_runs_own_ca_only() {
    let state = tempfile::tempdir().expect("temporary directory");
    let endpoint = serve(Some(tls::load_or_create(state.path()).expect("tls"))).await;
    check(&endpoint, "any").await.expect("the run's CA");
    let stranger = tempfile::tempdir().expect("temporary directory");
    let ca_pem = Some(tls::load_or_create(stranger.path()).expect("tls").ca_pem);
    let error = check(&Endpoint { ca_pem, ..endpoint.clone() }, "any").await.expect_err("a stranger's CA");
    assert!(error.message().contains("certificate"), "{error}");
    check(&Endpoint { ca_pem: None, ..endpoint }, "any").await.expect_err("in the clear");
}

#[tokio::test]
async fn a_certificate_of_the_runs_ca_that_is_not_over_opens_what_workers_do() {
    let state = tempfile::tempdir().expect("temporary directory");
    let tls = tls::load_or_create(state.path()).expect("tls");
    let (session, jobs) = ("/trainctl.v1.Workers/Session", "/trainctl.v1.Jobs/List");
    let endpoint = serve(Some(tls.clone())).await;
    let now = SystemClock::new().wall_ms();
    let hour = 3_600_000;
    let made = |tls: &tls::ServerTls, now: u64| -> Certified {
        let key = Key::generate().expect("key");
        let pem = tls.authority.sign("w1", &key.request().expect("request"), now, LIFE).expect("sign");
        key.certified(pem)
    };
    let call = async |certified: &Certified, path| call(&endpoint, Credentials::Certificate(certified), path).await;

    let good = made(&tls, now);
    assert_eq!(call(&good, session).await.expect("connect"), Code::Unimplemented);
    assert_eq!(call(&good, jobs).await.expect("connect"), Code::PermissionDenied);
    // A restart keeps the CA, and a clock that is five minutes behind does no harm.
    let again = tls::load_or_create(state.path()).expect("tls");
    assert_eq!(call(&made(&again, now + hour / 12), session).await.expect("connect"), Code::Unimplemented);

    let stranger = tempfile::tempdir().expect("temporary directory");
    let foreign = tls::load_or_create(stranger.path()).expect("tls");
    let life = u64::try_from(LIFE.as_millis()).expect("life");
    let bad = [made(&tls, now - life - hour), made(&tls, now + hour), made(&foreign, now)];
    for (certified, why) in bad.iter().zip(["expired", "not valid yet", "foreign"]) {
        match call(certified, session).await {
            Ok(code) => assert_eq!(code, Code::Unauthenticated, "{why}"),
            Err(error) => assert!(error.to_string().contains("alert"), "{why}: {error}"),
        }
    }
    // The join token asks for a certificate there and does nothing else.
    assert_eq!(with_join_token(&endpoint, "/trainctl.v1.Workers/Enroll").await, Code::Unimplemented);
    assert_eq!(with_join_token(&endpoint, session).await, Code::PermissionDenied);
}

async fn with_join_token(endpoint: &Endpoint, path: &'static str) -> Code {
    let token = tokens().worker;
    call(endpoint, &token, path).await.expect("connect")
}

#[tokio::test]
async fn a_restarted_listener_gets_its_port_back_unless_it_is_taken() {
    let any: SocketAddr = "127.0.0.1:0".parse().expect("address");
    let first = rpc::bind_or_fallback(any, None).expect("bind");
    let port = first.local_addr().expect("address").port();
    let second = rpc::bind_or_fallback(any, Some(port)).expect("another port");
    assert_ne!(second.local_addr().expect("address").port(), port);
    drop(first);
    let third = rpc::bind_or_fallback(any, Some(port)).expect("bind");
    assert_eq!(third.local_addr().expect("address").port(), port);
}

#[tokio::test]
async fn an_unreachable_coordinator_is_named_with_its_reason() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("address").port();
    drop(listener);
    let endpoint = Endpoint {
        addresses: vec!["127.0.0.1".into()],
        port,
        incarnation: String::new(),
        host: String::new(),
        pid: 0,
        ca_pem: None,
        state_dir: None,
    };
    let error = rpc::connect(&endpoint, "any").await.expect_err("nobody listens").to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("refused"), "{error}");
}
