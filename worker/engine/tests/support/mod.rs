//! What the engine's tests share.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

pub mod runs;
pub mod world;

use tch::{Device, Kind, Tensor};
use trainctl_engine::model::Gpt2;
use trainctl_engine::params::Parameters;
use trainctl_spec::model::Architecture;

/// A GPT-2 of a few thousand parameters with dropout `p` everywhere.
pub fn config(p: f64) -> serde_json::Map<String, serde_json::Value> {
    let config = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 67, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3,
        "embd_pdrop": p, "attn_pdrop": p, "resid_pdrop": p,
    });
    config.as_object().unwrap().clone()
}

/// That model with its initial weights.
pub fn model(p: f64, seq_length: i64, seed: u64) -> (Gpt2, Parameters) {
    model_of(&config(p), seq_length, seed, Kind::Float)
}

/// The model of a `config.json` with its initial weights, computing in `kind`.
pub fn model_of(
    config: &serde_json::Map<String, serde_json::Value>,
    seq_length: i64,
    seed: u64,
    kind: Kind,
) -> (Gpt2, Parameters) {
    let arch = Architecture::from_config(config).unwrap();
    let known = arch.parameters();
    let Architecture::Gpt2(config) = arch;
    let model = Gpt2::new(config, seq_length, Device::Cpu).unwrap();
    let mut params = Parameters::zeros(&model.block_names(), &known, kind, Device::Cpu).unwrap();
    params.init(&known, seed).unwrap();
    (model, params)
}

/// Equality of tensors: per tensor ‖a − b‖₂ ≤ `tolerance` · max(‖b‖₂, 1e-4 · ‖b_all‖₂).
pub fn assert_close(names: &[String], a: &[Tensor], b: &[Tensor], tolerance: f64) {
    assert_eq!((names.len(), a.len()), (b.len(), b.len()));
    let norm = |t: &Tensor| f64::try_from(&t.detach().to_kind(Kind::Double).square().sum(Kind::Double)).unwrap().sqrt();
    let all = b.iter().map(|t| norm(t).powi(2)).sum::<f64>().sqrt();
    for ((name, a), b) in names.iter().zip(a).zip(b) {
        let difference = norm(&(a.detach().to_kind(Kind::Double) - b.detach().to_kind(Kind::Double)));
        let bound = tolerance * norm(b).max(1e-4 * all);
        assert!(difference <= bound, "{name}: ‖a − b‖ = {difference:e} > {bound:e} (‖b‖ = {:e})", norm(b));
    }
}
