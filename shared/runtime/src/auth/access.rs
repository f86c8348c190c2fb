//! The decision whether a call is let in.

use std::sync::Arc;

use tonic::{Request, Status};

use super::grants::{Grant, Grants};

/// Who is calling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The person who owns the run.
    Owner,
    /// A worker daemon.
    Worker,
    /// A person who may look.
    Observer,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Owner => "the owner",
            Self::Worker => "a worker",
            Self::Observer => "an observer",
        })
    }
}

/// What a method asks of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing: health.
    Anyone,
    /// It only reads: observers and the owner.
    Read,
    /// It changes something that the owner owns.
    Own,
    /// What workers do. On a TLS listener a worker's certificate, elsewhere the join token or the owner's.
    Work,
    /// Asks for a certificate: the join token or the owner's.
    Enroll,
    /// Not for a network: a trainer calls it over the socketpair that it inherits.
    Inherited,
}

/// How a caller proved who it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// The owner's token.
    OwnerToken,
    /// The workers' token.
    JoinToken,
    /// A certificate of the run's CA, for the worker of this id.
    Certificate(String),
    /// A grant that is valid.
    Grant(Grant),
    /// A grant that has ended.
    Expired(Grant),
    /// Nothing that is known here.
    Nothing,
}

/// Why a call is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nobody that is known here.
    #[error(
        "no valid token (unknown, or revoked); the owner's lies in owner.json of the coordinator's state directory, the workers' in join.json, and `trainctl auth grant` makes one for a person who may look"
    )]
    Unknown,
    /// A grant that has ended.
    #[error("the grant {0:?} has expired; the run's owner makes a new one with `trainctl auth grant {0}`")]
    Expired(String),
    /// Somebody who may not do this.
    #[error("{role} may not call {method}: {needs}")]
    Forbidden {
        /// Who called.
        role: Role,
        /// Service and method.
        method: String,
        /// What would be needed.
        needs: &'static str,
    },
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.to_string();
        match refusal {
            Refusal::Unknown | Refusal::Expired(_) => Self::unauthenticated(text),
            Refusal::Forbidden { .. } => Self::permission_denied(text),
        }
    }
}

/// Decides whether a call of `path` is let in: `None` for calls that ask for nothing.
///
/// # Errors
/// [`Refusal`] says what is missing.
pub fn decide(access: Access, path: &str, is_tls: bool, proof: &Proof) -> Result<Option<Role>, Refusal> {
    if access == Access::Anyone {
        return Ok(None);
    }
    let role = match proof {
        Proof::OwnerToken => Role::Owner,
        Proof::JoinToken | Proof::Certificate(_) => Role::Worker,
        Proof::Grant(_) => Role::Observer,
        Proof::Expired(grant) => return Err(Refusal::Expired(grant.name.clone())),
        Proof::Nothing => return Err(Refusal::Unknown),
    };
    let forbidden = |needs| Err(Refusal::Forbidden { role, method: path.trim_start_matches('/').to_owned(), needs });
    let is_certified = matches!(proof, Proof::Certificate(_));
    match (access, role) {
        (Access::Anyone, _) => Ok(None),
        (Access::Inherited, _) => forbidden("only a trainer calls it, over the socket that its worker gave it"),
        (Access::Own | Access::Read, Role::Owner)
        | (Access::Read, Role::Observer)
        | (Access::Enroll, Role::Owner | Role::Worker) => Ok(Some(role)),
        (Access::Work, Role::Owner | Role::Worker) if is_certified || !is_tls => Ok(Some(role)),
        (Access::Work, Role::Owner | Role::Worker) => {
            forbidden("on a listener with TLS it needs a worker's certificate, which Enroll gives for the join token")
        }
        (Access::Work | Access::Enroll, Role::Observer) => forbidden("it is for workers"),
        (Access::Own, Role::Observer) => forbidden("it needs the owner's token; a grant lets its holder look"),
        (Access::Own | Access::Read, Role::Worker) => {
            forbidden("it needs the owner's token, or a grant for what reads")
        }
    }
}

/// Who is calling: in the extensions of every request that passed the [`AuthLayer`](super::AuthLayer), but health checks.
#[derive(Clone, Debug)]
pub struct Caller {
    /// In which role.
    pub role: Role,
    /// The worker of its certificate; absent where it has none.
    pub worker: Option<String>,
    pub(super) grant: Option<(Grant, Arc<Grants>)>,
}

impl Caller {
    /// The caller of a request, as a handler sees it.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` when the request did not pass an [`AuthLayer`](super::AuthLayer).
    pub fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        request.extensions().get::<Self>().cloned().ok_or_else(|| Status::unauthenticated("no token"))
    }

    /// Returns when the caller may look no longer, with what a stream that is open then ends with. Never for owner and
    /// workers.
    pub async fn over(&self) -> Status {
        match &self.grant {
            None => std::future::pending().await,
            Some((grant, grants)) => grants.over(grant).await.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant() -> Grant {
        Grant::new("ann", "token", 0, 1)
    }

    #[test]
    fn each_proof_opens_its_methods_only() {
        use Access::{Anyone, Enroll, Inherited, Own, Read, Work};
        let all = [Anyone, Read, Own, Work, Enroll, Inherited];
        let opened = |proof: &Proof, is_tls: bool| {
            all.into_iter().filter(|access| decide(*access, "/a/B", is_tls, proof).is_ok()).collect::<Vec<_>>()
        };
        let certificate = Proof::Certificate("w1".to_owned());
        for is_tls in [false, true] {
            assert_eq!(opened(&Proof::Nothing, is_tls), [Anyone]);
            assert_eq!(opened(&Proof::Expired(grant()), is_tls), [Anyone]);
            assert_eq!(opened(&Proof::Grant(grant()), is_tls), [Anyone, Read]);
            assert_eq!(opened(&certificate, is_tls), [Anyone, Work, Enroll]);
        }
        assert_eq!(opened(&Proof::OwnerToken, false), [Anyone, Read, Own, Work, Enroll]);
        assert_eq!(opened(&Proof::OwnerToken, true), [Anyone, Read, Own, Enroll]);
        assert_eq!(opened(&Proof::JoinToken, false), [Anyone, Work, Enroll]);
        assert_eq!(opened(&Proof::JoinToken, true), [Anyone, Enroll], "the join token opens only Enroll");
    }

    #[test]
    fn a_refusal_names_role_and_method() {
        let refusal = decide(Access::Own, "/trainctl.v1.Jobs/Submit", false, &Proof::Grant(grant())).unwrap_err();
        let status = Status::from(refusal);
        assert_eq!(status.code(), tonic::Code::PermissionDenied);
        assert_eq!(
            status.message(),
            "an observer may not call trainctl.v1.Jobs/Submit: it needs the owner's token; a grant lets its holder look"
        );
        let expired = Status::from(decide(Access::Read, "/a/B", false, &Proof::Expired(grant())).unwrap_err());
        assert_eq!(expired.code(), tonic::Code::Unauthenticated);
        assert!(expired.message().contains("\"ann\" has expired"), "{expired}");
    }
}
