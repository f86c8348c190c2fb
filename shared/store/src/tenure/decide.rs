//! When a run directory may be taken over: a pure function of what was seen (J2).

use std::time::Duration;

use trainctl_spec::Term;

use super::Holder;

/// The waiting times of J2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The same content must have been seen for so long, by the looker's own monotonic clock.
    pub lease: Duration,
    /// Time between two looks.
    pub look_every: Duration,
    /// A holder whose content still changes after so long is alive, even if it does not answer.
    pub patience: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(15),
            look_every: Duration::from_millis(500),
            patience: Duration::from_secs(45),
        }
    }
}

/// What one look saw.
#[derive(Clone, Debug)]
pub struct View {
    /// The highest term; 0 if none was ever taken.
    pub highest: Term,
    /// `holder.json`; `None` if missing or unreadable.
    pub holder: Option<Holder>,
    /// The process that took the highest term ran on this host, in this boot, and is gone.
    pub taker_gone: bool,
    /// For how long holder and highest term have not changed.
    pub same_for: Duration,
    /// Since the first look.
    pub waited: Duration,
    /// Whether the holder answers; `None` if it was not asked in this look.
    pub answers: Option<bool>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Take a term now.
    Take,
    /// Ask the holder's address, then decide again.
    Probe,
    /// Look again later.
    Wait,
    /// A live holder: give up.
    Refuse,
}

/// Why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No term was ever taken.
    NeverHeld,
    /// The holder of the highest term wrote that its tenure ended.
    Released,
    /// The holder's process on this host is gone.
    ProcessGone,
    /// Nothing changed for a lease and nobody answers.
    Expired,
    /// The lease has not run out.
    LeaseRuns,
    /// The lease has run out; whether the holder answers is not known yet.
    LeaseOver,
    /// The holder answers.
    Answers,
    /// The holder does not answer but goes on writing.
    StillWriting,
}

/// Decides by the rules of J2. A `holder.json` of an older term says nothing about the holder of the highest one: it has
/// taken its term and not written yet, or a frozen predecessor woke up and wrote late.
pub fn decide_takeover(view: &View, policy: &Policy) -> (Decision, Reason) {
    if view.highest == Term(0) && view.holder.is_none() {
        return (Decision::Take, Reason::NeverHeld);
    }
    let current = view.holder.as_ref().filter(|holder| holder.term >= view.highest.0);
    if current.is_some_and(|holder| holder.released) {
        return (Decision::Take, Reason::Released);
    }
    if view.answers == Some(true) {
        return (Decision::Refuse, Reason::Answers);
    }
    if view.taker_gone {
        // A dead process refuses connections at once; one that answers lives in another pid namespace of this host.
        let decision = if view.answers.is_none() { Decision::Probe } else { Decision::Take };
        return (decision, Reason::ProcessGone);
    }
    if view.same_for >= policy.lease {
        return match view.answers {
            Some(_) => (Decision::Take, Reason::Expired),
            None => (Decision::Probe, Reason::LeaseOver),
        };
    }
    if view.waited >= policy.patience && view.holder.is_some() {
        return (Decision::Refuse, Reason::StillWriting);
    }
    (Decision::Wait, Reason::LeaseRuns)
}
