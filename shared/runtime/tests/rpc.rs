//! Token, TLS and port rules against a real server on a real socket.

#![allow(clippy::disallowed_methods, clippy::expect_used, reason = "tests")]

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use trainctl_runtime::auth::{AuthLayer, Tokens};
use trainctl_runtime::endpoint::Endpoint;
use trainctl_runtime::{rpc, tls};

fn tokens() -> Tokens {
    Tokens { owner: "o".repeat(64), worker: "w".repeat(64) }
}

/// Serves health behind the token layer, over TLS when there is a state directory.
async fn serve(tls: Option<tls::ServerTls>) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let (_, health) = tonic_health::server::health_reporter();
    let server = rpc::server(tls.as_ref()).expect("server").layer(AuthLayer::new(tokens())).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
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

/// Any path but health's.
async fn other(endpoint: &Endpoint, token: &str) -> Code {
    let channel = rpc::connect(endpoint, token).await.expect("connect");
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.expect("ready");
    let codec = tonic_health_codec();
    let path = tonic::codegen::http::uri::PathAndQuery::from_static("/trainctl.v1.Jobs/List");
    let request = tonic::Request::new(HealthCheckRequest::default());
    let answer: Result<tonic::Response<tonic_health::pb::HealthCheckResponse>, _> =
        client.unary(request, path, codec).await;
    answer.expect_err("no such service").code()
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
async fn a_restarted_listener_gets_its_port_back_unless_it_is_taken() {
    let any: SocketAddr = "127.0.0.1:0".parse().expect("address");
    let first = rpc::bind_or_fallback(any, None).await.expect("bind");
    let port = first.local_addr().expect("address").port();
    let second = rpc::bind_or_fallback(any, Some(port)).await.expect("another port");
    assert_ne!(second.local_addr().expect("address").port(), port);
    drop(first);
    let third = rpc::bind_or_fallback(any, Some(port)).await.expect("bind");
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
