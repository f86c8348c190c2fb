//! Durable changes of a POSIX directory: a temporary file in the same directory, fsync, one atomic call, fsync of the
//! directory. What this does not do: it cannot make a drive honest that acknowledges writes it has not made.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::calls::Calls;
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Faults, Stage};

/// Temporary names start so; listings leave them out.
pub(crate) const TEMP_PREFIX: &str = ".tmp-";

/// A pointer that is a file holds one name.
pub(super) const MAX_POINTER_FILE: u64 = 256;

/// Outcome of [`Disk::create_if_absent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    /// The file is new and holds the given bytes.
    New,
    /// The name was taken; nothing was changed.
    Exists,
}

/// What a name in a directory is. Symlinks are not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// Something else.
    Other,
}

/// One name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The last part of the key.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// A directory of keys; every call blocks.
#[derive(Clone, Debug)]
pub struct Disk {
    root: PathBuf,
    calls: Calls,
}

impl Disk {
    /// A directory that exists or will be made by the first write; faults come from the environment.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_faults(root, Faults::from_env())
    }

    /// The same with given faults.
    pub fn with_faults(root: impl Into<PathBuf>, faults: Arc<Faults>) -> Self {
        let root: PathBuf = root.into();
        let root = if root.as_os_str().is_empty() { PathBuf::from(".") } else { root };
        Self { root, calls: Calls::new(faults) }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory below this one, with the same faults; `child` is a name.
    #[must_use]
    pub fn below(&self, child: &str) -> Self {
        Self { root: self.root.join(child), calls: self.calls.clone() }
    }

    /// The path of a key; an empty key is the root.
    ///
    /// # Errors
    /// [`Error::Key`] for absolute paths and paths with `.` or `..`.
    pub fn path(&self, key: &str) -> Result<PathBuf> {
        let inside = Path::new(key).components().all(|part| matches!(part, Component::Normal(_)));
        if !inside || key.contains('\0') {
            return Err(Error::Key { key: key.to_owned() });
        }
        Ok(if key.is_empty() { self.root.clone() } else { self.root.join(key) })
    }

    /// The whole file, or `None` if there is none (a name whose parent is missing too).
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(key)?;
        absent_is_none(fs::read(&path), "read", &path)
    }

    /// Fills `buffer` from `offset`; a shorter file is [`Error::Damaged`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`], [`Error::Damaged`].
    pub fn read_range(&self, key: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let path = self.path(key)?;
        let mut file = File::open(&path).map_err(|e| Error::io("open", &path, e))?;
        file.seek(SeekFrom::Start(offset)).map_err(|e| Error::io("read", &path, e))?;
        file.read_exact(buffer).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Error::Damaged {
                path: path.clone(),
                reason: format!("ends before byte {}", offset + buffer.len() as u64),
            },
            _ => Error::io("read", &path, e),
        })
    }

    /// Bytes of a file, or `None` if there is none. Symlinks are not followed.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn size(&self, key: &str) -> Result<Option<u64>> {
        let path = self.path(key)?;
        let metadata = absent_is_none(fs::symlink_metadata(&path), "look at", &path)?;
        Ok(metadata.filter(fs::Metadata::is_file).map(|m| m.len()))
    }

    /// What lies under a key, sorted by name, without temporary files. A missing directory is an empty one.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn list(&self, key: &str) -> Result<Vec<Entry>> {
        let mut entries = self.list_all(key)?;
        entries.retain(|entry| !entry.name.starts_with(TEMP_PREFIX));
        Ok(entries)
    }

    /// The same with temporary files.
    pub(crate) fn list_all(&self, key: &str) -> Result<Vec<Entry>> {
        let path = self.path(key)?;
        let Some(reader) = absent_is_none(fs::read_dir(&path), "list", &path)? else { return Ok(Vec::new()) };
        let mut entries = Vec::new();
        for entry in reader {
            let entry = entry.map_err(|e| Error::io("list", &path, e))?;
            // A name that is no UTF-8 is none of ours.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Some(kind) = absent_is_none(entry.file_type(), "look at", &entry.path())? else { continue };
            let kind = match kind {
                kind if kind.is_symlink() => Kind::Symlink,
                kind if kind.is_dir() => Kind::Dir,
                kind if kind.is_file() => Kind::File,
                _ => Kind::Other,
            };
            entries.push(Entry { name, kind });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// What a pointer names: the text of a symlink, or of a small file of its name, or of that name with `.txt`, which NeMo
    /// AutoModel writes where symlinks are refused and which may hold a path. `None` if there is none of them.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn read_link(&self, key: &str) -> Result<Option<String>> {
        let path = self.path(key)?;
        match fs::read_link(&path) {
            Ok(target) => Ok(Some(target.to_string_lossy().into_owned())),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => match self.size(key)? {
                Some(size) if size <= MAX_POINTER_FILE => self.read_pointer_file(key),
                _ => Ok(None),
            },
            Err(e) if is_absent(&e) => self.read_pointer_file(&text_key(key)),
            Err(e) => Err(Error::io("read the link", &path, e)),
        }
    }

    /// The last part of the path in a small file.
    fn read_pointer_file(&self, key: &str) -> Result<Option<String>> {
        let Some(bytes) = self.read(key)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let path = text.trim().trim_end_matches('/');
        Ok(Some(path.rsplit('/').next().unwrap_or(path).to_owned()))
    }

    /// Makes a directory and its parents, durably. One that exists is fine.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn make_dir(&self, key: &str) -> Result<()> {
        let path = self.path(key)?;
        if path.is_dir() {
            return Ok(());
        }
        self.hit(FailPoint::MAKE_DIRECTORY, Stage::Before, &path)?;
        let missing: Vec<_> = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.is_dir()).collect();
        for directory in missing.iter().rev() {
            match self.calls.create_dir(directory) {
                // Another rank was faster.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => {}
                other => other.map_err(|e| Error::io("make the directory", directory, e))?,
            }
        }
        for made in missing {
            self.sync_directory(parent(made), FailPoint::MAKE_DIRECTORY)?;
        }
        self.hit(FailPoint::MAKE_DIRECTORY, Stage::Done, &path)
    }

    /// Makes a file with these bytes unless the name is taken, in one atomic step: a hard link of a synced temporary
    /// file, or O_EXCL where the file system refuses hard links (a crash may then leave a torn file, which readers must
    /// recognise). The numbers of J2 and the manifests of C2 rest on it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn create_if_absent(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<Created> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        let write = || -> Result<Created> {
            self.write_new(&temp, bytes, point)?;
            self.hit(point, Stage::Temp, &path)?;
            match self.calls.hard_link(&temp, &path) {
                Ok(()) => Ok(Created::New),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    // A retransmitted NFS call reports its own success as "exists"; the second link gives it away.
                    let links = fs::metadata(&temp).map(|m| m.nlink()).unwrap_or(1);
                    Ok(if links == 2 { Created::New } else { Created::Exists })
                }
                Err(e) if links_refused(&e) => self.create_exclusive(&path, bytes, point),
                // Whoever took the directory over has swept it: as good as not begun.
                Err(e) if e.kind() == io::ErrorKind::NotFound && !temp.exists() => {
                    Err(Error::Swept { path: path.clone() })
                }
                Err(e) => Err(Error::io("create", &path, e)),
            }
        };
        let outcome = write();
        let cleaned = absent_is_none(self.calls.remove_file(&temp), "remove", &temp);
        let outcome = outcome?;
        cleaned?;
        self.sync_directory(parent(&path), point)?;
        self.hit(point, Stage::Done, &path)?;
        Ok(outcome)
    }

    /// Replaces a file by these bytes: readers see the old or the new ones, and after the call the new ones survive a
    /// power cut.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn put_durable(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<()> {
        let mut writer = self.writer(key, point)?;
        writer.write(bytes)?;
        writer.finish()
    }

    /// [`Disk::put_durable`] in the place of the file that is open as `old`. `false` if the name means another file by then:
    /// that one stays. (Where names cannot be exchanged, a process that is frozen between the look and the rename replaces
    /// it all the same.)
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub(crate) fn replace_durable(&self, key: &str, old: &File, bytes: &[u8], point: FailPoint) -> Result<bool> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        let swap = || -> Result<bool> {
            self.write_new(&temp, bytes, point)?;
            self.hit(point, Stage::Temp, &path)?;
            let failed = |e| Error::io("replace", &path, e);
            if !self.is_same_file(key, old)? {
                return Ok(false);
            }
            if !self.calls.exchange(&temp, &path).map_err(failed)? {
                self.calls.rename(&temp, &path).map_err(failed)?;
                return Ok(true);
            }
            let replaced = fs::metadata(&temp).map_err(failed)?;
            let is_old = is_file(old, &replaced).map_err(failed)?;
            if !is_old {
                self.calls.exchange(&temp, &path).map_err(failed)?;
            }
            Ok(is_old)
        };
        let outcome = swap();
        let cleaned = absent_is_none(self.calls.remove_file(&temp), "remove", &temp);
        let outcome = outcome?;
        cleaned?;
        self.sync_directory(parent(&path), point)?;
        self.hit(point, Stage::Done, &path)?;
        Ok(outcome)
    }

    /// Replaces a file that holds exactly `old` by these bytes. `false` if it holds something else, or is not there.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn replace_exactly(&self, key: &str, old: &[u8], bytes: &[u8], point: FailPoint) -> Result<bool> {
        let Some(mut file) = self.open_read(key)? else { return Ok(false) };
        let mut found = Vec::new();
        file.read_to_end(&mut found).map_err(|e| Error::io("read", self.root.join(key), e))?;
        if found != old {
            return Ok(false);
        }
        self.replace_durable(key, &file, bytes, point)
    }

    /// Starts a file that becomes visible, complete and durable, with [`FileWriter::finish`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn writer(&self, key: &str, point: FailPoint) -> Result<FileWriter> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        let file = self.calls.create_new(&temp).map_err(|e| Error::io("create", &temp, e))?;
        Ok(FileWriter { file, temp, path, point, calls: self.calls.clone(), finished: false, written: 0, begun: 0 })
    }

    /// Points a symlink at `target` (a relative name) in one atomic step (C3): the name is never absent in between. Where
    /// symlinks are refused, a file `<key>.txt` with that text takes its place, as with NeMo AutoModel, whose tools find it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn swap_symlink(&self, key: &str, target: &str, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        match self.calls.symlink(target, &temp) {
            Err(e) if links_refused(&e) => {
                self.put_durable(&text_key(key), format!("{target}\n").as_bytes(), point)?;
                return self.remove_stale(key, point);
            }
            other => other.map_err(|e| Error::io("make the symlink", &temp, e))?,
        }
        let swap = self
            .hit(point, Stage::Temp, &path)
            .and_then(|()| self.calls.rename(&temp, &path).map_err(|e| Error::io("swap the symlink", &path, e)));
        if swap.is_err() {
            remove_quietly(&self.calls, &temp);
        }
        swap?;
        self.sync_directory(parent(&path), point)?;
        self.remove_stale(&text_key(key), point)?;
        self.hit(point, Stage::Done, &path)
    }

    /// Removes a pointer in all its forms. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn remove_pointer(&self, key: &str, point: FailPoint) -> Result<bool> {
        let removed = self.remove_file(key, point)?;
        Ok(self.remove_file(&text_key(key), point)? || removed)
    }

    /// The other form of a pointer, from before the directory was copied to another file system.
    fn remove_stale(&self, key: &str, point: FailPoint) -> Result<()> {
        if self.size(key)?.is_some() {
            self.remove_file(key, point)?;
        }
        Ok(())
    }

    /// Renames a directory; both parents are synced. The new parent is made if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`] (also if `to` is a directory that is not empty), [`Error::Key`].
    pub fn rename_dir(&self, from: &str, to: &str, point: FailPoint) -> Result<()> {
        let (source, path) = (self.path(from)?, self.path(to)?);
        self.make_parent(to)?;
        self.hit(point, Stage::Before, &path)?;
        self.calls.rename(&source, &path).map_err(|e| Error::io("rename", &source, e))?;
        self.sync_directory(parent(&path), point)?;
        self.sync_directory(parent(&source), point)?;
        self.hit(point, Stage::Done, &path)
    }

    /// Removes a file or symlink durably. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn remove_file(&self, key: &str, point: FailPoint) -> Result<bool> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let removed = absent_is_none(self.calls.remove_file(&path), "remove", &path)?.is_some();
        if removed {
            self.sync_directory(parent(&path), point)?;
        }
        self.hit(point, Stage::Done, &path)?;
        Ok(removed)
    }

    /// Removes a directory and all below it. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn remove_tree(&self, key: &str, point: FailPoint) -> Result<bool> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let removed = absent_is_none(self.calls.remove_dir_all(&path), "remove", &path)?.is_some();
        if removed {
            self.sync_directory(parent(&path), point)?;
        }
        self.hit(point, Stage::Done, &path)?;
        Ok(removed)
    }

    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn sync_dir(&self, key: &str, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        self.sync_directory(&path, point)
    }

    /// Opens a file for appending; made, durably, if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub(crate) fn open_append(&self, key: &str, point: FailPoint) -> Result<File> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        let missing = !path.exists();
        let file = self.calls.open_append(&path).map_err(|e| Error::io("open", &path, e))?;
        if missing {
            self.sync_directory(parent(&path), point)?;
        }
        Ok(file)
    }

    /// Opens a file for reading; `None` if there is none.
    pub(crate) fn open_read(&self, key: &str) -> Result<Option<File>> {
        let path = self.path(key)?;
        absent_is_none(File::open(&path), "open", &path)
    }

    /// Makes what was written to an open file durable.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub(crate) fn sync_file(&self, key: &str, file: &File, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        self.calls.sync_file(file, point).map_err(|e| Error::io("sync", &path, e))
    }

    /// Whether `key` still names the open file.
    pub(crate) fn is_same_file(&self, key: &str, file: &File) -> Result<bool> {
        let path = self.path(key)?;
        match absent_is_none(fs::metadata(&path), "look at", &path)? {
            Some(named) => is_file(file, &named).map_err(|e| Error::io("look at", &path, e)),
            None => Ok(false),
        }
    }

    /// Appends with one write call; a short write is an error and leaves a torn tail, which the next open repairs.
    pub(crate) fn append(&self, key: &str, file: &File, bytes: &[u8], point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let written = self.calls.write(file, bytes).map_err(|e| Error::io("append to", &path, e))?;
        if written != bytes.len() {
            let short = io::Error::new(io::ErrorKind::StorageFull, format!("{written} of {} bytes fit", bytes.len()));
            return Err(Error::io("append to", &path, short));
        }
        self.hit(point, Stage::Done, &path)
    }

    /// Cuts a file to `size` bytes, durably.
    pub(crate) fn truncate(&self, key: &str, file: &File, size: u64, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let cut = self.calls.set_len(file, size).and_then(|()| self.calls.sync_file(file, point));
        cut.map_err(|e| Error::io("cut", &path, e))?;
        self.hit(point, Stage::Done, &path)
    }

    /// Removes temporary files of `key` that a killed process left. Only whoever alone may write the key calls this.
    pub(crate) fn sweep(&self, key: &str, point: FailPoint) -> Result<()> {
        let (directory, name) = key.rsplit_once('/').unwrap_or(("", key));
        self.sweep_prefix(directory, &format!("{TEMP_PREFIX}{name}-"), point)
    }

    /// Removes all temporary files in a directory.
    pub(crate) fn sweep_dir(&self, directory: &str, point: FailPoint) -> Result<()> {
        self.sweep_prefix(directory, TEMP_PREFIX, point)
    }

    fn sweep_prefix(&self, directory: &str, prefix: &str, point: FailPoint) -> Result<()> {
        for entry in self.list_all(directory)?.into_iter().filter(|entry| entry.name.starts_with(prefix)) {
            let stale = if directory.is_empty() { entry.name } else { format!("{directory}/{}", entry.name) };
            self.remove_file(&stale, point)?;
        }
        Ok(())
    }

    fn make_parent(&self, key: &str) -> Result<()> {
        self.make_dir(key.rsplit_once('/').map_or("", |(directory, _)| directory))
    }

    /// Passes a point of code that only reads.
    pub(crate) fn pass(&self, key: &str, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.calls.hit(point, Stage::Before).map_err(|e| Error::io("read", path, e))
    }

    fn hit(&self, point: FailPoint, stage: Stage, path: &Path) -> Result<()> {
        self.calls.hit(point, stage).map_err(|e| Error::io("write", path, e))
    }

    fn sync_directory(&self, path: &Path, point: FailPoint) -> Result<()> {
        self.calls.sync_dir(path, point).map_err(|e| Error::io("sync", path, e))
    }

    fn write_new(&self, path: &Path, bytes: &[u8], point: FailPoint) -> Result<()> {
        let write = || -> io::Result<()> {
            let file = self.calls.create_new(path)?;
            self.calls.write_all(&file, bytes)?;
            self.calls.sync_file(&file, point)
        };
        write().map_err(|e| Error::io("write", path, e))
    }

    /// For file systems without hard links. A file that could not be written whole goes again: readers would take it for
    /// what a crash left, and nobody could make it.
    fn create_exclusive(&self, path: &Path, bytes: &[u8], point: FailPoint) -> Result<Created> {
        let file = match self.calls.create_new(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(Created::Exists),
            other => other.map_err(|e| Error::io("create", path, e))?,
        };
        let written = self.calls.write_all(&file, bytes).and_then(|()| self.calls.sync_file(&file, point));
        written.map(|()| Created::New).map_err(|e| {
            remove_quietly(&self.calls, path);
            Error::io("write", path, e)
        })
    }
}

/// A file in the making. Dropped unfinished, it leaves nothing.
#[derive(Debug)]
pub struct FileWriter {
    file: File,
    temp: PathBuf,
    path: PathBuf,
    point: FailPoint,
    calls: Calls,
    finished: bool,
    /// Bytes written, and up to which of them the system was told to begin.
    written: u64,
    begun: u64,
}

/// After so many bytes the system is told to write them back.
const WRITE_BACK_BYTES: u64 = 8 << 20;

impl FileWriter {
    /// Adds bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.calls.write_all(&self.file, bytes).map_err(|e| Error::io("write", &self.path, e))?;
        self.written += bytes.len() as u64;
        if self.written - self.begun >= WRITE_BACK_BYTES {
            self.begin_write_back();
        }
        Ok(())
    }

    /// Lets the drive begin now, instead of all at once in the sync at the end, and keeps what is dirty little: a process
    /// with much of it is slowed down. Linux begins to write back what it is told will not be needed, and drops from its
    /// cache only what was written back already. A hint: nothing depends on it.
    fn begin_write_back(&mut self) {
        let (from, bytes) = (self.begun.cast_signed(), (self.written - self.begun).cast_signed());
        self.begun = self.written;
        if let Err(error) = posix_fadvise(&self.file, from, bytes, PosixFadviseAdvice::POSIX_FADV_DONTNEED) {
            tracing::trace!(path = %self.path.display(), %error, "no early write-back here");
        }
    }

    /// Syncs, gives the file its name and syncs the directory.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(mut self) -> Result<()> {
        let publish = || -> io::Result<()> {
            self.calls.sync_file(&self.file, self.point)?;
            self.calls.hit(self.point, Stage::Temp)?;
            self.calls.rename(&self.temp, &self.path)
        };
        publish().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound if !self.temp.exists() && parent(&self.path).exists() => {
                Error::Swept { path: self.path.clone() }
            }
            _ => Error::io("write", &self.path, e),
        })?;
        self.finished = true;
        let done = || {
            self.calls.sync_dir(parent(&self.path), self.point).and_then(|()| self.calls.hit(self.point, Stage::Done))
        };
        done().map_err(|e| Error::io("write", &self.path, e))
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if !self.finished {
            remove_quietly(&self.calls, &self.temp);
        }
    }
}

/// Whether a name is that of a file in the making.
pub(crate) fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMP_PREFIX)
}

/// A name beside `path` that nobody else uses: process, counter and the time of the first use, so that two hosts with
/// equal process ids do not meet.
fn temp_path(path: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    static SALT: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let salt = SALT.get_or_init(|| {
        let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        since.subsec_nanos() ^ since.as_secs() as u32
    });
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    parent(path).join(format!("{TEMP_PREFIX}{name}-{}-{salt:08x}-{count}", std::process::id()))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The form of a pointer that NeMo AutoModel writes where symlinks are refused.
pub(crate) fn text_key(key: &str) -> String {
    format!("{key}.txt")
}

fn is_file(open: &File, named: &fs::Metadata) -> io::Result<bool> {
    let open = open.metadata()?;
    Ok(named.ino() == open.ino() && named.dev() == open.dev())
}

fn links_refused(e: &io::Error) -> bool {
    use nix::errno::Errno;
    let refused = [Errno::EPERM, Errno::EOPNOTSUPP, Errno::ENOSYS, Errno::EMLINK, Errno::EXDEV];
    e.raw_os_error().is_some_and(|code| refused.contains(&Errno::from_raw(code)))
}

fn remove_quietly(calls: &Calls, path: &Path) {
    if let Err(error) = calls.remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "a temporary file stays");
    }
}

fn is_absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn absent_is_none<T>(result: io::Result<T>, action: &'static str, path: &Path) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if is_absent(&e) => Ok(None),
        Err(e) => Err(Error::io(action, path, e)),
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
