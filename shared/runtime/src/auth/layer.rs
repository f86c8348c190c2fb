//! Applies [`access::decide`] to every call.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::{Either, Ready, ready};
use subtle::ConstantTimeEq;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response, header};
use tower::{Layer, Service};

use super::access::{self, Access, Caller, Proof};
use super::grants::Grants;
use super::tokens::Tokens;
use crate::clock::{Clock, SystemClock};
use crate::connections::{Peer, Standing};

/// What a server knows of those who call.
pub struct Gate {
    /// Its tokens.
    pub tokens: Tokens,
    /// Those who may look.
    pub grants: Arc<Grants>,
    /// Whether its listener speaks TLS.
    pub is_tls: bool,
    /// What each method, by its path, asks of its caller.
    pub access: fn(&str) -> Access,
}

impl Gate {
    /// A token goes before a certificate: who enrols anew shows the token. Tokens are compared in constant time.
    fn proof<B>(&self, request: &Request<B>) -> Proof {
        let header = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
        if let Some(token) = header.and_then(|value| value.strip_prefix(b"Bearer ")) {
            let is_owner = bool::from(self.tokens.owner.as_bytes().ct_eq(token));
            let is_worker = bool::from(self.tokens.worker.as_bytes().ct_eq(token));
            return match (is_owner, is_worker) {
                (true, _) => Proof::OwnerToken,
                (false, true) => Proof::JoinToken,
                (false, false) => self.grants.proof(token, SystemClock::new().wall_ms()),
            };
        }
        // TLS has checked signature, CA and times.
        let worker = Peer::of(request.extensions()).and_then(|peer| peer.certified_worker(request.extensions()));
        worker.map_or(Proof::Nothing, Proof::Certificate)
    }

    fn decide<B>(&self, request: &Request<B>) -> Result<Option<Caller>, Status> {
        let path = request.uri().path();
        let access = (self.access)(path);
        let proof = if access == Access::Anyone { Proof::Nothing } else { self.proof(request) };
        let Some(role) = access::decide(access, path, self.is_tls, &proof)? else { return Ok(None) };
        let (worker, grant) = match proof {
            Proof::Certificate(worker) => (Some(worker), None),
            Proof::Grant(grant) => (None, Some((grant, self.grants.clone()))),
            _ => (None, None),
        };
        Ok(Some(Caller { role, worker, grant }))
    }
}

/// Put on a tonic server with `.layer(AuthLayer::new(gate))`.
#[derive(Clone)]
pub struct AuthLayer {
    gate: Arc<Gate>,
}

impl AuthLayer {
    /// A layer that knows these callers.
    #[must_use]
    pub fn new(gate: Gate) -> Self {
        Self { gate: Arc::new(gate) }
    }
}

impl<S> Layer<S> for AuthLayer {
    type Service = Auth<S>;

    fn layer(&self, inner: S) -> Auth<S> {
        Auth { inner, gate: self.gate.clone() }
    }
}

/// The service that [`AuthLayer`] makes.
#[derive(Clone)]
pub struct Auth<S> {
    inner: S,
    gate: Arc<Gate>,
}

impl<S, B> Service<Request<B>> for Auth<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Response<Body>, S::Error>>, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        match self.gate.decide(&request) {
            Err(status) => return Either::Left(ready(Ok(status.into_http()))),
            Ok(None) => {}
            Ok(Some(caller)) => {
                if let Some(peer) = Peer::of(request.extensions()) {
                    peer.prove(Standing::from(caller.role));
                }
                request.extensions_mut().insert(caller);
            }
        }
        // It has done its work; nobody further on can log it.
        request.headers_mut().remove(header::AUTHORIZATION);
        Either::Right(self.inner.call(request))
    }
}
