//! Large objects: written in parts, read in ranges.
//!
//! Memory is bounded: at most [`IN_FLIGHT`] parts of [`PART_BYTES`] are on their way while one more fills; then the writer
//! waits. Before the first part a small object `<key>.upload` says which upload is under way, so that whoever removes the
//! checkpoint of a dead generation can end it; parts of an upload that never ends cost storage and appear in no listing.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::path::Path as Key;
use object_store::{MultipartId, ObjectStoreExt, PutMode, PutPayload};
use serde::{Deserialize, Serialize};

use super::Objects;
use super::connect::Client;
use super::fault::{explain, failed};
use super::requests::{absent_is_none, again, cut_off, is_transport};
use super::runtime::{self, Pending};
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Stage};

/// Bytes of a part. S3 takes 10,000 parts, so an object has at most 156 GiB.
pub(super) const PART_BYTES: usize = 16 << 20;

/// Parts on their way at once.
const IN_FLIGHT: usize = 4;

const MAX_PARTS: usize = 10_000;

/// The end of the keys of notes about uploads that are under way.
pub(crate) const NOTE_SUFFIX: &str = ".upload";

/// An upload that is under way.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    /// The object's key below the prefix.
    key: String,
    /// The server's name of the upload.
    upload: MultipartId,
}

/// An object in the making. Dropped unfinished, it leaves nothing.
#[derive(Debug)]
pub struct ObjectWriter {
    objects: Objects,
    key: String,
    point: FailPoint,
    buffer: Vec<u8>,
    upload: Option<Upload>,
    size: u64,
}

#[derive(Debug)]
struct Upload {
    id: MultipartId,
    parts: Vec<PartId>,
    in_flight: VecDeque<Pending<object_store::Result<PartId>>>,
}

impl ObjectWriter {
    pub(super) fn new(objects: Objects, key: String, point: FailPoint) -> Self {
        Self { objects, key, point, buffer: Vec::new(), upload: None, size: 0 }
    }

    /// Adds bytes; waits while too many parts are on their way.
    ///
    /// # Errors
    /// [`Error::Object`]: one of the parts so far did not arrive.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.size += bytes.len() as u64;
        while !bytes.is_empty() {
            // A part is sent when more follows: what fits into one is a plain put.
            if self.buffer.len() == PART_BYTES {
                self.send_part()?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(PART_BYTES - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    /// Makes the object appear. After it returns the object is durable.
    ///
    /// # Errors
    /// [`Error::Object`]; [`Error::Io`] from a fail point.
    pub fn finish(mut self) -> Result<()> {
        if self.upload.is_none() {
            self.objects.hit(self.point, Stage::Temp, &self.key)?;
            let bytes = std::mem::take(&mut self.buffer);
            self.objects.put(&self.key, bytes, PutMode::Overwrite)?;
            return self.objects.hit(self.point, Stage::Done, &self.key);
        }
        self.send_part()?;
        while self.take_oldest()? {}
        self.objects.hit(self.point, Stage::Temp, &self.key)?;
        self.complete()?;
        self.objects.delete(vec![self.note_key()?])?;
        self.objects.hit(self.point, Stage::Done, &self.key)
    }

    fn note_key(&self) -> Result<Key> {
        self.objects.key(&format!("{}{NOTE_SUFFIX}", self.key))
    }

    fn send_part(&mut self) -> Result<()> {
        if self.upload.is_none() {
            self.upload = Some(self.begin()?);
        }
        while self.upload.as_ref().is_some_and(|upload| upload.in_flight.len() >= IN_FLIGHT) {
            self.take_oldest()?;
        }
        let key = self.objects.key(&self.key)?;
        self.objects.count(&self.key)?;
        let Some(upload) = &mut self.upload else { return Ok(()) };
        let index = upload.parts.len() + upload.in_flight.len();
        if index == MAX_PARTS {
            let reason = format!("it has more than {MAX_PARTS} parts of {PART_BYTES} bytes: use more ranks");
            return Err(Error::object("write", self.objects.path(&self.key)?.display(), reason));
        }
        let full = std::mem::replace(&mut self.buffer, Vec::with_capacity(PART_BYTES));
        let (client, id, bytes) = (Arc::clone(&self.objects.client), upload.id.clone(), Bytes::from(full));
        upload.in_flight.push_back(runtime::start(async move {
            let part = || client.store.put_part(&key, &id, index, PutPayload::from_bytes(bytes.clone()));
            again(part, is_transport).await
        })?);
        Ok(())
    }

    /// Waits for the part that was sent first. `false` if none is on its way.
    fn take_oldest(&mut self) -> Result<bool> {
        let Some(upload) = &mut self.upload else { return Ok(false) };
        let Some(part) = upload.in_flight.pop_front() else { return Ok(false) };
        let part = part.wait()?;
        upload.parts.push(self.objects.answer("write", &self.key, part)?);
        Ok(true)
    }

    fn begin(&self) -> Result<Upload> {
        let (client, key) = (Arc::clone(&self.objects.client), self.objects.key(&self.key)?);
        self.objects.count(&self.key)?;
        let begun = runtime::wait(async move { again(|| client.store.create_multipart(&key), is_transport).await })?;
        let id = self.objects.answer("begin the upload of", &self.key, begun)?;
        let upload = Upload { id, parts: Vec::new(), in_flight: VecDeque::new() };
        let noted = self.note(&upload.id);
        if let Err(error) = noted {
            end(&self.objects, &self.key, upload.id, None);
            return Err(error);
        }
        Ok(upload)
    }

    fn note(&self, id: &MultipartId) -> Result<()> {
        let note = Note { key: self.key.clone(), upload: id.clone() };
        let bytes = serde_json::to_vec(&note).map_err(|e| Error::io("write", self.objects.root(), e.into()))?;
        self.objects.put(&format!("{}{NOTE_SUFFIX}", self.key), bytes, PutMode::Overwrite)?;
        Ok(())
    }

    fn complete(&mut self) -> Result<()> {
        self.objects.count(&self.key)?;
        let Some(upload) = self.upload.take() else { return Ok(()) };
        let (client, key, size) = (Arc::clone(&self.objects.client), self.objects.key(&self.key)?, self.size);
        let id = upload.id.clone();
        let completed = runtime::wait(async move {
            let Err(error) = client.store.complete_multipart(&key, &upload.id, upload.parts).await else {
                return Ok(());
            };
            // A completion whose answer was lost ends the upload, so that the next try finds none.
            match absent_is_none(client.store.head(&key).await)? {
                Some(meta) if meta.size == size => Ok(()),
                _ => Err(error),
            }
        })?;
        let completed = self.objects.answer("complete", &self.key, completed);
        if completed.is_err() {
            end(&self.objects, &self.key, id, self.note_key().ok());
        }
        completed
    }
}

impl Drop for ObjectWriter {
    fn drop(&mut self) {
        if let Some(upload) = self.upload.take() {
            end(&self.objects, &self.key, upload.id, self.note_key().ok());
        }
    }
}

/// Ends an upload, and then removes its note. What fails is left to whoever removes the checkpoint.
fn end(objects: &Objects, key: &str, id: MultipartId, note: Option<Key>) {
    let Ok(path) = objects.key(key) else { return };
    let client = Arc::clone(&objects.client);
    let ended = runtime::wait(async move {
        absent_is_none(client.store.abort_multipart(&path, &id).await)?;
        match note {
            Some(note) => absent_is_none(client.store.delete(&note).await).map(drop),
            None => Ok(()),
        }
    });
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(key, error = %explain(&error), "an upload could not be ended; its parts stay"),
        Err(error) => tracing::warn!(key, %error, "an upload could not be ended; its parts stay"),
    }
}

impl Objects {
    /// Ends the upload that a note is about. An upload that is not there any more is fine.
    pub(super) fn abort_noted(&self, note_key: &str) -> Result<()> {
        let Some(bytes) = self.read(note_key)? else { return Ok(()) };
        let Ok(note) = serde_json::from_slice::<Note>(&bytes) else { return Ok(()) };
        self.count(note_key)?;
        let (client, path, id) = (Arc::clone(&self.client), self.key(&note.key)?, note.upload);
        let aborted = runtime::wait(async move { absent_is_none(client.store.abort_multipart(&path, &id).await) })?;
        self.answer("end the upload of", &note.key, aborted).map(drop)
    }
}

/// Reads of one object at any place: one range request each.
#[derive(Debug)]
pub struct ObjectReader {
    pub(super) client: Arc<Client>,
    pub(super) key: Key,
    pub(super) url: PathBuf,
}

impl ObjectReader {
    /// Fills `buffer` from `offset`; a shorter object is [`Error::Damaged`].
    ///
    /// # Errors
    /// [`Error::Object`], [`Error::Damaged`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        let (client, key, wanted) = (Arc::clone(&self.client), self.key.clone(), buffer.len() as u64);
        let range = offset..offset + wanted;
        let read = runtime::wait(async move {
            let get = || async {
                let bytes = client.store.get_range(&key, range.clone()).await?;
                if bytes.len() as u64 == wanted { Ok(bytes) } else { Err(cut_off(bytes.len() as u64, wanted)) }
            };
            match again(get, is_transport).await {
                Ok(bytes) => Ok(Ok(bytes)),
                // Is it the network, or is the object too short for this range?
                Err(error) => match absent_is_none(client.store.head(&key).await)? {
                    Some(meta) if meta.size < range.end => Ok(Err(format!("ends before byte {}", range.end))),
                    None => Ok(Err("is missing".to_owned())),
                    Some(_) => Err(error),
                },
            }
        })?;
        match read {
            Ok(Ok(bytes)) => {
                buffer.copy_from_slice(&bytes);
                Ok(())
            }
            Ok(Err(reason)) => Err(Error::Damaged { path: self.url.clone(), reason }),
            Err(error) => Err(failed("read", self.url.display(), &error)),
        }
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}
