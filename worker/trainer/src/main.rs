//! `trainctl-trainer`: the rank process. A worker starts it with one end of a socketpair as standard input; over that link
//! it gets its assignment and reports. It never talks to the coordinator.
//!
//! Exit codes are those of [`trainctl_spec::state::exit::code`], plus 64 when it was not started by a worker; see
//! [`ending`]. Before any other code than 0 the last line on standard error is `trainctl-trainer: error: …`.

mod assignment;
mod ending;
mod link;
mod log;
mod rendezvous;
mod reporter;
mod requests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod whereabouts;

use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::Arc;

use trainctl_engine::train;
use trainctl_runtime::{proc, telemetry};

use ending::Ending;

fn main() -> ExitCode {
    // First of all: from here on this process does not outlive its worker.
    match proc::die_with_parent() {
        Ok(true) => {}
        Ok(false) => return Ending::usage("it was not started by trainctl-worker, which gives it its link").report(),
        Err(error) => return Ending::usage(&error.to_string()).report(),
    }
    if let Err(error) = telemetry::init("trainctl-trainer") {
        return Ending::usage(&error.to_string()).report();
    }
    ending::watch_panics();
    if let Err(error) = trainctl_collective::install_stack_handler() {
        tracing::warn!(%error, "no stacks of this process at a hang: the signal handler was refused");
    }
    match std::panic::catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(ending)) => ending.report(),
        Err(_) => Ending::panicked().report(),
    }
}

/// The rank's life. The engine runs on this thread; the link has threads of its own.
fn run() -> Result<(), Ending> {
    let link = link::Link::connect()?;
    let assignment = link.assignment()?;
    log::take_up(&assignment.log)?;
    let requests = Arc::new(requests::Pending::default());
    link.follow_requests(requests.clone());
    let rendezvous = rendezvous::Forwarded::new(&link, &assignment, requests.clone());
    let job = assignment::train_job(&assignment, Arc::new(rendezvous))?;
    tracing::info!(
        rank = assignment.rank,
        world_size = assignment.world_size,
        generation = job.generation.0,
        start_step = assignment.start_step,
        stop_at = assignment.stop_at,
        "assigned"
    );
    let whereabouts = Arc::new(whereabouts::Whereabouts::open(assignment.page.as_ref(), job.pulse.clone())?);
    link.keep_beating(whereabouts.clone());
    let reporter = Arc::new(reporter::Reporter::start(&link, requests, whereabouts));
    let finished = train::run(job, reporter.clone());
    // What was reported before an error counts too: the worker must have it before this process ends.
    let delivered = match &finished {
        Ok(finished) => reporter.finish(finished),
        Err(_) => reporter.close(),
    };
    let finished = finished.map_err(|error| Ending::from(&error))?;
    delivered?;
    tracing::info!(cause = ?finished.cause, next_step = finished.next_step.0, "finished");
    Ok(())
}
