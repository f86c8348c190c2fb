//! One job: what is wanted of it and what is seen.

use std::collections::BTreeMap;
use std::time::Duration;

use trainctl_proto::v1;
use trainctl_spec::JobSpec;
use trainctl_spec::report::{SaveKind, TrainRow, ValidationRow};

use super::followers::Followers;
use super::live::Live;
use super::probes::Probing;
use crate::record::{End, JobRecord};

/// One job.
#[derive(Debug)]
pub struct Job {
    /// What is wanted, as journaled.
    pub record: JobRecord,
    /// The resolved spec.
    pub spec: JobSpec,
    /// What is seen of the current generation; absent before the first.
    pub live: Option<Live>,
    /// Not before this may the next generation form.
    pub form_after: Duration,
    /// A formation's run-directory work is under way.
    pub preparing: bool,
    /// What LATEST and LOWEST_VAL name; empty = nothing.
    pub pointers: (String, String),
    /// The run directory's task has said what the directory holds. Until then an adopted job does not end: its end needs the
    /// newest checkpoint.
    pub is_known: bool,
    /// First and last training row and last validation row.
    pub rows: Rows,
    /// Why it waits, for people; empty when it does not.
    pub waiting: String,
    /// What is wrong with its saves of a kind, for people, until the next commit of that kind.
    pub save_trouble: BTreeMap<SaveKind, String>,
    /// The last commit and what it cost.
    pub last_save: Option<v1::SaveSummary>,
    /// Exports and commands under way.
    pub followers: Followers,
    /// Which workers have proved that they see its run directory and reach each other.
    pub probing: Probing,
}

impl Job {
    /// A job that waits, or with `live` one that was adopted.
    pub(super) fn new(record: JobRecord, spec: JobSpec, live: Option<Live>, now: Duration) -> Self {
        Self {
            record,
            spec,
            live,
            form_after: now,
            preparing: false,
            pointers: Default::default(),
            is_known: false,
            rows: Rows::default(),
            waiting: String::new(),
            save_trouble: BTreeMap::new(),
            last_save: None,
            followers: Followers::default(),
            probing: Probing::default(),
        }
    }

    /// What is shown of it after its end.
    pub(super) fn end(&self) -> End {
        let Rows { first, last, validation } = self.rows.clone();
        let validation = validation.map(|row| (row.name.clone(), row));
        End { pointers: self.pointers.clone(), first, last, validation }
    }

    /// Shows an end that the journal has.
    pub(super) fn show(&mut self, end: End) {
        self.pointers = end.pointers;
        let validation = end.validation.map(|(name, row)| ValidationRow { name, ..row });
        self.rows = Rows { first: end.first, last: end.last, validation };
    }
}

/// Rows that a summary shows.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    /// First row of the run.
    pub first: Option<TrainRow>,
    /// Newest row.
    pub last: Option<TrainRow>,
    /// Newest validation row.
    pub validation: Option<ValidationRow>,
}
