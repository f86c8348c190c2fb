//! A connection to a coordinator, and what its answers mean for the exit code.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tonic::{Code, Status};
use trainctl_proto::v1;
use trainctl_proto::v1::jobs_client::JobsClient;
use trainctl_runtime::auth;
use trainctl_runtime::endpoint::{self, Endpoint, Located};
use trainctl_runtime::rpc::{self, AuthedChannel};

use crate::exit::{Exit, Failure};

/// Which coordinator it is about.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct PlaceArgs {
    /// Control or run directory, endpoint.json, or host:port of the coordinator; default: $TRAINCTL_COORDINATOR,
    /// ./control/endpoint.json, then the user's state directory
    #[arg(long, value_name = "ADDR")]
    pub(crate) coordinator: Option<String>,
}

/// Which coordinator to ask, and as whom.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CoordinatorArgs {
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// File with the token of `trainctl auth grant`, for who is not the run's owner
    #[arg(long, value_name = "FILE", env = "TRAINCTL_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

/// A client of the Jobs service.
pub(crate) type Client = JobsClient<AuthedChannel>;

impl CoordinatorArgs {
    /// Finds a coordinator and dials it.
    pub(crate) async fn connect(&self) -> Result<Client, Failure> {
        self.channel().await.map(client)
    }

    /// The same, for services other than Jobs.
    pub(crate) async fn channel(&self) -> Result<AuthedChannel, Failure> {
        let located = self.locate()?;
        let token = match &self.token_file {
            None => owner_token(&located)?,
            Some(file) => auth::read_file(file).map_err(|error| {
                Failure::usage(format!("--token-file: {error}; `trainctl auth grant NAME --file FILE` makes one"))
            })?,
        };
        dial(&located, &token).await
    }

    /// Finds a coordinator's endpoint file.
    pub(crate) fn locate(&self) -> Result<Located, Failure> {
        self.place.locate()
    }
}

impl PlaceArgs {
    /// Finds a coordinator's endpoint file.
    pub(crate) fn locate(&self) -> Result<Located, Failure> {
        endpoint::locate(self.coordinator.as_deref()).map_err(|error| Failure::unreachable(error.to_string()))
    }
}

/// Dials a coordinator that was found, as its owner.
pub(crate) async fn connect(located: &Located) -> Result<Client, Failure> {
    dial(located, &owner_token(located)?).await.map(client)
}

async fn dial(located: &Located, token: &str) -> Result<AuthedChannel, Failure> {
    rpc::connect(&located.endpoint, token).await.map_err(|error| {
        let started = process(&located.endpoint);
        Failure::unreachable(format!("{error}; {} names it{started}", located.dir.join(endpoint::FILE_NAME).display()))
    })
}

/// Whether a coordinator answers there within 3 s: a frozen one accepts connections and says nothing.
pub(crate) async fn answers(located: &Located) -> bool {
    let ask = async {
        let mut client = connect(located).await.ok()?;
        client.list(v1::ListRequest {}).await.ok()
    };
    tokio::time::timeout(Duration::from_secs(3), ask).await.is_ok_and(|answer| answer.is_some())
}

/// Wraps a channel.
pub(crate) fn client(channel: AuthedChannel) -> Client {
    JobsClient::new(channel)
        .max_decoding_message_size(rpc::MAX_ANSWER_BYTES)
        .max_encoding_message_size(rpc::MAX_REQUEST_BYTES)
}

fn process(endpoint: &Endpoint) -> String {
    if endpoint.pid == 0 { String::new() } else { format!(" (pid {} on {})", endpoint.pid, endpoint.host) }
}

/// The owner's token lies beside the endpoint file, or in the state directory that it names.
fn owner_token(located: &Located) -> Result<String, Failure> {
    let places = [Some(located.dir.clone()), located.endpoint.state_dir.clone()];
    let mut reasons = Vec::new();
    for place in places.into_iter().flatten() {
        match auth::read_owner(&place) {
            Ok(token) => return Ok(token),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    reasons.dedup();
    let reasons = reasons.join("; ");
    Err(Failure::usage(format!(
        "no token for the coordinator: {reasons}; only the person who started it may use it, or who has a grant of theirs (`trainctl auth grant`) and names it with --token-file"
    )))
}

/// What an answer of the coordinator means.
pub(crate) fn failure(status: &Status) -> Failure {
    let exit = match status.code() {
        Code::NotFound
        | Code::InvalidArgument
        | Code::FailedPrecondition
        | Code::Unauthenticated
        | Code::PermissionDenied => Exit::Usage,
        Code::AlreadyExists | Code::Unavailable | Code::DeadlineExceeded => Exit::Unreachable,
        _ => Exit::Internal,
    };
    let message = if is_away(status) {
        format!("the coordinator went away: {}", status.message())
    } else {
        status.message().to_owned()
    };
    Failure { exit, message }
}

/// Whether a call failed because the coordinator is away, so that it is worth another try.
pub(crate) fn is_away(status: &Status) -> bool {
    // tonic reports a connection that broke in mid-call as Unknown ("transport error", h2 errors) or Cancelled.
    let is_transport = std::error::Error::source(status).is_some();
    matches!(status.code(), Code::Unavailable)
        || (is_transport && matches!(status.code(), Code::Unknown | Code::Cancelled | Code::Internal))
}

/// The job that a person means: an id, or "" for the latest.
pub(crate) async fn get_job(client: &mut Client, id: Option<&str>) -> Result<v1::Job, Failure> {
    let request = v1::GetRequest { job: id.unwrap_or_default().to_owned() };
    client.get(request).await.map(tonic::Response::into_inner).map_err(|status| failure(&status))
}
