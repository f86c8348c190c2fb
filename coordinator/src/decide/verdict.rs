//! Who failed first, and is it a cause or a consequence?
//!
//! Endings are classed as cause or consequence by `spec::state::ExitClass`. The verdict is the earliest cause once every rank
//! is accounted for; else the earliest consequence that is not of our making; else "unknown" (P6).

use std::time::Duration;

use trainctl_spec::Rank;
use trainctl_spec::report::Phase;
use trainctl_spec::state::{Cause, ExitClass, RankFailure, WhyLost};

/// How one rank of a generation ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    /// Rank.
    pub rank: u32,
    /// Its worker.
    pub worker: String,
    /// When it ended, on the coordinator's clock (arrival less the report's age).
    pub at: Duration,
    /// How.
    pub how: How,
    /// Phase that it was in.
    pub phase: Phase,
    /// Last zero-based step that it had reported.
    pub step: Option<u64>,
    /// Last lines of its standard error.
    pub stderr_tail: Vec<String>,
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// Its worker's wait saw this.
    Exited(ExitClass),
    /// It went with its worker.
    WorkerLost(WhyLost),
    /// Its worker could not start it.
    NotStarted(String),
}

impl Ending {
    fn is_consequence(&self) -> bool {
        matches!(self.how, How::Exited(class) if class.is_consequence())
    }

    /// The last line of standard error that speaks of an error, else the last line.
    fn message(&self) -> String {
        let speaks = |line: &&String| line.contains("error") || line.contains("panicked");
        let line = self.stderr_tail.iter().rev().find(speaks).or(self.stderr_tail.last());
        line.map(|line| line.trim().to_owned()).unwrap_or_default()
    }

    fn cause(&self) -> Cause {
        match &self.how {
            How::Exited(class) => {
                let message = if class.has_last_words() { self.message() } else { String::new() };
                let failure = RankFailure { rank: Rank(self.rank), class: *class, phase: self.phase, message };
                Cause::Rank { failure }
            }
            How::WorkerLost(why) => {
                Cause::WorkerLost { worker: self.worker.clone(), rank: Some(Rank(self.rank)), why: *why }
            }
            How::NotStarted(error) => Cause::FormingFailed {
                message: format!("worker {} could not start rank {}: {error}", self.worker, self.rank),
            },
        }
    }
}

/// Judges the endings of a generation: its cause, and the step that the rank to blame had last reported.
pub fn decide_verdict(endings: &[Ending]) -> (Cause, Option<u64>) {
    let earliest = |wanted: &dyn Fn(&&Ending) -> bool| endings.iter().filter(wanted).min_by_key(|e| e.at);
    let finished = |e: &Ending| e.how == How::Exited(ExitClass::Finished);
    let ours = |e: &Ending| e.how == How::Exited(ExitClass::StoppedByUs);
    let first = earliest(&|e| !e.is_consequence() && !finished(e)).or_else(|| earliest(&|e| !ours(e) && !finished(e)));
    match first {
        Some(ending) => (ending.cause(), ending.step),
        None => (Cause::Unknown { message: "no rank reported a failure of its own".to_owned() }, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ending(rank: u32, at_ms: u64, how: How) -> Ending {
        let stderr_tail = vec!["error: index 12 out of range".to_owned(), "bye".to_owned()];
        let worker = format!("w{rank}");
        Ending {
            rank,
            worker,
            at: Duration::from_millis(at_ms),
            how,
            phase: Phase::Stepping,
            step: Some(7),
            stderr_tail,
        }
    }

    fn killed(rank: u32, at_ms: u64) -> Ending {
        ending(rank, at_ms, How::Exited(ExitClass::Signal { signal: 9, core: false }))
    }

    #[test]
    fn a_consequence_that_arrives_first_does_not_take_the_blame() {
        // Measured in the field: a victim's "connection closed by peer" can arrive before the killer's exit.
        let (cause, step) = decide_verdict(&[ending(0, 10, How::Exited(ExitClass::PeerLost)), killed(1, 20)]);
        assert_eq!(cause.to_string(), "rank 1 killed by signal 9 (SIGKILL) while stepping");
        assert!(cause.is_external());
        assert_eq!(step, Some(7));
    }

    #[test]
    fn an_internal_failure_speaks_in_its_own_words() {
        let (cause, _) = decide_verdict(&[
            ending(0, 10, How::Exited(ExitClass::Error { code: 1 })),
            ending(1, 5, How::Exited(ExitClass::StoppedByUs)),
        ]);
        assert!(cause.to_string().contains("error: index 12 out of range"), "{cause}");
        assert!(!cause.is_external());
    }

    #[test]
    fn a_lost_worker_beats_the_peers_that_lost_it() {
        let lost = ending(1, 5000, How::WorkerLost(WhyLost::LeaseExpired));
        let (cause, _) = decide_verdict(&[ending(0, 10, How::Exited(ExitClass::PeerLost)), lost]);
        assert!(matches!(cause, Cause::WorkerLost { .. }));
    }

    /// Every order of four things.
    fn orders() -> Vec<[u64; 4]> {
        let all = (0..256u64).map(|n| [n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6 & 3]);
        all.filter(|order| (0..4).all(|place| order.contains(&place))).collect()
    }

    #[test]
    fn p6_each_kind_of_failure_is_named_in_every_order_of_arrival() {
        let signal = |signal| How::Exited(ExitClass::Signal { signal, core: signal == 11 });
        let kinds = [
            (How::Exited(ExitClass::Error { code: 1 }), "exited with code 1"),
            (How::Exited(ExitClass::Error { code: 3 }), "exited with code 3"),
            (How::Exited(ExitClass::Panic), "panicked"),
            (How::Exited(ExitClass::Assertion), "SIGABRT"),
            (signal(11), "SIGSEGV"),
            (signal(9), "SIGKILL"),
            (signal(15), "SIGTERM"),
            (How::Exited(ExitClass::OutOfMemory), "ran out of memory"),
            (How::Exited(ExitClass::Disk), "reading or writing files failed"),
            (How::Exited(ExitClass::StoreAway), "cannot reach the checkpoint's place"),
            (How::Exited(ExitClass::Device), "device error"),
            (How::Exited(ExitClass::NonFinite), "not finite"),
            (How::WorkerLost(WhyLost::LeaseExpired), "was not heard from within its lease"),
            (How::WorkerLost(WhyLost::Restarted), "was restarted"),
            (How::NotStarted("no such file".to_owned()), "could not start rank 2"),
        ];
        assert_eq!(orders().len(), 24);
        for (how, words) in kinds {
            for order in orders() {
                // A peer that lost it, the failure, a rank that we stopped, and one that had just finished.
                let others = [ExitClass::PeerLost, ExitClass::StoppedByUs, ExitClass::Finished].map(How::Exited);
                let [lost, stopped, done] = others;
                let ends = [(0, lost), (2, how.clone()), (1, stopped), (3, done)];
                let endings: Vec<Ending> =
                    ends.into_iter().zip(order).map(|((rank, how), at)| ending(rank, at, how)).collect();
                let (cause, step) = decide_verdict(&endings);
                let text = cause.to_string();
                assert!(text.contains("rank 2") && text.contains(words), "{how:?} in {order:?}: {text}");
                assert_eq!(step, Some(7));
            }
        }
    }

    #[test]
    fn nothing_but_our_own_stops_is_unknown() {
        let (cause, _) = decide_verdict(&[ending(0, 1, How::Exited(ExitClass::StoppedByUs))]);
        assert!(matches!(cause, Cause::Unknown { .. }));
    }
}
