//! May these workers run ranks of one job together, by what they saw of its run directory and of each other?
//!
//! A worker proves itself once for each job and life of its daemon, so that a restart with the same workers looks at nothing.
//! Who is to blame is decided by comparison: what one worker alone cannot do is its own fault, what none of them can do is the
//! file system's, and of pairs that fail it is the worker that is in most of them, if there is one.

use std::collections::BTreeMap;

/// Files of so many peers are looked at by each member: a folder that one host sees late is found by any of them.
const LOOKS: usize = 3;

/// One worker of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Worker id.
    pub worker: String,
    /// Host name, for people.
    pub host: String,
    /// Machine (kernel boot id).
    pub machine: String,
    /// Address that its rank's peers reach it at.
    pub address: String,
    /// It has proved itself before: it is there for the others.
    pub is_proven: bool,
}

impl Member {
    /// One machine may still be several hosts to a network: its containers have addresses of their own.
    fn is_beside(&self, other: &Self) -> bool {
        self.machine == other.machine && self.address == other.address
    }
}

/// What one member shall look at, as indices into the members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Task {
    /// Peers whose files must be there, those on other machines first.
    pub see: Vec<usize>,
    /// Peers that must answer.
    pub dial: Vec<usize>,
}

/// Who looks at whom: every pair with a member that has not proved itself, both ways where they dial.
pub fn plan(members: &[Member]) -> Vec<Task> {
    let task = |own: usize| {
        let is_new = |other: &usize| !(members[own].is_proven && members[*other].is_proven);
        let peers: Vec<usize> =
            (1..members.len()).map(|by| (own + by) % members.len()).filter(|other| is_new(other)).collect();
        let (beside, away): (Vec<usize>, Vec<usize>) =
            peers.iter().partition(|other| members[own].machine == members[**other].machine);
        let dial = peers.iter().copied().filter(|other| !members[own].is_beside(&members[*other])).collect();
        Task { see: away.into_iter().chain(beside).take(LOOKS).collect(), dial }
    };
    (0..members.len()).map(task).collect()
}

/// What a member answered to the first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begun {
    /// It sees the run directory, has written its file and listens.
    Well,
    /// It does not see the coordinator's file.
    Blind(String),
    /// It sees the file of another coordinator: an old one, or that of our successor.
    Stale(String),
    /// It cannot write.
    Unwritable(String),
    /// It cannot listen at its rank's address.
    Deaf(String),
    /// It is connected and beats, but did not answer in time.
    Mute,
}

/// A pair of which one does not see or reach the other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Failed {
    /// Who looked.
    pub from: String,
    /// At whom.
    pub to: String,
    /// Both with their hosts, what was looked at, and the system's error.
    pub what: String,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All members have proved themselves.
    Pass,
    /// These are to blame, each with the reason.
    Blame(BTreeMap<String, String>),
    /// It is nobody's fault alone: what a person should know.
    Undecided(String),
}

/// Judges the first step. `others_prove` says whether a worker that is not in the round has proved itself for this job.
pub fn judge_begun(begun: &BTreeMap<String, Begun>, others_prove: bool, limit_s: u64) -> Verdict {
    let someone_can = begun.values().any(|answer| *answer == Begun::Well);
    let (mut blamed, mut undecided) = (BTreeMap::new(), None);
    for (worker, answer) in begun {
        let (reason, is_its_own) = match answer {
            Begun::Well => continue,
            Begun::Blind(error) => (format!("it does not see the run directory: {error}"), someone_can || others_prove),
            // After a takeover it may be right, and we are the ones who are late.
            Begun::Stale(error) => (format!("it sees an old run directory: {error}"), someone_can),
            Begun::Unwritable(error) => {
                (format!("it cannot write into the run directory: {error}"), someone_can || others_prove)
            }
            Begun::Deaf(error) => (format!("it cannot listen at its rank's address: {error}"), true),
            Begun::Mute => {
                let hangs = "did not look at the run directory in time: a file system that hangs?";
                (format!("it beats, but {hangs} ({limit_s} s)"), someone_can || others_prove)
            }
        };
        if is_its_own {
            blamed.insert(worker.clone(), reason);
        } else {
            undecided.get_or_insert(format!("worker {worker}: {reason}"));
        }
    }
    match (blamed.is_empty(), undecided) {
        (false, _) => Verdict::Blame(blamed),
        (true, Some(first)) => Verdict::Undecided(first),
        (true, None) => Verdict::Pass,
    }
}

/// Judges the second step, by the pairs that failed.
pub fn judge_pairs(failed: &[Failed]) -> Verdict {
    let Some(first) = failed.first() else { return Verdict::Pass };
    let mut pairs: Vec<(&str, &str)> =
        failed.iter().map(|pair| (pair.from.as_str().min(&pair.to), pair.from.as_str().max(&pair.to))).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    pairs.iter().flat_map(|(a, b)| [*a, *b]).for_each(|worker| *counts.entry(worker).or_default() += 1);
    let most = counts.values().copied().max().unwrap_or_default();
    let worst: Vec<&str> = counts.iter().filter(|(_, count)| **count == most).map(|(worker, _)| *worker).collect();
    match worst.as_slice() {
        [worker] => {
            let own: Vec<&str> = failed
                .iter()
                .filter(|pair| pair.from == *worker || pair.to == *worker)
                .map(|pair| pair.what.as_str())
                .collect();
            let reason = format!("it is in {most} pairs of workers that fail: {}", own.join("; "));
            Verdict::Blame(BTreeMap::from([((*worker).to_owned(), reason)]))
        }
        _ => {
            let more = pairs.len() - 1;
            let others = if more == 0 { String::new() } else { format!(" (and {more} more pairs)") };
            Verdict::Undecided(format!("{}{others}", first.what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(worker: &str, machine: &str, is_proven: bool) -> Member {
        let (worker, machine) = (worker.to_owned(), machine.to_owned());
        let address = format!("10.0.0.{machine}");
        Member { host: machine.clone(), worker, machine, address, is_proven }
    }

    fn begun(answers: &[(&str, Begun)]) -> BTreeMap<String, Begun> {
        answers.iter().map(|(worker, answer)| ((*worker).to_owned(), answer.clone())).collect()
    }

    fn failed(pairs: &[(&str, &str)]) -> Vec<Failed> {
        let of = |(from, to): &(&str, &str)| Failed {
            from: (*from).to_owned(),
            to: (*to).to_owned(),
            what: format!("{from} cannot reach {to}"),
        };
        pairs.iter().map(of).collect()
    }

    #[test]
    fn workers_of_one_machine_look_at_files_and_dial_nobody() {
        let tasks = plan(&[member("w0", "1", false), member("w1", "1", false)]);
        assert_eq!(tasks, [Task { see: vec![1], dial: vec![] }, Task { see: vec![0], dial: vec![] }]);
        assert_eq!(plan(&[member("w0", "1", false)]), [Task::default()]);
    }

    #[test]
    fn pairs_of_different_addresses_dial_both_ways() {
        let tasks = plan(&[member("w0", "1", false), member("w1", "2", false), member("w2", "1", false)]);
        assert_eq!(tasks[0], Task { see: vec![1, 2], dial: vec![1] });
        assert_eq!(tasks[1], Task { see: vec![2, 0], dial: vec![2, 0] });
        let mut container = member("w1", "1", false);
        container.address = "10.1.0.1".to_owned();
        assert_eq!(plan(&[member("w0", "1", false), container])[0].dial, [1], "one machine, two hosts");
    }

    #[test]
    fn those_who_have_proved_themselves_look_at_newcomers_only() {
        let tasks = plan(&[member("w0", "1", true), member("w1", "2", true), member("spare", "3", false)]);
        assert_eq!(tasks[0], Task { see: vec![2], dial: vec![2] });
        assert_eq!(tasks[2].dial, [0, 1]);
        let many: Vec<Member> = (0..40).map(|n| member(&format!("w{n}"), &n.to_string(), false)).collect();
        assert!(plan(&many).iter().all(|task| task.see.len() == LOOKS && task.dial.len() == 39));
    }

    #[test]
    fn what_one_worker_alone_cannot_do_is_its_own_fault() {
        for answer in [Begun::Blind("ENOENT".to_owned()), Begun::Unwritable("EROFS".to_owned()), Begun::Mute] {
            let verdict = judge_begun(&begun(&[("w0", Begun::Well), ("w1", answer.clone())]), false, 10);
            let Verdict::Blame(blamed) = verdict else { panic!("{verdict:?}") };
            assert_eq!(blamed.keys().collect::<Vec<_>>(), ["w1"]);
            assert!(blamed["w1"].contains("run directory"), "{}", blamed["w1"]);
            let alone = begun(&[("w1", answer)]);
            assert!(matches!(judge_begun(&alone, false, 10), Verdict::Undecided(_)));
            assert!(matches!(judge_begun(&alone, true, 10), Verdict::Blame(_)), "its peers could");
        }
        assert_eq!(judge_begun(&begun(&[("w0", Begun::Well)]), false, 10), Verdict::Pass);
    }

    #[test]
    fn j2_a_file_of_another_coordinator_blames_nobody_who_may_be_right() {
        let stale = || Begun::Stale("it names another coordinator".to_owned());
        assert!(matches!(judge_begun(&begun(&[("w0", stale())]), true, 10), Verdict::Undecided(_)));
        let others = begun(&[("w0", stale()), ("w1", Begun::Well)]);
        assert!(matches!(judge_begun(&others, true, 10), Verdict::Blame(_)));
    }

    #[test]
    fn what_nobody_can_do_is_the_file_systems() {
        let full = || Begun::Unwritable("No space left on device".to_owned());
        let verdict = judge_begun(&begun(&[("w0", full()), ("w1", full())]), false, 10);
        let Verdict::Undecided(text) = verdict else { panic!("{verdict:?}") };
        assert_eq!(text, "worker w0: it cannot write into the run directory: No space left on device");
        let deaf = begun(&[("w0", Begun::Deaf("10.0.0.1: not here".to_owned()))]);
        assert!(matches!(judge_begun(&deaf, false, 10), Verdict::Blame(_)), "its address is its own");
    }

    #[test]
    fn of_pairs_that_fail_the_worker_in_most_of_them_is_to_blame() {
        assert_eq!(judge_pairs(&[]), Verdict::Pass);
        let verdict = judge_pairs(&failed(&[("w0", "w2"), ("w1", "w2"), ("w2", "w0")]));
        let Verdict::Blame(blamed) = verdict else { panic!("{verdict:?}") };
        assert_eq!(
            blamed["w2"],
            "it is in 2 pairs of workers that fail: w0 cannot reach w2; w1 cannot reach w2; w2 cannot reach w0"
        );
        assert_eq!(blamed.len(), 1);
    }

    #[test]
    fn one_pair_names_both_and_blames_nobody() {
        let both = judge_pairs(&failed(&[("w0", "w1"), ("w1", "w0")]));
        assert_eq!(both, Verdict::Undecided("w0 cannot reach w1".to_owned()));
        let two = judge_pairs(&failed(&[("w0", "w1"), ("w2", "w3")]));
        assert_eq!(two, Verdict::Undecided("w0 cannot reach w1 (and 1 more pairs)".to_owned()));
    }
}
