//! From the worker's assignment to the engine's job.

use std::sync::Arc;
use std::time::Duration;

use trainctl_collective::KeyValue;
use trainctl_engine::TrainJob;
use trainctl_proto::convert::Fence;
use trainctl_proto::v1::Assignment;
use trainctl_spec::start::{DataPhase, StartFrom};
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
    if assignment.local_rank >= assignment.local_world_size {
        let (rank, size) = (assignment.local_rank, assignment.local_world_size);
        return Err(invalid(format!("local rank {rank} of {size} ranks on this host")));
    }
    if assignment.threads == 0 {
        return Err(invalid("threads is 0: the coordinator resolves resources.threads_per_worker".to_owned()));
    }
    let start_from = assignment.start_from.clone().map(StartFrom::try_from).transpose();
    let start_from = start_from.map_err(|error| invalid(error.to_string()))?;
    Ok(TrainJob {
        spec,
        rank: Rank(assignment.rank),
        world_size: assignment.world_size,
        local_rank: assignment.local_rank,
        local_world_size: assignment.local_world_size,
        generation: fence.generation,
        start_from,
        phase: assignment.phase.clone().map(DataPhase::from).unwrap_or_default(),
        start_step: Step(assignment.start_step),
        stop_at: Step(assignment.stop_at),
        threads: assignment.threads,
        address: assignment.address.clone(),
        rendezvous,
        burn_in: Duration::from_millis(assignment.burn_in_ms.into()),
        node_ranks: assignment.node_ranks.clone(),
        pulse: Arc::default(),
    })
}
