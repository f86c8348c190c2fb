//! From a [`TrainJob`] to everything that a step needs: settings, process group, data, parameters, optimizer.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tch::{Device, Kind};
use trainctl_collective::{GroupOptions, ProcessGroup};
use trainctl_dataset::{CorpusCounts, Split};
use trainctl_spec::job::{self, JobSpec, ModelConfigSource, ModelInit, Precision};
use trainctl_spec::lr;
use trainctl_spec::model::Architecture;
use trainctl_spec::report::Phase;
use trainctl_spec::start::DataPhase;
use trainctl_store::Location;
use trainctl_store::shard::Peers;

use crate::Error;
use crate::burn_in;
use crate::checkpoint::{self, Saver, Together};
use crate::data::Source;
use crate::executor::Executor;
use crate::head::Head;
use crate::job::{Link, TrainJob};
use crate::model::Gpt2;
use crate::optim::AdamW;
use crate::parallel::World;
use crate::params::Parameters;
use crate::schedule::Schedule;
use crate::train::Run;
use crate::validate::{Share, ValidationSet, num_samples};

/// c10d's own limit for a collective, at least.
const LAST_RESORT: Duration = Duration::from_secs(30 * 60);

/// Meets the other ranks, opens the data and loads the state that the job starts from.
pub(crate) fn prepare(job: TrainJob, link: Arc<dyn Link>) -> Result<Run, Error> {
    let device = device_of(&job.spec)?;
    trainctl_collective::set_num_threads(job.threads.max(1) as usize).map_err(Error::Shim)?;
    trainctl_collective::set_deterministic(job.spec.deterministic).map_err(Error::Shim)?;
    let world = meet(&job, link.as_ref(), device)?;
    let loaded = load(&job, &world, &link, device);
    if let Err(error) = &loaded
        && error.is_own_fault()
    {
        link.failed(Some(error));
    }
    let Loaded { train, validation, executor, params, optimizer, updates, saver } = loaded?;
    Ok(Run {
        generation: job.generation,
        share: Share {
            rank: job.rank.0,
            size: job.world_size,
            local_batch_size: job.spec.step_scheduler.local_batch_size,
        },
        start_step: job.start_step,
        schedule: Schedule::new(&job.spec.step_scheduler, job.spec.checkpoint.weights_every_steps, job.stop_at),
        lr: lr::Schedule::of(&job.spec),
        saver,
        phase: job.phase,
        executor,
        spec: job.spec,
        link,
        world,
        train,
        validation,
        params,
        optimizer,
        updates,
    })
}

/// What a rank has once it has met the others and opened what it reads.
struct Loaded {
    train: Source,
    validation: Vec<ValidationSet>,
    executor: Executor,
    params: Parameters,
    optimizer: AdamW,
    updates: u64,
    saver: Saver,
}

fn load(job: &TrainJob, world: &World, link: &Arc<dyn Link>, device: Device) -> Result<Loaded, Error> {
    link.phase(Phase::Loading, job.start_step);
    let spec = &job.spec;
    let arch = architecture(spec)?;
    let known = arch.parameters();
    let Architecture::Gpt2(config) = arch.clone();
    if spec.dataset.seq_length > config.n_positions {
        return Err(Error::Spec(format!(
            "dataset.seq_length {} exceeds model.config.n_positions {}",
            spec.dataset.seq_length, config.n_positions
        )));
    }
    let (train, validation) = open_data(spec, &job.phase, i64::from(config.vocab_size), device)?;
    let model = Gpt2::new(config, i64::from(spec.dataset.seq_length), device)?;
    let mut params = Parameters::zeros(&model.block_names(), &known, kind_of(spec), device)?;
    let mut optimizer = AdamW::new(&spec.optimizer, params.entries(), device)?;
    let updates = match (&job.start_from, &spec.model.init) {
        (Some(from), _) => {
            let place = if from.store.is_empty() { Location::of_job(spec) } else { from.store.parse() };
            let place = place.map_err(|e| Error::load_stored(&format!("checkpoint {}", from.name), &e))?;
            let threads = NonZeroUsize::new(job.threads as usize).unwrap_or(NonZeroUsize::MIN);
            let together = Together {
                threads,
                peers: Peers { index: job.local_rank, count: job.local_world_size },
                all_have_read: &|| world.all_have_loaded(job.start_step),
            };
            checkpoint::load(&place, from, &mut params, &mut optimizer, together)?
        }
        (None, ModelInit::HuggingFace(directory)) => {
            checkpoint::load_pretrained(directory.as_ref(), &arch, &mut params)?;
            0
        }
        (None, ModelInit::Random) => {
            params.init(&known, spec.seed)?;
            0
        }
    };
    let saver = Saver::new(job, &params, device, Arc::clone(link))?;
    let executor = Executor::new(model, Head::new(spec.loss_fn), false);
    Ok(Loaded { train, validation, executor, params, optimizer, updates, saver })
}

fn device_of(spec: &JobSpec) -> Result<Device, Error> {
    match spec.resources.device {
        job::Device::Cpu => Ok(Device::Cpu),
        job::Device::Cuda => Err(Error::Unsupported {
            key: "resources.device",
            value: "cuda".to_owned(),
            why: "this build trains on CPUs; use resources.device: cpu".to_owned(),
        }),
    }
}

/// What the forward computes in.
fn kind_of(spec: &JobSpec) -> Kind {
    match spec.precision {
        Precision::Fp32 => Kind::Float,
        Precision::Bf16 => Kind::BFloat16,
    }
}

/// Makes the generation's process groups and proves them, and the device where that is asked for; afterwards the rendezvous store
/// may be sealed.
fn meet(job: &TrainJob, link: &dyn Link, device: Device) -> Result<World, Error> {
    link.phase(Phase::Rendezvous, job.start_step);
    let timeout = Duration::try_from_secs_f64(job.spec.dist_env.timeout_minutes * 60.0)
        .map_err(|e| Error::Spec(format!("dist_env.timeout_minutes {}: {e}", job.spec.dist_env.timeout_minutes)))?;
    // Hangs are the coordinator's to find, which can name the rank; this is for ranks whose worker and coordinator are gone.
    let timeout = LAST_RESORT.max(timeout.saturating_mul(4));
    let address = job.address.parse().map_err(|e| Error::Spec(format!("rank address {:?}: {e}", job.address)))?;
    let options = GroupOptions { rank: job.rank.0 as usize, world_size: job.world_size as usize, address, timeout };
    let fail = |source| Error::Collective { what: "make the process group".to_owned(), step: job.start_step, source };
    let group = ProcessGroup::gloo(Arc::clone(&job.rendezvous), &options).map_err(fail)?;
    let world = World::new(group, device, job.world_size, job.start_step, Arc::clone(&job.pulse))?;
    if !job.burn_in.is_zero() {
        let report = burn_in::burn_in(&world, job, kind_of(&job.spec), device);
        if let Err(error) = &report
            && error.is_own_fault()
        {
            link.failed(Some(error));
        }
        let report = report?;
        tracing::info!(?report, "burnt in");
        link.burned_in(report);
    }
    link.formed();
    Ok(world)
}

/// The architecture that the resolved spec holds inline.
pub(crate) fn architecture(spec: &JobSpec) -> Result<Architecture, Error> {
    match &spec.model.config {
        ModelConfigSource::Inline(config) => {
            Architecture::from_config(config).map_err(|e| Error::Spec(format!("model.config: {e}")))
        }
        ModelConfigSource::Path(path) => {
            Err(Error::Spec(format!("model.config still names the file {}: the spec was not resolved", path.display())))
        }
    }
}

fn open_data(
    spec: &JobSpec,
    phase: &DataPhase,
    vocab: i64,
    device: Device,
) -> Result<(Source, Vec<ValidationSet>), Error> {
    let steps = &spec.step_scheduler;
    let wanted = phase.position(steps.max_steps, steps.global_batch_size);
    let train = Source::open("train", &spec.dataset, Split::Train, wanted, &phase.corpora, vocab, device)?;
    if train.len() < wanted {
        return Err(Error::Spec(format!(
            "dataset: {} samples, but {wanted} are needed until max_steps = {} at global_batch_size = {}; give the paths weights \
             (then data repeats) or lower step_scheduler.max_steps",
            train.len(),
            steps.max_steps,
            steps.global_batch_size
        )));
    }
    let mut validation = Vec::with_capacity(spec.validation_datasets.len());
    for (name, set) in &spec.validation_datasets {
        let wanted = num_samples(spec, set);
        let unused = CorpusCounts::new();
        let source = Source::open(name, &set.dataset, Split::Validation, wanted, &unused, vocab, device)?;
        let num_samples = wanted.min(source.len());
        if num_samples == 0 {
            return Err(Error::Spec(format!(
                "validation_dataset {name}: no sample of seq_length {}; dataset.split {:?} leaves too little",
                source.seq_length(),
                set.dataset.split
            )));
        }
        validation.push(ValidationSet { name: name.clone(), source, num_samples });
    }
    Ok((train, validation))
}
