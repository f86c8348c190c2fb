//! The learning rate as a pure function of the step: Megatron's OptimizerParamScheduler as NeMo AutoModel drives it.
//!
//! With warm-up w, decay d and n scheduler steps taken:
//! - n ≤ w and w > 0: init + (max − init) · n ÷ w
//! - constant: max
//! - n > d: min
//! - else, r = (n − w) ÷ (d − w): min + coefficient · (max − min), where the coefficient is 1 − r (linear) or
//!   ½(cos πr + 1) (cosine)
//!
//! **Two timing rules.** The scheduler steps after the optimizer, so optimizer step k (zero-based) *uses* lr(k):
//! [`Schedule::at`]; step 0 uses `init_lr`, not 0. The log row of step k *shows* lr(k + 1): [`Schedule::logged`].

use std::f64::consts::PI;

use crate::ids::Step;
use crate::job::{JobSpec, LrDecayStyle};

/// A schedule with every value known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape of the decay.
    pub style: LrDecayStyle,
    /// w: steps of warm-up.
    pub warmup: u64,
    /// d: step at which `min` is reached.
    pub decay: u64,
    /// Learning rate of step 0.
    pub init: f64,
    /// Peak.
    pub max: f64,
    /// End.
    pub min: f64,
}

impl Schedule {
    /// The schedule of a spec; what it leaves open is the documented default, so an unresolved spec gives the same.
    #[must_use]
    pub fn of(spec: &JobSpec) -> Self {
        let (keys, lr, steps) = (&spec.lr_scheduler, spec.optimizer.lr, spec.step_scheduler.max_steps);
        Self {
            style: keys.lr_decay_style,
            warmup: keys.lr_warmup_steps.unwrap_or((steps / 10).min(1000)),
            decay: keys.lr_decay_steps.unwrap_or(steps),
            init: keys.init_lr.unwrap_or(0.1 * lr),
            max: keys.max_lr.unwrap_or(lr),
            min: keys.min_lr.unwrap_or(0.01 * lr),
        }
    }

    /// The learning rate that a zero-based optimizer step uses.
    #[must_use]
    pub fn at(&self, step: Step) -> f64 {
        self.after(step.0)
    }

    /// What the log row of that step shows: the rate that the next step will use.
    #[must_use]
    pub fn logged(&self, step: Step) -> f64 {
        self.after(step.0.saturating_add(1))
    }

    fn after(&self, n: u64) -> f64 {
        if self.warmup > 0 && n <= self.warmup {
            return self.init + (self.max - self.init) * as_f64(n) / as_f64(self.warmup);
        }
        if self.style == LrDecayStyle::Constant {
            return self.max;
        }
        if n > self.decay {
            return self.min;
        }
        // n > w here, unless w = 0; d > w is checked with the spec, and d = w never comes this far.
        let ratio = as_f64(n - self.warmup) / as_f64(self.decay.saturating_sub(self.warmup).max(1));
        let coefficient = match self.style {
            LrDecayStyle::Constant => 1.0,
            LrDecayStyle::Linear => 1.0 - ratio,
            LrDecayStyle::Cosine => 0.5 * ((PI * ratio).cos() + 1.0),
        };
        self.min + coefficient * (self.max - self.min)
    }
}

/// Exact below 2⁵³ steps.
fn as_f64(n: u64) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn automodel() -> Schedule {
        Schedule { style: LrDecayStyle::Cosine, warmup: 10, decay: 100, init: 1e-6, max: 1e-5, min: 1e-6 }
    }

    /// LR column of NeMo AutoModel's golden run llama3_2_1b_squad_h100 (max 1e-5, min 1e-6, 100 steps).
    #[test]
    fn rows_match_nemo_automodels_golden_column() {
        let golden = [
            (0, 1.9e-06),
            (8, 9.1e-06),
            (9, 1e-05),
            (10, 9.997_258_721_585_933e-06),
            (49, 6.281_416_799_501_187e-06),
            (99, 1e-06),
        ];
        for (step, lr) in golden {
            let got = automodel().logged(Step(step));
            assert!((got - lr).abs() < 1e-15, "step {step}: {got} is not {lr}");
        }
    }

    /// Megatron Bridge's five values: warm-up 5 from 0, decay 100, max 1.5e-4, min 1e-5, at iteration n.
    #[test]
    fn values_match_megatron_bridges_log() {
        let schedule =
            Schedule { style: LrDecayStyle::Cosine, warmup: 5, decay: 100, init: 0.0, max: 1.5e-4, min: 1e-5 };
        let golden = [(10, "1.490453"), (20, "1.415632"), (30, "1.274097"), (40, "1.081187"), (50, "0.857806")];
        for (n, text) in golden {
            assert_eq!(format!("{:.6}", schedule.at(Step(n)) * 1e4), text, "iteration {n}");
        }
        assert_eq!(schedule.at(Step(0)), 0.0, "the first iteration trains with the initial rate");
    }

    #[test]
    fn a_step_uses_what_the_row_before_it_showed() {
        for style in [LrDecayStyle::Constant, LrDecayStyle::Linear, LrDecayStyle::Cosine] {
            let schedule = Schedule { style, ..automodel() };
            assert_eq!(schedule.at(Step(0)), 1e-6, "step 0 uses init_lr");
            for step in 0..120 {
                assert_eq!(schedule.logged(Step(step)), schedule.at(Step(step + 1)));
            }
        }
    }

    #[test]
    fn shapes_and_edges() {
        let linear = Schedule { style: LrDecayStyle::Linear, ..automodel() };
        assert!((linear.at(Step(55)) - 5.5e-6).abs() < 1e-18);
        assert_eq!((linear.at(Step(10)), linear.at(Step(101))), (1e-5, 1e-6));
        let constant = Schedule { style: LrDecayStyle::Constant, ..automodel() };
        assert_eq!((constant.at(Step(10)), constant.at(Step(1000))), (1e-5, 1e-5));
        let no_warmup = Schedule { warmup: 0, ..automodel() };
        assert_eq!(no_warmup.at(Step(0)), 1e-5, "without warm-up step 0 has the peak");
    }
}
