//! From a file and overrides to a checked spec. Reads files, writes nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainctl_dataset::indexed::IndexedReader;
use trainctl_dataset::tokenizer::Tokenizer;
use trainctl_spec::job::{ModelConfigSource, ModelInit};
use trainctl_spec::{
    Architecture, CorpusFacts, Facts, Fault, Faults, Files, JobSpec, Origin, Override, PathKind, PretrainedFacts,
    Severity, Spans, check as check_spec, parse, resolve,
};
use trainctl_store::hugging_face::Directory;

use crate::exit::{Exit, Failure};
use crate::output::{note, people, size};

/// A spec that was looked at.
#[derive(Debug)]
pub(crate) struct Checked {
    /// Absent when it does not parse.
    pub(crate) spec: Option<JobSpec>,
    /// Everything that was found.
    pub(crate) faults: Faults,
}

/// Parses, resolves and checks a spec. Relative paths in it are taken from the current folder.
pub(crate) fn check(path: &Path, overrides: &[Override]) -> Result<Checked, Failure> {
    let file = path.display().to_string();
    let source = match read_spec(path) {
        Ok(source) => source,
        Err(message) => {
            let fault = Fault {
                file,
                origin: Origin::Nowhere,
                key: String::new(),
                value: None,
                message,
                severity: Severity::Error,
            };
            return Ok(Checked { spec: None, faults: Faults(vec![fault]) });
        }
    };
    let base =
        std::env::current_dir().map_err(|error| Failure::internal(format!("find the current folder: {error}")))?;
    Ok(check_source(&source, &file, overrides, &base))
}

fn read_spec(path: &Path) -> Result<String, String> {
    if path.is_dir() {
        return Err("is a directory; name the spec's file".to_owned());
    }
    let bytes = std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "does not exist; name a job spec, for example job.yaml".to_owned(),
        _ => format!("cannot be read: {error}"),
    })?;
    String::from_utf8(bytes).map_err(|error| format!("is not UTF-8 text (byte {})", error.utf8_error().valid_up_to()))
}

fn check_source(source: &str, file: &str, overrides: &[Override], base: &Path) -> Checked {
    let environment: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let parsed = match parse(source, file, overrides, &environment) {
        Ok(parsed) => parsed,
        Err(faults) => return Checked { spec: None, faults },
    };
    let resolved = resolve(parsed, base, &Machine);
    let mut faults = resolved.faults;
    faults.extend(facts_faults(&resolved.spec, &resolved.spans));
    Checked { spec: Some(resolved.spec), faults }
}

fn facts_faults(spec: &JobSpec, spans: &Spans) -> Faults {
    check_spec(spec, &gather(spec), spans)
}

/// The spec when it may start; warnings go to stderr. Faults are printed, and the failure then says nothing more.
pub(crate) fn accept(path: &Path, overrides: &[Override]) -> Result<JobSpec, Failure> {
    let checked = check(path, overrides)?;
    if checked.faults.has_errors() {
        return Err(refuse(&checked.faults));
    }
    checked.faults.warnings().for_each(|warning| note(&warning.to_string()));
    checked.spec.ok_or_else(|| Failure::internal("a spec without a fault did not parse"))
}

/// Prints the faults.
pub(crate) fn refuse(faults: &Faults) -> Failure {
    note(&faults.to_string());
    Failure { exit: Exit::Usage, message: String::new() }
}

/// `--run-dir DIR` as an override, taken from the current folder.
pub(crate) fn run_dir_override(run_dir: Option<&Path>) -> Result<Option<Override>, Failure> {
    let Some(run_dir) = run_dir else { return Ok(None) };
    let absolute = std::path::absolute(run_dir).map_err(|error| Failure::usage(format!("--run-dir: {error}")))?;
    let Some(text) = absolute.to_str() else {
        return Err(Failure::usage(format!("--run-dir {}: must be UTF-8", run_dir.display())));
    };
    // JSON's quotes are YAML's.
    Ok(Some(Override::set(&format!("run_dir={}", serde_json::Value::from(text)))))
}

/// `--weights-only` as an override.
pub(crate) fn weights_only_override(weights_only: bool) -> Option<Override> {
    weights_only.then(|| Override::set("checkpoint.weights_only=true"))
}

/// `--workers N` as an override.
pub(crate) fn workers_override(workers: Option<u32>) -> Option<Override> {
    workers.map(|workers| Override::set(&format!("resources.workers={workers}")))
}

/// What a checked spec amounts to, a line each.
pub(crate) fn describe(spec: &JobSpec) -> Vec<String> {
    let steps = &spec.step_scheduler;
    let mut lines = vec![format!("run         {}", spec.run_dir.display())];
    if let ModelConfigSource::Inline(config) = &spec.model.config
        && let Ok(architecture) = Architecture::from_config(config)
    {
        let memory = architecture.memory(spec.precision);
        let count = people(architecture.parameter_count());
        lines.push(format!("model       {count} parameters, {} of training state", size(memory.total())));
    }
    let tokens = u64::from(steps.global_batch_size) * u64::from(spec.dataset.seq_length);
    lines.push(format!("training    {} steps of {} tokens", people(steps.max_steps), people(tokens)));
    lines.push(format!("world size  {} on {:?}", spec.resources.workers, spec.resources.device).to_lowercase());
    lines
}

/// This machine, as resolving needs it.
struct Machine;

impl Files for Machine {
    fn read_to_string(&self, path: &Path) -> std::io::Result<String> {
        std::fs::read_to_string(path)
    }

    fn kind(&self, path: &Path) -> PathKind {
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => PathKind::Directory,
            Ok(_) => PathKind::File,
            Err(_) => PathKind::Missing,
        }
    }

    fn glob(&self, pattern: &str) -> Result<Vec<PathBuf>, String> {
        trainctl_dataset::paths::glob(pattern).map_err(|error| error.to_string())
    }

    fn cores(&self) -> u32 {
        cores()
    }
}

fn cores() -> u32 {
    std::thread::available_parallelism().ok().and_then(|cores| u32::try_from(cores.get()).ok()).unwrap_or(1)
}

/// What the rules need to know about files and machine.
fn gather(spec: &JobSpec) -> Facts {
    let free_bytes = match &spec.checkpoint.checkpoint_dir {
        None => free_bytes(&spec.run_dir),
        Some(place) if place.contains("://") => None,
        Some(directory) => free_bytes(Path::new(directory)),
    };
    let mut facts = Facts { free_bytes, cores: Some(cores()), ..Facts::default() };
    let datasets = std::iter::once(&spec.dataset).chain(spec.validation_datasets.values().map(|set| &set.dataset));
    for dataset in datasets {
        for path in &dataset.paths {
            // A pair that is missing was noticed by resolving.
            if [".bin", ".idx"].iter().all(|end| with_suffix(&path.prefix, end).exists()) {
                facts.corpora.entry(path.prefix.clone()).or_insert_with(|| corpus(&path.prefix));
            }
        }
        if let Some(path) = &dataset.tokenizer {
            // One that is missing was noticed by resolving.
            if path.exists() {
                facts.tokenizers.entry(path.clone()).or_insert_with(|| vocabulary(path));
            }
        }
    }
    if let ModelInit::HuggingFace(directory) = &spec.model.init
        && Path::new(directory).is_dir()
    {
        facts.pretrained = Some(pretrained(directory));
    }
    facts
}

fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

fn corpus(prefix: &Path) -> Result<CorpusFacts, String> {
    let reader = IndexedReader::open(prefix).map_err(|error| error.to_string())?;
    Ok(CorpusFacts { tokens: reader.num_tokens(), documents: reader.num_documents() as u64, max_token: None })
}

fn vocabulary(path: &Path) -> Result<u64, String> {
    Tokenizer::load(path).map(|tokenizer| tokenizer.vocabulary_size() as u64).map_err(|error| error.to_string())
}

/// Free space where `path` is or will be, bytes; `None` if the file system does not say.
fn free_bytes(path: &Path) -> Option<u64> {
    trainctl_store::space::free_bytes(path).ok()
}

/// The headers of a Hugging Face directory.
fn pretrained(directory: &str) -> Result<PretrainedFacts, String> {
    let directory = Directory::open(directory.as_ref()).map_err(|error| error.to_string())?;
    Ok(PretrainedFacts { tensors: directory.tensors(), config: directory.config().cloned() })
}
