//! Who may act on a run directory: the holder of the highest term (J2).
//!
//! [`Tenure::acquire`] waits until nobody holds the directory and takes a term; [`Tenure::beat`] shows every 2 s that
//! the holder lives; [`Tenure::check`] is asked directly before each commit, pointer move and removal. A holder that
//! freezes between the check and the write is why late writes must be harmless (C2).

mod decide;

use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use trainctl_spec::{Generation, Term};

pub use decide::{Decision, Policy, Reason, View, decide_takeover};

use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::Io;
use crate::numbers::{Numbers, Taker};
use crate::origin::ORIGIN;
use crate::wall;

/// How often a holder calls [`Tenure::beat`].
pub const BEAT_EVERY: Duration = Duration::from_secs(2);

const HOLDER: &str = "holder.json";

/// What a coordinator says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderInfo {
    /// Host, pid, boot id and start time.
    #[serde(flatten)]
    pub process: Taker,
    /// Addresses at which it listens.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Port at which it listens.
    #[serde(default)]
    pub port: u16,
    /// Random text of this start: tells this coordinator from another one that got its address later.
    #[serde(default)]
    pub incarnation: String,
    /// `SLURM_JOB_ID`, if it runs in one.
    #[serde(default)]
    pub slurm_job: Option<String>,
}

/// The content of `control/holder.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its term.
    pub term: u64,
    /// Who holds it.
    #[serde(flatten)]
    pub info: HolderInfo,
    /// Grows with every rewrite: the content differs although nothing else changed.
    pub beat: u64,
    /// The tenure ended cleanly.
    pub released: bool,
    /// When it was written, in UTC; for people only.
    pub at: String,
}

/// Whether a term is still the highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is.
    Mine,
    /// It is not: change nothing more.
    Superseded {
        /// The highest term.
        term: Term,
    },
}

/// A look for a higher term directly before a change (J2). What the store changes it changes under one of these.
#[async_trait]
pub trait Fence: Send + Sync + std::fmt::Debug {
    /// `Ok` if the caller may still change things.
    ///
    /// # Errors
    /// [`Error::Superseded`] if it may not; [`Error::Io`] if that cannot be known.
    async fn pass(&self) -> Result<()>;

    /// The same for code that is not async.
    ///
    /// # Errors
    /// As [`Fence::pass`].
    fn pass_blocking(&self) -> Result<()>;
}

/// For directories that no coordinator holds: copies, exports, tests.
#[derive(Clone, Copy, Debug)]
pub struct Unfenced;

#[async_trait]
impl Fence for Unfenced {
    async fn pass(&self) -> Result<()> {
        Ok(())
    }

    fn pass_blocking(&self) -> Result<()> {
        Ok(())
    }
}

/// Monotonic time for [`Tenure::acquire`].
#[async_trait]
pub trait Clock: Send + Sync {
    /// Time since any fixed origin.
    fn now(&self) -> Duration;
    /// Waits.
    async fn sleep(&self, duration: Duration);
}

/// tokio's clock (which tests can pause).
#[derive(Clone, Copy, Debug)]
pub struct TokioClock(tokio::time::Instant);

impl Default for TokioClock {
    fn default() -> Self {
        Self(tokio::time::Instant::now())
    }
}

#[async_trait]
impl Clock for TokioClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}

/// What an acquirer must ask of the world outside the directory.
#[async_trait]
pub trait Probe: Send + Sync {
    /// Whether the holder answers at one of its addresses **with its incarnation** (a frozen process still accepts
    /// connections, and a port may have a new owner). Must end within a few seconds, and at once when refused.
    async fn answers(&self, holder: &Holder) -> bool;

    /// Whether this host's process `pid` with that start time is alive. Asked only if the boot ids are equal.
    fn lives(&self, pid: u32, start_time: u64) -> bool;
}

/// Why no term was taken.
#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    /// Another coordinator holds the run directory.
    #[error("{}", live_holder(.holder, *.answered))]
    LiveHolder {
        /// Its last words.
        holder: Box<Holder>,
        /// It answers at its address (else only its file keeps changing).
        answered: bool,
    },
    /// The directory cannot be read or written.
    #[error(transparent)]
    Store(#[from] Error),
}

fn live_holder(holder: &Holder, answered: bool) -> String {
    let Holder { term, info, .. } = holder;
    let place = info.addresses.first().map(|a| format!(" at {a}:{}", info.port)).unwrap_or_default();
    let slurm = info.slurm_job.as_ref().map(|job| format!(", Slurm job {job}")).unwrap_or_default();
    let sign = if answered { "answers" } else { "does not answer, but keeps writing control/holder.json" };
    format!(
        "this run directory is held by the coordinator{place} (host {}, pid {}{slurm}, term {term}), which {sign}; \
         talk to it with `--coordinator`, or stop it first",
        info.process.host, info.process.pid
    )
}

/// A term that this process has taken.
#[derive(Debug)]
pub struct Tenure {
    io: Io,
    numbers: Numbers,
    term: Term,
    info: HolderInfo,
    written: tokio::sync::Mutex<Written>,
}

/// What this holder has written so far. Locked while it writes: a beat must not overtake the release.
#[derive(Debug, Default)]
struct Written {
    beats: u64,
    released: bool,
}

impl Tenure {
    /// Waits until the directory is free by the rules of J2 (see [`decide_takeover`]) and takes a term.
    ///
    /// # Errors
    /// [`AcquireError::LiveHolder`] if a live coordinator holds it; [`AcquireError::Store`].
    pub async fn acquire(
        control: Io,
        info: HolderInfo,
        probe: &dyn Probe,
        clock: &dyn Clock,
        policy: &Policy,
    ) -> Result<Self, AcquireError> {
        let numbers = Numbers::new(control.clone());
        let started = clock.now();
        let mut same_since = started;
        let mut last: Option<(Vec<u8>, Term)> = None;
        loop {
            let content = (control.read(HOLDER).await?.unwrap_or_default(), numbers.highest_term().await?);
            let now = clock.now();
            if last.as_ref() != Some(&content) {
                same_since = now;
            }
            let changed = last.is_some() && same_since == now;
            let highest = content.1;
            let holder: Option<Holder> = serde_json::from_slice(&content.0).ok();
            let taker = numbers.taker_of(highest).await?;
            let here = taker.as_ref().is_some_and(|t| !t.boot_id.is_empty() && t.boot_id == info.process.boot_id);
            let gone = here && taker.as_ref().is_some_and(|t| !probe.lives(t.pid, t.start_time));
            let mut view = View {
                highest,
                holder,
                taker_gone: gone,
                same_for: now - same_since,
                waited: now - started,
                answers: None,
            };
            // A probe costs seconds when nobody is there: at the first look, and again before a takeover.
            let (mut decision, mut reason) = decide_takeover(&view, policy);
            if decision == Decision::Probe || (last.is_none() && decision == Decision::Wait) {
                view.answers = match &view.holder {
                    Some(holder) => Some(probe.answers(holder).await),
                    None => Some(false),
                };
                (decision, reason) = decide_takeover(&view, policy);
            }
            tracing::debug!(?decision, ?reason, term = highest.0, "looked at the holder of the run directory");
            match decision {
                Decision::Take => {
                    if let Some(term) = numbers.take_term(highest, &info.process).await? {
                        let tenure = Self { io: control, numbers, term, info, written: tokio::sync::Mutex::default() };
                        tenure.io.run(|files| files.sweep(HOLDER, FailPoint::HOLDER_SWEEP)).await?;
                        tenure.io.run(|files| files.sweep(ORIGIN, FailPoint::HOLDER_SWEEP)).await?;
                        tenure.numbers.sweep().await?;
                        tenure.write_holder(false, FailPoint::HOLDER_BEAT).await?;
                        tracing::info!(term = term.0, ?reason, "holds the run directory");
                        return Ok(tenure);
                    }
                    // Somebody else took a term between the look and the call.
                    last = None;
                    continue;
                }
                Decision::Refuse => {
                    if let Some(holder) = view.holder {
                        let answered = view.answers == Some(true);
                        return Err(AcquireError::LiveHolder { holder: Box::new(holder), answered });
                    }
                }
                Decision::Wait | Decision::Probe => {}
            }
            if last.is_none() || changed {
                tracing::info!(term = highest.0, ?reason, "waits for the run directory");
            }
            last = Some(content);
            clock.sleep(policy.look_every).await;
        }
    }

    /// The term.
    pub fn term(&self) -> Term {
        self.term
    }

    /// What this holder says about itself.
    pub fn info(&self) -> &HolderInfo {
        &self.info
    }

    /// The numbers of the run directory.
    pub fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Takes the next generation.
    ///
    /// # Errors
    /// [`Error::Superseded`], [`Error::Io`].
    pub async fn take_generation(&self) -> Result<Generation> {
        self.numbers.take_generation(self.term, &self.info.process).await
    }

    /// Says where this holder listens, from the next beat on.
    pub fn set_endpoint(&mut self, addresses: Vec<String>, port: u16) {
        self.info.addresses = addresses;
        self.info.port = port;
    }

    /// Rewrites `holder.json`, unless a higher term exists. Call it every [`BEAT_EVERY`].
    ///
    /// # Errors
    /// [`Error::Io`]; a failed beat changes nothing and is tried again at the next one.
    pub async fn beat(&self) -> Result<Standing> {
        let standing = self.check().await?;
        if standing == Standing::Mine {
            self.write_holder(false, FailPoint::HOLDER_BEAT).await?;
        }
        Ok(standing)
    }

    /// Whether this term is still the highest. Call it directly before each change.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn check(&self) -> Result<Standing> {
        let highest = self.numbers.highest_term().await?;
        Ok(if highest == self.term { Standing::Mine } else { Standing::Superseded { term: highest } })
    }

    /// Ends the tenure cleanly: a successor need not wait.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn release(&self) -> Result<Standing> {
        let standing = self.check().await?;
        if standing == Standing::Mine {
            self.write_holder(true, FailPoint::HOLDER_RELEASE).await?;
        }
        Ok(standing)
    }

    fn admit(&self, highest: Term) -> Result<()> {
        if highest == self.term {
            return Ok(());
        }
        Err(Error::Superseded { mine: self.term.0, theirs: highest.0 })
    }

    async fn write_holder(&self, released: bool, point: FailPoint) -> Result<()> {
        let mut written = self.written.lock().await;
        if written.released {
            return Ok(());
        }
        let beat = written.beats;
        let holder = Holder { term: self.term.0, info: self.info.clone(), beat, released, at: wall::now() };
        let bytes =
            serde_json::to_vec(&holder).map_err(|e| Error::io("write", self.io.root().join(HOLDER), e.into()))?;
        self.io.put_durable(HOLDER, bytes, point).await?;
        *written = Written { beats: beat + 1, released };
        Ok(())
    }
}

#[async_trait]
impl Fence for Tenure {
    async fn pass(&self) -> Result<()> {
        self.admit(self.numbers.highest_term().await?)
    }

    fn pass_blocking(&self) -> Result<()> {
        self.admit(self.numbers.highest_term_blocking()?)
    }
}

/// Reads `holder.json` of a control directory, for `status` and for messages.
///
/// # Errors
/// [`Error::Io`].
pub async fn read_holder(control: &Io) -> Result<Option<Holder>> {
    Ok(control.read(HOLDER).await?.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

#[cfg(test)]
mod tests;
