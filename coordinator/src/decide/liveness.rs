//! Who is alive? Unreachable is not dead: UNKNOWN holds until a lease expires by our own monotonic clock (J6).

use std::time::Duration;

/// How long silence is tolerated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// A worker that is silent for longer is lost.
    pub lease: Duration,
    /// No lease expires this long after a restarted coordinator took over.
    pub grace: Duration,
    /// Expected time between two ticks.
    pub tick: Duration,
    /// So long a coordinator that hears nobody at all takes that for its own fault.
    pub alone: Duration,
}

/// What the owner task knows of one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Time of the last message, on the receiver's clock.
    pub heard_at: Duration,
    /// Whether its stream is up.
    pub connected: bool,
}

/// What is held of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Connected and heard within half its lease.
    Alive,
    /// Silent or disconnected, within its lease.
    Unknown,
    /// Its lease is over.
    Lost,
}

/// Time that does not count against any lease, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// Leases count as they stand.
    None,
    /// The coordinator has just taken over.
    Grace,
    /// More than half of the leases lapsed in one tick: more likely our own fault.
    MassExpiry,
    /// Nobody is heard, or nobody was within the last lease: we are cut off, and there is nobody to restart anything on.
    Alone,
}

/// Whether no worker of several is heard. They are more likely to be all behind one fault of the network, and to train on (P5), than
/// to be all dead; for how long is a matter of policy.
pub fn hears_nobody(now: Duration, seen: &[Seen], policy: &Policy) -> bool {
    let last = seen.iter().map(|seen| seen.heard_at).max().unwrap_or_default();
    let is_lost = |seen: &Seen| standing(now, seen, policy) == Liveness::Lost;
    seen.len() > 1 && seen.iter().all(is_lost) && now.saturating_sub(last) <= policy.lease + policy.alone
}

/// By how much a tick that came late extends every lease: our own standstill must not be charged to the workers.
pub fn late_by(since_last_tick: Duration, policy: &Policy) -> Duration {
    since_last_tick.saturating_sub(policy.tick)
}

/// One worker by its own lease alone.
pub fn standing(now: Duration, seen: &Seen, policy: &Policy) -> Liveness {
    let silent = now.saturating_sub(seen.heard_at);
    match seen.connected {
        _ if silent > policy.lease => Liveness::Lost,
        true if silent <= policy.lease / 2 => Liveness::Alive,
        _ => Liveness::Unknown,
    }
}

/// Judges all workers at `now`. `adopted_at` is when this coordinator took over jobs that may be running, if it did;
/// `doubted` whether the previous tick already answered [`Doubt::MassExpiry`]: the doubt holds once, and leases that are
/// still over at the next look are over. `alone_at` is when it last held that [`hears_nobody`]: once somebody is heard again the
/// others have one lease to come back too, and who has not by then is lost without a further doubt. Who has, and lapses again,
/// is judged like anybody.
pub fn decide_liveness(
    now: Duration,
    adopted_at: Option<Duration>,
    alone_at: Option<Duration>,
    seen: &[Seen],
    doubted: bool,
    policy: &Policy,
) -> (Vec<Liveness>, Doubt) {
    let verdicts: Vec<Liveness> = seen.iter().map(|seen| standing(now, seen, policy)).collect();
    let lost = || seen.iter().zip(&verdicts).filter(|(_, verdict)| **verdict == Liveness::Lost);
    let newly = lost().filter(|(seen, _)| alone_at.is_none_or(|at| seen.heard_at > at)).count();
    let doubt = match lost().count() {
        0 => Doubt::None,
        _ if adopted_at.is_some_and(|at| now.saturating_sub(at) < policy.grace) => Doubt::Grace,
        _ if alone_at.is_some_and(|at| now.saturating_sub(at) < policy.lease) => Doubt::Alone,
        _ if newly > 1 && newly * 2 > seen.len() && !doubted => Doubt::MassExpiry,
        _ => Doubt::None,
    };
    match doubt {
        Doubt::None => (verdicts, doubt),
        _ => {
            let spared = verdicts.iter().map(|v| if *v == Liveness::Lost { Liveness::Unknown } else { *v }).collect();
            (spared, doubt)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: Policy = Policy {
        lease: Duration::from_secs(5),
        grace: Duration::from_secs(30),
        tick: Duration::from_millis(500),
        alone: Duration::from_secs(60),
    };

    fn at(secs: u64, connected: bool) -> Seen {
        Seen { heard_at: Duration::from_secs(secs), connected }
    }

    fn judge(now: u64, seen: &[Seen], doubted: bool) -> (Vec<Liveness>, Doubt) {
        decide_liveness(Duration::from_secs(now), Some(Duration::ZERO), None, seen, doubted, &POLICY)
    }

    #[test]
    fn j6_silence_is_unknown_until_the_lease_is_over() {
        let seen = [at(100, true), at(97, false), at(94, false), at(97, true)];
        let (verdicts, doubt) = judge(100, &seen, false);
        let frozen = Liveness::Unknown;
        assert_eq!(verdicts, [Liveness::Alive, Liveness::Unknown, Liveness::Lost, frozen]);
        assert_eq!(doubt, Doubt::None);
    }

    #[test]
    fn j6_no_lease_expires_in_the_grace_after_a_takeover() {
        let (verdicts, doubt) = judge(29, &[at(0, false), at(29, true)], false);
        assert_eq!((verdicts[0], doubt), (Liveness::Unknown, Doubt::Grace));
        let fresh = decide_liveness(Duration::from_secs(29), None, None, &[at(0, false), at(29, true)], false, &POLICY);
        assert_eq!(fresh.0[0], Liveness::Lost, "a coordinator that took nothing over knows its workers");
    }

    #[test]
    fn j6_mass_expiry_is_doubted_once() {
        let seen = [at(90, false), at(90, false), at(100, true)];
        assert_eq!(
            judge(100, &seen, false),
            (vec![Liveness::Unknown, Liveness::Unknown, Liveness::Alive], Doubt::MassExpiry)
        );
        assert_eq!(judge(101, &seen, true).0[0], Liveness::Lost);
    }

    #[test]
    fn p5_a_coordinator_that_hears_nobody_loses_nobody_and_gives_them_a_lease_to_come_back() {
        let now = |secs| Duration::from_secs(secs);
        let cut_off = [at(90, true), at(91, false)];
        assert!(!hears_nobody(now(96), &cut_off, &POLICY), "one of them is within its lease");
        assert!(hears_nobody(now(97), &cut_off, &POLICY));
        assert!(hears_nobody(now(156), &cut_off, &POLICY) && !hears_nobody(now(157), &cut_off, &POLICY));
        assert!(!hears_nobody(now(97), &cut_off[..1], &POLICY), "one worker alone may well be dead");
        let judge =
            |secs, alone_at, seen: &[Seen]| decide_liveness(now(secs), None, Some(now(alone_at)), seen, false, &POLICY);
        assert_eq!(judge(120, 120, &cut_off), (vec![Liveness::Unknown; 2], Doubt::Alone));
        let back = [at(123, true), at(91, false)];
        assert_eq!(judge(124, 120, &back), (vec![Liveness::Alive, Liveness::Unknown], Doubt::Alone));
        assert_eq!(judge(125, 120, &back), (vec![Liveness::Alive, Liveness::Lost], Doubt::None));
        let never_came = [at(126, true), at(91, false), at(90, false)];
        assert_eq!(judge(126, 120, &never_came).1, Doubt::None, "they have been doubted");
        let lapse_again = [at(127, true), at(121, false), at(121, false)];
        assert_eq!(judge(127, 120, &lapse_again).1, Doubt::MassExpiry, "they came back");
    }

    #[test]
    fn j6_a_late_tick_extends_leases() {
        assert_eq!(late_by(Duration::from_millis(500), &POLICY), Duration::ZERO);
        assert_eq!(late_by(Duration::from_secs(20), &POLICY), Duration::from_millis(19_500));
    }
}
