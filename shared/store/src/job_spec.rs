//! `job.yaml`: the resolved spec of the newest job, written before the job is admitted.

use crate::error::Result;
use crate::fault::FailPoint;
use crate::io::Io;
use crate::layout::RunDir;

const JOB_SPEC: &str = "job.yaml";

/// Replaces `job.yaml`, whole or not at all, and removes what a killed predecessor left of doing the same.
///
/// # Errors
/// [`crate::Error::Io`]; the file is then the old one or the new one.
pub async fn write_job_spec(run_dir: &RunDir, yaml: String) -> Result<()> {
    let io = Io::new(run_dir.root());
    io.run(|files| files.sweep(JOB_SPEC, FailPoint::JOB_SWEEP)).await?;
    io.put_durable(JOB_SPEC, yaml.into_bytes(), FailPoint::JOB_SPEC).await
}
