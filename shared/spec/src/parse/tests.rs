//! Parsing: what is accepted, how faults read, where they point.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::*;
use crate::job::{Device, LrDecayStyle, ModelConfigSource, Precision};

pub(crate) const FULL: &str = r#"name: gpt2-124m
run_dir: runs/gpt2-124m
seed: 1111
deterministic: true
resources: {workers: 8, spares: 4, device: cuda, threads_per_worker: 4}
model: {config: configs/gpt2-124m.json, init: random}
dataset:
  paths: data/processed_*_text_document
  index_mapping_dir: data/index
  tokenizer: data/tokenizer
  seq_length: 1024
  split: "99,1,0"
  seed: 1234
validation_dataset: {num_val_samples: 1024}
validation_dataset_web:
  paths: [data/web]
  split: 0,1,0
step_scheduler: {global_batch_size: 512, local_batch_size: 32, max_steps: 18500, ckpt_every_steps: 1000, val_every_steps: 250}
distributed: {strategy: ddp}
precision: bf16
optimizer: {name: adamw, lr: 6.0e-4, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, decay: matrices}
lr_scheduler: {lr_decay_style: cosine, lr_warmup_steps: 700, lr_decay_steps: 18500, init_lr: 6e-5, max_lr: 6e-4, min_lr: 0.0}
clip_grad_norm: {max_norm: 1.0}
loss_fn: chunked
checkpoint:
  checkpoint_dir: s3://bucket/gpt2-124m
  max_recent_checkpoints: 2
  keep_every_steps: 5000
  best_metric_key: default
  when_busy: skip
  max_failures: 3
  save_consolidated: every
  weights_every_steps: 250
  max_recent_weights: 4
  restore_from: runs/other/epoch_0_step_999
  weights_only: true
fault_tolerance:
  max_restarts: 10
  on_nonfinite: stop
  hang:
    enabled: true
    factor: 10
    start_seconds: 120
    rendezvous_seconds: 300
    load_seconds: 1800
    first_step_seconds: 600
    step_seconds: 60
    validate_seconds: 1800
    save_seconds: 1800
  compare_replicas: true
  stragglers: observe
  burn_in_seconds: 5
dist_env: {timeout_minutes: 30}
on_commit: evaluate "$TRAINCTL_CHECKPOINT"
on_end: "mail -s ended me@example.org"
"#;

const SMALL: &str = "\
name: tiny
run_dir: runs/tiny
model:
  config: {model_type: gpt2, n_layer: 2}
dataset:
  paths: data/a
  seq_length: 64
step_scheduler:
  max_steps: 40
";

fn ok(source: &str) -> Parsed {
    parse(source, "job.yaml", &[], &BTreeMap::new()).unwrap_or_else(|faults| panic!("{faults}"))
}

fn faults(source: &str) -> String {
    parse(source, "job.yaml", &[], &BTreeMap::new()).expect_err("must be refused").to_string()
}

#[test]
fn every_key_is_read() {
    let spec = ok(FULL).spec;
    assert_eq!(spec.resources.device, Device::Cuda);
    assert_eq!(spec.precision, Precision::Bf16);
    assert_eq!(spec.optimizer.lr, 6.0e-4);
    assert_eq!(spec.lr_scheduler.lr_decay_style, LrDecayStyle::Cosine);
    assert_eq!(spec.lr_scheduler.min_lr, Some(0.0));
    assert_eq!(spec.model.config, ModelConfigSource::Path(PathBuf::from("configs/gpt2-124m.json")));
    assert_eq!(spec.validation_datasets.keys().collect::<Vec<_>>(), ["default", "web"]);
    let default = &spec.validation_datasets["default"];
    assert_eq!(
        (default.num_val_samples, default.dataset.clone()),
        (Some(1024), spec.dataset.clone()),
        "inherits what it does not say"
    );
    let web = &spec.validation_datasets["web"];
    assert_eq!((web.dataset.split.as_str(), web.dataset.seq_length, web.dataset.seed), ("0,1,0", 1024, 1234));
}

#[test]
fn defaults_are_nemo_automodels_or_documented() {
    let spec = ok(SMALL).spec;
    assert_eq!((spec.seed, spec.dataset.seed, spec.deterministic), (42, 1234, true));
    assert_eq!((spec.step_scheduler.global_batch_size, spec.step_scheduler.local_batch_size), (32, 1));
    assert_eq!((spec.step_scheduler.ckpt_every_steps, spec.step_scheduler.val_every_steps), (100, None));
    assert_eq!((spec.optimizer.lr, spec.optimizer.betas, spec.optimizer.weight_decay), (1e-4, [0.9, 0.999], 0.01));
    let cuda = ok(&SMALL.replace("run_dir", "resources: {device: cuda}\nrun_dir")).spec;
    assert!(!cuda.deterministic, "deterministic by default on CPU only");
}

#[test]
fn the_written_form_reads_back_equal() {
    for source in [FULL, SMALL] {
        let spec = ok(source).spec;
        let yaml = spec.to_yaml().unwrap();
        assert_eq!(JobSpec::from_yaml(&yaml).unwrap_or_else(|faults| panic!("{faults}\n{yaml}")), spec, "{yaml}");
    }
    insta::assert_snapshot!(ok(SMALL).spec.to_yaml().unwrap());
}

#[test]
fn paths_in_all_their_forms() {
    let cases = [
        ("data/a", vec![("data/a", None)]),
        ("[data/a, data/b]", vec![("data/a", None), ("data/b", None)]),
        ("[0.3, data/a, 7, data/b]", vec![("data/a", Some(0.3)), ("data/b", Some(7.0))]),
        (
            "[{prefix: data/a, weight: 1}, {prefix: data/b, weight: 2.5}]",
            vec![("data/a", Some(1.0)), ("data/b", Some(2.5))],
        ),
    ];
    for (written, expected) in cases {
        let spec = ok(&SMALL.replace("data/a", written)).spec;
        let got: Vec<_> = spec.dataset.paths.iter().map(|path| (path.prefix.to_str().unwrap(), path.weight)).collect();
        assert_eq!(got, expected, "{written}");
    }
}

#[test]
fn all_faults_come_at_once() {
    insta::assert_snapshot!(faults(
        "name: a b\nrun_dir: s3://bucket/run\nresources: {workers: 0, gpus: 2}\ndataset:\n  paths: [0.5, data/a, 0.5]\n  seq_lenght: 10\n  split: \"0,0\"\n\
         validation_datasets: {}\nstep_scheduler:\n  global_batch_size: -4\n  max_steps: many\noptimizer: {lr: 0, betas: [0.9, 1.0]}\nprecision: fp16\nlr_scheduler: 3\n"
    ));
}

#[test]
fn overrides_and_their_faults_name_themselves() {
    let over = [
        Override::set("optimizer.lr=3e-4"),
        Override::bare("--lr_scheduler.lr_warmup_steps=7"),
        Override::bare("optimizer.betas=[0.8,0.9]"),
        Override::set("validation_dataset_web.num_val_samples=4"),
        Override::set("step_scheduler.val_every_steps="),
    ];
    let parsed = parse(SMALL, "job.yaml", &over, &BTreeMap::new()).unwrap();
    assert_eq!((parsed.spec.optimizer.lr, parsed.spec.optimizer.betas), (3e-4, [0.8, 0.9]));
    assert_eq!(parsed.spec.lr_scheduler.lr_warmup_steps, Some(7));
    assert_eq!(parsed.spec.validation_datasets["web"].num_val_samples, Some(4));
    assert_eq!(parsed.spans.origin("optimizer.lr"), Origin::Override("--set optimizer.lr=3e-4".to_owned()));

    let over = [
        Override::set("optimizer.lr=abc"),
        Override::set("name.x=1"),
        Override::set("seed"),
        Override::set("=3"),
        Override::bare("--optimizer.learning_rate=1"),
        Override::bare("resources=[1"),
    ];
    let faults = parse(SMALL, "job.yaml", &over, &BTreeMap::new()).unwrap_err();
    insta::assert_snapshot!(faults.to_string());
}

#[test]
fn variables_are_expanded_once() {
    let source = SMALL.replace("runs/tiny", "${ROOT}/${WHO,nobody}/tiny").replace("40", "${STEPS}");
    let env =
        BTreeMap::from([("ROOT".to_owned(), "/scratch/${WHO}".to_owned()), ("STEPS".to_owned(), "50".to_owned())]);
    let spec = parse(&source, "job.yaml", &[], &env).unwrap().spec;
    assert_eq!((spec.run_dir.to_str().unwrap(), spec.step_scheduler.max_steps), ("/scratch/${WHO}/nobody/tiny", 50));
    insta::assert_snapshot!(
        parse(&source.replace("STEPS}", "STEPS"), "job.yaml", &[], &BTreeMap::new()).unwrap_err().to_string()
    );
}

#[test]
fn a_resolved_spec_is_not_expanded_again() {
    let env = BTreeMap::from([("ROOT".to_owned(), "/scratch/${WHO}".to_owned())]);
    let spec = parse(&SMALL.replace("runs/tiny", "${ROOT}"), "job.yaml", &[], &env).unwrap().spec;
    assert_eq!(JobSpec::from_yaml(&spec.to_yaml().unwrap()).unwrap(), spec);
}
