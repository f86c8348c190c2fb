//! Faults of a job spec: each says where, which key, what value, and what is allowed (P8).
//!
//! Nothing here stops at the first fault: parsing, resolving and checking collect them, so that a person repairs a spec
//! once and not once a fault.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// Where a value came from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A place in the spec's file.
    At {
        /// 1-based.
        line: usize,
        /// 1-based, in characters.
        column: usize,
    },
    /// An override on the command line, as it was typed: `--set optimizer.lr=abc`.
    Override(String),
    /// Nobody wrote it: a default, or a spec that came over the wire.
    #[default]
    Nowhere,
}

/// Whether a fault stops the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The job does not start.
    Error,
    /// The job starts; a person should know.
    Warning,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// The spec's file as the caller named it.
    pub file: String,
    /// Where in it, or which override.
    pub origin: Origin,
    /// Key path, for example `step_scheduler.max_steps`; empty when the fault is the file's.
    pub key: String,
    /// The offending value as written; absent for a missing or unknown key.
    pub value: Option<String>,
    /// What is wrong with it and what is allowed.
    pub message: String,
    /// Whether it stops the job.
    pub severity: Severity,
}

impl fmt::Display for Fault {
    /// `job.yaml:12: step_scheduler.global_batch_size: -4: must be a whole number ≥ 1`; an override takes the place of
    /// file and line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::At { line, .. } => write!(f, "{}:{line}: ", self.file)?,
            Origin::Override(text) => write!(f, "{text}: ")?,
            Origin::Nowhere => write!(f, "{}: ", self.file)?,
        }
        if self.severity == Severity::Warning {
            f.write_str("warning: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        if let Some(value) = &self.value {
            write!(f, "{value}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// All faults of a spec, errors first, each kind in the order of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Faults(pub Vec<Fault>);

impl Faults {
    /// Whether there is none, not even a warning.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether any of them stops the job.
    #[must_use]
    pub fn has_errors(&self) -> bool {
        self.errors().next().is_some()
    }

    /// Those that stop the job.
    pub fn errors(&self) -> impl Iterator<Item = &Fault> {
        self.0.iter().filter(|fault| fault.severity == Severity::Error)
    }

    /// Those that do not.
    pub fn warnings(&self) -> impl Iterator<Item = &Fault> {
        self.0.iter().filter(|fault| fault.severity == Severity::Warning)
    }

    /// Adds those of another stage and puts all in order.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
        self.sort();
    }

    /// Errors before warnings, then by place; faults without a place keep their order at the end.
    pub fn sort(&mut self) {
        self.0.sort_by_key(|fault| {
            let place = match fault.origin {
                Origin::At { line, column } => (0, line, column),
                Origin::Override(_) => (1, 0, 0),
                Origin::Nowhere => (2, 0, 0),
            };
            (fault.severity, place)
        });
    }

    /// Keeps the first fault of each key at each place: what follows from it says nothing new.
    pub(crate) fn keep_first_of_each_key(&mut self) {
        let mut kept: Vec<Fault> = Vec::new();
        for fault in self.0.drain(..) {
            let repeats = !fault.key.is_empty()
                && kept.iter().any(|other| other.key == fault.key && other.origin == fault.origin);
            if !repeats {
                kept.push(fault);
            }
        }
        self.0 = kept;
    }

    /// `Ok` with what did not stop the job.
    ///
    /// # Errors
    /// All faults, when one of them is an error.
    pub fn into_result<T>(self, value: T) -> Result<(T, Self), Self> {
        if self.has_errors() { Err(self) } else { Ok((value, self)) }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            fault.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// Where each key of a parsed spec was written, so that later rules can point back at it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    /// The spec's file as the caller named it.
    pub file: String,
    by_key: BTreeMap<String, Origin>,
}

impl Spans {
    /// A table without places, for a spec that came over the wire.
    #[must_use]
    pub fn nowhere(file: impl Into<String>) -> Self {
        Self { file: file.into(), by_key: BTreeMap::new() }
    }

    pub(crate) fn insert(&mut self, key: String, origin: Origin) {
        self.by_key.insert(key, origin);
    }

    /// Whether the key itself was written.
    #[must_use]
    pub fn is_written(&self, key: &str) -> bool {
        self.by_key.contains_key(key)
    }

    /// Where the key, or else its nearest written parent, stands.
    #[must_use]
    pub fn origin(&self, key: &str) -> Origin {
        let mut key = key;
        loop {
            if let Some(origin) = self.by_key.get(key) {
                return origin.clone();
            }
            match key.rfind(['.', '[']) {
                Some(end) => key = &key[..end],
                None => return Origin::Nowhere,
            }
        }
    }

    /// An error at a key.
    #[must_use]
    pub fn error(&self, key: &str, value: impl fmt::Display, message: impl Into<String>) -> Fault {
        self.fault(Severity::Error, key, value, message)
    }

    /// A warning at a key.
    #[must_use]
    pub fn warning(&self, key: &str, value: impl fmt::Display, message: impl Into<String>) -> Fault {
        self.fault(Severity::Warning, key, value, message)
    }

    fn fault(&self, severity: Severity, key: &str, value: impl fmt::Display, message: impl Into<String>) -> Fault {
        let value = value.to_string();
        Fault {
            file: self.file.clone(),
            origin: self.origin(key),
            key: key.to_owned(),
            value: (!value.is_empty()).then_some(value),
            message: message.into(),
            severity,
        }
    }
}
