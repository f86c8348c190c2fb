//! The service that gives others leave to look, and takes it back.

use std::sync::Arc;

use tonic::{Request, Response, Status};
use tracing::info;
use trainctl_proto::v1;
use trainctl_runtime::auth::{Grant, GrantError, Grants};
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_store::{Fence as _, Tenure};

/// `Grants`.
pub struct GrantsService {
    /// All of them; the server's gate asks the same.
    pub grants: Arc<Grants>,
    /// Over the state directory.
    pub tenure: Arc<Tenure>,
}

impl GrantsService {
    /// Changes are durable before they are answered, and a disk may hang: not on the runtime's threads. One that was made while
    /// another coordinator took over is not answered: who was to lose his leave may still have it there (J2).
    async fn change<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Grants) -> Result<T, GrantError> + Send + 'static,
    ) -> Result<T, Status> {
        let grants = self.grants.clone();
        let changed = tokio::task::spawn_blocking(move || change(&grants)).await;
        let changed = changed.map_err(|error| Status::internal(error.to_string()))?.map_err(|error| refused(&error))?;
        self.tenure.pass().await.map_err(|error| Status::unavailable(format!("{error}; ask again")))?;
        Ok(changed)
    }
}

#[tonic::async_trait]
impl v1::grants_server::Grants for GrantsService {
    async fn add_grant(&self, request: Request<v1::AddGrantRequest>) -> Result<Response<v1::AddGrantResponse>, Status> {
        let v1::AddGrantRequest { name, life_ms } = request.into_inner();
        let (grant, token) = self.change(move |grants| grants.add(&name, life_ms, now_ms())).await?;
        info!(name = %grant.name, expires_at_ms = grant.expires_at_ms, "a grant to look");
        Ok(Response::new(v1::AddGrantResponse { grant: Some(message(&grant)), token }))
    }

    async fn list_grants(&self, _: Request<v1::ListGrantsRequest>) -> Result<Response<v1::ListGrantsResponse>, Status> {
        Ok(Response::new(v1::ListGrantsResponse { grants: self.grants.list().iter().map(message).collect() }))
    }

    async fn revoke_grant(&self, request: Request<v1::RevokeGrantRequest>) -> Result<Response<v1::Grant>, Status> {
        let name = request.into_inner().name;
        let grant = self.change(move |grants| grants.revoke(&name)).await?;
        info!(name = %grant.name, "a grant is taken back");
        Ok(Response::new(message(&grant)))
    }
}

fn message(grant: &Grant) -> v1::Grant {
    v1::Grant {
        name: grant.name.clone(),
        created_at_ms: grant.created_at_ms,
        expires_at_ms: grant.expires_at_ms,
        expired: grant.expires_at_ms <= now_ms(),
    }
}

fn refused(error: &GrantError) -> Status {
    let text = error.to_string();
    match error {
        GrantError::Name(_) | GrantError::Life(_) => Status::invalid_argument(text),
        GrantError::Exists(_) | GrantError::TooMany => Status::failed_precondition(text),
        GrantError::Missing(_) => Status::not_found(text),
        GrantError::File(_) => Status::internal(text),
    }
}

fn now_ms() -> u64 {
    SystemClock::new().wall_ms()
}
