//! The rule. "Running again is resuming": a directory that holds commits is continued from LATEST, unless the resolved spec
//! differs in a key that a resume may not change. Nothing is ever overwritten.

use std::fmt;

use trainctl_spec::JobSpec;
use trainctl_spec::start::Keep;

use super::Asked;
use crate::layout::CheckpointName;

/// What the run directory and the place of its checkpoints hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The directory exists and is not empty (`control/` and `logs/` aside).
    pub not_empty: bool,
    /// What the run would start from.
    pub start: Start,
}

/// What a run would start from.
#[derive(Clone, Debug, PartialEq)]
pub enum Start {
    /// There is no checkpoint, and none was asked for.
    Nothing {
        /// The checkpoint of another run that this one begins with.
        begins: Option<Begins>,
    },
    /// One of its own checkpoints.
    Checkpoint {
        /// Its name.
        name: CheckpointName,
        /// Its zero-based step.
        step: u64,
        /// Keys that a resume may not change and that differ, one line each.
        forbidden: Vec<String>,
    },
    /// What was asked for is not there, or nothing that is there was ever committed (C5): why.
    Missing(String),
}

/// A checkpoint of another run.
#[derive(Clone, Debug, PartialEq)]
pub struct Begins {
    /// The checkpoint as people write it.
    pub parent: String,
    /// What is kept of it and the first zero-based step, or every reason why the run cannot begin so.
    pub outcome: Result<(Keep, u64), Vec<String>>,
}

/// The decision.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// Queue the job. `from` names what its first generation starts from; empty = from scratch.
    Admit {
        /// `LATEST`, `LOWEST_VAL`, a name, or empty.
        from: String,
        /// One line for the person who asked.
        reason: Reason,
    },
    /// The run has done all that was asked.
    AlreadyFinished(Finished),
    /// Refused: nothing was changed.
    Refuse(Refusal),
}

/// A run that has done all that was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Steps done.
    pub steps_done: u64,
    /// `step_scheduler.max_steps`.
    pub max_steps: u64,
    /// Newest checkpoint.
    pub latest: CheckpointName,
}

/// Why a job was admitted the way it was.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// An empty directory.
    NewRun,
    /// There are logs, but nothing was ever committed.
    NoCommits,
    /// Begins with another run's checkpoint.
    Begins {
        /// The checkpoint as people write it.
        parent: String,
        /// What is kept of it.
        keep: Keep,
        /// First zero-based step.
        start_step: u64,
    },
    /// Continues from the newest commit.
    Continues {
        /// Checkpoint's name.
        latest: CheckpointName,
        /// Zero-based step of that checkpoint.
        step: u64,
    },
    /// Starts where the person said.
    AsAsked {
        /// Selector as typed.
        from: String,
        /// The checkpoint.
        name: CheckpointName,
        /// Its zero-based step.
        step: u64,
    },
}

/// Why a job was refused.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// `--fresh` and the directory holds something.
    NotEmpty,
    /// Another job lives in the directory.
    LiveJob(String),
    /// The spec differs in keys that need a fork.
    Differs(Vec<String>),
    /// What was asked for is not there (C5): why.
    Missing {
        /// Selector as typed.
        from: String,
        /// Why.
        reason: String,
    },
    /// The run cannot begin with the checkpoint that it names.
    CannotBegin {
        /// The checkpoint as people write it.
        parent: String,
        /// Why not.
        reasons: Vec<String>,
    },
    /// The start that was asked for lies at or beyond the job's end: what is later would be retired for nothing.
    NothingToDo {
        /// Selector as typed.
        from: String,
        /// The checkpoint.
        name: CheckpointName,
        /// Steps done there.
        steps_done: u64,
        /// Steps done at which the job would end.
        stop_at: u64,
    },
}

/// Decides on a submission of `spec`.
pub fn decide(found: &Found, asked: &Asked, spec: &JobSpec) -> Admission {
    decide_until(found, asked, asked.stop_at(spec), spec.step_scheduler.max_steps)
}

/// The same, of all the spec's keys, by those that count.
fn decide_until(found: &Found, asked: &Asked, stop_at: u64, max_steps: u64) -> Admission {
    let from = asked.from.clone();
    let has_commits = matches!(found.start, Start::Checkpoint { .. });
    if asked.fresh && (found.not_empty || has_commits) {
        return Admission::Refuse(Refusal::NotEmpty);
    }
    match &found.start {
        // C5: directories without a single valid manifest are never silently started over.
        Start::Missing(reason) => Admission::Refuse(Refusal::Missing { from, reason: reason.clone() }),
        Start::Nothing { begins } => {
            let reason = match begins {
                Some(Begins { parent, outcome: Err(reasons) }) => {
                    let (parent, reasons) = (parent.clone(), reasons.clone());
                    return Admission::Refuse(Refusal::CannotBegin { parent, reasons });
                }
                Some(Begins { parent, outcome: Ok((keep, start_step)) }) => {
                    Reason::Begins { parent: parent.clone(), keep: *keep, start_step: *start_step }
                }
                None if found.not_empty => Reason::NoCommits,
                None => Reason::NewRun,
            };
            Admission::Admit { from: String::new(), reason }
        }
        Start::Checkpoint { forbidden, .. } if !forbidden.is_empty() => {
            Admission::Refuse(Refusal::Differs(forbidden.clone()))
        }
        Start::Checkpoint { name, step, .. } => {
            let (name, steps_done) = (*name, step + 1);
            match (asked.is_latest(), steps_done >= stop_at) {
                (true, true) => Admission::AlreadyFinished(Finished { steps_done, max_steps, latest: name }),
                (false, true) => Admission::Refuse(Refusal::NothingToDo { from, name, steps_done, stop_at }),
                (true, false) => {
                    // An older one than asked for is what the formation must find too.
                    let from = if asked.allow_older { name.to_string() } else { crate::layout::LATEST.to_owned() };
                    Admission::Admit { from, reason: Reason::Continues { latest: name, step: *step } }
                }
                (false, false) => {
                    let reason = Reason::AsAsked { from: from.clone(), name, step: *step };
                    Admission::Admit { from: if asked.allow_older { name.to_string() } else { from }, reason }
                }
            }
        }
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps_done, max_steps, latest } = self;
        write!(f, "this run has done {} steps already: LATEST is {latest}", people(*steps_done))?;
        if steps_done < max_steps {
            write!(f, "; --until-step or leaving it out goes on to {}", people(*max_steps))?;
        }
        Ok(())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NewRun => write!(f, "starts a new run"),
            Self::NoCommits => {
                write!(f, "the run directory has logs but no checkpoint: starts at step 0 in the next generation")
            }
            Self::Begins { parent, keep, start_step } => {
                write!(f, "begins with {parent}, keeps {keep}, first step {}", people(*start_step))
            }
            Self::Continues { latest, step } => write!(f, "continues from {latest} (after {} steps)", people(step + 1)),
            Self::AsAsked { from, name, step } => {
                write!(f, "starts from {from}")?;
                if *from != name.to_string() {
                    write!(f, ": {name}")?;
                }
                write!(f, " (after {} steps)", people(step + 1))
            }
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEmpty => write!(
                f,
                "--fresh takes an empty directory only, and this one holds a run; leave out --fresh to continue it or name another --run-dir"
            ),
            Self::LiveJob(job) => {
                write!(f, "job {job} is still running in this directory; `trainctl cancel {job}` stops it")
            }
            Self::Differs(keys) => {
                write!(f, "the spec differs from the run's in keys that a resume may not change:")?;
                for key in keys {
                    write!(f, "\n  {key}")?;
                }
                write!(f, "\nset them back, or begin another run with this one's weights: `trainctl fork`")
            }
            Self::Missing { from, reason } => {
                write!(f, "cannot start from {}: {reason}", if from.is_empty() { "LATEST" } else { from })
            }
            Self::CannotBegin { parent, reasons } => {
                write!(f, "the run cannot begin with {parent}:")?;
                reasons.iter().try_for_each(|reason| write!(f, "\n  {reason}"))
            }
            Self::NothingToDo { from, name, steps_done, stop_at } => {
                write!(f, "--from {from} is {name}, where {} steps are done, ", people(*steps_done))?;
                write!(
                    f,
                    "and the job is to end after {}: there is nothing to do, and what is later ",
                    people(*stop_at)
                )?;
                write!(f, "would be retired; name an earlier checkpoint or a higher --until-step (max_steps)")
            }
        }
    }
}

/// A count as people write it: 18,500.
pub fn people(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64) -> Found {
        let name = CheckpointName { epoch: 0, step };
        Found { not_empty: true, start: Start::Checkpoint { name, step, forbidden: Vec::new() } }
    }

    fn nothing(not_empty: bool, begins: Option<Begins>) -> Found {
        Found { not_empty, start: Start::Nothing { begins } }
    }

    fn ask(from: &str) -> Asked {
        Asked { from: from.to_owned(), ..Asked::default() }
    }

    fn decided(found: &Found, asked: &Asked, stop_at: u64) -> Admission {
        decide_until(found, asked, stop_at, 2000)
    }

    fn refusal(found: &Found, asked: &Asked, stop_at: u64) -> Refusal {
        match decided(found, asked, stop_at) {
            Admission::Refuse(refusal) => refusal,
            other => panic!("{other:?}"),
        }
    }

    fn admitted(found: &Found, asked: &Asked, stop_at: u64) -> (String, String) {
        match decided(found, asked, stop_at) {
            Admission::Admit { from, reason } => (from, reason.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_empty_directory_starts_a_new_run() {
        let got = decided(&nothing(false, None), &ask(""), 40);
        assert_eq!(got, Admission::Admit { from: String::new(), reason: Reason::NewRun });
    }

    #[test]
    fn logs_without_a_commit_start_over_and_say_so() {
        let got = decided(&nothing(true, None), &ask(""), 40);
        assert_eq!(got, Admission::Admit { from: String::new(), reason: Reason::NoCommits });
    }

    #[test]
    fn commits_are_continued_from_latest() {
        let (from, reason) = admitted(&at(999), &ask(""), 2000);
        assert_eq!((from.as_str(), reason.as_str()), ("LATEST", "continues from epoch_0_step_999 (after 1,000 steps)"));
        let (from, reason) = admitted(&at(9), &ask("LOWEST_VAL"), 2000);
        let want = ("LOWEST_VAL", "starts from LOWEST_VAL: epoch_0_step_9 (after 10 steps)");
        assert_eq!((from.as_str(), reason.as_str()), want);
        let older = Asked { allow_older: true, ..ask("LATEST") };
        assert_eq!(admitted(&at(9), &older, 2000).0, "epoch_0_step_9", "the one that was found, not the damaged one");
    }

    #[test]
    fn a_finished_run_is_said_to_be_finished_unless_the_end_moved() {
        let latest = CheckpointName { epoch: 0, step: 39 };
        let finished = Finished { steps_done: 40, max_steps: 2000, latest };
        assert_eq!(decided(&at(39), &ask("LATEST"), 40), Admission::AlreadyFinished(finished));
        assert!(matches!(decided(&at(39), &ask(""), 41), Admission::Admit { .. }));
    }

    #[test]
    fn a_start_at_or_beyond_the_end_is_refused_before_anything_is_retired() {
        let text = refusal(&at(39), &ask("epoch_0_step_39"), 25).to_string();
        for part in ["epoch_0_step_39", "40 steps are done", "end after 25", "--until-step"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(matches!(refusal(&at(39), &ask("LOWEST_VAL"), 40), Refusal::NothingToDo { .. }));
        assert_eq!(admitted(&at(39), &ask("LOWEST_VAL"), 41).0, "LOWEST_VAL");
    }

    #[test]
    fn c5_what_is_not_there_is_refused_with_the_reason() {
        let found = Found { not_empty: true, start: Start::Missing("epoch_0_step_9 (no manifest)".to_owned()) };
        let text = refusal(&found, &ask(""), 40).to_string();
        assert!(text.contains("LATEST") && text.contains("epoch_0_step_9 (no manifest)"), "{text}");
    }

    #[test]
    fn a_run_without_commits_begins_with_its_parent_or_is_refused_with_every_reason() {
        let begins = |outcome| Some(Begins { parent: "/runs/a/epoch_0_step_9".to_owned(), outcome });
        let (from, reason) = admitted(&nothing(true, begins(Ok((Keep::WEIGHTS, 0)))), &ask(""), 40);
        let want = ("", "begins with /runs/a/epoch_0_step_9, keeps weights, first step 0");
        assert_eq!((from.as_str(), reason.as_str()), want);
        let reasons = vec!["one".to_owned(), "two".to_owned()];
        let text = refusal(&nothing(false, begins(Err(reasons))), &ask(""), 40).to_string();
        assert_eq!(text, "the run cannot begin with /runs/a/epoch_0_step_9:\n  one\n  two");
    }

    #[test]
    fn refusals_come_in_order_of_what_would_be_lost() {
        let mut found = at(9);
        if let Start::Checkpoint { forbidden, .. } = &mut found.start {
            forbidden.push("seed: 1 → 2".to_owned());
        }
        assert!(matches!(refusal(&found, &ask(""), 5), Refusal::Differs(_)));
        let fresh = Asked { fresh: true, ..ask("") };
        assert_eq!(refusal(&found, &fresh, 40), Refusal::NotEmpty);
        let elsewhere = Found { not_empty: false, ..at(9) };
        assert_eq!(refusal(&elsewhere, &fresh, 40), Refusal::NotEmpty, "its checkpoints lie in another place");
    }

    #[test]
    fn counts_are_written_as_people_write_them() {
        assert_eq!([0, 999, 1000, 18_500, 1_234_567].map(people), ["0", "999", "1,000", "18,500", "1,234,567"]);
    }
}
