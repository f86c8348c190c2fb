//! Cross-field rules, one snapshot each for errors, warnings and file facts.

use std::path::{Path, PathBuf};

use super::*;
use crate::parse::{Override, parse};
use crate::resolve::{resolve, tests::Machine};

const JOB: &str = "\
name: tiny
run_dir: runs/tiny
resources: {workers: 2}
model:
  config: {model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 32, n_positions: 64, vocab_size: 512}
dataset:
  paths: data/a
  tokenizer: tok
  seq_length: 64
  split: \"99,1,0\"
validation_dataset: {num_val_samples: 8}
step_scheduler:
  global_batch_size: 8
  max_steps: 400
  val_every_steps: 100
";

fn faults(overrides: &[&str], facts: &Facts) -> String {
    let overrides: Vec<_> = overrides.iter().map(|text| Override::set(text)).collect();
    let parsed = parse(JOB, "job.yaml", &overrides, &BTreeMap::new()).unwrap_or_else(|faults| panic!("{faults}"));
    let machine = Machine::new(&[
        ("/w/data/a.bin", ""),
        ("/w/data/a.idx", ""),
        ("/w/data/b.bin", ""),
        ("/w/data/b.idx", ""),
        ("/w/tok/tokenizer.json", ""),
    ]);
    let resolved = resolve(parsed, Path::new("/w"), &machine);
    assert!(resolved.faults.is_empty(), "{}", resolved.faults);
    check(&resolved.spec, facts, &resolved.spans).to_string()
}

#[test]
fn a_sound_spec_has_no_faults() {
    assert_eq!(faults(&[], &Facts::default()), "");
}

#[test]
fn rules_across_keys() {
    let cases: &[&[&str]] = &[
        &["step_scheduler.local_batch_size=8"],
        &["resources.workers=3"],
        &["step_scheduler.max_steps=9223372036854775807"],
        &["step_scheduler.ckpt_every_steps=500"],
        &["lr_scheduler.lr_warmup_steps=400"],
        &["lr_scheduler.lr_decay_steps=40"],
        &["lr_scheduler.lr_decay_steps=300", "lr_scheduler.min_lr=0"],
        &["lr_scheduler.min_lr=1"],
        &["lr_scheduler.init_lr=1"],
        &["model.config.n_head=3"],
        &["model.config.model_type=llama"],
        &["dataset.seq_length=65"],
        &["validation_dataset.seq_length=65"],
        &["dataset.split=0,1,0", "validation_dataset.split=1,0,0"],
        &["dataset.paths=[{prefix: data/a, weight: 1}, {prefix: data/b}]"],
        &["dataset.paths=[data/a, data/b, data/a]"],
        &["checkpoint.best_metric_key=web"],
        &["validation_dataset=null", "checkpoint.best_metric_key=default"],
        &["validation_dataset=null"],
        &["validation_dataset=null", "validation_dataset_web.seed=1", "validation_dataset_code.seed=2"],
        &["precision=bf16"],
        &["checkpoint.keep_every_steps=200"],
        &["checkpoint.keep_every_steps=150", "checkpoint.max_recent_checkpoints=2"],
        &["checkpoint.keep_every_steps=350", "checkpoint.max_recent_checkpoints=2"],
        &["checkpoint.max_recent_weights=2"],
        &["checkpoint.weights_every_steps=401"],
        &["checkpoint.weights_only=true"],
        &["checkpoint.restore_from=runs/tiny"],
        &["checkpoint.restore_from=runs/other", "model.init=tok"],
    ];
    let text: Vec<_> =
        cases.iter().map(|case| format!("# {}\n{}", case.join(" "), faults(case, &Facts::default()))).collect();
    insta::assert_snapshot!(text.join("\n"));
}

#[test]
fn rules_about_files_and_machine() {
    let corpus = CorpusFacts { tokens: 10_000, documents: 10, max_token: Some(511) };
    let one = |prefix: &str, facts: Result<CorpusFacts, String>| Facts {
        corpora: [(PathBuf::from(prefix), facts)].into(),
        ..Facts::default()
    };
    let tokenizer = |facts| Facts { tokenizers: [(PathBuf::from("/w/tok"), facts)].into(), ..Facts::default() };
    assert_eq!(faults(&[], &one("/w/data/a", Ok(corpus))), "");
    assert_eq!(faults(&[], &tokenizer(Ok(512))), "");
    let cases = [
        one("/w/data/a", Ok(CorpusFacts { tokens: 64, ..corpus })),
        one("/w/data/a", Ok(CorpusFacts { max_token: Some(512), ..corpus })),
        one("/w/data/a", Err("the first 9 bytes are not MMIDIDX".to_owned())),
        tokenizer(Ok(513)),
        tokenizer(Err("not JSON".to_owned())),
        Facts { cores: Some(8), ..Facts::default() },
        Facts { free_bytes: Some(1000), ..Facts::default() },
        Facts { free_bytes: Some(1 << 20), ..Facts::default() },
    ];
    let text: Vec<_> = cases.iter().map(|facts| faults(&["resources.threads_per_worker=5"], facts)).collect();
    let space = Facts { free_bytes: Some(2 << 20), ..Facts::default() };
    let kept: &[&[&str]] = &[
        &["checkpoint.max_recent_checkpoints=1", "checkpoint.save_consolidated=false"],
        &["checkpoint.max_recent_checkpoints=1", "checkpoint.keep_every_steps=200"],
        &[
            "checkpoint.max_recent_checkpoints=1",
            "checkpoint.checkpoint_dir=elsewhere",
            "checkpoint.weights_every_steps=10",
        ],
    ];
    let kept: Vec<_> = kept.iter().map(|case| format!("# {}\n{}", case.join(" "), faults(case, &space))).collect();
    insta::assert_snapshot!("space", kept.join("\n"));
    insta::assert_snapshot!(text.join("\n"));
    insta::assert_snapshot!(faults(&["resources.device=cuda"], &Facts::default()));
}

#[test]
fn the_directory_of_model_init_must_hold_this_models_weights() {
    let config = serde_json::json!({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64,
        "vocab_size": 512});
    let config = config.as_object().unwrap();
    let model = Architecture::from_config(config).unwrap();
    let saved = |p: crate::model::Parameter| (p.name, Saved { dtype: "BF16".to_owned(), shape: p.shape });
    let good =
        PretrainedFacts { tensors: model.parameters().into_iter().map(saved).collect(), config: Some(config.clone()) };
    let said = |facts| faults(&["model.init=tok"], &Facts { pretrained: Some(facts), ..Facts::default() });
    assert_eq!(said(Ok(good.clone())), "");
    assert_eq!(said(Ok(PretrainedFacts { config: None, ..good.clone() })), "");
    let mut lacking = good.clone();
    lacking.tensors.remove("transformer.ln_f.bias");
    let mut heads = good;
    heads.config.as_mut().unwrap().insert("n_head".to_owned(), 1.into());
    let mut text =
        vec![said(Err("/w/tok has no model.safetensors".to_owned())), said(Ok(lacking)), said(Ok(heads.clone()))];
    heads.config.as_mut().unwrap().insert("model_type".to_owned(), "llama".into());
    text.push(said(Ok(heads)));
    insta::assert_snapshot!(text.join("\n"));
}
