//! Submitting a spec, for every verb that does.

use trainctl_proto::v1;
use trainctl_runtime::auth::random_hex;
use trainctl_runtime::signals::Signals;
use trainctl_runtime::tasks::Shutdown;
use trainctl_spec::JobSpec;

use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Failure, Outcome};
use crate::follow::{Dialer, Followed, OnInterrupt, follow};
use crate::output::{OutputArgs, json, line, note};
use crate::progress::Progress;
use crate::summary;
use crate::view::JobView;

/// What is asked of the coordinator.
#[derive(Debug)]
pub(crate) struct Submission<'a> {
    pub(crate) spec: &'a JobSpec,
    /// Empty: LATEST when there is one.
    pub(crate) from: String,
    pub(crate) until_step: Option<u64>,
    pub(crate) fresh: bool,
    pub(crate) allow_older: bool,
}

impl Submission<'_> {
    /// The request, with a key of its own: sent twice it submits once.
    pub(crate) fn request(&self) -> Result<v1::SubmitRequest, Failure> {
        Ok(v1::SubmitRequest {
            spec_yaml: self.spec.to_yaml().map_err(|error| Failure::usage(error.to_string()))?,
            from: self.from.clone(),
            until_step: self.until_step,
            fresh: self.fresh,
            allow_older: self.allow_older,
            request_id: random_hex(16).map_err(|error| Failure::internal(error.to_string()))?,
        })
    }
}

/// Sends it, says what was decided, and follows when asked.
pub(crate) async fn submit_and_follow(
    coordinator: &CoordinatorArgs,
    submission: &Submission<'_>,
    follow_it: bool,
    output: OutputArgs,
) -> Outcome {
    let mut client = coordinator.connect().await?;
    let response = client.submit(submission.request()?).await.map_err(|status| client::failure(&status))?.into_inner();
    if !response.message.is_empty() {
        note(&response.message);
    }
    let Some(job) = response.job else {
        return Err(Failure::internal("the coordinator answered without a job"));
    };
    let id = job.id.clone();
    if !follow_it || response.already_finished {
        if output.is_json() {
            json(&JobView::from(job))?;
        } else {
            line(&id)?;
        }
        return Ok(Exit::Ok);
    }
    let shutdown = Shutdown::new();
    let mut signals = Signals::listen(&shutdown)?;
    let mut progress = Progress::new();
    let dialer = Dialer { place: coordinator.place.coordinator.clone() };
    let followed = follow(client, &dialer, &id, &mut signals, OnInterrupt::Detach, &mut progress).await;
    progress.finish();
    match followed? {
        Followed::Ended(job) => {
            note(&summary::summary(&job));
            let exit = summary::exit_of(job.phase());
            if output.is_json() {
                json(&JobView::from(*job))?;
            } else {
                line(&id)?;
            }
            Ok(exit)
        }
        Followed::Detached | Followed::StopNow => {
            note(&format!("{id} goes on; `trainctl status {id}` shows it, `trainctl cancel {id}` stops it"));
            line(&id)?;
            Ok(Exit::Ok)
        }
    }
}
