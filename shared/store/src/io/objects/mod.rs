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
mod runtime;
mod upload;

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path as Key;
use object_store::{GetOptions, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};

pub(crate) use upload::NOTE_SUFFIX as UPLOAD_NOTE;
pub use upload::{ObjectReader, ObjectWriter};

use super::disk::{Created, Entry, Kind, MAX_POINTER_FILE};
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Faults, Stage};
use crate::location::BucketUrl;
use connect::Client;
use fault::{explain, failed};

/// How often a body that ended too early, or a conditional put whose answer was lost, is tried.
const TRIES: u32 = 4;

/// No further try after so long.
const LONG: Duration = Duration::from_secs(20);

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

/// What a put under a condition came to.
enum Put {
    Done,
    Refused,
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

    /// The whole object, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let (client, path) = (Arc::clone(&self.client), self.key(key)?);
        let found = runtime::wait(async move { absent_is_none(get(&client, &path).await) })?;
        Ok(self.answer("read", key, found)?.map(|(bytes, _)| bytes))
    }

    /// Fills `buffer` from `offset`; a shorter object is [`Error::Damaged`].
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`], [`Error::Damaged`].
    pub fn read_range(&self, key: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.reader(key)?.read_at(offset, buffer)
    }

    /// Opens an object for reads at any place. Nothing is asked before the first read.
    ///
    /// # Errors
    /// [`Error::Key`].
    pub fn reader(&self, key: &str) -> Result<ObjectReader> {
        Ok(ObjectReader { client: Arc::clone(&self.client), key: self.key(key)?, url: self.path(key)? })
    }

    /// Bytes of an object, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn size(&self, key: &str) -> Result<Option<u64>> {
        let (client, path) = (Arc::clone(&self.client), self.key(key)?);
        let found = runtime::wait(async move { absent_is_none(client.store.head(&path).await) })?;
        Ok(self.answer("look at", key, found)?.map(|meta| meta.size))
    }

    /// What lies under a key, sorted by name: objects, and the next parts of longer keys as directories.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn list(&self, key: &str) -> Result<Vec<Entry>> {
        let (client, path) = (Arc::clone(&self.client), self.key(key)?);
        let found = runtime::wait(async move { client.store.list_with_delimiter(Some(&path)).await })?;
        let found = self.answer("list", key, found)?;
        let name = |path: &Key| path.filename().map(str::to_owned);
        let folders = found.common_prefixes.iter().filter_map(name).map(|name| Entry { name, kind: Kind::Dir });
        let objects = found.objects.iter().filter_map(|meta| name(&meta.location));
        let mut entries: Vec<_> = folders.chain(objects.map(|name| Entry { name, kind: Kind::File })).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Every object below a key, however deep: its key relative to that, and its size.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn walk(&self, key: &str) -> Result<BTreeMap<String, u64>> {
        let (client, path) = (Arc::clone(&self.client), self.key(key)?);
        let below = path.clone();
        let listed = runtime::wait(async move { client.store.list(Some(&path)).try_collect::<Vec<_>>().await })?;
        let listed = self.answer("list", key, listed)?;
        let relative =
            |found: &Key| Some(found.prefix_match(&below)?.map(|p| p.as_ref().to_owned()).collect::<Vec<_>>());
        let named = listed.iter().filter_map(|meta| Some((relative(&meta.location)?.join("/"), meta.size)));
        Ok(named.collect())
    }

    /// The text of a small object, without the line's end: what a pointer names.
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Key`].
    pub fn read_link(&self, key: &str) -> Result<Option<String>> {
        Ok(self.read_pointer(key)?.0)
    }

    /// A pointer's text and the version that was read; both `None` without an object.
    fn read_pointer(&self, key: &str) -> Result<(Option<String>, Option<UpdateVersion>)> {
        let (client, path) = (Arc::clone(&self.client), self.key(key)?);
        let found = runtime::wait(async move {
            let Some(found) = absent_is_none(client.store.get(&path).await)? else { return Ok(None) };
            let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
            let small = found.meta.size <= MAX_POINTER_FILE;
            let text = if small { Some(found.bytes().await?) } else { None };
            Ok(Some((text, version)))
        })?;
        let Some((text, version)) = self.answer("read", key, found)? else { return Ok((None, None)) };
        let text = text.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        Ok((text, Some(version)))
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

/// Runs a request again while `retry` says so, with a growing pause. The client retries what the server refuses; this is for
/// what it cannot know.
async fn again<T, F, W>(mut work: W, retry: impl Fn(&object_store::Error) -> bool) -> object_store::Result<T>
where
    F: Future<Output = object_store::Result<T>>,
    W: FnMut() -> F,
{
    let mut pause = Duration::from_millis(100);
    let started = tokio::time::Instant::now();
    for _ in 1..TRIES {
        match work().await {
            // A failure that took long was tried often already, by the client.
            Err(error) if retry(&error) && started.elapsed() < LONG => {
                tracing::debug!(error = %explain(&error), "a request to the object store is tried again");
                tokio::time::sleep(pause).await;
                pause *= 3;
            }
            other => return other,
        }
    }
    work().await
}

/// A failure that says nothing about the object: the connection, or an answer that ended too early.
fn is_transport(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::Generic { .. })
}

async fn get(client: &Client, key: &Key) -> object_store::Result<(Vec<u8>, UpdateVersion)> {
    let whole = || async {
        let found = client.store.get_opts(key, GetOptions::default()).await?;
        let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        let size = found.meta.size;
        let bytes = found.bytes().await?;
        if bytes.len() as u64 != size {
            return Err(cut_off(bytes.len() as u64, size));
        }
        Ok((bytes.to_vec(), version))
    };
    again(whole, is_transport).await
}

fn cut_off(got: u64, size: u64) -> object_store::Error {
    object_store::Error::Generic {
        store: "store",
        source: format!("the answer ended after {got} of {size} bytes").into(),
    }
}

async fn put(client: &Client, key: &Key, bytes: bytes::Bytes, mode: PutMode) -> object_store::Result<Put> {
    use object_store::Error as E;
    let condition = !matches!(mode, PutMode::Overwrite);
    let try_once = || async {
        let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
        match client.store.put_opts(key, PutPayload::from_bytes(bytes.clone()), options).await {
            Ok(_) => Ok(Put::Done),
            Err(error) if !condition => Err(error),
            // 409 says that two conditional puts of one key met; one of them was carried out.
            Err(error @ (E::AlreadyExists { .. } | E::Precondition { .. } | E::Generic { .. })) => {
                match absent_is_none(get(client, key).await)? {
                    Some((found, _)) if found == bytes => Ok(Put::Done),
                    _ if is_transport(&error) => Err(error),
                    Some(_) => Ok(Put::Refused),
                    None if matches!(mode, PutMode::Update(_)) => Ok(Put::Refused),
                    None => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    };
    again(try_once, |error| is_transport(error) || matches!(error, E::AlreadyExists { .. })).await
}

fn absent_is_none<T>(result: object_store::Result<T>) -> object_store::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
