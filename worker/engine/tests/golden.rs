//! Directories saved by transformers give the logits and the losses that transformers computed (`tests/oracle/golden.py`).

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use std::collections::BTreeMap;
use std::path::PathBuf;

use tch::{Kind, Tensor};
use trainctl_engine::checkpoint;
use trainctl_engine::executor::{Batch, Executor};
use trainctl_engine::head::Head;
use trainctl_engine::params::Parameters;
use trainctl_spec::job::LossFn;
use trainctl_spec::model::Architecture;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/hf-gpt2").join(name)
}

/// What transformers computed: `tokens`, and for each folder `<folder>.logits` and `<folder>.loss`.
fn expected() -> BTreeMap<String, Tensor> {
    Tensor::read_safetensors(folder("expected.safetensors")).unwrap().into_iter().collect()
}

/// The model that `config`'s directory describes, with the weights of the directory `name`.
fn load(name: &str, config: &str, seq_length: i64) -> (Executor, Parameters) {
    let config = std::fs::read(folder(config).join("config.json")).unwrap();
    let config = serde_json::from_slice(&config).unwrap();
    let (model, mut params) = support::model_of(&config, seq_length, 0, Kind::Float);
    let architecture = Architecture::from_config(&config).unwrap();
    checkpoint::load_pretrained(&folder(name), &architecture, &mut params).unwrap();
    (Executor::new(model, Head::new(LossFn::Chunked), false), params)
}

/// Compares the directory `name` with what transformers computed for `golden`, the directory of the same weights.
fn assert_golden(name: &str, golden: &str) {
    let expected = expected();
    let tokens = &expected["tokens"];
    let (rows, columns) = tokens.size2().unwrap();
    let (mut executor, params) = load(name, golden, columns);

    let batch = |ids: Tensor, targets: Tensor| Batch { ids, targets: targets.reshape([-1]), first_sequence: 0 };
    let hidden = executor.hidden(&params, &batch(tokens.shallow_clone(), tokens.shallow_clone())).unwrap();
    let (block, index) = executor.model().head_place();
    let logits = hidden.matmul(&params.block(block)[index].detach().tr());
    let golden_logits = &expected[&format!("{golden}.logits")];
    assert_eq!(logits.size(), golden_logits.size());
    let range = f64::try_from(golden_logits.max() - golden_logits.min()).unwrap();
    let worst = f64::try_from((&logits - golden_logits).abs().max()).unwrap();
    assert!(worst <= 1e-5 * range, "{name}: logits differ by {worst:e}, their range is {range}");

    // transformers shifts the labels itself and takes the mean over the tokens that have a predecessor.
    let shifted = batch(tokens.narrow(1, 0, columns - 1), tokens.narrow(1, 1, columns - 1));
    let loss = executor.evaluate(&params, &shifted).unwrap() / (rows * (columns - 1)) as f64;
    let golden_loss = f64::try_from(&expected[&format!("{golden}.loss")]).unwrap();
    assert!((loss - golden_loss).abs() <= 1e-5 * golden_loss, "{name}: loss {loss}, transformers' is {golden_loss}");
}

#[test]
fn one_file_gives_the_logits_of_transformers() {
    assert_golden("single", "single");
}

#[test]
fn shards_give_the_logits_of_transformers() {
    assert_golden("sharded", "single");
}

#[test]
fn names_without_prefix_and_mask_buffers_give_the_logits_of_transformers() {
    assert_golden("hub", "single");
}

#[test]
fn bf16_weights_give_the_logits_of_transformers() {
    assert_golden("bf16", "bf16");
}
