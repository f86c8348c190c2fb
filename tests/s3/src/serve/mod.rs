//! The server: HTTP connections, the log of requests, and the way through the faults to the store.

mod faults;
mod store;

use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, DATE, HeaderValue, IF_MATCH, IF_NONE_MATCH, RANGE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;

use crate::switches::Switches;
use crate::{ACCESS_KEY, SECRET_KEY};

/// Where the switches are read and set. No bucket has such a name.
pub const SWITCHES: &str = "/_/switches";

/// An error of any kind.
pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

type Body = UnsyncBoxBody<Bytes, AnyError>;

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct Control {
    switches: Mutex<(Switches, StdRng)>,
    parts: std::sync::atomic::AtomicU64,
    log: File,
}

impl Control {
    fn new(log: &Path) -> std::io::Result<Self> {
        let log = OpenOptions::new().create(true).append(true).open(log)?;
        let switches = Mutex::new((Switches::default(), StdRng::seed_from_u64(0)));
        Ok(Self { switches, parts: Default::default(), log })
    }

    pub(crate) fn switches(&self) -> Switches {
        self.switches.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    fn set(&self, switches: Switches) {
        let random = StdRng::seed_from_u64(switches.seed);
        *self.switches.lock().unwrap_or_else(PoisonError::into_inner) = (switches, random);
    }

    /// Whether something with this share happens now.
    fn draw(&self, share: f64) -> bool {
        share > 0.0 && self.switches.lock().unwrap_or_else(PoisonError::into_inner).1.random_bool(share)
    }

    /// One line, in one write call.
    fn write_line(&self, entry: &serde_json::Value) {
        let line = format!("{entry}\n");
        (&self.log).write_all(line.as_bytes()).unwrap();
    }
}

/// A server that has its port.
#[derive(Debug)]
pub struct Bound {
    listener: TcpListener,
    service: S3Service,
    control: Arc<Control>,
}

impl Bound {
    /// Binds a port of the loopback; `port` 0 takes any. The bucket is made in the folder `data`.
    ///
    /// # Errors
    /// If a folder cannot be made or the port is taken.
    pub async fn bind(data: &Path, bucket: &str, log: &Path, port: u16) -> Result<Self, AnyError> {
        std::fs::create_dir_all(data.join(bucket))?;
        let control = Arc::new(Control::new(log)?);
        let files = s3s_fs::FileSystem::new(data).map_err(|e| format!("{}: {e:?}", data.display()))?;
        let mut builder = S3ServiceBuilder::new(store::Store::new(files, Arc::clone(&control)));
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let listener = TcpListener::bind(("127.0.0.1", port)).await?;
        Ok(Self { listener, service: builder.build(), control })
    }

    /// The port.
    ///
    /// # Errors
    /// If the socket is gone.
    pub fn port(&self) -> std::io::Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Serves for ever.
    ///
    /// # Errors
    /// If no connection can be accepted any more.
    pub async fn run(self) -> Result<(), AnyError> {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (stream, _) = self.listener.accept().await?;
            let (service, control) = (self.service.clone(), Arc::clone(&self.control));
            let answer = service_fn(move |request| {
                let (service, control) = (service.clone(), Arc::clone(&control));
                async move { Ok::<_, Infallible>(answer(request, service, &control).await) }
            });
            // A connection that ends badly is the client's business, or what a switch asked for.
            connections.spawn(async move {
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await.is_ok()
            });
            while connections.try_join_next().is_some() {}
        }
    }
}

async fn answer(request: Request<Incoming>, service: S3Service, control: &Control) -> Response<Body> {
    if request.uri().path() == SWITCHES {
        return set_switches(request, control).await;
    }
    let mut entry = describe(&request);
    let switches = control.switches();
    let mut fault = None;
    let mut response = match faults::refusal(&request, control, &switches) {
        Some((name, response)) => {
            fault = Some(name);
            response
        }
        None => {
            let changes = !matches!(*request.method(), Method::GET | Method::HEAD);
            let request = request.map(|body| faults::part_that_kills(&entry, body, control, &switches));
            match service.call(request).await {
                Ok(_) if changes && control.draw(switches.lose) => {
                    fault = Some("lost");
                    faults::error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "the answer was lost")
                }
                Ok(response) => response.map(|body| body.map_err(AnyError::from).boxed_unsync()),
                Err(error) => faults::error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", &format!("{error:?}")),
            }
        }
    };
    let length = response.headers().get(CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse::<u64>().ok()).unwrap_or(0);
    if entry["method"] == "GET" && response.status().is_success() && length > 0 {
        if control.draw(switches.truncate) {
            fault = Some("truncated");
            response = response.map(|body| faults::truncated(body, length / 2));
        } else if let Some(rate) = switches.bytes_per_second {
            response = response.map(|body| faults::paced(body, rate));
        }
    }
    let now = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(switches.clock_offset_seconds);
    let date = jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&now);
    if let Some(date) = date.ok().and_then(|date| HeaderValue::from_str(&date).ok()) {
        response.headers_mut().insert(DATE, date);
    }
    entry["status"] = response.status().as_u16().into();
    entry["fault"] = fault.into();
    control.write_line(&entry);
    response
}

fn describe(request: &Request<Incoming>) -> serde_json::Value {
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    serde_json::json!({
        "method": request.method().as_str(),
        "path": request.uri().path(),
        "query": request.uri().query().unwrap_or_default(),
        "range": header(RANGE),
        "if_none_match": header(IF_NONE_MATCH),
        "if_match": header(IF_MATCH),
        "bytes": header(CONTENT_LENGTH).and_then(|n| n.parse::<u64>().ok()),
    })
}

async fn set_switches(request: Request<Incoming>, control: &Control) -> Response<Body> {
    let body = request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    match serde_json::from_slice(&body) {
        Ok(switches) => {
            control.set(switches);
            faults::plain(StatusCode::OK, String::new())
        }
        Err(error) => faults::plain(StatusCode::BAD_REQUEST, error.to_string()),
    }
}
