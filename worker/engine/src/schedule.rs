//! When to validate, save and stop. Pure: the same arguments give the same answer on every rank.
//!
//! Steps are zero-based; N = `val_every_steps`, K = `ckpt_every_steps`, W = `weights_every_steps`, last = `stop_at − 1`. The
//! requests are the *reduced* ones (in band), equal on every rank.
//!
//! | after step s        | log | validate | save | weights | stop |
//! |---------------------|-----|----------|------|---------|------|
//! | any                 | yes |          |      |         |      |
//! | s mod N = N − 1     | yes | yes      |      |         |      |
//! | s mod K = K − 1     | yes | yes      | yes  |         |      |
//! | s mod W = W − 1     | yes |          |      | yes     |      |
//! | s = last            | yes | yes      | yes  |         | yes  |
//! | save requested      | yes |          | yes  |         |      |
//! | stop requested      | yes |          | yes  |         | yes  |
//!
//! A requested save does not validate unless the step would anyway: who asks to stop has little time (a Slurm limit, a
//! preemption), and the validation loss of such a step is simply absent from its manifest.

use trainctl_spec::Step;
use trainctl_spec::job::StepScheduler;
use trainctl_spec::report::{FinishCause, SaveKind};

/// The rhythm of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    validate_every: Option<u64>,
    save_every: u64,
    weights_every: Option<u64>,
    max_steps: u64,
    stop_at: u64,
}

/// Requests after the all-reduce: how many ranks ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Ranks that want to stop.
    pub stop: i64,
    /// Ranks that want a save.
    pub save: i64,
}

/// Why a save happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveReason {
    /// `ckpt_every_steps`.
    Every,
    /// The last step of the run.
    Last,
    /// Somebody asked for a save.
    Requested,
    /// Somebody asked to stop.
    Stopping,
}

/// What follows a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// Evaluate every validation set.
    pub validate: bool,
    /// Save, and why.
    pub save: Option<SaveReason>,
    /// Save the weights alone.
    pub weights: bool,
    /// Leave the loop, and why.
    pub stop: Option<FinishCause>,
}

impl After {
    /// The saves to make, in this order.
    pub fn saves(self) -> impl Iterator<Item = (SaveKind, SaveReason)> {
        // With the last step in its train a save of weights must not be left out either.
        let weights = self.weights.then(|| self.save.unwrap_or(SaveReason::Every));
        let full = self.save.map(|reason| (SaveKind::Full, reason));
        full.into_iter().chain(weights.map(|reason| (SaveKind::Weights, reason)))
    }
}

impl Schedule {
    /// The rhythm of `scheduler` for a generation that ends before `stop_at`; weights alone are saved every
    /// `weights_every` steps.
    pub fn new(scheduler: &StepScheduler, weights_every: Option<u64>, stop_at: Step) -> Self {
        Self {
            validate_every: scheduler.val_every_steps.filter(|&n| n > 0),
            save_every: scheduler.ckpt_every_steps.max(1),
            weights_every: weights_every.filter(|&n| n > 0),
            max_steps: scheduler.max_steps,
            stop_at: stop_at.0.min(scheduler.max_steps),
        }
    }

    /// Steps that this generation may run end before this one.
    pub fn end(&self) -> Step {
        Step(self.stop_at)
    }

    /// Why a generation with no step left to run is finished.
    pub fn end_cause(&self) -> FinishCause {
        if self.stop_at < self.max_steps { FinishCause::UntilStep } else { FinishCause::Complete }
    }

    /// What follows `step`.
    pub fn after(&self, step: Step, asked: Asked) -> After {
        let every = |n: u64| step.0 % n == n - 1;
        let last = step.0 + 1 >= self.stop_at;
        let regular = last || every(self.save_every);
        let save = match () {
            () if last => Some(SaveReason::Last),
            () if asked.stop > 0 => Some(SaveReason::Stopping),
            () if regular => Some(SaveReason::Every),
            () if asked.save > 0 => Some(SaveReason::Requested),
            () => None,
        };
        let stop = match () {
            () if last => Some(self.end_cause()),
            () if asked.stop > 0 => Some(FinishCause::Stopped),
            () => None,
        };
        After {
            validate: regular || self.validate_every.is_some_and(every),
            save,
            weights: self.weights_every.is_some_and(every),
            stop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{After, Asked, SaveReason, Schedule};
    use trainctl_spec::Step;
    use trainctl_spec::job::StepScheduler;
    use trainctl_spec::report::{FinishCause, SaveKind};

    fn schedule(val: Option<u64>, save: u64, max_steps: u64, stop_at: u64) -> Schedule {
        let scheduler = StepScheduler {
            global_batch_size: 4,
            local_batch_size: 2,
            max_steps,
            ckpt_every_steps: save,
            val_every_steps: val,
        };
        Schedule::new(&scheduler, Some(6), Step(stop_at))
    }

    #[test]
    fn the_table_of_the_module_doc() {
        let plan = schedule(Some(3), 4, 14, 14);
        let none = Asked::default();
        let row = |s, asked| plan.after(Step(s), asked);
        let quiet = After { validate: false, save: None, weights: false, stop: None };
        assert_eq!(row(0, none), quiet);
        assert_eq!(row(2, none), After { validate: true, ..quiet });
        assert_eq!(row(3, none), After { validate: true, save: Some(SaveReason::Every), ..quiet });
        assert_eq!(row(5, none), After { validate: true, weights: true, ..quiet });
        assert_eq!(row(11, none), After { validate: true, save: Some(SaveReason::Every), weights: true, stop: None });
        assert_eq!(
            row(13, none),
            After { validate: true, save: Some(SaveReason::Last), stop: Some(FinishCause::Complete), ..quiet }
        );
        assert_eq!(row(6, Asked { save: 1, stop: 0 }), After { save: Some(SaveReason::Requested), ..quiet });
        assert_eq!(
            row(6, Asked { save: 1, stop: 2 }),
            After { save: Some(SaveReason::Stopping), stop: Some(FinishCause::Stopped), ..quiet }
        );
    }

    #[test]
    fn weights_come_after_the_checkpoint_and_wait_at_the_end_as_it_does() {
        let plan = schedule(None, 4, 12, 12);
        let saves = |s| plan.after(Step(s), Asked::default()).saves().collect::<Vec<_>>();
        assert_eq!(saves(0), []);
        assert_eq!(saves(5), [(SaveKind::Weights, SaveReason::Every)]);
        assert_eq!(saves(7), [(SaveKind::Full, SaveReason::Every)]);
        assert_eq!(saves(11), [(SaveKind::Full, SaveReason::Last), (SaveKind::Weights, SaveReason::Last)]);
    }

    #[test]
    fn until_step_leaves_max_steps_alone() {
        let plan = schedule(None, 100, 12, 7);
        assert_eq!(plan.after(Step(6), Asked::default()).stop, Some(FinishCause::UntilStep));
        assert_eq!(schedule(None, 100, 12, 99).end(), Step(12), "stop_at is clamped to max_steps");
    }
}
