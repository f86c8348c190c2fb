//! The block executor, the heads and the optimizer against plain implementations of the same mathematics.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use std::collections::BTreeMap;

use support::{assert_close, config, model, model_of};
use tch::{Device, Kind, Reduction, Tensor};
use trainctl_engine::executor::{Batch, Executor, NoSync};
use trainctl_engine::head::Head;
use trainctl_engine::model::{Draw, Site, dropout};
use trainctl_engine::optim::{AdamW, clip, grad_norm};
use trainctl_engine::params::Parameters;
use trainctl_spec::job::{DecayRule, LossFn, Optimizer};

const SEQUENCES: i64 = 3;
const TOKENS: i64 = 13;
const VOCAB: i64 = 67;

fn batch(first_sequence: u64, count: i64) -> Batch {
    let numbers = |shift: u64| -> Vec<i64> {
        let token = |s: u64, t: u64| {
            (((first_sequence + s) * 31 + (t + shift) * 17 + (t + shift) * (t + shift) * 5) % 67) as i64
        };
        (0..count as u64).flat_map(|s| (0..TOKENS as u64).map(move |t| token(s, t))).collect()
    };
    Batch {
        ids: Tensor::from_slice(&numbers(0)).view([count, TOKENS]),
        targets: Tensor::from_slice(&numbers(1)),
        first_sequence,
    }
}

fn names(params: &Parameters) -> Vec<String> {
    params.entries().iter().map(|entry| entry.name.clone()).collect()
}

/// GPT-2 written down a second time, as one graph with explicit attention.
fn plain_logits(params: &Parameters, ids: &Tensor, p: f64, draw: Option<&Draw>) -> Tensor {
    let by_name: BTreeMap<String, &Tensor> = names(params).into_iter().zip(params.values()).collect();
    let get = |name: String| by_name[&format!("transformer.{name}")];
    let drop = |x: Tensor, site| dropout(x, p, site, draw).unwrap();
    let norm = |x: &Tensor, name: String| {
        let mean = x.mean_dim([-1i64].as_slice(), true, None);
        let var = (x - &mean).square().mean_dim([-1i64].as_slice(), true, None);
        (x - mean) / (var + 1e-5).sqrt() * get(format!("{name}.weight")) + get(format!("{name}.bias"))
    };
    let linear = |x: &Tensor, name: String| x.matmul(get(format!("{name}.weight"))) + get(format!("{name}.bias"));
    let (b, t) = ids.size2().unwrap();
    let (heads, width) = (3, 24);
    let future = Tensor::ones([t, t], (Kind::Bool, Device::Cpu)).triu(1);
    let positions = Tensor::arange(t, (Kind::Int64, Device::Cpu));
    let mut x = get("wte.weight".into()).index_select(0, &ids.view([-1])).view([b, t, width])
        + get("wpe.weight".into()).index_select(0, &positions);
    x = drop(x, Site::Embedding);
    for layer in 0..2 {
        let name = |part: &str| format!("h.{layer}.{part}");
        let qkv = linear(&norm(&x, name("ln_1")), name("attn.c_attn"));
        let parts: Vec<Tensor> =
            qkv.split(width, -1).iter().map(|part| part.view([b, t, heads, width / heads]).transpose(1, 2)).collect();
        let scores = parts[0].matmul(&parts[1].transpose(-2, -1)) / ((width / heads) as f64).sqrt();
        let probabilities =
            drop(scores.masked_fill(&future, f64::NEG_INFINITY).softmax(-1, None), Site::Attention(layer));
        let mixed = probabilities.matmul(&parts[2]).transpose(1, 2).reshape([b, t, width]);
        x = &x + drop(linear(&mixed, name("attn.c_proj")), Site::AttentionOutput(layer));
        let m = linear(&norm(&x, name("ln_2")), name("mlp.c_fc"));
        let inner = (&m + m.pow_tensor_scalar(3) * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
        let m = &m * 0.5 * (inner.tanh() + 1.0);
        x = &x + drop(linear(&m, name("mlp.c_proj")), Site::MlpOutput(layer));
    }
    let head = by_name.get("lm_head.weight").copied().unwrap_or_else(|| get("wte.weight".into()));
    norm(&x, "ln_f".into()).matmul(&head.tr())
}

fn plain_gradients(params: &Parameters, batch: &Batch, p: f64, draw: Option<&Draw>, scale: f64) -> (f64, Vec<Tensor>) {
    let logits = plain_logits(params, &batch.ids, p, draw).view([-1, VOCAB]);
    let loss = logits.cross_entropy_loss::<&Tensor>(&batch.targets, None, Reduction::Sum, -100, 0.0);
    let found = trainctl_collective::grad(&[&loss * scale], params.values(), &[None], false).unwrap();
    (f64::try_from(&loss.detach()).unwrap(), found.into_iter().map(|grad| grad.unwrap()).collect())
}

fn executor(p: f64, loss_fn: LossFn, recompute: bool) -> (Executor, Parameters) {
    let (model, params) = model(p, TOKENS, 11);
    (Executor::new(model, Head::with_chunk(loss_fn, 7), recompute), params)
}

#[test]
fn logits_equal_the_plain_model() {
    let (executor, params) = executor(0.0, LossFn::Chunked, false);
    let batch = batch(0, SEQUENCES);
    let ours = executor.hidden(&params, &batch).unwrap().matmul(&params.values()[0].tr());
    let plain = plain_logits(&params, &batch.ids, 0.0, None);
    let range = f64::try_from(&(plain.max() - plain.min()).detach()).unwrap();
    let worst = f64::try_from(&(ours - plain).abs().max().detach()).unwrap();
    assert!(worst <= 1e-5 * range, "{worst:e} of a range of {range}");
}

#[test]
fn gradients_equal_the_plain_model_with_and_without_dropout() {
    for p in [0.0, 0.2] {
        for loss_fn in [LossFn::Chunked, LossFn::Masked] {
            let (mut executor, mut params) = executor(p, loss_fn, false);
            let batch = batch(5, SEQUENCES);
            let draw = Draw { seed: 3, step: 8, first_sequence: batch.first_sequence };
            let scale = 1.0 / 39.0;
            let loss = executor.forward_backward(&mut params, &batch, Some(&draw), scale, &mut NoSync).unwrap();
            let (plain_loss, plain) = plain_gradients(&params, &batch, p, Some(&draw), scale);
            assert!((loss - plain_loss).abs() <= 1e-5 * plain_loss, "{loss} against {plain_loss}");
            assert_close(&names(&params), params.grads(), &plain, 1e-5);
        }
    }
}

#[test]
fn a_head_of_its_own_gets_its_own_gradient() {
    let mut untied = config(0.0);
    untied.insert("tie_word_embeddings".into(), false.into());
    let (model, mut params) = model_of(&untied, TOKENS, 11, Kind::Float);
    let mut executor = Executor::new(model, Head::with_chunk(LossFn::Chunked, 7), false);
    let batch = batch(0, SEQUENCES);
    let loss = executor.forward_backward(&mut params, &batch, None, 0.1, &mut NoSync).unwrap();
    let (plain_loss, plain) = plain_gradients(&params, &batch, 0.0, None, 0.1);
    assert_eq!(names(&params).last().map(String::as_str), Some("lm_head.weight"));
    assert!((loss - plain_loss).abs() <= 1e-5 * plain_loss, "{loss} against {plain_loss}");
    assert_close(&names(&params), params.grads(), &plain, 1e-5);
}

#[test]
fn initial_weights_depend_on_seed_and_name_only() {
    let deviation = |t: &Tensor| f64::try_from(&t.detach().std(false)).unwrap();
    let (_, params) = model(0.0, TOKENS, 11);
    let of = |params: &Parameters, name: &str| {
        let i = names(params).iter().position(|n| n == name).unwrap();
        params.masters()[i].shallow_clone()
    };
    // GPT-2: 0.02, and 0.02 ÷ √(2 · layers) for what goes back into the residual stream.
    for (name, std) in [("transformer.wte.weight", 0.02), ("transformer.h.1.mlp.c_proj.weight", 0.01)] {
        let found = deviation(&of(&params, name));
        assert!((found / std - 1.0).abs() < 0.1, "{name}: {found}");
    }
    let mut deeper = config(0.0);
    deeper.insert("n_layer".into(), 4.into());
    let (_, deeper) = model_of(&deeper, TOKENS, 11, Kind::Float);
    let (_, other) = model(0.0, TOKENS, 12);
    let name = "transformer.h.1.attn.c_attn.weight";
    assert!(of(&params, name).equal(&of(&deeper, name)));
    assert!(!of(&params, name).equal(&of(&other, name)));
}

#[test]
fn evaluation_is_the_loss_without_dropout() {
    let (mut executor, params) = executor(0.2, LossFn::Chunked, false);
    let batch = batch(0, SEQUENCES);
    let (plain, _) = plain_gradients(&params, &batch, 0.0, None, 1.0);
    let ours = executor.evaluate(&params, &batch).unwrap();
    assert!((ours - plain).abs() <= 1e-5 * plain, "{ours} against {plain}");
}

#[test]
fn d3_recompute_and_micro_batches_draw_the_same_masks() {
    let gradients = |recompute: bool, cuts: &[(u64, i64)]| {
        let (mut executor, mut params) = executor(0.2, LossFn::Chunked, recompute);
        let mut loss = 0.0;
        for &(first, count) in cuts {
            let draw = Draw { seed: 3, step: 8, first_sequence: first };
            loss +=
                executor.forward_backward(&mut params, &batch(first, count), Some(&draw), 0.01, &mut NoSync).unwrap();
        }
        (loss, params)
    };
    let (loss, whole) = gradients(false, &[(0, 3)]);
    let (recomputed_loss, recomputed) = gradients(true, &[(0, 3)]);
    assert_eq!(loss.to_bits(), recomputed_loss.to_bits());
    for (a, b) in whole.grads().iter().zip(recomputed.grads()) {
        assert!(a.equal(b), "recompute must be the same bit for bit");
    }
    let (cut_loss, cut) = gradients(false, &[(0, 2), (2, 1)]);
    assert!((loss - cut_loss).abs() <= 1e-5 * loss);
    assert_close(&names(&whole), cut.grads(), whole.grads(), 1e-5);
}

#[test]
fn chunked_head_equals_masked_at_any_chunk_size() {
    let rows = 29;
    let seeded = |shape: &[i64], seed| trainctl_collective::random::normal(shape, 0.0, 0.7, seed, Kind::Float).unwrap();
    let (h, w) = (seeded(&[rows, 24], 1), seeded(&[VOCAB, 24], 2));
    let targets = Tensor::from_slice(&(0..rows).map(|i| i * 13 % VOCAB).collect::<Vec<_>>());
    let run = |mut head: Head| {
        let mut dw = Tensor::ones([VOCAB, 24], (Kind::Float, Device::Cpu));
        let out = head.forward_backward(&h, &w, &targets, 0.1, &mut dw).unwrap();
        (out.loss_sum, [out.dh_ND, dw])
    };
    let (loss, grads) = run(Head::new(LossFn::Masked));
    for chunk in [1, 7, 29, 256] {
        let (chunked_loss, chunked) = run(Head::with_chunk(LossFn::Chunked, chunk));
        assert!((loss - chunked_loss).abs() <= 1e-5 * loss, "chunk {chunk}");
        assert_close(&["dh".into(), "dw".into()], &chunked, &grads, 1e-5);
    }
}

#[test]
fn adamw_equals_a_scalar_reference() {
    for (decay, decays_bias) in [(DecayRule::All, true), (DecayRule::Matrices, false)] {
        let options =
            Optimizer { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, decay, lr: 1e-2, ..Optimizer::default() };
        let (_, mut params) = model(0.0, TOKENS, 4);
        let mut optimizer = AdamW::new(&options, params.entries(), Device::Cpu).unwrap();
        // One matrix element and one bias element are followed by hand.
        let followed = [(0, decays_bias || params.entries()[0].shape.len() == 2), (3, decays_bias)];
        let element = |tensors: &[Tensor], i: usize| f64::try_from(&tensors[i].view([-1]).get(1).detach()).unwrap();
        let mut state: Vec<[f64; 3]> =
            followed.iter().map(|&(i, _)| [element(params.masters(), i), 0.0, 0.0]).collect();
        for step in 0..6u64 {
            let lr = 1e-2 / (step + 1) as f64;
            for (i, bucket) in params.buckets_mut().iter_mut().enumerate() {
                let drawn =
                    trainctl_collective::random::normal(&bucket.size(), 0.1, 0.3, step * 10 + i as u64, Kind::Float);
                bucket.copy_(&drawn.unwrap());
            }
            for (&(i, decays), [p, m, v]) in followed.iter().zip(&mut state) {
                let g = element(params.grads(), i);
                let t = (step + 1) as i32;
                *p -= lr * if decays { 0.1 } else { 0.0 } * *p;
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.95 * *v + 0.05 * g * g;
                *p -= lr * (*m / (1.0 - 0.9f64.powi(t))) / ((*v / (1.0 - 0.95f64.powi(t))).sqrt() + 1e-8);
            }
            optimizer.step(&mut params, step, lr).unwrap();
            for (&(i, _), [p, m, v]) in followed.iter().zip(&state) {
                let (exp_avg, exp_avg_sq) = optimizer.moments();
                for (ours, want) in
                    [(element(params.masters(), i), p), (element(exp_avg, i), m), (element(exp_avg_sq, i), v)]
                {
                    assert!(
                        (ours - want).abs() <= 1e-5 * want.abs() + 1e-8,
                        "step {step}, tensor {i}: {ours} against {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn clipping_scales_to_the_norm_and_leaves_small_gradients_alone() {
    let (mut executor, mut params) = executor(0.0, LossFn::Chunked, false);
    executor.forward_backward(&mut params, &batch(0, SEQUENCES), None, 1.0, &mut NoSync).unwrap();
    let norm = grad_norm(&params).unwrap();
    let by_tensor = params.grads().iter().map(|g| f64::try_from(&g.square().sum(Kind::Double)).unwrap()).sum::<f64>();
    assert!((norm - by_tensor.sqrt()).abs() <= 1e-6 * norm);
    clip(&mut params, norm, norm * 2.0).unwrap();
    assert_eq!(grad_norm(&params).unwrap().to_bits(), norm.to_bits());
    clip(&mut params, norm, norm / 4.0).unwrap();
    assert!((grad_norm(&params).unwrap() / (norm / 4.0) - 1.0).abs() < 1e-5);
}

#[test]
fn bf16_computes_in_bf16_and_keeps_fp32_masters() {
    let (model, mut params) = model_of(&config(0.0), TOKENS, 11, Kind::BFloat16);
    let mut half = Executor::new(model, Head::new(LossFn::Chunked), false);
    let (mut full, mut full_params) = executor(0.0, LossFn::Chunked, false);
    let batch = batch(0, SEQUENCES);
    let loss = half.forward_backward(&mut params, &batch, None, 0.1, &mut NoSync).unwrap();
    let full_loss = full.forward_backward(&mut full_params, &batch, None, 0.1, &mut NoSync).unwrap();
    assert!((loss - full_loss).abs() <= 1e-2 * full_loss, "{loss} against {full_loss}");
    assert!(params.has_masters() && !full_params.has_masters());
    let norms = (grad_norm(&params).unwrap(), grad_norm(&full_params).unwrap());
    assert!((norms.0 / norms.1 - 1.0).abs() < 0.05, "{norms:?}");
    assert!(params.masters()[0].equal(&full_params.masters()[0]));
}
