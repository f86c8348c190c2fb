//! Malformed specs: each gives one error that names file, line, key, value and what is allowed (P8).
//!
//! Files are a map here; the end-to-end suite runs the same kinds of fault through the binary.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainctl_spec::{Facts, Files, Override, PathKind, parse, prepare};

const SOUND: &str = "\
name: tiny
run_dir: runs/tiny
resources:
  workers: 2
model:
  config: model.json
dataset:
  paths: data/a
  tokenizer: tok
  seq_length: 64
  split: \"99,1,0\"
validation_dataset:
  num_val_samples: 8
step_scheduler:
  global_batch_size: 8
  max_steps: 40
optimizer:
  lr: 1e-3
";

struct Disk;

impl Files for Disk {
    fn read_to_string(&self, path: &Path) -> std::io::Result<String> {
        match path.to_str() {
            Some("/w/model.json") => Ok(r#"{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 512}"#.to_owned()),
            Some("/w/heads.json") => Ok(r#"{"model_type": "gpt2", "n_head": 5, "n_embd": 32}"#.to_owned()),
            Some("/w/broken.json") => Ok("{\"model_type\": gpt2}".to_owned()),
            _ => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    fn kind(&self, path: &Path) -> PathKind {
        match path.to_str() {
            Some("/w/data" | "/w/tok" | "/w/bigtok") => PathKind::Directory,
            Some(
                "/w/model.json"
                | "/w/heads.json"
                | "/w/broken.json"
                | "/w/data/a.bin"
                | "/w/data/a.idx"
                | "/w/data/half.idx"
                | "/w/tok/tokenizer.json"
                | "/w/bigtok/tokenizer.json",
            ) => PathKind::File,
            _ => PathKind::Missing,
        }
    }

    fn glob(&self, _pattern: &str) -> Result<Vec<PathBuf>, String> {
        Ok(Vec::new())
    }

    fn cores(&self) -> u32 {
        4
    }
}

fn faults(source: &str, overrides: &[Override]) -> String {
    let parsed = match parse(source, "job.yaml", overrides, &BTreeMap::new()) {
        Ok(parsed) => parsed,
        Err(faults) => return faults.to_string(),
    };
    let gather = |_: &_| Facts {
        tokenizers: [(PathBuf::from("/w/tok"), Ok(512)), (PathBuf::from("/w/bigtok"), Ok(50_257))].into(),
        ..Facts::default()
    };
    prepare(parsed, Path::new("/w"), &Disk, gather).faults.to_string()
}

#[test]
fn the_sound_spec_is_sound() {
    assert_eq!(faults(SOUND, &[]), "");
}

#[test]
fn each_malformed_spec_gives_one_clear_error() {
    let cases = [
        ("unknown key", "  workers: 2", "  workerz: 2"),
        ("unknown section", "optimizer:\n  lr: 1e-3", "wandb:\n  project: x"),
        ("wrong type", "  max_steps: 40", "  max_steps: [40]"),
        ("number in quotes", "  max_steps: 40", "  max_steps: \"40\""),
        ("fraction for a count", "  max_steps: 40", "  max_steps: 40.5"),
        ("negative", "global_batch_size: 8", "global_batch_size: -8"),
        ("zero", "workers: 2", "workers: 0"),
        ("missing key", "  seq_length: 64\n", ""),
        ("missing section", "model:\n  config: model.json\n", ""),
        ("section that is a list", "resources:\n  workers: 2", "resources:\n  - workers"),
        ("missing file", "config: model.json", "config: none.json"),
        ("directory as file", "config: model.json", "config: data"),
        ("file as directory", "run_dir: runs/tiny", "run_dir: model.json"),
        ("config that is not JSON", "config: model.json", "config: broken.json"),
        ("heads that do not divide", "config: model.json", "config: heads.json"),
        ("tokenizer larger than the vocabulary", "tokenizer: tok", "tokenizer: bigtok"),
        ("data that is not there", "paths: data/a", "paths: data/b"),
        ("half a pair", "paths: data/a", "paths: data/half"),
        ("glob without a match", "paths: data/a", "paths: data/x*"),
        ("blend without a path", "paths: data/a", "paths: [0.5]"),
        ("sequence longer than the model's", "seq_length: 64", "seq_length: 65"),
        ("batch too small for the world", "global_batch_size: 8", "global_batch_size: 1"),
        ("unknown word", "optimizer:", "precision: fp8\noptimizer:"),
        ("split of words", "99,1,0", "most,rest"),
        ("name with a slash", "name: tiny", "name: ../tiny"),
        ("URL as run directory", "run_dir: runs/tiny", "run_dir: s3://bucket/run"),
        ("variable that is not set", "run_dir: runs/tiny", "run_dir: ${SCRATCH}/tiny"),
        ("duplicate key", "  lr: 1e-3", "  lr: 1e-3\n  lr: 1e-4"),
        ("YAML: bad indentation", "  lr: 1e-3", "  lr: 1e-3\n betas: [0.9, 0.95]"),
        ("YAML: bracket not closed", "paths: data/a", "paths: [data/a"),
        ("YAML: tab", "  lr: 1e-3", "\tlr: 1e-3"),
        ("YAML: tag", "name: tiny", "name: !!python/object:os.system tiny"),
        ("YAML: two documents", "  lr: 1e-3", "  lr: 1e-3\n---\nname: other"),
        ("burn-in of an hour", "optimizer:", "fault_tolerance: {burn_in_seconds: 3600}\noptimizer:"),
        ("warm-up as long as the run", "optimizer:", "lr_scheduler: {lr_warmup_steps: 40}\noptimizer:"),
    ];
    let mut report = String::new();
    for (title, from, to) in cases {
        assert!(SOUND.contains(from), "{title}");
        let text = faults(&SOUND.replacen(from, to, 1), &[]);
        assert_eq!(text.lines().count(), 1, "{title}: {text}");
        assert!(text.starts_with("job.yaml:"), "{title}: {text}");
        report += &format!("{title}\n    {text}\n");
    }
    for (title, source) in [("empty file", ""), ("a list", "- a\n- b\n"), ("no text at all", "\0\u{1}\u{2}")] {
        report += &format!("{title}\n    {}\n", faults(source, &[]).replace('\n', "\n    "));
    }
    insta::assert_snapshot!(report);
}
