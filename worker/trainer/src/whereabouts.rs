//! Where this rank is, for its worker: steps, their times, collectives, and that the process runs at all.
//!
//! It is written into a page of memory that the worker reads whenever it likes ([`trainctl_runtime::page`]): a step costs one
//! system call and no message, and the newest step is known to the worker even when the next instant kills this process (J5).

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prost::Message as _;
use trainctl_engine::pulse::Pulse;
use trainctl_proto::v1::{Place, Progress};
use trainctl_runtime::page::Writer;
use trainctl_spec::Step;

use crate::ending::Ending;

/// Steps whose times are shown.
const TIMES: usize = 32;

/// The page, and what stands in it.
pub(crate) struct Whereabouts {
    page: Writer,
    place: Mutex<Place>,
    pulse: Arc<Pulse>,
}

impl Whereabouts {
    /// Opens the worker's page.
    pub(crate) fn open(page: &Path, pulse: Arc<Pulse>) -> Result<Self, Ending> {
        let opened = Writer::open(page);
        let page =
            opened.map_err(|error| Ending::error(format!("open the worker's page {}: {error}", page.display())))?;
        Ok(Self { page, place: Mutex::default(), pulse })
    }

    /// A step is done.
    pub(crate) fn step_done(&self, step: Step, compute: Duration) {
        self.write(|place| {
            place.steps += 1;
            place.step = step.0;
            if place.compute_seconds.len() == TIMES {
                place.compute_seconds.remove(0);
            }
            place.compute_seconds.push(compute.as_secs_f64());
        });
    }

    /// The process runs. Called once a second by a thread that the engine does not hold up.
    pub(crate) fn beat(&self) {
        let place = self.pulse.place();
        let collective = place.newest.map(|newest| newest.to_string()).unwrap_or_default();
        let progress = Progress { entered: place.entered, left: place.left, collective };
        self.write(|place| {
            place.beats += 1;
            place.progress = Some(progress);
        });
    }

    fn write(&self, change: impl FnOnce(&mut Place)) {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut place);
        if let Err(error) = self.page.write(&place.encode_to_vec()) {
            tracing::warn!(%error, "the worker's page cannot be written");
        }
    }
}
