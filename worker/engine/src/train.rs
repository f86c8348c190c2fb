//! The training loop.
//!
//! [`run`] is the whole life of a rank: meet the others, load, then step by step until the schedule says stop. Every
//! decision is taken on numbers that are equal on every rank: the reduced counts, the reduced loss and the norm of the
//! reduced gradient.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use trainctl_dataset::{CorpusCounts, batch};
use trainctl_spec::job::JobSpec;
use trainctl_spec::lr;
use trainctl_spec::report::{Phase, SaveKind, TrainRow, ValidationRow};
use trainctl_spec::start::DataPhase;
use trainctl_spec::{Generation, Step};
use trainctl_store::fault::{self, FailPoint};

use crate::checkpoint::{Meta, Saver, State, TrainerState};
use crate::data::Source;
use crate::executor::{Executor, NoSync, Sink};
use crate::job::{Finished, Link, Requests, TrainJob};
use crate::model::Draw;
use crate::optim::{self, AdamW, Verdict};
use crate::parallel::{Counts, World};
use crate::params::Parameters;
use crate::pulse::Collective;
use crate::schedule::{Asked, SaveReason, Schedule};
use crate::setup;
use crate::validate::{self, Share, ValidationSet};
use crate::{Error, memory};

/// Epoch of every step: the sample index spans all passes over the corpus, as in Megatron, so there is one epoch.
pub const EPOCH: u64 = 0;

/// Trains one rank of one generation until its schedule, a stop request or an error ends it.
///
/// Call it once per process: threads, determinism and process groups are the process's own. The run's last save is
/// durable before it returns; so is one that was in flight when the run failed by itself (not when a peer was lost: then
/// the next generation waits for this process to end).
///
/// # Errors
/// [`Error::Collective`] when a peer was lost, else what this rank or every rank did wrong.
pub fn run(job: TrainJob, link: Arc<dyn Link>) -> Result<Finished, Error> {
    let mut run = setup::prepare(job, Arc::clone(&link))?;
    let finished = catch_unwind(AssertUnwindSafe(|| run.steps(link.as_ref()))).unwrap_or_else(|panic| {
        link.failed(None);
        resume_unwind(panic)
    });
    let wait = finished.as_ref().err().is_none_or(Error::is_own_fault);
    let saved = if wait { run.saver.finish() } else { Ok(()) };
    if let Some(error) = finished.as_ref().err().or(saved.as_ref().err()).filter(|error| error.is_own_fault()) {
        link.failed(Some(error));
    }
    let finished = finished?;
    saved?;
    link.phase(Phase::Finished, finished.next_step);
    Ok(finished)
}

/// Everything that a step needs.
pub(crate) struct Run {
    pub(crate) spec: JobSpec,
    pub(crate) generation: Generation,
    pub(crate) share: Share,
    pub(crate) start_step: Step,
    /// Which samples the steps read.
    pub(crate) phase: DataPhase,
    pub(crate) schedule: Schedule,
    pub(crate) lr: lr::Schedule,
    pub(crate) link: Arc<dyn Link>,
    pub(crate) world: World,
    pub(crate) train: Source,
    pub(crate) validation: Vec<ValidationSet>,
    pub(crate) executor: Executor,
    pub(crate) params: Parameters,
    pub(crate) optimizer: AdamW,
    /// Updates made so far: steps less those that `skip_step` skipped.
    pub(crate) updates: u64,
    pub(crate) saver: Saver,
}

/// What a step leaves behind, equal on every rank where it does not say otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepDone {
    pub(crate) loss: f64,
    pub(crate) asked: Asked,
    /// Time in which this rank did not wait for others: not equal.
    pub(crate) compute: Duration,
}

impl Run {
    /// Step after step, and what the schedule says follows each.
    fn steps(&mut self, link: &dyn Link) -> Result<Finished, Error> {
        let mut step = self.start_step;
        let mut last_loss = None;
        while step < self.schedule.end() {
            link.phase(Phase::Stepping, step);
            let done = self.step(step, link.requests())?;
            last_loss = Some(done.loss);
            link.step_done(step, done.compute);
            let after = self.schedule.after(step, done.asked);
            let val_losses = if after.validate { self.validate(step)? } else { BTreeMap::new() };
            for (kind, reason) in after.saves() {
                self.save(kind, reason, step, done.loss, &val_losses)?;
            }
            step = Step(step.0 + 1);
            if let Some(cause) = after.stop {
                return Ok(Finished { cause, next_step: step, last_loss });
            }
        }
        Ok(Finished { cause: self.schedule.end_cause(), next_step: step, last_loss })
    }

    /// One optimizer step.
    fn step(&mut self, step: Step, requests: Requests) -> Result<StepDone, Error> {
        let (started, waited) = (Instant::now(), self.world.waited());
        let state = |error: std::io::Error| Error::Data {
            what: format!("the state of step {}", step.0),
            source: Box::new(error),
        };
        if fault::flips(FailPoint::STEP_BEGIN).map_err(state)? {
            self.saver.before_update();
            self.params.flip_a_bit()?;
        }
        let ids = self.step_ids(step);
        let cut = batch::micro_batches(ids.clone(), self.share.local_batch_size);
        let mine = &cut[batch::assign(cut.len(), self.share.rank, self.share.size)];

        let samples: u64 = mine.iter().map(|run| run.end - run.start).sum();
        let counts = self.world.sum_counts(
            Counts {
                tokens: (samples * self.train.seq_length()).cast_signed(),
                stop: i64::from(requests.stop),
                save: i64::from(requests.save),
                profile: 0,
            },
            step,
        )?;
        let scale = 1.0 / counts.tokens as f64;

        self.params.zero_grads()?;
        let mut reducer = self.world.reducer(step);
        let mut loss_sum = 0.0;
        let rounds = batch::rounds(cut.len(), self.share.size);
        for round in 0..rounds {
            let last = round + 1 == rounds;
            let sink: &mut dyn Sink = if last { &mut reducer } else { &mut NoSync };
            if let Some(range) = mine.get(round) {
                let batch = self.train.batch(range.clone(), range.start - ids.start)?;
                let draw = Draw { seed: self.spec.seed, step: step.0, first_sequence: batch.first_sequence };
                loss_sum += self.executor.forward_backward(&mut self.params, &batch, Some(&draw), scale, sink)?;
            } else {
                // D2: no micro-batch in this round, but part of its collectives.
                for block in self.executor.backward_order() {
                    sink.block_done(&self.params, block)?;
                }
            }
        }
        reducer.finish()?;
        let loss = self.world.sum(&[loss_sum], Collective::Loss, step)?.iter().sum::<f64>() * scale;
        let grad_norm = optim::grad_norm(&self.params)?;
        self.update(step, loss, grad_norm)?;
        self.report(step, loss, grad_norm, counts.tokens.cast_unsigned(), started);
        let compute = started.elapsed().saturating_sub(self.world.waited().saturating_sub(waited));
        Ok(StepDone { loss, asked: Asked { stop: counts.stop, save: counts.save }, compute })
    }

    /// Clips and updates, or does what `on_nonfinite` says.
    fn update(&mut self, step: Step, loss: f64, grad_norm: f64) -> Result<(), Error> {
        match optim::verdict(loss, grad_norm, self.spec.fault_tolerance.on_nonfinite) {
            Verdict::Update => {
                optim::clip(&mut self.params, grad_norm, self.spec.clip_grad_norm.max_norm)?;
                self.saver.before_update();
                self.optimizer.step(&mut self.params, self.updates, self.lr.at(step))?;
                self.updates += 1;
                Ok(())
            }
            Verdict::Skip => {
                tracing::warn!(step = step.0, loss, grad_norm, "not finite: the step is skipped");
                Ok(())
            }
            Verdict::Stop => Err(Error::NonFinite { step, loss, grad_norm }),
        }
    }

    fn report(&self, step: Step, loss: f64, grad_norm: f64, tokens: u64, started: Instant) {
        if self.share.rank != 0 {
            return;
        }
        let tps = tokens as f64 / started.elapsed().as_secs_f64().max(1e-9);
        self.link.train_row(TrainRow {
            step: step.0,
            epoch: EPOCH,
            timestamp: timestamp(),
            loss,
            grad_norm,
            lr: self.lr.logged(step),
            mem: memory::take_peak_gib(),
            tps,
            tps_per_gpu: tps / f64::from(self.share.size),
            mfu: None,
            num_tokens_per_step: tokens,
            num_label_tokens: tokens,
            generation: self.generation.0,
        });
    }

    /// Evaluates every validation set; the losses by name.
    fn validate(&mut self, step: Step) -> Result<BTreeMap<String, f64>, Error> {
        let mut losses = BTreeMap::new();
        for set in &mut self.validation {
            self.link.phase(Phase::Validating, step);
            let found = validate::evaluate(&mut self.executor, &self.params, set, &self.world, self.share, step)?;
            losses.insert(set.name.clone(), found.loss);
            if self.share.rank == 0 {
                self.link.validation_row(ValidationRow {
                    name: set.name.clone(),
                    step: step.0,
                    epoch: EPOCH,
                    timestamp: timestamp(),
                    val_loss: found.loss,
                    lr: self.lr.logged(step),
                    num_label_tokens: found.num_label_tokens,
                    mem: memory::take_peak_gib(),
                    generation: self.generation.0,
                });
            }
        }
        Ok(losses)
    }

    /// The sampler's ids of a step (D2).
    fn step_ids(&self, step: Step) -> Range<u64> {
        batch::step_ids(&self.phase, step.0, self.spec.step_scheduler.global_batch_size)
    }

    /// Samples of each corpus used below a sampler position, in all phases (rank 0 only: it reports them).
    fn corpora(&self, position: u64) -> CorpusCounts {
        if self.share.rank != 0 {
            return CorpusCounts::new();
        }
        let mut corpora = self.phase.corpora.clone();
        corpora.extend(self.train.used(position));
        corpora
    }

    /// Snapshots the state and has it written in the background (C7).
    fn save(
        &mut self,
        kind: SaveKind,
        reason: SaveReason,
        step: Step,
        train_loss: f64,
        val_losses: &BTreeMap<String, f64>,
    ) -> Result<(), Error> {
        tracing::info!(step = step.0, ?kind, ?reason, "save");
        self.link.phase(Phase::Saving, step);
        if kind == SaveKind::Full {
            self.link.save_begins();
        }
        let consumed_samples = self.step_ids(step).end;
        let trainer = TrainerState {
            step: step.0,
            epoch: EPOCH,
            updates: self.updates,
            consumed_samples,
            next_lr: self.lr.logged(step),
        };
        let state = State { params: &self.params, optimizer: &self.optimizer };
        let corpora = self.corpora(consumed_samples);
        let meta = Meta { trainer, train_loss, val_losses: val_losses.clone(), corpora };
        self.saver.save(kind, reason, state, meta, &self.world)
    }
}

/// UTC with milliseconds, as NeMo AutoModel writes it.
fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
