//! AdamW with fp32 state, and clipping by the global norm.
//!
//! One step k (zero-based) of Loshchilov & Hutter, with bias correction by t = k + 1:
//! p ← p − lr · wd · p; m ← β₁m + (1 − β₁)g; v ← β₂v + (1 − β₂)g²; p ← p − lr · (m ÷ (1 − β₁ᵗ)) ÷ (√(v ÷ (1 − β₂ᵗ)) + ε).

use tch::{Device, Kind, Tensor};
use trainctl_spec::job::{DecayRule, OnNonfinite, Optimizer};

use crate::Error;
use crate::params::{Entry, Parameters};

/// Elements of one partial sum of the norm.
const NORM_CHUNK: i64 = 1 << 18;

/// The optimizer's state, by parameter.
#[derive(Debug)]
pub struct AdamW {
    options: Optimizer,
    exp_avg: Vec<Tensor>,
    exp_avg_sq: Vec<Tensor>,
    /// Indices of the parameters with and without weight decay.
    groups: [Vec<usize>; 2],
}

impl AdamW {
    /// Zero moments for `entries`.
    pub fn new(options: &Optimizer, entries: &[Entry], device: Device) -> Result<Self, Error> {
        let zeros = || {
            let made = entries.iter().map(|e| Tensor::f_zeros(e.shape.as_slice(), (Kind::Float, device)));
            made.collect::<Result<Vec<_>, _>>()
        };
        let decays = |i: &usize| match options.decay {
            DecayRule::All => true,
            DecayRule::Matrices => entries[*i].shape.len() >= 2,
        };
        let (with, without) = (0..entries.len()).partition(decays);
        Ok(Self { options: options.clone(), exp_avg: zeros()?, exp_avg_sq: zeros()?, groups: [with, without] })
    }

    /// First and second moments, by parameter.
    pub fn moments(&self) -> (&[Tensor], &[Tensor]) {
        (&self.exp_avg, &self.exp_avg_sq)
    }

    /// First and second moments, by parameter, to load into.
    pub fn moments_mut(&mut self) -> (&mut [Tensor], &mut [Tensor]) {
        (&mut self.exp_avg, &mut self.exp_avg_sq)
    }

    /// One update with the gradients in `params`. `updates` = how many were made before (bias correction).
    pub fn step(&mut self, params: &mut Parameters, updates: u64, lr: f64) -> Result<(), Error> {
        let pick = |all: &[Tensor], of: &[usize]| of.iter().map(|&i| all[i].shallow_clone()).collect::<Vec<_>>();
        let step = Tensor::f_full([0i64; 0], (updates + 1) as f64, (Kind::Float, Device::Cpu))?;
        for (group, weight_decay) in self.groups.iter().zip([self.options.weight_decay, 0.0]) {
            trainctl_collective::fused_adamw(
                &pick(params.masters(), group),
                &pick(params.grads(), group),
                &pick(&self.exp_avg, group),
                &pick(&self.exp_avg_sq, group),
                &group.iter().map(|_| step.shallow_clone()).collect::<Vec<_>>(),
                trainctl_collective::AdamW {
                    lr,
                    betas: self.options.betas.into(),
                    weight_decay,
                    eps: self.options.eps,
                },
            )
            .map_err(Error::Shim)?;
        }
        params.refresh()
    }
}

/// Global L2 norm of the gradients. Squares are summed in f64, in parameter-block order and in chunks of a fixed size, so
/// that every rank and every run of one layout gets the same bits (P4); libtorch's own fp32 norm is off by 0.3 % at
/// 19 M elements.
pub fn grad_norm(params: &Parameters) -> Result<f64, Error> {
    tch::no_grad(|| {
        let mut total = 0.0;
        for block in 0..params.num_blocks() {
            let bucket = params.bucket(block);
            let len = bucket.size1()?;
            for start in (0..len).step_by(NORM_CHUNK as usize) {
                let part = bucket.f_narrow(0, start, NORM_CHUNK.min(len - start))?;
                total += f64::try_from(&part.f_square()?.f_sum(Kind::Double)?)?;
            }
        }
        Ok(total.sqrt())
    })
}

/// Scales the gradients so that their norm, `norm`, becomes at most `max_norm` (torch's rule: × max ÷ (norm + 1e-6)).
/// `max_norm` ≤ 0 turns clipping off.
pub fn clip(params: &mut Parameters, norm: f64, max_norm: f64) -> Result<(), Error> {
    let factor = max_norm / (norm + 1e-6);
    if max_norm <= 0.0 || factor >= 1.0 {
        return Ok(());
    }
    for bucket in params.buckets_mut() {
        drop(bucket.f_mul_scalar_(factor)?);
    }
    Ok(())
}

/// What to do with a step's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Loss and norm are finite: update.
    Update,
    /// Not finite: leave weights and moments as they are.
    Skip,
    /// Not finite: end the run.
    Stop,
}

/// Decides once per step, on the reduced loss and norm, which are equal on every rank; so all ranks decide alike.
pub fn verdict(loss: f64, norm: f64, rule: OnNonfinite) -> Verdict {
    match rule {
        _ if loss.is_finite() && norm.is_finite() => Verdict::Update,
        OnNonfinite::SkipStep => Verdict::Skip,
        OnNonfinite::Stop => Verdict::Stop,
    }
}

#[cfg(test)]
mod tests {
    use super::{Verdict, verdict};
    use trainctl_spec::job::OnNonfinite;

    #[test]
    fn one_verdict_per_step() {
        assert_eq!(verdict(1.0, 2.0, OnNonfinite::Stop), Verdict::Update);
        assert_eq!(verdict(f64::NAN, 2.0, OnNonfinite::Stop), Verdict::Stop);
        assert_eq!(verdict(1.0, f64::INFINITY, OnNonfinite::SkipStep), Verdict::Skip);
    }
}
