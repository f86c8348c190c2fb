//! The `.jsonl` files of one run directory, which only its task writes. It writes them by plain calls: the task has a thread of
//! its own, so that a file system that hangs holds up that run alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tracing::{error, info};
use trainctl_spec::Generation;
use trainctl_spec::report::{TrainRow, ValidationRow};
use trainctl_store::rows::{Order, RowFile, parse_rows};
use trainctl_store::{Error, Fence, RunDir};

use crate::events::Entry;

/// All row files of a run.
pub struct Rows {
    run_dir: RunDir,
    training: Slot,
    validations: BTreeMap<String, Slot>,
    events: Slot,
}

/// One file, opened when it is first needed, so that a full disk at the start is waited out like any other.
struct Slot {
    path: PathBuf,
    order: Order,
    fence: Arc<dyn Fence>,
    file: Option<RowFile>,
}

impl Slot {
    fn new(path: PathBuf, order: Order, fence: &Arc<dyn Fence>) -> Self {
        Self { path, order, fence: fence.clone(), file: None }
    }

    fn open(&mut self) -> Result<&mut RowFile, Error> {
        match &mut self.file {
            Some(file) => Ok(file),
            empty => Ok(empty.insert(RowFile::open_fenced(&self.path, self.order, self.fence.clone())?)),
        }
    }

    /// Appends a row however long it takes: rows are the last thing that is dropped (P5).
    ///
    /// # Errors
    /// [`Error::Superseded`]: the file is another holder's.
    async fn append<T: Serialize + Sync>(&mut self, row: &T, retry: Duration) -> Result<(), Error> {
        loop {
            match self.open().and_then(|file| file.append(row)) {
                Ok(_) => return Ok(()),
                Err(error @ Error::Io { .. }) => {
                    error!(path = %self.path.display(), %error, "a row cannot be written: trying again");
                    tokio::time::sleep(retry).await;
                }
                Err(error @ Error::Superseded { .. }) => return Err(error),
                Err(error) => {
                    error!(path = %self.path.display(), %error, "a row that has no place here was left out");
                    return Ok(());
                }
            }
        }
    }

    async fn sync(&mut self, retry: Duration) {
        let Some(file) = &self.file else { return };
        while let Err(error) = file.sync() {
            error!(path = %self.path.display(), %error, "rows cannot be made durable: trying again");
            tokio::time::sleep(retry).await;
        }
    }
}

impl Rows {
    /// The files of a run with these validation sets.
    pub fn open<'a>(run_dir: &RunDir, validations: impl Iterator<Item = &'a String>, fence: &Arc<dyn Fence>) -> Self {
        let validation = |name: &String| (name.clone(), Slot::new(run_dir.validation_rows(name), Order::ByStep, fence));
        Self {
            training: Slot::new(run_dir.training_rows(), Order::ByStep, fence),
            validations: validations.map(validation).collect(),
            events: Slot::new(run_dir.events(), Order::AsAppended, fence),
            run_dir: run_dir.clone(),
        }
    }

    /// First and last training row and last validation row that the files hold.
    pub fn known(&self) -> (Option<TrainRow>, Option<TrainRow>, Option<ValidationRow>) {
        let train: Vec<TrainRow> = existing(&self.training.path);
        let validation = self.validations.iter().filter_map(|(name, slot)| {
            let last = existing::<ValidationRow>(&slot.path).pop()?;
            Some(ValidationRow { name: name.clone(), ..last })
        });
        (train.first().cloned(), train.last().cloned(), validation.max_by_key(|row| row.step))
    }

    /// Makes all rows durable.
    pub async fn sync(&mut self, retry: Duration) {
        for slot in std::iter::once(&mut self.training).chain(self.validations.values_mut()) {
            slot.sync(retry).await;
        }
    }

    /// Appends to `events.jsonl`.
    ///
    /// # Errors
    /// [`Error::Superseded`].
    pub async fn event(&mut self, entry: &Entry, retry: Duration) -> Result<(), Error> {
        self.events.append(&entry.to_json(), retry).await
    }

    /// Appends to `training.jsonl`, unless that step is there.
    ///
    /// # Errors
    /// [`Error::Superseded`].
    pub async fn train(&mut self, row: &TrainRow, retry: Duration) -> Result<(), Error> {
        self.training.append(row, retry).await
    }

    /// Appends to `validation[_name].jsonl`, unless that step is there.
    ///
    /// # Errors
    /// [`Error::Superseded`].
    pub async fn validation(&mut self, row: &ValidationRow, retry: Duration) -> Result<(), Error> {
        match self.validations.get_mut(&row.name) {
            Some(slot) => slot.append(row, retry).await,
            None => {
                error!(name = row.name, "a validation row of a set that the spec does not have was left out");
                Ok(())
            }
        }
    }

    /// Moves the rows after `step` (`None`: all) aside: the generation that starts there makes them again.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn cut_after(&mut self, step: Option<u64>, generation: Generation) -> Result<(), Error> {
        let abandoned = self.run_dir.abandoned(generation.0);
        for slot in std::iter::once(&mut self.training).chain(self.validations.values_mut()) {
            let Some(name) = slot.path.file_name().map(PathBuf::from) else { continue };
            let moved = slot.open()?.cut_after(step, abandoned.join(&name))?;
            if moved > 0 {
                info!(rows = moved, file = %name.display(), "moved rows of steps that are run again");
            }
        }
        Ok(())
    }
}

fn existing<T: serde::de::DeserializeOwned>(path: &std::path::Path) -> Vec<T> {
    if !path.exists() {
        return Vec::new();
    }
    parse_rows(path).unwrap_or_else(|error| {
        error!(path = %path.display(), %error, "rows cannot be read");
        Vec::new()
    })
}
