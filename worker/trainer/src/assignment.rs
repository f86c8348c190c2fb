//! From the worker's assignment to the engine's job.

use std::sync::Arc;

use trainctl_collective::KeyValue;
use trainctl_engine::TrainJob;
use trainctl_proto::convert::{Fence, hex};
use trainctl_proto::v1::Assignment;
use trainctl_spec::{JobSpec, Rank, Step};

use crate::ending::Ending;

/// Converts and checks an assignment.
pub(crate) fn train_job(assignment: &Assignment, rendezvous: Arc<dyn KeyValue>) -> Result<TrainJob, Ending> {
    let invalid = |what: String| Ending::error(format!("the assignment is invalid: {what}"));
    let fence = Fence::try_from(assignment.fence.clone()).map_err(|error| invalid(error.to_string()))?;
    let spec = JobSpec::from_yaml(&assignment.spec_yaml).map_err(|faults| invalid(faults.to_string()))?;
    if assignment.rank >= assignment.world_size {
        return Err(invalid(format!("rank {} of {} ranks", assignment.rank, assignment.world_size)));
    }
    if assignment.threads == 0 {
        return Err(invalid("threads is 0: the coordinator resolves resources.threads_per_worker".to_owned()));
    }
    let start_from = match &assignment.start_from {
        None => None,
        Some(checkpoint) if checkpoint.manifest_blake3.len() == 32 => {
            Some((checkpoint.name.clone(), hex(&checkpoint.manifest_blake3)))
        }
        Some(checkpoint) => {
            let length = checkpoint.manifest_blake3.len();
            return Err(invalid(format!("manifest_blake3 of {} has {length} bytes instead of 32", checkpoint.name)));
        }
    };
    Ok(TrainJob {
        spec,
        rank: Rank(assignment.rank),
        world_size: assignment.world_size,
        generation: fence.generation,
        start_from,
        start_step: Step(assignment.start_step),
        stop_at: Step(assignment.stop_at),
        threads: assignment.threads,
        address: assignment.address.clone(),
        rendezvous,
    })
}
