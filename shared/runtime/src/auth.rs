//! Tokens and roles: every RPC but health needs a bearer token, on loopback too.
//!
//! A coordinator has two tokens, made at its first start and kept for the run's life: the owner's (everything) and the
//! workers' (Workers and Rendezvous only). They live in files that only the owner reads and never in argv or logs.

use std::path::{Path, PathBuf};
use std::task::{Context, Poll};

use futures::future::{Either, Ready, ready};
use rand::TryRngCore;
use rand::rngs::OsRng;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response, header};
use tower::{Layer, Service};

use crate::files;

/// File with the owner's token.
pub const OWNER_FILE: &str = "owner.json";
/// File with the workers' token.
pub const JOIN_FILE: &str = "join.json";

/// The two secrets of a coordinator. Their `Debug` shows nothing.
#[derive(Clone, PartialEq, Eq)]
pub struct Tokens {
    /// Opens every service.
    pub owner: String,
    /// Opens Workers and Rendezvous.
    pub worker: String,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokens(…)")
    }
}

#[derive(Serialize, Deserialize)]
struct TokenFile {
    token: String,
}

/// Why a token could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read or written.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file holds no token.
    #[error("{path} holds no token: {reason}; delete it and start the coordinator again")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The system gave no random bytes.
    #[error("no random bytes for a token: {0}")]
    Random(String),
}

/// Reads the tokens of `state_dir`, or makes them: `owner.json` and `join.json`, both 0600.
///
/// # Errors
/// [`Error`]: the directory cannot be written, or a file is damaged.
pub fn load_or_create(state_dir: &Path) -> Result<Tokens, Error> {
    Ok(Tokens { owner: load_or_create_one(state_dir, OWNER_FILE)?, worker: load_or_create_one(state_dir, JOIN_FILE)? })
}

fn load_or_create_one(dir: &Path, name: &str) -> Result<String, Error> {
    match read_token(dir, name) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            let token = new_token()?;
            write_token(dir, name, &token)?;
            Ok(token)
        }
        other => other,
    }
}

/// Writes `join.json` in another control directory, for workers that start there.
///
/// # Errors
/// [`Error::Io`].
pub fn publish_join(tokens: &Tokens, control_dir: &Path) -> Result<(), Error> {
    write_token(control_dir, JOIN_FILE, &tokens.worker)
}

/// The worker token in a control directory.
///
/// # Errors
/// [`Error`] when there is none.
pub fn read_join(control_dir: &Path) -> Result<String, Error> {
    read_token(control_dir, JOIN_FILE)
}

/// The owner token in a state directory.
///
/// # Errors
/// [`Error`] when there is none.
pub fn read_owner(state_dir: &Path) -> Result<String, Error> {
    read_token(state_dir, OWNER_FILE)
}

fn write_token(dir: &Path, name: &str, token: &str) -> Result<(), Error> {
    let path = dir.join(name);
    let io = |source| Error::Io { action: "write", path: path.clone(), source };
    let bytes = serde_json::to_vec(&TokenFile { token: token.to_owned() }).map_err(|error| io(error.into()))?;
    files::write_atomically(&path, &bytes, 0o600).map_err(io)
}

fn read_token(dir: &Path, name: &str) -> Result<String, Error> {
    let path = dir.join(name);
    let bytes = std::fs::read(&path).map_err(|source| Error::Io { action: "read", path: path.clone(), source })?;
    let file: TokenFile = serde_json::from_slice(&bytes)
        .map_err(|error| Error::Malformed { path: path.clone(), reason: error.to_string() })?;
    if file.token.len() < 32 || !file.token.is_ascii() {
        return Err(Error::Malformed { path, reason: "too short".to_owned() });
    }
    Ok(file.token)
}

/// 256 random bits in hexadecimal.
fn new_token() -> Result<String, Error> {
    random_hex(32)
}

/// `bytes` random bytes from the operating system, in hexadecimal: tokens, incarnations, nonces.
///
/// # Errors
/// [`Error::Random`].
pub fn random_hex(bytes: usize) -> Result<String, Error> {
    let mut buffer = vec![0_u8; bytes];
    OsRng.try_fill_bytes(&mut buffer).map_err(|error| Error::Random(error.to_string()))?;
    Ok(buffer.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Who is calling. In the extensions of every request that passed the [`AuthLayer`], but health checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The person who owns the run.
    Owner,
    /// A worker daemon.
    Worker,
}

impl Role {
    /// The role of a request, as a handler sees it.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` when the request did not pass an [`AuthLayer`].
    pub fn of<T>(request: &tonic::Request<T>) -> Result<Self, Status> {
        request.extensions().get::<Self>().copied().ok_or_else(|| Status::unauthenticated("no token"))
    }
}

/// What a token opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing is asked: health.
    Open,
    /// Known token with enough rights.
    Allow(Role),
    /// No token, or an unknown one.
    Unknown,
    /// The workers' token on an owner's service.
    Forbidden,
}

const HEALTH: &str = "/grpc.health.v1.Health/";
const WORKER_SERVICES: [&str; 2] = ["/trainctl.v1.Workers/", "/trainctl.v1.Rendezvous/"];

/// Decides by path and `authorization` header. Compares in constant time.
#[must_use]
pub fn decide(tokens: &Tokens, path: &str, authorization: Option<&[u8]>) -> Decision {
    if path.starts_with(HEALTH) {
        return Decision::Open;
    }
    let Some(token) = authorization.and_then(|value| value.strip_prefix(b"Bearer ")) else {
        return Decision::Unknown;
    };
    let is_owner = bool::from(tokens.owner.as_bytes().ct_eq(token));
    let is_worker = bool::from(tokens.worker.as_bytes().ct_eq(token));
    if is_owner {
        Decision::Allow(Role::Owner)
    } else if !is_worker {
        Decision::Unknown
    } else if WORKER_SERVICES.iter().any(|service| path.starts_with(service)) {
        Decision::Allow(Role::Worker)
    } else {
        Decision::Forbidden
    }
}

/// Put on a tonic server with `.layer(AuthLayer::new(tokens))`.
#[derive(Clone, Debug)]
pub struct AuthLayer {
    tokens: std::sync::Arc<Tokens>,
}

impl AuthLayer {
    /// A layer that knows these tokens.
    #[must_use]
    pub fn new(tokens: Tokens) -> Self {
        Self { tokens: std::sync::Arc::new(tokens) }
    }
}

impl<S> Layer<S> for AuthLayer {
    type Service = Auth<S>;

    fn layer(&self, inner: S) -> Auth<S> {
        Auth { inner, tokens: self.tokens.clone() }
    }
}

/// The service that [`AuthLayer`] makes.
#[derive(Clone, Debug)]
pub struct Auth<S> {
    inner: S,
    tokens: std::sync::Arc<Tokens>,
}

impl<S, B> Service<Request<B>> for Auth<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Response<Body>, S::Error>>, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let authorization = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let refusal = match decide(&self.tokens, request.uri().path(), authorization) {
            Decision::Open => None,
            Decision::Allow(role) => {
                request.extensions_mut().insert(role);
                None
            }
            Decision::Unknown => Some(Status::unauthenticated(
                "no valid token; the owner's lies in owner.json of the coordinator's state directory, the workers' in join.json",
            )),
            Decision::Forbidden => {
                Some(Status::permission_denied("a worker's token opens Workers and Rendezvous only"))
            }
        };
        match refusal {
            Some(status) => Either::Left(ready(Ok(status.into_http()))),
            None => Either::Right(self.inner.call(request)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn tokens_are_made_once_private_and_different() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let tokens = load_or_create(dir.path()).expect("create");
        assert_ne!(tokens.owner, tokens.worker);
        assert_eq!(load_or_create(dir.path()).expect("load"), tokens);
        assert_eq!(read_owner(dir.path()).expect("owner"), tokens.owner);
        assert_eq!(read_join(dir.path()).expect("join"), tokens.worker);
        for name in [OWNER_FILE, JOIN_FILE] {
            let mode = std::fs::metadata(dir.path().join(name)).expect("metadata").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        let other = tempfile::tempdir().expect("temporary directory");
        publish_join(&tokens, other.path()).expect("publish");
        assert_eq!(read_join(other.path()).expect("join"), tokens.worker);
        assert!(read_owner(other.path()).is_err(), "the owner's token is not published");
        assert!(!format!("{tokens:?}").contains(&tokens.owner));
    }

    #[test]
    fn a_damaged_token_file_is_not_replaced() {
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::write(dir.path().join(OWNER_FILE), "{\"token\": \"abc\"}").expect("write");
        assert!(matches!(load_or_create(dir.path()), Err(Error::Malformed { .. })));
    }

    #[test]
    fn each_token_opens_its_services_only() {
        let tokens = Tokens { owner: "o".repeat(64), worker: "w".repeat(64) };
        let owner = format!("Bearer {}", tokens.owner);
        let worker = format!("Bearer {}", tokens.worker);
        let cases = [
            ("/grpc.health.v1.Health/Check", None, Decision::Open),
            ("/trainctl.v1.Jobs/List", None, Decision::Unknown),
            ("/trainctl.v1.Jobs/List", Some(tokens.owner.as_str()), Decision::Unknown),
            ("/trainctl.v1.Jobs/List", Some("Bearer "), Decision::Unknown),
            ("/trainctl.v1.Jobs/List", Some(&worker), Decision::Forbidden),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Some(&worker), Decision::Forbidden),
            ("/trainctl.v1.Jobs/List", Some(&owner), Decision::Allow(Role::Owner)),
            ("/trainctl.v1.Workers/Session", Some(&worker), Decision::Allow(Role::Worker)),
            ("/trainctl.v1.Rendezvous/Get", Some(&worker), Decision::Allow(Role::Worker)),
            ("/trainctl.v1.Workers/Session", Some(&owner), Decision::Allow(Role::Owner)),
        ];
        for (path, header, wanted) in cases {
            assert_eq!(decide(&tokens, path, header.map(str::as_bytes)), wanted, "{path} {header:?}");
        }
    }
}
