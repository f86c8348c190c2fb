//! What only reads a bucket.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{ObjectStoreExt, UpdateVersion};

use super::requests::{absent_is_none, get};
use super::{ObjectReader, Objects, runtime};
use crate::error::Result;
use crate::io::disk::{Entry, Kind, MAX_POINTER_FILE};

impl Objects {
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
    pub(super) fn read_pointer(&self, key: &str) -> Result<(Option<String>, Option<UpdateVersion>)> {
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
}
