//! May this spec run in this run directory, and from where?
//!
//! "Running again is resuming": a directory that holds commits is continued from LATEST, unless the resolved spec differs
//! in a key that a resume may not change. Nothing is ever overwritten.

use std::fmt;

use trainctl_spec::start::Keep;

/// What the run directory holds, gathered before the decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// The directory exists and is not empty (its control folder aside).
    pub not_empty: bool,
    /// Zero-based step and name of each committed checkpoint, in step order (C1).
    pub commits: Vec<(u64, String)>,
    /// Name that LATEST resolves to.
    pub latest: Option<String>,
    /// Directories that look like checkpoints and have no valid manifest, each with what is wrong with it.
    pub uncommitted: Vec<String>,
    /// A job of this coordinator that is still alive in the directory.
    pub live_job: Option<String>,
    /// Keys that a resume may not change and that differ, one line each.
    pub forbidden: Vec<String>,
    /// The checkpoint of another run that this one begins with while it has no commit of its own.
    pub begins: Option<Begins>,
}

/// A checkpoint of another run.
#[derive(Clone, Debug, PartialEq)]
pub struct Begins {
    /// The checkpoint as people write it.
    pub parent: String,
    /// What is kept of it.
    pub keep: Keep,
    /// First zero-based step, or every reason why the run cannot begin so.
    pub outcome: Result<u64, Vec<String>>,
}

/// What was asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked {
    /// Empty, `LATEST`, `LOWEST_VAL` or a checkpoint's name.
    pub from: String,
    /// Refuse a directory that holds anything.
    pub fresh: bool,
    /// Steps done at which this job ends: `until_step`, else `max_steps`.
    pub stop_at: u64,
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
    AlreadyFinished {
        /// Steps done.
        steps_done: u64,
        /// Newest checkpoint.
        latest: String,
    },
    /// Refused: nothing was changed.
    Refuse(Refusal),
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
        latest: String,
        /// Zero-based step of that checkpoint.
        step: u64,
    },
    /// Starts where the person said.
    AsAsked {
        /// Selector as typed.
        from: String,
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
    /// Something was asked to be resumed and there is no commit (C5).
    NothingCommitted {
        /// Selector as typed.
        from: String,
        /// Directories without a valid manifest.
        uncommitted: Vec<String>,
    },
    /// The run cannot begin with the checkpoint that it names.
    CannotBegin {
        /// The checkpoint as people write it.
        parent: String,
        /// Why not.
        reasons: Vec<String>,
    },
}

/// Decides on a submission.
pub fn decide_admission(found: &Found, asked: &Asked) -> Admission {
    if let Some(job) = &found.live_job {
        return Admission::Refuse(Refusal::LiveJob(job.clone()));
    }
    if asked.fresh && found.not_empty {
        return Admission::Refuse(Refusal::NotEmpty);
    }
    let Some((last_step, last_name)) = found.commits.last() else {
        // C5: directories without a single valid manifest are never silently started over.
        if !asked.from.is_empty() || !found.uncommitted.is_empty() {
            let uncommitted = found.uncommitted.clone();
            return Admission::Refuse(Refusal::NothingCommitted { from: asked.from.clone(), uncommitted });
        }
        let reason = match &found.begins {
            Some(Begins { parent, outcome: Err(reasons), .. }) => {
                let (parent, reasons) = (parent.clone(), reasons.clone());
                return Admission::Refuse(Refusal::CannotBegin { parent, reasons });
            }
            Some(Begins { parent, keep, outcome: Ok(start_step) }) => {
                Reason::Begins { parent: parent.clone(), keep: *keep, start_step: *start_step }
            }
            None if found.not_empty => Reason::NoCommits,
            None => Reason::NewRun,
        };
        return Admission::Admit { from: String::new(), reason };
    };
    if !found.forbidden.is_empty() {
        return Admission::Refuse(Refusal::Differs(found.forbidden.clone()));
    }
    if asked.from.is_empty() || asked.from == "LATEST" {
        if last_step + 1 >= asked.stop_at {
            return Admission::AlreadyFinished { steps_done: last_step + 1, latest: last_name.clone() };
        }
        let reason = Reason::Continues { latest: last_name.clone(), step: *last_step };
        return Admission::Admit { from: "LATEST".to_owned(), reason };
    }
    Admission::Admit { from: asked.from.clone(), reason: Reason::AsAsked { from: asked.from.clone() } }
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
            Self::AsAsked { from } => write!(f, "starts from {from}"),
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
            Self::NothingCommitted { from, uncommitted } => {
                let asked = if from.is_empty() { "LATEST" } else { from };
                write!(f, "cannot start from {asked}: ")?;
                if uncommitted.is_empty() {
                    return write!(f, "there is no committed checkpoint; leave out --from to start from step 0");
                }
                let found = uncommitted.join(", ");
                write!(f, "there are checkpoint directories, but none is committed: {found}; ")?;
                write!(f, "remove or move them, or name another run directory")
            }
            Self::CannotBegin { parent, reasons } => {
                write!(f, "the run cannot begin with {parent}:")?;
                reasons.iter().try_for_each(|reason| write!(f, "\n  {reason}"))
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

    fn with_commits(steps: &[u64]) -> Found {
        let commits: Vec<_> = steps.iter().map(|s| (*s, format!("epoch_0_step_{s}"))).collect();
        let latest = commits.last().map(|(_, name)| name.clone());
        Found { not_empty: true, commits, latest, ..Found::default() }
    }

    fn ask(from: &str, stop_at: u64) -> Asked {
        Asked { from: from.to_owned(), fresh: false, stop_at }
    }

    #[test]
    fn an_empty_directory_starts_a_new_run() {
        let got = decide_admission(&Found::default(), &ask("", 40));
        assert_eq!(got, Admission::Admit { from: String::new(), reason: Reason::NewRun });
    }

    #[test]
    fn logs_without_a_commit_start_over_and_say_so() {
        let found = Found { not_empty: true, ..Found::default() };
        let got = decide_admission(&found, &ask("", 40));
        assert_eq!(got, Admission::Admit { from: String::new(), reason: Reason::NoCommits });
    }

    #[test]
    fn commits_are_continued_from_latest() {
        let Admission::Admit { from, reason } = decide_admission(&with_commits(&[9, 999]), &ask("", 2000)) else {
            panic!("not admitted")
        };
        assert_eq!(from, "LATEST");
        assert_eq!(reason.to_string(), "continues from epoch_0_step_999 (after 1,000 steps)");
    }

    #[test]
    fn a_finished_run_is_said_to_be_finished_unless_the_end_moved() {
        let found = with_commits(&[19, 39]);
        let done = decide_admission(&found, &ask("", 40));
        assert_eq!(done, Admission::AlreadyFinished { steps_done: 40, latest: "epoch_0_step_39".to_owned() });
        assert!(matches!(decide_admission(&found, &ask("", 41)), Admission::Admit { .. }));
        assert!(matches!(decide_admission(&found, &ask("LOWEST_VAL", 40)), Admission::Admit { .. }));
    }

    #[test]
    fn c5_directories_without_a_manifest_are_listed_and_refused() {
        let found = Found { not_empty: true, uncommitted: vec!["epoch_0_step_9".to_owned()], ..Found::default() };
        let Admission::Refuse(refusal) = decide_admission(&found, &ask("", 40)) else { panic!("admitted") };
        assert!(refusal.to_string().contains("epoch_0_step_9"), "{refusal}");
    }

    #[test]
    fn c5_a_damaged_manifest_is_refused_with_what_is_wrong_and_what_to_do() {
        let damaged = "epoch_0_step_9 (its manifest is damaged)".to_owned();
        let found = Found { not_empty: true, uncommitted: vec![damaged.clone()], ..Found::default() };
        let Admission::Refuse(refusal) = decide_admission(&found, &ask("", 40)) else { panic!("admitted") };
        let text = refusal.to_string();
        assert!(text.contains(&damaged) && text.contains("remove or move them"), "{text}");
    }

    #[test]
    fn a_run_without_commits_begins_with_its_parent_or_is_refused_with_every_reason() {
        let begins =
            |outcome| Some(Begins { parent: "/runs/a/epoch_0_step_9".to_owned(), keep: Keep::WEIGHTS, outcome });
        let found = Found { not_empty: true, begins: begins(Ok(0)), ..Found::default() };
        let Admission::Admit { from, reason } = decide_admission(&found, &ask("", 40)) else { panic!("not admitted") };
        assert_eq!(
            (from.as_str(), reason.to_string()),
            ("", "begins with /runs/a/epoch_0_step_9, keeps weights, first step 0".to_owned())
        );
        let found = Found { begins: begins(Err(vec!["one".to_owned(), "two".to_owned()])), ..Found::default() };
        let Admission::Refuse(refusal) = decide_admission(&found, &ask("", 40)) else { panic!("admitted") };
        assert_eq!(refusal.to_string(), "the run cannot begin with /runs/a/epoch_0_step_9:\n  one\n  two");
        // A commit of its own counts more, whatever became of the parent.
        let found = Found { begins: begins(Err(vec!["gone".to_owned()])), ..with_commits(&[9]) };
        assert!(matches!(decide_admission(&found, &ask("", 40)), Admission::Admit { .. }));
    }

    #[test]
    fn refusals_come_in_order_of_what_would_be_lost() {
        let mut found = with_commits(&[9]);
        found.forbidden = vec!["seed: 1 → 2".to_owned()];
        assert!(matches!(decide_admission(&found, &ask("", 40)), Admission::Refuse(Refusal::Differs(_))));
        let fresh = Asked { fresh: true, ..ask("", 40) };
        assert_eq!(decide_admission(&found, &fresh), Admission::Refuse(Refusal::NotEmpty));
        found.live_job = Some("a-1".to_owned());
        assert!(matches!(decide_admission(&found, &fresh), Admission::Refuse(Refusal::LiveJob(_))));
    }

    #[test]
    fn counts_are_written_as_people_write_them() {
        assert_eq!([0, 999, 1000, 18_500, 1_234_567].map(people), ["0", "999", "1,000", "18,500", "1,234,567"]);
    }
}
