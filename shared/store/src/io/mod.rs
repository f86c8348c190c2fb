//! The one module through which every mutating call goes (C3).
//!
//! [`Disk`] does the work on a POSIX directory and [`Objects`] on a prefix of a bucket; [`Files`] is either, and all of them
//! block. [`Io`] is the same for async code, each call on tokio's blocking pool. Every mutating call names a [`FailPoint`].

mod calls;
mod disk;
mod files;
mod objects;
mod reader;
mod view;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use disk::{Created, Disk, Entry, FileWriter as DiskWriter, Kind};
pub(crate) use disk::{is_temporary, text_key};
pub use files::{FileWriter, Files};
pub(crate) use objects::UPLOAD_NOTE;
pub use objects::{ObjectReader, ObjectWriter, Objects};
pub use reader::FileReader;
pub use view::View;

use crate::error::{Error, Result};
use crate::fault::{FailPoint, Faults};
use crate::location::Location;

/// A place of keys, for async code. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Io {
    files: Arc<Files>,
}

impl Io {
    /// A directory that exists or will be made by the first write; faults come from the environment.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_faults(root, Faults::from_env())
    }

    /// The same with given faults.
    pub fn with_faults(root: impl Into<PathBuf>, faults: Arc<Faults>) -> Self {
        Self::over(Disk::with_faults(root, faults).into())
    }

    /// A directory or a prefix of a bucket; faults come from the environment.
    ///
    /// # Errors
    /// As [`Files::open`].
    pub fn open(location: &Location) -> Result<Self> {
        Files::open(location).map(Self::over)
    }

    /// The same calls over given files.
    pub fn over(files: Files) -> Self {
        Self { files: Arc::new(files) }
    }

    /// The place below this one, with the same faults; `child` is a name.
    #[must_use]
    pub fn below(&self, child: &str) -> Self {
        Self::over(self.files.below(child))
    }

    /// The directory; for a bucket its URL, which is for messages only.
    pub fn root(&self) -> &Path {
        self.files.root()
    }

    /// The blocking form.
    pub fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Runs file work off the async threads.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Stopped`] if the runtime shuts down meanwhile.
    pub async fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Files) -> Result<T> + Send + 'static,
    {
        let files = Arc::clone(&self.files);
        match tokio::task::spawn_blocking(move || work(&files)).await {
            Ok(result) => result,
            Err(stopped) => Err(Error::Stopped(stopped.to_string())),
        }
    }

    /// [`Files::read`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let key = key.to_owned();
        self.run(move |files| files.read(&key)).await
    }

    /// [`Files::size`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn size(&self, key: &str) -> Result<Option<u64>> {
        let key = key.to_owned();
        self.run(move |files| files.size(&key)).await
    }

    /// [`Files::list`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn list(&self, key: &str) -> Result<Vec<Entry>> {
        let key = key.to_owned();
        self.run(move |files| files.list(&key)).await
    }

    /// [`Files::read_link`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn read_link(&self, key: &str) -> Result<Option<String>> {
        let key = key.to_owned();
        self.run(move |files| files.read_link(&key)).await
    }

    /// [`Files::make_dir`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn make_dir(&self, key: &str) -> Result<()> {
        let key = key.to_owned();
        self.run(move |files| files.make_dir(&key)).await
    }

    /// [`Files::create_if_absent`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn create_if_absent(&self, key: &str, bytes: Vec<u8>, point: FailPoint) -> Result<Created> {
        let key = key.to_owned();
        self.run(move |files| files.create_if_absent(&key, &bytes, point)).await
    }

    /// [`Files::replace_exactly`].
    ///
    /// # Errors
    /// As there.
    pub async fn replace_exactly(&self, key: &str, old: Vec<u8>, bytes: Vec<u8>, point: FailPoint) -> Result<bool> {
        let key = key.to_owned();
        self.run(move |files| files.replace_exactly(&key, &old, &bytes, point)).await
    }

    /// [`Files::put_durable`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn put_durable(&self, key: &str, bytes: Vec<u8>, point: FailPoint) -> Result<()> {
        let key = key.to_owned();
        self.run(move |files| files.put_durable(&key, &bytes, point)).await
    }

    /// [`Files::swap_symlink`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn swap_symlink(&self, key: &str, target: &str, point: FailPoint) -> Result<()> {
        let (key, target) = (key.to_owned(), target.to_owned());
        self.run(move |files| files.swap_symlink(&key, &target, point)).await
    }

    /// [`Files::rename_dir`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn rename_dir(&self, from: &str, to: &str, point: FailPoint) -> Result<()> {
        let (from, to) = (from.to_owned(), to.to_owned());
        self.run(move |files| files.rename_dir(&from, &to, point)).await
    }

    /// [`Files::remove_file`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn remove_file(&self, key: &str, point: FailPoint) -> Result<bool> {
        let key = key.to_owned();
        self.run(move |files| files.remove_file(&key, point)).await
    }

    /// [`Files::remove_tree`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn remove_tree(&self, key: &str, point: FailPoint) -> Result<bool> {
        let key = key.to_owned();
        self.run(move |files| files.remove_tree(&key, point)).await
    }

    /// [`Files::sync_dir`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub async fn sync_dir(&self, key: &str, point: FailPoint) -> Result<()> {
        let key = key.to_owned();
        self.run(move |files| files.sync_dir(&key, point)).await
    }
}
