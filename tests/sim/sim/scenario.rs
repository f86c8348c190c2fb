//! What a seed decides before the world begins: how many workers, which jobs, how bad it gets.

use std::ops::Range;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trainctl_spec::{JobId, JobSpec};

/// How a job is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    /// By itself.
    Success,
    /// A person stops it.
    Cancel { at: u64, save: bool },
    /// A rank fails by itself whenever it comes to this step.
    Poison { rank: u32, step: u64 },
}

/// A job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) spec: JobSpec,
    pub(crate) yaml: String,
    pub(crate) world_size: u32,
    pub(crate) max_steps: u64,
    /// Steps between two saves.
    pub(crate) save_every: u64,
    /// Steps between two saves of the weights alone.
    pub(crate) weights_every: Option<u64>,
    /// How many checkpoints stay.
    pub(crate) keep: usize,
    /// Milliseconds of a step.
    pub(crate) step_ms: Range<u64>,
    pub(crate) submitted_at: u64,
    pub(crate) wants: Wants,
}

impl Job {
    pub(crate) fn new(number: usize, world_size: u32, max_steps: u64, save_every: u64, weights: Option<u64>) -> Self {
        let weights_key = weights.map_or_else(String::new, |every| format!(", weights_every_steps: {every}"));
        let (keep, batch) = (2, 2 * world_size);
        let yaml = format!(
            "
name: job-{number}
run_dir: /runs/{number}
resources: {{workers: {world_size}, threads_per_worker: 1}}
model: {{config: {{model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 8, vocab_size: 64, n_positions: 16}}}}
dataset: {{paths: /data/text, seq_length: 8, split: '99,1,0'}}
step_scheduler: {{global_batch_size: {batch}, local_batch_size: 2, max_steps: {max_steps}, ckpt_every_steps: {save_every}}}
fault_tolerance: {{max_restarts: 1000}}
checkpoint: {{save_consolidated: false, max_recent_checkpoints: {keep}, max_recent_weights: {keep}{weights_key}}}
"
        );
        Self {
            id: JobId(format!("job-{number}")),
            spec: JobSpec::from_yaml(&yaml).unwrap_or_else(|faults| panic!("{faults}")),
            yaml,
            world_size,
            max_steps,
            save_every,
            weights_every: weights,
            keep,
            step_ms: 30..300,
            submitted_at: 0,
            wants: Wants::Success,
        }
    }
}

/// What goes wrong, and how often.
#[derive(Clone, Debug)]
pub(crate) struct Weather {
    /// Milliseconds between two faults, while it storms.
    pub(crate) every: Range<u64>,
    /// Milliseconds that a message takes.
    pub(crate) delay: Range<u64>,
    /// Milliseconds that a change of the disk takes.
    pub(crate) disk: Range<u64>,
    /// One effect in so many is the last of its process, or its last for a long time.
    pub(crate) crash_in: u32,
    /// One command in so many arrives twice.
    pub(crate) repeat_in: u32,
    /// One dial in so many goes to a coordinator that was read from an old file.
    pub(crate) stale_in: u32,
    /// When it storms. Between storms the world must come to rest, after the last one to its end.
    pub(crate) storms: Vec<Range<u64>>,
}

impl Weather {
    /// No fault, ever.
    pub(crate) fn calm() -> Self {
        let (every, delay, disk) = (1_000..2_000, 1..10, 1..10);
        Self { every, delay, disk, crash_in: 1, repeat_in: 1, stale_in: 1, storms: Vec::new() }
    }

    pub(crate) fn storms_at(&self, now: u64) -> bool {
        self.storms.iter().any(|storm| storm.contains(&now))
    }

    pub(crate) fn ends_at(&self) -> u64 {
        self.storms.last().map_or(0, |storm| storm.end)
    }
}

/// A world to be.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) jobs: Vec<Job>,
    pub(crate) num_workers: usize,
    /// Workers that may go for good.
    pub(crate) num_spare: usize,
    pub(crate) weather: Weather,
}

impl Scenario {
    /// Small and large, calm and stormy worlds in turn.
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed ^ 0x5EED);
        let num_workers: usize = match seed % 10 {
            0 => random.random_range(21..=40),
            1 | 2 => random.random_range(9..=20),
            _ => random.random_range(3..=8),
        };
        let num_jobs = if num_workers < 5 { 1 } else { random.random_range(1..=3).min(num_workers / 2) };
        let num_spare = random.random_range(0..=2).min(num_workers - num_jobs.max(2));
        let mut left = num_workers - num_spare;
        let mut jobs = Vec::new();
        for number in 0..num_jobs {
            let others = num_jobs - number - 1;
            let most = left - others;
            let world_size = if others == 0 { most } else { random.random_range(1..=most) }.min(12);
            left -= world_size;
            let save_every = random.random_range(3..9);
            let weights = random.random_bool(0.5).then(|| random.random_range(3..9));
            let mut job = Job::new(number, world_size as u32, random.random_range(100..500), save_every, weights);
            job.submitted_at = random.random_range(0..10_000);
            job.wants = match random.random_range(0..10) {
                0 => Wants::Cancel { at: random.random_range(5_000..120_000), save: random.random_bool(0.5) },
                1 => Wants::Poison { rank: random.random_range(0..job.world_size), step: random.random_range(5..100) },
                _ => Wants::Success,
            };
            jobs.push(job);
        }
        let mut storms = Vec::new();
        let mut at = 0;
        for _ in 0..random.random_range(1..=4) {
            let begins = at + random.random_range(0..20_000);
            at = begins + random.random_range(5_000..40_000);
            storms.push(begins..at);
            at += random.random_range(25_000..40_000);
        }
        let weather = Weather {
            every: [2_000..6_000, 300..2_500, 50..900][(seed % 3) as usize].clone(),
            delay: [1..10, 1..150, 1..1_500][(seed / 3 % 3) as usize].clone(),
            disk: [1..10, 1..60, 1..400][(seed / 9 % 3) as usize].clone(),
            crash_in: [2_000, 400, 150][(seed / 2 % 3) as usize],
            repeat_in: 4,
            stale_in: 3,
            storms,
        };
        Self { seed, jobs, num_workers, num_spare, weather }
    }
}
