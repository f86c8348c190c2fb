//! A prefix of a bucket as a place of keys. Every call blocks; requests run on one small runtime of the process.
//!
//! What the invariants rest on here:
//!
//! - A put is atomic and durable when it is answered: an object is the old one, the new one or absent, never a part.
//! - A put with `If-None-Match: *` makes an object only if there is none (C2). A server that ignores the condition is
//!   refused before the first such put ([`Objects::require_conditional_put`]).
//! - A put with `If-Match` moves a pointer only if nobody else did since it was read; where a server ignores that, it is as
//!   on a directory, where takeovers recompute pointers (C6).
//! - A request whose answer was lost is sent again and may then meet its own success. Bytes that are there and equal ours
//!   are therefore ours: manifests hold the time of their commit, so no two of them are equal.

mod connect;
mod fault;
mod profile;
mod read;
mod requests;
mod runtime;
mod upload;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::StreamExt;
use object_store::PutMode;
use object_store::path::Path as Key;

pub(crate) use upload::NOTE_SUFFIX as UPLOAD_NOTE;
pub use upload::{ObjectReader, ObjectWriter};

use super::disk::Created;
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Faults, Stage};
use crate::location::BucketUrl;
use connect::Client;
use fault::failed;
use requests::{Put, absent_is_none, get, put};

/// Keys with which servers are asked whether they honour conditions.
const PROBE_PREFIX: &str = ".trainctl-probe-";

/// A prefix of a bucket; every call blocks. Cheap to clone.
#[derive(Clone)]
pub struct Objects {
    url: BucketUrl,
    /// The URL as text, where directories have their path.
    root: PathBuf,
    client: Arc<Client>,
    faults: Arc<Faults>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The client's own form has credentials in it.
        f.debug_tuple("Objects").field(&self.root).finish()
    }
}

impl Objects {
    /// Opens a prefix; the server is not asked anything yet.
    ///
    /// # Errors
    /// [`Error::Object`] if the environment's settings are wrong.
    pub fn with_faults(url: &BucketUrl, faults: Arc<Faults>) -> Result<Self> {
        Ok(Self { url: url.clone(), root: url.to_string().into(), client: connect::client(url)?, faults })
    }

    /// The place.
    pub fn url(&self) -> &BucketUrl {
        &self.url
    }

    /// Its URL, for messages.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The prefix below this one, with the same client and faults.
    #[must_use]
    pub fn below(&self, child: &str) -> Self {
        let url = self.url.join(child);
        Self { root: url.to_string().into(), url, ..self.clone() }
    }

    /// The URL of a key, for messages; an empty key is the prefix.
    ///
    /// # Errors
    /// [`Error::Key`] for keys with empty parts, `.` or `..`.
    pub fn path(&self, key: &str) -> Result<PathBuf> {
        self.key(key)?;
        Ok(if key.is_empty() { self.root.clone() } else { format!("{}/{key}", self.url).into() })
    }

    fn key(&self, key: &str) -> Result<Key> {
        let whole = match (self.url.prefix(), key) {
            (prefix, "") => prefix.to_owned(),
            ("", key) => key.to_owned(),
            (prefix, key) => format!("{prefix}/{key}"),
        };
        let outside = || Error::Key { key: key.to_owned() };
        if key.starts_with('/') || key.ends_with('/') {
            return Err(outside());
        }
        Key::parse(whole).map_err(|_| outside())
    }

    /// Makes an object with these bytes unless the key is taken (C2).
    ///
    /// # Errors
    /// [`Error::Unconditional`] if the server would overwrite it; [`Error::Object`], [`Error::Key`].
    pub fn create_if_absent(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<Created> {
        self.require_conditional_put()?;
        self.hit(point, Stage::Before, key)?;
        self.hit(point, Stage::Temp, key)?;
        let created = match self.put(key, bytes.to_vec(), PutMode::Create)? {
            Put::Done => Created::New,
            Put::Refused => Created::Exists,
        };
        self.hit(point, Stage::Done, key)?;
        Ok(created)
    }

    /// Replaces an object by these bytes.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn put_durable(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<()> {
        self.hit(point, Stage::Before, key)?;
        self.hit(point, Stage::Temp, key)?;
        self.put(key, bytes.to_vec(), PutMode::Overwrite)?;
        self.hit(point, Stage::Done, key)
    }

    /// Replaces an object that holds exactly `old`, in one conditional put. `false` if it holds something else, or is not
    /// there.
    ///
    /// # Errors
    /// [`Error::Unconditional`], [`Error::Object`], [`Error::Key`].
    pub fn replace_exactly(&self, key: &str, old: &[u8], bytes: &[u8], point: FailPoint) -> Result<bool> {
        self.require_conditional_put()?;
        let (client, path) = (Arc::clone(&self.client), self.key(key)?);
        let found = runtime::wait(async move { absent_is_none(get(&client, &path).await) })?;
        let Some((found, version)) = self.answer("read", key, found)? else { return Ok(false) };
        if found != old {
            return Ok(false);
        }
        self.hit(point, Stage::Before, key)?;
        self.hit(point, Stage::Temp, key)?;
        let replaced = self.put(key, bytes.to_vec(), PutMode::Update(version))?;
        self.hit(point, Stage::Done, key)?;
        Ok(matches!(replaced, Put::Done))
    }

    /// Starts an object that appears, whole, with [`ObjectWriter::finish`].
    ///
    /// # Errors
    /// [`Error::Key`]; [`Error::Io`] from a fail point.
    pub fn writer(&self, key: &str, point: FailPoint) -> Result<ObjectWriter> {
        self.key(key)?;
        self.hit(point, Stage::Before, key)?;
        Ok(ObjectWriter::new(self.clone(), key.to_owned(), point))
    }

    /// Writes the pointer `key`, unless somebody else wrote it since this call began: a holder that freezes in here and wakes
    /// up after a takeover moves nothing.
    ///
    /// # Errors
    /// [`Error::Object`] (also in that case), [`Error::Key`].
    pub fn swap_symlink(&self, key: &str, target: &str, point: FailPoint) -> Result<()> {
        let (_, version) = self.read_pointer(key)?;
        self.hit(point, Stage::Before, key)?;
        self.hit(point, Stage::Temp, key)?;
        let mode = match version {
            None => PutMode::Create,
            Some(version) if version.e_tag.is_some() => PutMode::Update(version),
            Some(_) => PutMode::Overwrite,
        };
        if let Put::Refused = self.put(key, format!("{target}\n").into_bytes(), mode)? {
            return Err(Error::object(
                "move the pointer",
                self.path(key)?.display(),
                "somebody else moved it meanwhile",
            ));
        }
        self.hit(point, Stage::Done, key)
    }

    /// Gives an object that holds `bytes` another key: it is copied and then removed, so for a moment there are both. `false`
    /// if it holds something else by then: it stays.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn move_exactly(&self, from: &str, to: &str, bytes: &[u8], point: FailPoint) -> Result<bool> {
        self.hit(point, Stage::Before, from)?;
        self.put(to, bytes.to_vec(), PutMode::Overwrite)?;
        self.hit(point, Stage::Temp, from)?;
        let same = self.read(from)?.as_deref() == Some(bytes);
        self.delete(vec![self.key(if same { from } else { to })?])?;
        self.hit(point, Stage::Done, from)?;
        Ok(same)
    }

    /// Removes an object that holds `bytes`. `false` if it holds something else, or is not there.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn remove_exactly(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<bool> {
        self.hit(point, Stage::Before, key)?;
        let same = self.read(key)?.as_deref() == Some(bytes);
        if same {
            self.delete(vec![self.key(key)?])?;
        }
        self.hit(point, Stage::Done, key)?;
        Ok(same)
    }

    /// Removes an object; the note of an upload that was begun with the upload. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn remove_file(&self, key: &str, point: FailPoint) -> Result<bool> {
        self.hit(point, Stage::Before, key)?;
        let there = self.size(key)?.is_some();
        if there {
            if key.ends_with(UPLOAD_NOTE) {
                self.abort_noted(key)?;
            }
            self.delete(vec![self.key(key)?])?;
        }
        self.hit(point, Stage::Done, key)?;
        Ok(there)
    }

    /// Removes everything below a key and ends the uploads that were begun there. `false` if there was nothing.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn remove_tree(&self, key: &str, point: FailPoint) -> Result<bool> {
        self.hit(point, Stage::Before, key)?;
        let all: Vec<String> = self.walk(key)?.into_keys().collect();
        self.remove_below(key, &all)?;
        self.hit(point, Stage::Done, key)?;
        Ok(!all.is_empty())
    }

    /// Removes some of what lies below a key, and ends the uploads among it.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn remove_files(&self, key: &str, files: &[String], point: FailPoint) -> Result<()> {
        self.hit(point, Stage::Before, key)?;
        self.remove_below(key, files)?;
        self.hit(point, Stage::Done, key)
    }

    fn remove_below(&self, key: &str, files: &[String]) -> Result<()> {
        for note in files.iter().filter(|file| file.ends_with(upload::NOTE_SUFFIX)) {
            self.abort_noted(&format!("{key}/{note}"))?;
        }
        let keys = files.iter().map(|file| self.key(&format!("{key}/{file}"))).collect::<Result<Vec<_>>>()?;
        self.delete(keys)
    }

    /// Refuses a server that ignores the condition of a put: two coordinators could commit the same step there (C2).
    /// Looked at once in the life of a process.
    ///
    /// # Errors
    /// [`Error::Unconditional`], [`Error::Object`].
    pub fn require_conditional_put(&self) -> Result<()> {
        if self.client.conditional.initialized() {
            return Ok(());
        }
        let unlike = blake3::hash(format!("{:?}{:?}", std::process::id(), std::time::UNIX_EPOCH.elapsed()).as_bytes());
        let probe = format!("{PROBE_PREFIX}{}", &unlike.to_hex()[..16]);
        let first = self.put(&probe, b"first\n".to_vec(), PutMode::Create)?;
        let second = self.put(&probe, b"second\n".to_vec(), PutMode::Create);
        let removed = self.delete(vec![self.key(&probe)?]);
        match (first, second?) {
            (Put::Done, Put::Refused) => {}
            (Put::Done, Put::Done) => return Err(Error::Unconditional { url: self.url.to_string() }),
            (Put::Refused, _) => {
                return Err(Error::object("create", self.path(&probe)?.display(), "a new key is said to be taken"));
            }
        }
        removed?;
        if self.client.conditional.set(()).is_err() {
            tracing::debug!("another thread asked the object store at the same time");
        }
        Ok(())
    }

    /// Removes what is left of the questions of processes that were killed while they asked. Only the holder calls this.
    pub(crate) fn sweep_probes(&self, point: FailPoint) -> Result<()> {
        let left: Vec<_> = self.list("")?.into_iter().filter(|entry| entry.name.starts_with(PROBE_PREFIX)).collect();
        for entry in left {
            self.remove_file(&entry.name, point)?;
        }
        Ok(())
    }

    /// Puts an object. A refusal whose cause is the success of an earlier try of this put is a success.
    fn put(&self, key: &str, bytes: Vec<u8>, mode: PutMode) -> Result<Put> {
        let (client, path) = (Arc::clone(&self.client), self.key(key)?);
        self.count(key)?;
        let outcome = runtime::wait(async move { put(&client, &path, bytes.into(), mode).await })?;
        self.answer("write", key, outcome)
    }

    fn delete(&self, keys: Vec<Key>) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.count("")?;
        let client = Arc::clone(&self.client);
        let deleted = runtime::wait(async move {
            let keys = futures::stream::iter(keys.into_iter().map(Ok)).boxed();
            let mut results = client.store.delete_stream(keys);
            while let Some(result) = results.next().await {
                absent_is_none(result)?;
            }
            Ok(())
        })?;
        self.answer("remove", "", deleted)
    }

    fn answer<T>(&self, action: &'static str, key: &str, result: object_store::Result<T>) -> Result<T> {
        result.map_err(|error| match self.path(key) {
            Ok(url) => failed(action, url.display(), &error),
            Err(error) => error,
        })
    }

    /// Passes a point of code that only reads.
    pub(crate) fn pass(&self, key: &str, point: FailPoint) -> Result<()> {
        self.faults.hit(point, Stage::Before).map_err(|e| Error::io("read", self.root.join(key), e))
    }

    fn hit(&self, point: FailPoint, stage: Stage, key: &str) -> Result<()> {
        self.faults.hit(point, stage).map_err(|e| Error::io("write", self.root.join(key), e))
    }

    /// Passes a request that changes the bucket: they are counted as system calls are on a directory.
    fn count(&self, key: &str) -> Result<()> {
        self.faults.call().map_err(|e| Error::io("write", self.root.join(key), e))
    }
}
