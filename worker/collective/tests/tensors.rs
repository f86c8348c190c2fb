//! The libtorch calls that tch lacks, and the random values (D3).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper fails the test that called it")]

use tch::{Device, Kind, Tensor};
use trainctl_collective::random::{dropout_mask, dropout_mask_from, mix, normal, uniform};
use trainctl_collective::{AdamW, Error, bytes, copy_from_bytes, fused_adamw, grad};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

fn leaf(shape: &[i64], seed: u64) -> Tensor {
    normal(shape, 0.0, 1.0, seed, Kind::Float).unwrap().set_requires_grad(true)
}

#[test]
fn grad_with_grad_outputs_equals_run_backward() {
    let (x, w, unused) = (leaf(&[4, 3], 1), leaf(&[3, 5], 2), leaf(&[2], 3));
    let y = x.matmul(&w).tanh();
    let seed = normal(&[4, 5], 0.0, 1.0, 4, Kind::Float).unwrap();
    let loss = (&y * &seed).sum(Kind::Float);
    let want = Tensor::run_backward(&[&loss], &[&x, &w], true, false);
    let got = grad(&[&y], &[&x, &w, &unused], &[Some(seed)], true).unwrap();
    assert!(got[2].is_none());
    for (got, want) in got.iter().zip(&want) {
        let got = got.as_ref().unwrap();
        assert!(got.allclose(want, 1e-6, 1e-7, false));
        assert!(!got.requires_grad());
    }
    // None stands for 1.
    let got = grad(&[&loss], &[&x], &[None], false).unwrap();
    assert!(got[0].as_ref().unwrap().allclose(&want[0], 1e-6, 1e-7, false));
    // The graph is gone now, and that is an error with libtorch's text.
    let error = grad(&[&loss], &[&x], &[None], false).unwrap_err();
    assert!(matches!(error, Error::Torch { .. }), "{error}");
    assert!(matches!(grad(&[&loss], &[&x], &[], false), Err(Error::Argument { .. })));
}

#[test]
fn adamw_is_the_formula() {
    let numbers = AdamW { lr: 0.1, betas: (0.9, 0.95), weight_decay: 0.01, eps: 1e-8 };
    let params = [normal(&[33], 0.0, 1.0, 1, Kind::Float).unwrap(), normal(&[2, 7], 0.0, 1.0, 2, Kind::Float).unwrap()];
    let zeros = |like: &Tensor| Tensor::zeros(like.size(), FLOAT);
    let (m, v): (Vec<_>, Vec<_>) = params.iter().map(|p| (zeros(p), zeros(p))).unzip();
    let steps = [Tensor::zeros([], FLOAT), Tensor::zeros([], FLOAT)];
    let mut want: Vec<Vec<f64>> = params.iter().map(values).collect();
    let mut moments: Vec<Vec<(f64, f64)>> = want.iter().map(|p| vec![(0.0, 0.0); p.len()]).collect();
    for step in 1..=3 {
        let grads: Vec<_> =
            params.iter().map(|p| normal(&p.size(), 0.0, 1.0, 10 + step, Kind::Float).unwrap()).collect();
        steps.iter().for_each(|s| drop(s.shallow_clone().fill_(step as f64)));
        fused_adamw(&params, &grads, &m, &v, &steps, numbers).unwrap();
        for ((want, moments), grad) in want.iter_mut().zip(&mut moments).zip(&grads) {
            for ((p, (m, v)), g) in want.iter_mut().zip(moments).zip(values(grad)) {
                *p -= numbers.lr * numbers.weight_decay * *p;
                *m = numbers.betas.0 * *m + (1.0 - numbers.betas.0) * g;
                *v = numbers.betas.1 * *v + (1.0 - numbers.betas.1) * g * g;
                let m_hat = *m / (1.0 - numbers.betas.0.powi(step as i32));
                let v_hat = *v / (1.0 - numbers.betas.1.powi(step as i32));
                *p -= numbers.lr * m_hat / (v_hat.sqrt() + numbers.eps);
            }
        }
    }
    for (got, want) in params.iter().zip(&want) {
        for (got, want) in values(got).iter().zip(want) {
            assert!((got - want).abs() < 1e-5, "{got} {want}");
        }
    }
    assert!(matches!(fused_adamw(&params, &[], &m, &v, &steps, numbers), Err(Error::Argument { .. })));
}

#[test]
fn bytes_are_the_tensors_own() {
    let tensor = Tensor::from_slice(&[1.0_f32, -2.5]);
    let want: Vec<u8> = [1.0_f32, -2.5].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(bytes(&tensor).unwrap(), want);
    let mut target = Tensor::zeros([2], FLOAT);
    copy_from_bytes(&mut target, &want).unwrap();
    assert_eq!(values(&target), [1.0, -2.5]);
    assert!(copy_from_bytes(&mut target, &want[1..]).is_err());
    assert_eq!(bytes(&Tensor::zeros([0], FLOAT)).unwrap(), b"");
    // A view that begins in mid-storage, and one that is not contiguous.
    let rows = Tensor::from_slice(&[1_i64, 2, 3, 4]).reshape([2, 2]);
    assert_eq!(bytes(&rows.get(1)).unwrap(), [3_i64, 4].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let error = bytes(&rows.transpose(0, 1)).unwrap_err();
    assert!(error.to_string().contains("contiguous"), "{error}");
}

/// Random123's known answer: Philox4x32-10 of counter 0 and key 0 (kat_vectors: "philox4x32 10").
#[test]
fn the_generator_is_philox() {
    let words = [0x6627_e8d5_u32, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
    let want: Vec<f64> = words.iter().map(|word| f64::from(word >> 8) / 16_777_216.0).collect();
    assert_eq!(values(&uniform(&[4], 0, Kind::Float).unwrap()), want);
}

#[test]
fn a_mask_does_not_depend_on_batching() {
    let seeds: Vec<u64> = (0..5).map(|sequence| mix(&[1234, 7, sequence, 2])).collect();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Bool, Kind::Double] {
        let mut whole = Tensor::zeros([5, 37, 11], (kind, Device::Cpu));
        dropout_mask(&mut whole, &seeds, 0.3).unwrap();
        for (row, seed) in seeds.iter().enumerate() {
            let mut alone = Tensor::zeros([1, 37, 11], (kind, Device::Cpu));
            dropout_mask(&mut alone, &[*seed], 0.3).unwrap();
            assert_eq!(values(&alone), values(&whole.get(row as i64)), "{kind:?} row {row}");
        }
        // Parts of a sequence, cut where no group of the generator begins.
        let mut part = Tensor::zeros([5, 30, 11], (kind, Device::Cpu));
        dropout_mask_from(&mut part, &seeds, 0.3, 7 * 11).unwrap();
        assert_eq!(values(&part), values(&whole.narrow(1, 7, 30)), "{kind:?}");
    }
}

#[test]
fn a_mask_does_not_depend_on_threads() {
    let draw = || {
        let mut mask = Tensor::zeros([2, 300_000], FLOAT);
        dropout_mask(&mut mask, &[1, 2], 0.5).unwrap();
        values(&mask)
    };
    trainctl_collective::set_num_threads(1).unwrap();
    let one = draw();
    trainctl_collective::set_num_threads(2).unwrap();
    assert!(one == draw());
}

#[test]
fn rates_and_scales() {
    for p in [0.0, 0.1, 0.5, 0.9] {
        let mut mask = Tensor::zeros([4, 100_000], FLOAT);
        dropout_mask(&mut mask, &[1, 2, 3, 4], p).unwrap();
        let kept = 1.0 / (1.0 - p);
        assert!(values(&mask).iter().all(|x| *x == 0.0 || (x - kept).abs() < 1e-6));
        // The mean of the mask is 1; its standard error is sqrt(p / (1 - p) / n).
        let mean = mask.mean(Kind::Double).double_value(&[]);
        let error = (p / (1.0 - p) / 400_000.0_f64).sqrt();
        assert!((mean - 1.0).abs() <= 5.0 * error + 1e-6, "p {p}: mean {mean}");
    }
    let mut mask = Tensor::zeros([1, 4], FLOAT);
    assert!(dropout_mask(&mut mask, &[1], 1.0).is_err());
    assert!(dropout_mask(&mut mask, &[1, 2], 0.1).is_err());
    assert!(dropout_mask(&mut Tensor::zeros([1], (Kind::Int, Device::Cpu)), &[1], 0.1).is_err());
}

#[test]
fn fills_have_their_moments_and_repeat() {
    let x = normal(&[1000, 400], 2.0, 0.5, 9, Kind::Float).unwrap();
    assert!((x.mean(Kind::Double).double_value(&[]) - 2.0).abs() < 0.005);
    assert!((x.to_kind(Kind::Double).std(true).double_value(&[]) - 0.5).abs() < 0.005);
    let z = (x - 2.0) / 0.5;
    let kurtosis = z.pow_tensor_scalar(4).mean(Kind::Double).double_value(&[]);
    assert!((kurtosis - 3.0).abs() < 0.05, "{kurtosis}");
    let u = uniform(&[400_000], 9, Kind::Float).unwrap();
    assert!((u.mean(Kind::Double).double_value(&[]) - 0.5).abs() < 0.003);
    assert_eq!(values(&u), values(&uniform(&[400_000], 9, Kind::Float).unwrap()));
    assert_ne!(values(&u), values(&uniform(&[400_000], 10, Kind::Float).unwrap()));
    assert!(normal(&[-1], 0.0, 1.0, 0, Kind::Float).is_err());
}

#[test]
fn mixed_seeds_differ_by_order_and_length() {
    let seeds = [mix(&[]), mix(&[0]), mix(&[0, 0]), mix(&[1, 2]), mix(&[2, 1]), mix(&[1]), mix(&[2])];
    for (i, a) in seeds.iter().enumerate() {
        assert!(seeds[i + 1..].iter().all(|b| a != b));
    }
}

#[test]
fn switches_can_be_set() {
    trainctl_collective::set_deterministic(true).unwrap();
    assert!(trainctl_collective::set_flush_denormal(true));
    let tiny = Tensor::from_slice(&[1e-30_f32]);
    assert_eq!(values(&(&tiny * 1e-10)), [0.0]);
    assert!(trainctl_collective::set_num_threads(0).is_err());
}
