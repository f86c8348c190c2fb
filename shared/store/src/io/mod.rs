//! The one module through which every mutating call goes (C3).
//!
//! [`Disk`] does the work on a POSIX directory and blocks; [`Io`] is the same for async code, each call on tokio's
//! blocking pool. Every mutating call names a [`FailPoint`].

mod calls;
mod disk;
mod reader;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use disk::{Created, Disk, Entry, FileWriter, Kind};
pub use reader::FileReader;

use crate::error::{Error, Result};
use crate::fault::{FailPoint, Faults};

/// A directory of keys, for async code. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Io {
    disk: Arc<Disk>,
}

impl Io {
    /// A directory that exists or will be made by the first write; faults come from the environment.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_faults(root, Faults::from_env())
    }

    /// The same with given faults.
    pub fn with_faults(root: impl Into<PathBuf>, faults: Arc<Faults>) -> Self {
        Self { disk: Arc::new(Disk::with_faults(root, faults)) }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        self.disk.root()
    }

    /// The blocking form.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Runs file work off the async threads.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Stopped`] if the runtime shuts down meanwhile.
    pub async fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Disk) -> Result<T> + Send + 'static,
    {
        let disk = Arc::clone(&self.disk);
        match tokio::task::spawn_blocking(move || work(&disk)).await {
            Ok(result) => result,
            Err(stopped) => Err(Error::Stopped(stopped.to_string())),
        }
    }

    /// [`Disk::read`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let key = key.to_owned();
        self.run(move |disk| disk.read(&key)).await
    }

    /// [`Disk::size`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn size(&self, key: &str) -> Result<Option<u64>> {
        let key = key.to_owned();
        self.run(move |disk| disk.size(&key)).await
    }

    /// [`Disk::list`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn list(&self, key: &str) -> Result<Vec<Entry>> {
        let key = key.to_owned();
        self.run(move |disk| disk.list(&key)).await
    }

    /// [`Disk::read_link`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn read_link(&self, key: &str) -> Result<Option<String>> {
        let key = key.to_owned();
        self.run(move |disk| disk.read_link(&key)).await
    }

    /// [`Disk::make_dir`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn make_dir(&self, key: &str) -> Result<()> {
        let key = key.to_owned();
        self.run(move |disk| disk.make_dir(&key)).await
    }

    /// [`Disk::create_if_absent`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn create_if_absent(&self, key: &str, bytes: Vec<u8>, point: FailPoint) -> Result<Created> {
        let key = key.to_owned();
        self.run(move |disk| disk.create_if_absent(&key, &bytes, point)).await
    }

    /// [`Disk::put_durable`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn put_durable(&self, key: &str, bytes: Vec<u8>, point: FailPoint) -> Result<()> {
        let key = key.to_owned();
        self.run(move |disk| disk.put_durable(&key, &bytes, point)).await
    }

    /// [`Disk::swap_symlink`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn swap_symlink(&self, key: &str, target: &str, point: FailPoint) -> Result<()> {
        let (key, target) = (key.to_owned(), target.to_owned());
        self.run(move |disk| disk.swap_symlink(&key, &target, point)).await
    }

    /// [`Disk::rename_dir`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn rename_dir(&self, from: &str, to: &str, point: FailPoint) -> Result<()> {
        let (from, to) = (from.to_owned(), to.to_owned());
        self.run(move |disk| disk.rename_dir(&from, &to, point)).await
    }

    /// [`Disk::remove_file`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn remove_file(&self, key: &str, point: FailPoint) -> Result<bool> {
        let key = key.to_owned();
        self.run(move |disk| disk.remove_file(&key, point)).await
    }

    /// [`Disk::remove_tree`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn remove_tree(&self, key: &str, point: FailPoint) -> Result<bool> {
        let key = key.to_owned();
        self.run(move |disk| disk.remove_tree(&key, point)).await
    }

    /// [`Disk::sync_dir`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub async fn sync_dir(&self, key: &str, point: FailPoint) -> Result<()> {
        let key = key.to_owned();
        self.run(move |disk| disk.sync_dir(&key, point)).await
    }
}
