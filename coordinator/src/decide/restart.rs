//! Does a job that lost its generation get another one?
//!
//! One budget per job in the journal (J5). External causes (a kill from outside, a lost node, preemption) are never
//! deterministic; the same internal fingerprint at the same step twice stops the job with that explanation, and so do replicas
//! that differ once more at the same step. What the job is
//! not to blame for (`Cause::is_charged`) costs nothing. A store that is away is waited for without end, as before a formation:
//! each look at it is a formation, so they come ever further apart.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trainctl_spec::state::Cause;

/// The budget as the journal keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Failures since the counters were last set to 0.
    pub used: u32,
    /// Failures per fingerprint, with the step of the last one.
    pub by_fingerprint: BTreeMap<String, Seen>,
    /// Step of the last failure, when one had been reached.
    pub last_failure_step: Option<u64>,
    /// Generations in a row that could not load since the store was away.
    #[serde(default)]
    pub store_away: u32,
}

/// One fingerprint's record.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// How often.
    pub count: u32,
    /// At which step last; absent before the first step.
    pub step: Option<u64>,
}

/// Limits of the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// `fault_tolerance.max_restarts`.
    pub max_restarts: u32,
    /// Back-off of the second failure in a row (the first restarts at once); doubles with each further one.
    pub second_delay: Duration,
    /// Longest back-off.
    pub max_delay: Duration,
}

impl Policy {
    /// The policy of a job with this `fault_tolerance.max_restarts`.
    pub fn new(max_restarts: u32) -> Self {
        Self { max_restarts, second_delay: Duration::from_millis(500), max_delay: Duration::from_secs(60) }
    }

    /// The `n`-th pause, from 1.
    fn delay(&self, n: u32) -> Duration {
        self.second_delay.saturating_mul(1 << n.saturating_sub(1).min(16)).min(self.max_delay)
    }
}

/// The decision.
#[derive(Clone, Debug, PartialEq)]
pub enum Restart {
    /// Form again after this long.
    After(Duration),
    /// The job fails with this cause, which says why it is not restarted.
    GiveUp(Cause),
}

/// Decides on a generation that ended by `cause` when its rank to blame had done `step`, and returns the budget as it must
/// be journaled. `jitter` in [0, 1) shortens the delay by up to half.
pub fn decide_restart(
    budget: &Budget,
    cause: &Cause,
    step: Option<u64>,
    jitter: f64,
    policy: &Policy,
) -> (Restart, Budget) {
    let shortened = |delay: Duration| delay.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 2.0);
    if cause.is_store_away() {
        let after = Budget { store_away: budget.store_away.saturating_add(1), ..budget.clone() };
        return (Restart::After(shortened(policy.delay(after.store_away))), after);
    }
    if !cause.is_charged() {
        return (Restart::After(Duration::ZERO), budget.clone());
    }
    let mut after = budget.clone();
    after.used += 1;
    after.store_away = 0;
    after.last_failure_step = step.or(after.last_failure_step);
    if let Some(fingerprint) = cause.fingerprint() {
        let before = after.by_fingerprint.get(&fingerprint.0).copied();
        let count = before.map_or(1, |seen| seen.count + 1);
        after.by_fingerprint.insert(fingerprint.0.clone(), Seen { count, step });
        if before.is_some_and(|seen| seen.step == step) {
            let last = Box::new(cause.clone());
            let cause = Cause::Deterministic { step: step.unwrap_or_default(), fingerprint, last };
            return (Restart::GiveUp(cause), after);
        }
    }
    if after.used > policy.max_restarts {
        let last = Box::new(cause.clone());
        return (Restart::GiveUp(Cause::BudgetSpent { max_restarts: policy.max_restarts, last }), after);
    }
    let delay = after.used.checked_sub(1).filter(|n| *n > 0).map_or(Duration::ZERO, |n| policy.delay(n));
    (Restart::After(shortened(delay)), after)
}

/// A commit later than the last failure shows progress: both counters start again (J5).
pub fn refill(budget: &Budget, committed_step: u64) -> Budget {
    match budget.last_failure_step {
        Some(step) if committed_step <= step => budget.clone(),
        _ => Budget::default(),
    }
}

#[cfg(test)]
mod tests {
    use trainctl_spec::Rank;
    use trainctl_spec::report::Phase;
    use trainctl_spec::state::{ExitClass, RankFailure, Suspect};

    use super::*;

    fn policy(max_restarts: u32) -> Policy {
        Policy { max_restarts, second_delay: Duration::from_secs(1), max_delay: Duration::from_secs(60) }
    }

    fn rank_failed(class: ExitClass) -> Cause {
        let failure = RankFailure { rank: Rank(1), class, phase: Phase::Stepping, message: "index 12".to_owned() };
        Cause::Rank { failure }
    }

    fn killed() -> Cause {
        rank_failed(ExitClass::Signal { signal: 9, core: false })
    }

    #[test]
    fn j5_external_causes_are_never_deterministic() {
        let (first, budget) = decide_restart(&Budget::default(), &killed(), Some(5), 0.0, &policy(3));
        assert_eq!(first, Restart::After(Duration::ZERO));
        let (second, budget) = decide_restart(&budget, &killed(), Some(5), 0.0, &policy(3));
        assert_eq!(second, Restart::After(Duration::from_secs(1)));
        assert_eq!(budget.used, 2);
    }

    #[test]
    fn j5_the_same_internal_failure_at_the_same_step_twice_stops() {
        let panic = rank_failed(ExitClass::Panic);
        let (first, budget) = decide_restart(&Budget::default(), &panic, Some(5), 0.0, &policy(3));
        assert!(matches!(first, Restart::After(_)));
        let (elsewhere, _) = decide_restart(&budget, &panic, Some(6), 0.0, &policy(3));
        assert!(matches!(elsewhere, Restart::After(_)));
        let (again, _) = decide_restart(&budget, &panic, Some(5), 0.0, &policy(3));
        assert!(matches!(again, Restart::GiveUp(Cause::Deterministic { step: 5, .. })), "{again:?}");
    }

    #[test]
    fn j5_replicas_that_differ_again_at_the_same_step_stop_whoever_was_named() {
        let corrupt = |rank: u32| Cause::Corrupt {
            step: 9,
            replicas: 3,
            suspects: vec![Suspect { rank: Rank(rank), worker: format!("w{rank}"), host: "n".to_owned() }],
            named: true,
        };
        assert!(corrupt(1).is_external() && corrupt(1).is_charged());
        let (first, budget) = decide_restart(&Budget::default(), &corrupt(1), Some(9), 0.0, &policy(3));
        assert_eq!(first, Restart::After(Duration::ZERO));
        let (again, _) = decide_restart(&budget, &corrupt(2), Some(9), 0.0, &policy(3));
        let Restart::GiveUp(cause @ Cause::Deterministic { step: 9, .. }) = &again else { panic!("{again:?}") };
        assert_eq!(cause.rank(), Some(Rank(2)));
        let (later, _) = decide_restart(&refill(&budget, 19), &corrupt(1), Some(29), 0.0, &policy(3));
        assert_eq!(later, Restart::After(Duration::ZERO));
    }

    #[test]
    fn j5_the_budget_ends_and_a_later_commit_refills_it() {
        let mut budget = Budget::default();
        for step in 0..3 {
            budget = decide_restart(&budget, &killed(), Some(step), 0.0, &policy(3)).1;
        }
        let (fourth, spent) = decide_restart(&budget, &killed(), Some(3), 0.0, &policy(3));
        assert!(matches!(fourth, Restart::GiveUp(Cause::BudgetSpent { max_restarts: 3, .. })));
        assert_eq!(refill(&spent, 3), spent, "a commit at the step of the failure proves nothing");
        assert_eq!(refill(&spent, 4), Budget::default());
    }

    #[test]
    fn j5_what_the_job_is_not_to_blame_for_is_free() {
        let abandoned = Cause::Abandoned { message: "coordinator restarted".to_owned() };
        let got = decide_restart(&Budget::default(), &abandoned, None, 0.0, &policy(0));
        assert_eq!(got, (Restart::After(Duration::ZERO), Budget::default()));
    }

    #[test]
    fn j5_a_store_that_is_away_is_waited_for_ever_more_patiently_and_costs_nothing() {
        let away = rank_failed(ExitClass::StoreAway);
        let spent = Budget { used: 3, ..Budget::default() };
        let mut budget = spent.clone();
        let mut delays = Vec::new();
        for _ in 0..100 {
            let (decision, after) = decide_restart(&budget, &away, None, 0.0, &policy(3));
            let Restart::After(delay) = decision else { panic!("{decision:?}") };
            delays.push(delay.as_secs());
            budget = after;
        }
        assert_eq!(delays[..8], [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(Budget { store_away: 0, ..budget.clone() }, spent, "no restart is charged");
        assert!(away.to_string().contains("index 12"), "it says what it could not read: {away}");
        // Whatever else fails, and a commit, end the wait.
        assert_eq!(decide_restart(&budget, &killed(), None, 0.0, &policy(9)).1.store_away, 0);
        assert_eq!(refill(&budget, 4).store_away, 0);
    }

    #[test]
    fn back_off_grows_to_its_cap_and_jitter_only_shortens() {
        let budget = Budget { used: 40, ..Budget::default() };
        let delay = |jitter| decide_restart(&budget, &killed(), Some(1), jitter, &policy(100)).0;
        assert_eq!(delay(0.0), Restart::After(Duration::from_secs(60)));
        assert_eq!(delay(1.0), Restart::After(Duration::from_secs(30)));
    }
}
