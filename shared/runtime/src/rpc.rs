//! Dialling and listening. Both sides send HTTP/2 keep-alives, so that a peer that is gone without a word is noticed.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Server};
use tonic::{Request, Status};

use crate::certificates::Certified;
use crate::endpoint::{self, Endpoint};
use crate::tls;

/// Largest message between the parts of a run, bytes. The longest is a shard report: 32 B for each 1,024 elements that a rank
/// saves, so about 5 G parameters a rank with AdamW.
pub const MAX_MESSAGE_BYTES: usize = 512 * 1024 * 1024;
/// Largest request that people's commands may send, bytes: a spec is a few KiB.
pub const MAX_REQUEST_BYTES: usize = 16 * 1024 * 1024;
/// Largest answer to people's commands, bytes: a list of all jobs of a coordinator, with their specs' names and states.
pub const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
/// Largest message that only has a name in it, bytes.
pub const MAX_SMALL_BYTES: usize = 64 * 1024;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections that may wait to be accepted. Where it is full a caller's next try is a second away, so a crowd that comes at once
/// would hold up everybody.
const BACKLOG: u32 = 4096;
/// Calls and streams that may be open on one connection.
const MAX_STREAMS: u32 = 256;
/// Bytes of a call's headers.
const MAX_HEADERS: u32 = 16 << 10;
/// Bytes of an HTTP/2 frame.
const MAX_FRAME: u32 = 16 << 10;
/// Streams that a peer may reset before they were looked at, until its connection is closed.
const MAX_RESETS: usize = 20;

/// A channel that proves itself with every call.
pub type AuthedChannel = InterceptedService<Channel, Bearer>;

/// How a caller proves who it is.
#[derive(Clone, Copy, Debug)]
pub enum Credentials<'a> {
    /// A bearer token, sent with every call.
    Token(&'a str),
    /// A certificate, shown in the TLS handshake. Only for endpoints with a CA.
    Certificate(&'a Certified),
}

impl<'a> From<&'a str> for Credentials<'a> {
    fn from(token: &'a str) -> Self {
        Self::Token(token)
    }
}

impl<'a> From<&'a String> for Credentials<'a> {
    fn from(token: &'a String) -> Self {
        Self::Token(token)
    }
}

/// Adds `authorization: Bearer …` where there is a token.
#[derive(Clone)]
pub struct Bearer {
    header: Option<MetadataValue<Ascii>>,
}

impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bearer(…)")
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(header) = &self.header {
            request.metadata_mut().insert("authorization", header.clone());
        }
        Ok(request)
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// None of the addresses answers.
    #[error("no coordinator answers at {tried}: {reason}")]
    Unreachable {
        /// The addresses with their port.
        tried: String,
        /// The last address's error.
        reason: String,
    },
    /// The token or the CA certificate cannot be used.
    #[error("{what} of the coordinator at {at} cannot be used: {reason}")]
    Invalid {
        /// "token", "certificate" or "address".
        what: &'static str,
        /// Address.
        at: String,
        /// What is wrong.
        reason: String,
    },
    /// The port cannot be had.
    #[error("listen on {address}: {source}")]
    Bind {
        /// Wanted address.
        address: SocketAddr,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Dials the first address that answers, over TLS when the endpoint has a CA.
///
/// # Errors
/// [`Error::Unreachable`] after every address was tried for 3 s; [`Error::Invalid`].
pub async fn connect<'a>(endpoint: &Endpoint, credentials: impl Into<Credentials<'a>>) -> Result<AuthedChannel, Error> {
    let credentials = credentials.into();
    let invalid = |what, reason: &dyn std::fmt::Display| Error::Invalid {
        what,
        at: endpoint.display(),
        reason: reason.to_string(),
    };
    let header = match credentials {
        Credentials::Certificate(_) => None,
        Credentials::Token(token) => {
            // The parser's own text could quote the token.
            let parsed: Result<MetadataValue<Ascii>, _> = format!("Bearer {token}").parse();
            let mut header = parsed.map_err(|_| invalid("token", &"it has characters that no token has"))?;
            header.set_sensitive(true);
            Some(header)
        }
    };
    let mut last = "endpoint.json lists no address".to_owned();
    for address in &endpoint.addresses {
        let scheme = if endpoint.ca_pem.is_some() { "https" } else { "http" };
        let uri = format!("{scheme}://{}", endpoint::join_host_port(address, endpoint.port));
        let mut dial = Channel::from_shared(uri)
            .map_err(|error| invalid("address", &error))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        if let Some(ca_pem) = &endpoint.ca_pem {
            let mut config =
                ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca_pem)).domain_name(tls::SERVER_NAME);
            if let Credentials::Certificate(certified) = credentials {
                config = config.identity(certified.identity());
            }
            dial = dial.tls_config(config).map_err(|error| invalid("certificate", &error))?;
        }
        match tokio::time::timeout(CONNECT_TIMEOUT * 2, dial.connect()).await {
            Ok(Ok(channel)) => return Ok(InterceptedService::new(channel, Bearer { header })),
            Ok(Err(error)) => last = innermost(&error),
            Err(_) => last = "no answer in time".to_owned(),
        }
    }
    Err(Error::Unreachable { tried: endpoint.display(), reason: last })
}

/// The last cause of an error: tonic's own text is only "transport error".
#[must_use]
pub fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// A server with keep-alives, limits and, when given, TLS. Add the [`AuthLayer`](crate::auth::AuthLayer) to it, limits on
/// message sizes to each service, and serve [`Incoming`](crate::connections::Incoming).
///
/// # Errors
/// [`Error::Invalid`] when the certificate is refused.
pub fn server(tls: Option<&tls::ServerTls>) -> Result<Server, Error> {
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADERS)
        .max_frame_size(MAX_FRAME)
        .http2_max_pending_accept_reset_streams(Some(MAX_RESETS));
    match tls {
        None => Ok(server),
        Some(tls) => server.tls_config(tls.config.clone()).map_err(|error| Error::Invalid {
            what: "certificate",
            at: tls::SERVER_NAME.to_owned(),
            reason: error.to_string(),
        }),
    }
}

/// Binds `listen`. When its port is 0 the `preferred` port (the one of the last start) is tried first, and any free port
/// is taken if that one is gone.
///
/// # Errors
/// [`Error::Bind`].
pub fn bind_or_fallback(listen: SocketAddr, preferred: Option<u16>) -> Result<TcpListener, Error> {
    if let (0, Some(port)) = (listen.port(), preferred) {
        let address = SocketAddr::new(listen.ip(), port);
        match bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => tracing::warn!(%address, %error, "the port of the last start is taken: taking another"),
        }
    }
    bind(listen).map_err(|source| Error::Bind { address: listen, source })
}

fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restart takes its port back while connections of the last start linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// The addresses to publish for a listener bound to `bound`: itself, or every non-loopback address of the machine when it
/// is bound to all of them.
#[must_use]
pub fn published_addresses(bound: IpAddr) -> Vec<String> {
    if !bound.is_unspecified() {
        return vec![bound.to_string()];
    }
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let mut addresses: Vec<IpAddr> = interfaces
        .iter()
        .map(if_addrs::Interface::ip)
        .filter(|ip| !ip.is_loopback() && (bound.is_ipv6() || ip.is_ipv4()) && !is_link_local(*ip))
        .collect();
    addresses.sort_by_key(|ip| (ip.is_ipv6(), *ip));
    addresses.dedup();
    if addresses.is_empty() {
        addresses.push(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));
    }
    addresses.iter().map(ToString::to_string).collect()
}

/// Link-local addresses need an interface beside them and cannot be dialled from another machine by number alone.
fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}
