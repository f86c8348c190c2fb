//! A run directory held by this process for a moment, as a coordinator holds it: for what only its holder may change (J2).

use std::future::Future;

use trainctl_runtime::proc;
use trainctl_store::io::Io;
use trainctl_store::numbers::Taker;
use trainctl_store::tenure::{AcquireError, BEAT_EVERY, Holder, HolderInfo, Policy, Probe, Tenure, TokioClock};
use trainctl_store::{Fence, RunDir};

use crate::exit::Failure;
use crate::output::note;
use crate::precheck;
use crate::run_place::failure;

/// A term of this process.
#[derive(Debug)]
pub(crate) struct Held {
    tenure: Tenure,
}

impl Held {
    /// Takes a term. A coordinator that answers is refused at once; where it is uncertain whether one lives, its lease is
    /// waited out, as by another coordinator.
    pub(crate) async fn acquire(run_dir: &RunDir) -> Result<Self, Failure> {
        precheck::refuse_live_holder(run_dir).await?;
        let pid = std::process::id();
        let start_time = proc::start_time(pid).unwrap_or_default();
        let process = Taker { host: proc::host_name(), pid, boot_id: proc::boot_id().unwrap_or_default(), start_time };
        // Nobody listens, so nobody asks for it; it must only differ from every coordinator's.
        let incarnation = format!("trainctl-{pid}-{start_time}");
        let info = HolderInfo { process, incarnation, ..HolderInfo::default() };
        let probe = Answers { run_dir: run_dir.clone() };
        let control = Io::new(run_dir.control());
        let tenure = Tenure::acquire(control, info, &probe, &TokioClock::default(), &Policy::default()).await;
        match tenure {
            Ok(tenure) => Ok(Self { tenure }),
            Err(error @ AcquireError::LiveHolder { .. }) => Err(Failure::unreachable(error.to_string())),
            Err(AcquireError::Store(error)) => Err(failure(error)),
        }
    }

    /// Does something under the term, shows meanwhile that its holder lives, and gives the directory back.
    pub(crate) async fn during<'a, T, F>(&'a self, work: impl FnOnce(&'a dyn Fence) -> F) -> Result<T, Failure>
    where
        F: Future<Output = T>,
    {
        let mut work = Box::pin(work(&self.tenure));
        let result = loop {
            tokio::select! {
                result = &mut work => break result,
                () = tokio::time::sleep(BEAT_EVERY) => {}
            }
            if let Err(error) = self.tenure.beat().await {
                note(&format!("trainctl: {error}"));
            }
        };
        self.tenure.release().await.map_err(failure)?;
        Ok(result)
    }
}

struct Answers {
    run_dir: RunDir,
}

#[tonic::async_trait]
impl Probe for Answers {
    async fn answers(&self, holder: &Holder) -> bool {
        precheck::answers(&self.run_dir, holder).await
    }

    fn lives(&self, pid: u32, start_time: u64) -> bool {
        proc::is_running(pid, start_time)
    }
}
