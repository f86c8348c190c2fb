//! Resolving against a machine that is written down here.

use std::collections::BTreeMap;

use super::*;
use crate::parse::{Override, parse};

pub(crate) struct Machine {
    files: BTreeMap<PathBuf, String>,
    cores: u32,
}

impl Machine {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        Self { files: files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect(), cores: 16 }
    }
}

impl Files for Machine {
    fn read_to_string(&self, path: &Path) -> std::io::Result<String> {
        self.files.get(path).cloned().ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    fn kind(&self, path: &Path) -> PathKind {
        if self.files.contains_key(path) {
            PathKind::File
        } else if self.files.keys().any(|file| file.starts_with(path)) {
            PathKind::Directory
        } else {
            PathKind::Missing
        }
    }

    /// Enough for the tests: one `*`.
    fn glob(&self, pattern: &str) -> Result<Vec<PathBuf>, String> {
        let (before, after) = pattern.split_once('*').ok_or("no star")?;
        let matches =
            |file: &&PathBuf| file.to_str().is_some_and(|file| file.starts_with(before) && file.ends_with(after));
        Ok(self.files.keys().filter(matches).rev().cloned().collect())
    }

    fn cores(&self) -> u32 {
        self.cores
    }
}

fn machine() -> Machine {
    Machine::new(&[
        ("/project/configs/tiny.json", r#"{"model_type": "gpt2", "n_layer": 2, "layer_norm_epsilon": 1e-05}"#),
        ("/project/configs/list.json", "[]"),
        ("/project/data/b.idx", ""),
        ("/project/data/b.bin", ""),
        ("/project/data/a.idx", ""),
        ("/project/data/a.bin", ""),
        ("/project/data/half.idx", ""),
        ("/project/tok/tokenizer.json", "{}"),
    ])
}

const JOB: &str = "\
name: tiny
run_dir: ./runs/tiny
resources: {workers: 3}
model: {config: configs/tiny.json}
dataset:
  paths: data/*
  tokenizer: tok
  index_mapping_dir: data/index
  seq_length: 64
validation_dataset: {split: \"0,1\"}
step_scheduler: {max_steps: 400, global_batch_size: 8, val_every_steps: 100}
optimizer: {lr: 1e-3}
";

fn resolved(source: &str, overrides: &[Override]) -> Resolved {
    let parsed = parse(source, "job.yaml", overrides, &BTreeMap::new()).unwrap_or_else(|faults| panic!("{faults}"));
    resolve(parsed, Path::new("/project"), &machine())
}

#[test]
fn everything_is_filled_in() {
    let machine = {
        let mut machine = machine();
        machine.files.remove(Path::new("/project/data/half.idx"));
        machine
    };
    let parsed = parse(JOB, "job.yaml", &[], &BTreeMap::new()).unwrap();
    let Resolved { spec, faults, .. } = resolve(parsed, Path::new("/project"), &machine);
    assert!(faults.is_empty(), "{faults}");
    insta::assert_snapshot!(spec.to_yaml().unwrap());
    assert_eq!(JobSpec::from_yaml(&spec.to_yaml().unwrap()).unwrap(), spec);
}

#[test]
fn what_is_missing_is_named_once() {
    let over = [
        Override::set("run_dir=data/a.bin"),
        Override::set("model.config=configs"),
        Override::set("dataset.paths=[0.5, data/none, 0.5, data/half.bin, 1, data/*, 1, zzz*, 1, blend.json]"),
        Override::set("dataset.tokenizer=~/tok"),
        Override::set("validation_dataset_web.paths=data/gone"),
        Override::set("validation_dataset_web.tokenizer=data"),
    ];
    insta::assert_snapshot!(resolved(JOB, &over).faults.to_string());
    insta::assert_snapshot!(resolved(JOB, &[Override::set("model.config=configs/list.json")]).faults.to_string());
}

#[test]
fn faults_of_a_flat_blend_point_at_their_line() {
    let source = JOB.replace("data/*", "\n    - 0.5\n    - data/a\n    - 0.5\n    - data/gone");
    let faults = resolved(&source, &[]).faults.to_string();
    assert!(faults.starts_with("job.yaml:10: dataset.paths[3]: /project/data/gone: "), "{faults}");
}
