//! One function a section; one line a key: type, range, default.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::reader::{self, Section, Sink, boolean, choice, number, path, text, whole};
use super::tree::{Entry, Node, Value};
use crate::fault::Origin;
use crate::job::{
    Checkpoint, ClipGradNorm, Dataset, DecayRule, Device, DistEnv, Distributed, FaultTolerance, HangDetection, JobSpec,
    LossFn, LrDecayStyle, LrScheduler, Model, ModelConfigSource, ModelInit, OnNonfinite, Optimizer, OptimizerName,
    Precision, Resources, SaveConsolidated, StepScheduler, Stragglers, Strategy, ValidationDataset, WeightedPath,
    WhenBusy, defaults,
};

/// The section that holds the default validation set; `validation_dataset_<name>` hold others.
pub(crate) const VALIDATION: &str = "validation_dataset";

/// Absent when a key that must be there is missing or wrong; the sink then says so.
pub(super) fn job(sink: &mut Sink, root: &Node) -> Option<JobSpec> {
    if !matches!(root.value, Value::Map(_)) && !root.is_null() {
        sink.wrong(root, "", "a job spec must be a mapping of keys to values; see `trainctl validate --help`");
        return None;
    }
    let root_origin = Origin::At { line: 1, column: 1 };
    let mut top = Section::new(sink, "", &root_origin, Some(root));
    let name =
        top.need("name", "give the run a name, for example name: gpt2-124m", |node| text(node).and_then(run_name));
    let run_dir = top.need("run_dir", "say where the run's files go, for example run_dir: runs/gpt2-124m", path);
    let seed = top.get("seed", whole(0, u64::MAX));
    let deterministic = top.get("deterministic", boolean);
    let precision = top.get("precision", choice(&[("fp32", Precision::Fp32), ("bf16", Precision::Bf16)]));
    let loss_fn = top.get("loss_fn", choice(&[("chunked", LossFn::Chunked), ("masked", LossFn::Masked)]));
    let resources = resources(&mut top);
    let model = model(&mut top);
    let dataset = dataset(&mut top);
    let validation_datasets = validation_datasets(&mut top, root, dataset.as_ref());
    let step_scheduler = step_scheduler(&mut top);
    let distributed = distributed(&mut top);
    let optimizer = optimizer(&mut top);
    let lr_scheduler = lr_scheduler(&mut top);
    let clip_grad_norm = clip_grad_norm(&mut top);
    let checkpoint = checkpoint(&mut top);
    let fault_tolerance = fault_tolerance(&mut top);
    let dist_env = dist_env(&mut top);
    let on_commit = top.get("on_commit", text);
    let on_end = top.get("on_end", text);
    top.finish(&["validation_dataset_"]);
    Some(JobSpec {
        name: name?,
        run_dir: run_dir?,
        seed: seed.unwrap_or(defaults::SEED),
        deterministic: deterministic.unwrap_or(resources.device == Device::Cpu),
        resources,
        model: model?,
        dataset: dataset?,
        validation_datasets,
        step_scheduler: step_scheduler?,
        distributed,
        precision: precision.unwrap_or_default(),
        optimizer,
        lr_scheduler,
        clip_grad_norm,
        loss_fn: loss_fn.unwrap_or_default(),
        checkpoint,
        fault_tolerance,
        dist_env,
        on_commit,
        on_end,
    })
}

/// Names become file and directory names.
fn run_name(name: String) -> Result<String, String> {
    let fits = name.len() <= 100
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if fits {
        Ok(name)
    } else {
        Err("must be 1 to 100 letters, digits, `.`, `_`, `-`, beginning with a letter or digit".to_owned())
    }
}

/// Opens a section of the top level.
fn section<'t, 's>(top: &'s mut Section<'t, '_>, key: &'static str) -> Section<'t, 's> {
    let entry = top.entry(key);
    let origin = entry.map_or(Origin::At { line: 1, column: 1 }, |entry| entry.key_origin.clone());
    Section::new(top.sink(), key, &origin, entry.map(|entry| &entry.node))
}

fn resources(top: &mut Section<'_, '_>) -> Resources {
    let mut section = section(top, "resources");
    let default = Resources::default();
    let resources = Resources {
        workers: section.get("workers", whole(1, 65_536)).unwrap_or(default.workers),
        spares: section.get("spares", whole(0, 65_536)).unwrap_or(default.spares),
        device: section
            .get("device", choice(&[("cpu", Device::Cpu), ("cuda", Device::Cuda)]))
            .unwrap_or(default.device),
        threads_per_worker: section.get("threads_per_worker", whole(1, 4096)),
    };
    section.finish(&[]);
    resources
}

fn model(top: &mut Section<'_, '_>) -> Option<Model> {
    let missing = top.entry("model").is_none();
    let mut section = section(top, "model");
    let what = "name a Hugging Face config.json or write its keys inline";
    let config = if missing {
        section.need("config", what, |_| Ok(())).map(|()| ModelConfigSource::Path(PathBuf::new()))
    } else {
        section.need("config", what, |node| match &node.value {
            Value::Map(_) => match reader::json(node) {
                serde_json::Value::Object(map) => Ok(ModelConfigSource::Inline(map)),
                _ => Err("must be a path or a mapping".to_owned()),
            },
            Value::Scalar { .. } => path(node).map(ModelConfigSource::Path),
            Value::List(_) => Err("must be the path of a config.json, or its keys inline".to_owned()),
        })
    };
    let init = section.get("init", text).map(ModelInit::from).unwrap_or_default();
    section.finish(&[]);
    Some(Model { config: config?, init })
}

fn dataset(top: &mut Section<'_, '_>) -> Option<Dataset> {
    let mut section = section(top, "dataset");
    let paths = if section.entry("paths").is_some() {
        paths(&mut section)
    } else {
        section.need("paths", "name the prefix of a .bin/.idx pair, a glob, or a list of them", |_| Ok(Vec::new()))
    };
    let seq_length = section.need("seq_length", "say how many tokens a sample has", whole(1, 1 << 24));
    let fields = dataset_fields(&mut section);
    section.finish(&[]);
    Some(Dataset {
        paths: paths?,
        index_mapping_dir: fields.index_mapping_dir,
        tokenizer: fields.tokenizer,
        seq_length: seq_length?,
        split: fields.split.unwrap_or_else(defaults::split),
        seed: fields.seed.unwrap_or(defaults::DATA_SEED),
    })
}

struct DatasetFields {
    index_mapping_dir: Option<PathBuf>,
    tokenizer: Option<PathBuf>,
    split: Option<String>,
    seed: Option<u32>,
}

fn dataset_fields(section: &mut Section<'_, '_>) -> DatasetFields {
    DatasetFields {
        index_mapping_dir: section.get("index_mapping_dir", path),
        tokenizer: section.get("tokenizer", path),
        split: section.get("split", |node| text(node).and_then(split)),
        seed: section.get("seed", whole(0, u32::MAX)),
    }
}

/// Megatron's split: up to three shares, not all zero.
fn split(split: String) -> Result<String, String> {
    let shares: Option<Vec<f64>> =
        split.split(',').map(|share| share.trim().parse::<f64>().ok().filter(|s| s.is_finite() && *s >= 0.0)).collect();
    match shares {
        Some(shares) if shares.len() <= 3 && shares.iter().sum::<f64>() > 0.0 => Ok(split),
        _ => Err("must be up to three shares ≥ 0 for train, validation and test, not all zero, for example \"99,1,0\""
            .to_owned()),
    }
}

fn validation_datasets(
    top: &mut Section<'_, '_>,
    root: &Node,
    dataset: Option<&Dataset>,
) -> BTreeMap<String, ValidationDataset> {
    let mut sets = BTreeMap::new();
    top.known(VALIDATION);
    let Value::Map(entries) = &root.value else { return sets };
    for entry in entries {
        let name = match entry.key.strip_prefix(VALIDATION) {
            Some("") => "default",
            Some(rest) => match rest.strip_prefix('_') {
                Some(name) => name,
                None => continue,
            },
            None => continue,
        };
        if entry.node.is_null() {
            continue;
        }
        let named = entry.key != VALIDATION;
        if run_name(name.to_owned()).is_err() || (named && name == "default") {
            let message = "must be validation_dataset or validation_dataset_<name>, the name of letters, digits, `.`, `_`, `-` and not \"default\"";
            top.sink().push(&entry.key_origin, &entry.key, None, message);
            continue;
        }
        if let Some(set) = validation_dataset(top.sink(), entry, dataset) {
            sets.insert(name.to_owned(), set);
        }
    }
    sets
}

/// What a validation set does not say it inherits from `dataset`; without a valid one there is nothing to inherit, and
/// only its own faults are found.
fn validation_dataset(sink: &mut Sink, entry: &Entry, dataset: Option<&Dataset>) -> Option<ValidationDataset> {
    let mut section = Section::new(sink, &entry.key, &entry.key_origin, Some(&entry.node));
    let own_paths = if section.entry("paths").is_some() { paths(&mut section) } else { None };
    let seq_length = section.get("seq_length", whole(1, 1 << 24));
    let fields = dataset_fields(&mut section);
    let num_val_samples = section.get("num_val_samples", whole(1, u64::MAX));
    section.finish(&[]);
    let base = dataset?;
    Some(ValidationDataset {
        dataset: Dataset {
            paths: own_paths.unwrap_or_else(|| base.paths.clone()),
            index_mapping_dir: fields.index_mapping_dir.or_else(|| base.index_mapping_dir.clone()),
            tokenizer: fields.tokenizer.or_else(|| base.tokenizer.clone()),
            seq_length: seq_length.unwrap_or(base.seq_length),
            split: fields.split.unwrap_or_else(|| base.split.clone()),
            seed: fields.seed.unwrap_or(base.seed),
        },
        num_val_samples,
    })
}

/// `paths`: one prefix or glob; a list of them; a flat list of weight, path, weight, path; a list of mappings.
fn paths(section: &mut Section<'_, '_>) -> Option<Vec<WeightedPath>> {
    let key = section.path("paths");
    let entry = section.entry("paths")?;
    let sink = section.sink();
    let before = sink.faults.len();
    let plain = |prefix| WeightedPath { prefix, weight: None };
    let mut blend = Vec::new();
    match &entry.node.value {
        Value::Scalar { .. } => match path(&entry.node) {
            Ok(prefix) => blend.push(plain(prefix)),
            Err(allowed) => sink.wrong(&entry.node, &key, allowed),
        },
        Value::Map(_) => sink.wrong(&entry.node, &key, "must be a prefix, a glob, or a list of them"),
        Value::List(items) if items.is_empty() => sink.wrong(&entry.node, &key, "must name at least one corpus"),
        Value::List(items) if is_flat_blend(items) => {
            for (index, pair) in items.chunks(2).enumerate() {
                let at = format!("{key}[{}]", 2 * index);
                match (number_of(&pair[0]), pair.get(1).map(path)) {
                    (Some(_), Some(Ok(prefix))) => match weight(&pair[0]) {
                        Ok(weight) => blend.push(WeightedPath { prefix, weight: Some(weight) }),
                        Err(allowed) => sink.wrong(&pair[0], &at, allowed),
                    },
                    _ => sink.wrong(&pair[0], &at, "a weighted list alternates weight, path, weight, path"),
                }
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                let at = format!("{key}[{index}]");
                match &item.value {
                    Value::Map(_) => blend.extend(weighted_path(sink, &at, item)),
                    _ => match path(item) {
                        Ok(prefix) => blend.push(plain(prefix)),
                        Err(allowed) => sink.wrong(item, &at, allowed),
                    },
                }
            }
        }
    }
    (sink.faults.len() == before).then_some(blend)
}

fn weighted_path(sink: &mut Sink, at: &str, item: &Node) -> Option<WeightedPath> {
    let mut section = Section::new(sink, at, &item.origin, Some(item));
    let prefix = section.need("prefix", "name the prefix of a .bin/.idx pair", path);
    let weight = section.get("weight", weight);
    section.finish(&[]);
    Some(WeightedPath { prefix: prefix?, weight })
}

/// A list that begins with a number is Megatron's flat blend.
fn is_flat_blend(items: &[Node]) -> bool {
    items.first().is_some_and(|first| number_of(first).is_some())
}

fn number_of(node: &Node) -> Option<f64> {
    reader::json(node).as_f64()
}

fn weight(node: &Node) -> Result<f64, String> {
    number("must be a weight > 0", |weight| weight > 0.0)(node)
}

fn step_scheduler(top: &mut Section<'_, '_>) -> Option<StepScheduler> {
    let mut section = section(top, "step_scheduler");
    let global_batch_size = section.get("global_batch_size", whole(1, u32::MAX)).unwrap_or(defaults::GLOBAL_BATCH);
    let local_batch_size = section.get("local_batch_size", whole(1, u32::MAX)).unwrap_or(1);
    let max_steps = section.need("max_steps", "say how many optimizer steps the run has", whole(1, i64::MAX as u64));
    let ckpt_every_steps = section.get("ckpt_every_steps", whole(1, u64::MAX)).unwrap_or(defaults::CKPT_EVERY);
    let val_every_steps = section.get("val_every_steps", whole(1, u64::MAX));
    section.finish(&[]);
    Some(StepScheduler {
        global_batch_size,
        local_batch_size,
        max_steps: max_steps?,
        ckpt_every_steps,
        val_every_steps,
    })
}

fn distributed(top: &mut Section<'_, '_>) -> Distributed {
    let mut section = section(top, "distributed");
    let strategy = section.get("strategy", choice(&[("ddp", Strategy::Ddp)])).unwrap_or_default();
    section.finish(&[]);
    Distributed { strategy }
}

fn optimizer(top: &mut Section<'_, '_>) -> Optimizer {
    let mut section = section(top, "optimizer");
    let default = Optimizer::default();
    let optimizer = Optimizer {
        name: section.get("name", choice(&[("adamw", OptimizerName::Adamw)])).unwrap_or_default(),
        lr: section.get("lr", number("must be a number > 0", |lr| lr > 0.0)).unwrap_or(default.lr),
        betas: section.get("betas", betas).unwrap_or(default.betas),
        eps: section.get("eps", number("must be a number > 0", |eps| eps > 0.0)).unwrap_or(default.eps),
        weight_decay: section
            .get("weight_decay", number("must be a number ≥ 0", |wd| wd >= 0.0))
            .unwrap_or(default.weight_decay),
        decay: section
            .get("decay", choice(&[("all", DecayRule::All), ("matrices", DecayRule::Matrices)]))
            .unwrap_or_default(),
    };
    section.finish(&[]);
    optimizer
}

fn betas(node: &Node) -> Result<[f64; 2], String> {
    let allowed = "must be two numbers, each ≥ 0 and < 1, for example [0.9, 0.95]";
    let Value::List(items) = &node.value else { return Err(allowed.to_owned()) };
    let beta = number(allowed, |beta| (0.0..1.0).contains(&beta));
    match items.as_slice() {
        [first, second] => Ok([beta(first)?, beta(second)?]),
        _ => Err(allowed.to_owned()),
    }
}

fn lr_scheduler(top: &mut Section<'_, '_>) -> LrScheduler {
    let mut section = section(top, "lr_scheduler");
    let styles =
        [("constant", LrDecayStyle::Constant), ("linear", LrDecayStyle::Linear), ("cosine", LrDecayStyle::Cosine)];
    let warmup = whole(0, u64::MAX);
    let scheduler = LrScheduler {
        lr_decay_style: section.get("lr_decay_style", choice(&styles)).unwrap_or_default(),
        lr_warmup_steps: section
            .get("lr_warmup_steps", |node| warmup(node).map_err(|allowed| format!("{allowed}: steps, not a fraction"))),
        lr_decay_steps: section.get("lr_decay_steps", whole(1, u64::MAX)),
        init_lr: section.get("init_lr", number("must be a number ≥ 0", |lr| lr >= 0.0)),
        max_lr: section.get("max_lr", number("must be a number > 0", |lr| lr > 0.0)),
        min_lr: section.get("min_lr", number("must be a number ≥ 0", |lr| lr >= 0.0)),
    };
    section.finish(&[]);
    scheduler
}

fn clip_grad_norm(top: &mut Section<'_, '_>) -> ClipGradNorm {
    let mut section = section(top, "clip_grad_norm");
    let max_norm = section.get("max_norm", number("must be a number > 0", |norm| norm > 0.0));
    section.finish(&[]);
    max_norm.map_or_else(ClipGradNorm::default, |max_norm| ClipGradNorm { max_norm })
}

fn checkpoint(top: &mut Section<'_, '_>) -> Checkpoint {
    let mut section = section(top, "checkpoint");
    let busy = [("wait", WhenBusy::Wait), ("skip", WhenBusy::Skip)];
    let checkpoint = Checkpoint {
        checkpoint_dir: section.get("checkpoint_dir", text),
        max_recent_checkpoints: section.get("max_recent_checkpoints", whole(1, u32::MAX)),
        keep_every_steps: section.get("keep_every_steps", whole(1, u64::MAX)),
        best_metric_key: section.get("best_metric_key", text),
        when_busy: section.get("when_busy", choice(&busy)).unwrap_or_default(),
        max_failures: section.get("max_failures", whole(1, u32::MAX)),
        save_consolidated: section.get("save_consolidated", save_consolidated).unwrap_or_default(),
        weights_every_steps: section.get("weights_every_steps", whole(1, u64::MAX)),
        max_recent_weights: section.get("max_recent_weights", whole(1, u32::MAX)),
        restore_from: section.get("restore_from", text),
        weights_only: section.get("weights_only", boolean).unwrap_or_default(),
    };
    section.finish(&[]);
    checkpoint
}

/// NeMo AutoModel also takes booleans: true is `every`.
fn save_consolidated(node: &Node) -> Result<SaveConsolidated, String> {
    let choices =
        [("false", SaveConsolidated::False), ("final", SaveConsolidated::Final), ("every", SaveConsolidated::Every)];
    match boolean(node) {
        Ok(true) => Ok(SaveConsolidated::Every),
        Ok(false) => Ok(SaveConsolidated::False),
        Err(_) => choice(&choices)(node),
    }
}

fn fault_tolerance(top: &mut Section<'_, '_>) -> FaultTolerance {
    let mut section = section(top, "fault_tolerance");
    let default = FaultTolerance::default();
    let choices = [("stop", OnNonfinite::Stop), ("skip_step", OnNonfinite::SkipStep)];
    let stragglers = [("observe", Stragglers::Observe), ("evict", Stragglers::Evict)];
    let fault_tolerance = FaultTolerance {
        max_restarts: section.get("max_restarts", whole(0, u32::MAX)).unwrap_or(default.max_restarts),
        on_nonfinite: section.get("on_nonfinite", choice(&choices)).unwrap_or(default.on_nonfinite),
        hang: hang_detection(&mut section),
        compare_replicas: section.get("compare_replicas", boolean).unwrap_or(default.compare_replicas),
        stragglers: section.get("stragglers", choice(&stragglers)).unwrap_or(default.stragglers),
        burn_in_seconds: section.get(
            "burn_in_seconds",
            number("must be seconds from 0 (never) to 60; 5 is enough for most faults", |t| (0.0..=60.0).contains(&t)),
        ),
    };
    section.finish(&[]);
    fault_tolerance
}

fn hang_detection(fault_tolerance: &mut Section<'_, '_>) -> HangDetection {
    let path = fault_tolerance.path("hang");
    let entry = fault_tolerance.entry("hang");
    let origin = entry.map_or(Origin::At { line: 1, column: 1 }, |entry| entry.key_origin.clone());
    let mut section = Section::new(fault_tolerance.sink(), &path, &origin, entry.map(|entry| &entry.node));
    let default = HangDetection::default();
    let mut seconds = |key, default| section.get(key, whole(1, 604_800)).unwrap_or(default);
    let hang = HangDetection {
        start_seconds: seconds("start_seconds", default.start_seconds),
        rendezvous_seconds: seconds("rendezvous_seconds", default.rendezvous_seconds),
        load_seconds: seconds("load_seconds", default.load_seconds),
        first_step_seconds: seconds("first_step_seconds", default.first_step_seconds),
        step_seconds: seconds("step_seconds", default.step_seconds),
        validate_seconds: seconds("validate_seconds", default.validate_seconds),
        save_seconds: seconds("save_seconds", default.save_seconds),
        enabled: section.get("enabled", boolean).unwrap_or(default.enabled),
        factor: section.get("factor", whole(2, 1_000)).unwrap_or(default.factor),
    };
    section.finish(&[]);
    hang
}

fn dist_env(top: &mut Section<'_, '_>) -> DistEnv {
    let mut section = section(top, "dist_env");
    let timeout = section
        .get("timeout_minutes", number("must be minutes > 0 and ≤ 10080 (a week)", |t| t > 0.0 && t <= 10_080.0));
    section.finish(&[]);
    timeout.map_or_else(DistEnv::default, |timeout_minutes| DistEnv { timeout_minutes })
}
