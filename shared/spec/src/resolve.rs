//! A parsed spec → the spec that is queued, stored and sent: absolute paths, globs expanded, the model's config inlined,
//! every default that depends on something filled in.
//!
//! File contents and facts come through [`Files`], so that this crate does no I/O. Faults are collected, not returned at the
//! first: a caller adds those of [`crate::check()`] and shows all at once (P8).

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::fault::{Faults, Spans};
use crate::job::{Dataset, JobSpec, ModelConfigSource, ModelInit, WeightedPath};
use crate::parse::Parsed;

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// Nothing, or nothing that this user can see.
    Missing,
    /// A file.
    File,
    /// A directory.
    Directory,
}

/// The machine as resolving needs it.
pub trait Files {
    /// Contents of a text file.
    ///
    /// # Errors
    /// Why it cannot be read.
    fn read_to_string(&self, path: &Path) -> std::io::Result<String>;
    /// What the path leads to, links followed.
    fn kind(&self, path: &Path) -> PathKind;
    /// Files that match a shell glob, in any order.
    ///
    /// # Errors
    /// What is wrong with the pattern.
    fn glob(&self, pattern: &str) -> Result<Vec<PathBuf>, String>;
    /// Cores that this process may use.
    fn cores(&self) -> u32;
}

/// A resolved spec and what was found on the way.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// Complete unless `faults` has errors.
    pub spec: JobSpec,
    /// Where each key was written; `paths[i]` count the expanded list.
    pub spans: Spans,
    /// Missing files and the like.
    pub faults: Faults,
}

/// Resolves a spec; relative paths are taken from `base`, which must be absolute.
#[must_use]
pub fn resolve(parsed: Parsed, base: &Path, files: &dyn Files) -> Resolved {
    let Parsed { spec, spans } = parsed;
    let mut resolver = Resolver { base, files, spans, faults: Faults::default() };
    let spec = resolver.spec(spec);
    resolver.faults.keep_first_of_each_key();
    resolver.faults.sort();
    Resolved { spec, spans: resolver.spans, faults: resolver.faults }
}

struct Resolver<'a> {
    base: &'a Path,
    files: &'a dyn Files,
    spans: Spans,
    faults: Faults,
}

impl Resolver<'_> {
    fn spec(&mut self, mut spec: JobSpec) -> JobSpec {
        spec.run_dir = self.absolute("run_dir", &spec.run_dir);
        if self.files.kind(&spec.run_dir) == PathKind::File {
            self.error("run_dir", &spec.run_dir, "is a file; name a directory, or a path that does not exist yet");
        }
        if spec.resources.threads_per_worker.is_none() {
            spec.resources.threads_per_worker = Some((self.files.cores() / spec.resources.workers.max(1)).max(1));
        }
        if let ModelConfigSource::Path(path) = &spec.model.config
            && let Some(config) = self.model_config(path)
        {
            spec.model.config = ModelConfigSource::Inline(config);
        }
        let written = spec.dataset.clone();
        spec.dataset = self.dataset("dataset", written.clone());
        for (name, set) in &mut spec.validation_datasets {
            let key = validation_key(name);
            let inherited = set.dataset.paths == written.paths;
            let tokenizer = set.dataset.tokenizer == written.tokenizer;
            let index = set.dataset.index_mapping_dir == written.index_mapping_dir;
            // What is inherited was looked at once already.
            if inherited {
                set.dataset.paths = Vec::new();
            }
            if tokenizer {
                set.dataset.tokenizer = None;
            }
            set.dataset = self.dataset(&key, set.dataset.clone());
            if inherited {
                set.dataset.paths.clone_from(&spec.dataset.paths);
            }
            if tokenizer {
                set.dataset.tokenizer.clone_from(&spec.dataset.tokenizer);
            }
            if index {
                set.dataset.index_mapping_dir.clone_from(&spec.dataset.index_mapping_dir);
            }
        }
        spec.model.init = match spec.model.init {
            ModelInit::Random => ModelInit::Random,
            ModelInit::HuggingFace(path) => {
                let path = self.absolute("model.init", Path::new(&path));
                if self.files.kind(&path) != PathKind::Directory {
                    self.error("model.init", &path, "is no directory; use random, or name a Hugging Face directory");
                }
                ModelInit::HuggingFace(path.to_string_lossy().into_owned())
            }
        };
        let checkpoint = &mut spec.checkpoint;
        checkpoint.checkpoint_dir =
            checkpoint.checkpoint_dir.take().map(|place| self.place("checkpoint.checkpoint_dir", place));
        checkpoint.restore_from =
            checkpoint.restore_from.take().map(|place| self.place("checkpoint.restore_from", place));
        fill_defaults(&mut spec);
        spec
    }

    /// A URL stays as it is; a path becomes absolute.
    fn place(&mut self, key: &str, written: String) -> String {
        if written.contains("://") {
            return written;
        }
        self.absolute(key, Path::new(&written)).to_string_lossy().into_owned()
    }

    fn dataset(&mut self, key: &str, mut dataset: Dataset) -> Dataset {
        dataset.paths = self.paths(&format!("{key}.paths"), dataset.paths);
        dataset.index_mapping_dir =
            dataset.index_mapping_dir.map(|path| self.absolute(&format!("{key}.index_mapping_dir"), &path));
        dataset.tokenizer = dataset.tokenizer.map(|path| {
            let key = format!("{key}.tokenizer");
            let path = self.absolute(&key, &path);
            match self.files.kind(&path) {
                PathKind::File => {}
                PathKind::Directory if self.files.kind(&path.join("tokenizer.json")) == PathKind::File => {}
                PathKind::Directory => {
                    self.error(&key, &path, "has no tokenizer.json; name a directory with one, or the file")
                }
                PathKind::Missing => {
                    self.error(&key, &path, "does not exist; make it with `trainctl data tokenizer train`")
                }
            }
            path
        });
        dataset
    }

    fn paths(&mut self, key: &str, written: Vec<WeightedPath>) -> Vec<WeightedPath> {
        let count = written.len();
        // Megatron's flat blend has a weight before each path.
        let flat = count > 0 && self.spans.is_written(&format!("{key}[{}]", 2 * count - 1));
        let mut resolved = Vec::new();
        let mut origins = Vec::new();
        for (index, path) in written.into_iter().enumerate() {
            let at = format!("{key}[{}]", if flat { 2 * index + 1 } else { index });
            let origin = self.spans.origin(&at);
            for path in self.path(&at, path) {
                resolved.push(path);
                origins.push(origin.clone());
            }
        }
        for (index, origin) in origins.into_iter().enumerate() {
            self.spans.insert(format!("{key}[{index}]"), origin);
        }
        resolved
    }

    /// One written path is one corpus, or as many as its glob matches, sorted.
    fn path(&mut self, key: &str, written: WeightedPath) -> Vec<WeightedPath> {
        let WeightedPath { prefix, weight } = written;
        let prefix = self.absolute(key, &without_suffix(prefix));
        let text = prefix.to_string_lossy().into_owned();
        if text.ends_with(".json") {
            self.error(key, &prefix, "JSON blends are not supported; write the blend as a list of weight, path");
            return Vec::new();
        }
        if !text.contains(['*', '?', '[']) {
            for suffix in [".idx", ".bin"] {
                let file = PathBuf::from(format!("{text}{suffix}"));
                match self.files.kind(&file) {
                    PathKind::File => continue,
                    PathKind::Missing => self.error(
                        key,
                        &prefix,
                        &format!("{} does not exist; make it with `trainctl data preprocess`", file.display()),
                    ),
                    PathKind::Directory => {
                        self.error(key, &prefix, &format!("{} is a directory, not a file", file.display()))
                    }
                }
                break;
            }
            return vec![WeightedPath { prefix, weight }];
        }
        let mut prefixes: Vec<PathBuf> = match self.files.glob(&format!("{text}.idx")) {
            Ok(found) => found.into_iter().map(without_suffix).collect(),
            Err(message) => {
                self.error(key, &prefix, &format!("not a glob: {message}"));
                return Vec::new();
            }
        };
        prefixes.sort();
        prefixes.dedup();
        if prefixes.is_empty() {
            self.error(key, &prefix, "matches no .bin/.idx pair");
        } else if weight.is_some() && prefixes.len() > 1 {
            self.error(
                key,
                &prefix,
                &format!("has one weight and matches {}; give each path its weight", prefixes.len()),
            );
        }
        prefixes.into_iter().map(|prefix| WeightedPath { prefix, weight }).collect()
    }

    fn model_config(&mut self, path: &Path) -> Option<serde_json::Map<String, Value>> {
        let key = "model.config";
        let mut path = self.absolute(key, path);
        if self.files.kind(&path) == PathKind::Directory && self.files.kind(&path.join("config.json")) == PathKind::File
        {
            path.push("config.json");
        }
        match self.files.kind(&path) {
            PathKind::Missing => {
                self.error(key, &path, "does not exist; name a Hugging Face config.json");
                return None;
            }
            PathKind::Directory => {
                self.error(key, &path, "has no config.json; name a Hugging Face directory, or the file");
                return None;
            }
            PathKind::File => {}
        }
        let text = match self.files.read_to_string(&path) {
            Ok(text) => text,
            Err(error) => {
                self.error(key, &path, &format!("cannot be read: {error}"));
                return None;
            }
        };
        match serde_json::from_str(&text) {
            Ok(Value::Object(map)) => Some(map),
            Ok(_) => {
                self.error(key, &path, "must hold a JSON object, as Hugging Face's config.json");
                None
            }
            Err(error) => {
                self.error(key, &path, &format!("not valid JSON: {error}"));
                None
            }
        }
    }

    fn absolute(&mut self, key: &str, path: &Path) -> PathBuf {
        if path.starts_with("~") {
            self.error(key, path, "`~` is the shell's; write ${HOME}");
        }
        // `components` drops `.` and doubled slashes; `..` stays, since a link may stand before it.
        self.base.join(path).components().collect()
    }

    fn error(&mut self, key: &str, path: &Path, message: &str) {
        self.faults.0.push(self.spans.error(key, path.display(), message));
    }
}

/// Key of a validation set in `job.yaml`.
#[must_use]
pub fn validation_key(name: &str) -> String {
    if name == "default" { "validation_dataset".to_owned() } else { format!("validation_dataset_{name}") }
}

/// A prefix may be written with the suffix of either file.
fn without_suffix(path: PathBuf) -> PathBuf {
    match path.extension() {
        Some(extension) if extension == "bin" || extension == "idx" => path.with_extension(""),
        _ => path,
    }
}

/// Defaults that depend on other keys (reference: NeMo AutoModel's `lr_scheduler` defaults).
fn fill_defaults(spec: &mut JobSpec) {
    let steps = &spec.step_scheduler;
    let lr = spec.optimizer.lr;
    let schedule = &mut spec.lr_scheduler;
    schedule.lr_warmup_steps.get_or_insert((steps.max_steps / 10).min(1000));
    schedule.lr_decay_steps.get_or_insert(steps.max_steps);
    schedule.init_lr.get_or_insert(0.1 * lr);
    schedule.max_lr.get_or_insert(lr);
    schedule.min_lr.get_or_insert(0.01 * lr);
    let every = steps.val_every_steps.unwrap_or(steps.ckpt_every_steps).max(1);
    let samples = (steps.max_steps / every).max(1).saturating_mul(u64::from(steps.global_batch_size));
    for set in spec.validation_datasets.values_mut() {
        set.num_val_samples.get_or_insert(samples);
    }
    if spec.checkpoint.best_metric_key.is_none() {
        let mut names = spec.validation_datasets.keys();
        spec.checkpoint.best_metric_key = match (names.next(), names.next()) {
            (Some(only), None) => Some(only.clone()),
            (Some(_), Some(_)) if spec.validation_datasets.contains_key("default") => Some("default".to_owned()),
            _ => None,
        };
    }
}

#[cfg(test)]
pub(crate) mod tests;
