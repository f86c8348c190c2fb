//! The spool's file format.
//!
//! ```text
//! header   8 bytes "TCSPOOL1" · 1 byte length of the id · the id · 4 bytes check of the id
//! frame    4 bytes length of the body, little-endian · 4 bytes check of the body · body
//! body     1 byte kind · 8 bytes sequence number · 8 bytes wall time in ms · payload
//! ```
//! A check is the first four bytes of blake3. Kinds: 1 record (payload: an encoded `RankReport`), 2 acknowledged up to
//! the number, 3 opened (payload: the kernel's boot id; number: the highest one given before), 4 withdrawn (number: the record's).

#![expect(
    clippy::disallowed_methods,
    reason = "the worker's own state directory: the spool syncs file and directory itself"
)]

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use trainctl_fault::{FailPoint, Faults, Stage, Synced};

use super::SpoolError;

const MAGIC: &[u8; 8] = b"TCSPOOL1";
const FRAME_HEAD: usize = 8;
const BODY_HEAD: usize = 17;
/// Larger frames cannot be ours: the link refuses such messages.
const MAX_BODY: usize = 1 << 30;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    Record = 1,
    Acked = 2,
    Opened = 3,
    Withdrawn = 4,
}

/// One frame; `offset` is where it begins in the file, once it is there.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Frame {
    pub(super) kind: FrameKind,
    pub(super) seq: u64,
    pub(super) wall_ms: u64,
    pub(super) payload: Vec<u8>,
    pub(super) offset: u64,
}

impl Frame {
    pub(super) fn new(kind: FrameKind, seq: u64, wall_ms: u64, payload: Vec<u8>) -> Self {
        Self { kind, seq, wall_ms, payload, offset: 0 }
    }

    fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(BODY_HEAD + self.payload.len());
        body.push(self.kind as u8);
        body.extend_from_slice(&self.seq.to_le_bytes());
        body.extend_from_slice(&self.wall_ms.to_le_bytes());
        body.extend_from_slice(&self.payload);
        let mut frame = Vec::with_capacity(FRAME_HEAD + body.len());
        frame.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
        frame.extend_from_slice(&check(&body));
        frame.extend_from_slice(&body);
        frame
    }

    /// The first frame of `bytes` and its length; `None` when it is torn or damaged.
    fn decode(bytes: &[u8], offset: u64) -> Option<(Self, usize)> {
        let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
        if !(BODY_HEAD..=MAX_BODY).contains(&length) {
            return None;
        }
        let body = bytes.get(FRAME_HEAD..FRAME_HEAD + length)?;
        if bytes.get(4..FRAME_HEAD)? != check(body) {
            return None;
        }
        let kind = match body[0] {
            1 => FrameKind::Record,
            2 => FrameKind::Acked,
            3 => FrameKind::Opened,
            4 => FrameKind::Withdrawn,
            _ => return None,
        };
        let seq = u64::from_le_bytes(body[1..9].try_into().ok()?);
        let wall_ms = u64::from_le_bytes(body[9..17].try_into().ok()?);
        Some((Self { kind, seq, wall_ms, payload: body[BODY_HEAD..].to_vec(), offset }, FRAME_HEAD + length))
    }
}

fn check(bytes: &[u8]) -> [u8; 4] {
    let hash = blake3::hash(bytes);
    let bytes = hash.as_bytes();
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

fn encode_header(id: &str) -> Vec<u8> {
    let id = &id.as_bytes()[..id.len().min(255)];
    let mut header = MAGIC.to_vec();
    header.push(u8::try_from(id.len()).unwrap_or(u8::MAX));
    header.extend_from_slice(id);
    header.extend_from_slice(&check(id));
    header
}

fn decode_header(bytes: &[u8]) -> Option<(String, usize)> {
    if bytes.get(..8)? != MAGIC {
        return None;
    }
    let length = usize::from(*bytes.get(8)?);
    let id = bytes.get(9..9 + length)?;
    if bytes.get(9 + length..13 + length)? != check(id) {
        return None;
    }
    Some((String::from_utf8(id.to_vec()).ok()?, 13 + length))
}

/// What an existing file held.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    pub(super) frames: Vec<Frame>,
    /// A whole frame with a wrong check was found: more than the tail of an interrupted write is gone.
    pub(super) damaged: bool,
}

/// The open file. The whole life of one file has one writer: the state directory's lock sees to it.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    id: String,
    length: u64,
}

impl LogFile {
    /// Opens `path`, cutting a torn tail; makes a new file with `fresh_id` when there is none, or when its header is
    /// unreadable (the old one is then kept beside it under the name `spool.damaged`).
    pub(super) fn open(path: &Path, fresh_id: &str) -> Result<(Self, Loaded), SpoolError> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(SpoolError::Io { action: "read", path: path.to_path_buf(), source }),
        };
        let Some((id, start)) = decode_header(&bytes) else {
            if !bytes.is_empty() {
                let aside = path.with_extension("damaged");
                tracing::error!(path = %path.display(), aside = %aside.display(), "the spool's header is damaged");
                std::fs::rename(path, &aside).map_err(|source| SpoolError::Io {
                    action: "set aside",
                    path: aside,
                    source,
                })?;
            }
            let log = Self::create(path, fresh_id, &[])?;
            return Ok((log, Loaded::default()));
        };
        let mut loaded = Loaded::default();
        let mut at = start;
        while let Some((frame, length)) = Frame::decode(&bytes[at..], at as u64) {
            loaded.frames.push(frame);
            at += length;
        }
        if at < bytes.len() {
            loaded.damaged = is_damage(&bytes[at..]);
            tracing::warn!(path = %path.display(), bytes = bytes.len() - at, "cut the spool's torn tail");
        }
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|source| SpoolError::Io { action: "open", path: path.to_path_buf(), source })?;
        let mut log = Self { path: path.to_path_buf(), file, id, length: at as u64 };
        log.cut_to(at as u64)?;
        Ok((log, loaded))
    }

    fn create(path: &Path, id: &str, frames: &[Frame]) -> Result<Self, SpoolError> {
        let temporary = path.with_extension("tmp");
        let faults = Faults::from_env();
        let failed = |action| move |source| SpoolError::Io { action, path: path.to_path_buf(), source };
        let mut bytes = encode_header(id);
        for frame in frames {
            bytes.extend_from_slice(&frame.encode());
        }
        faults.hit(FailPoint::SPOOL_REPLACE, Stage::Before).map_err(failed("replace"))?;
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&temporary);
        let file = file.as_mut().map_err(|error| SpoolError::Io {
            action: "create",
            path: temporary.clone(),
            source: std::io::Error::new(error.kind(), error.to_string()),
        })?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed("write"))?;
        faults.hit(FailPoint::SPOOL_REPLACE, Stage::Temp).map_err(failed("replace"))?;
        std::fs::rename(&temporary, path).map_err(failed("rename"))?;
        if let Some(parent) = path.parent() {
            File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed("sync the directory of"))?;
        }
        let file = file.try_clone().map_err(failed("open"))?;
        Ok(Self { path: path.to_path_buf(), file, id: id.to_owned(), length: bytes.len() as u64 })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn len(&self) -> u64 {
        self.length
    }

    /// Appends a frame and returns where it begins. After an error the file ends where it ended before.
    pub(super) fn append(&mut self, frame: &Frame) -> Result<u64, SpoolError> {
        let bytes = frame.encode();
        let offset = self.length;
        let faults = Faults::from_env();
        let passed = faults.hit(FailPoint::SPOOL_APPEND, Stage::Before);
        if let Err(source) = passed.and_then(|()| self.file.write_all_at(&bytes, offset)) {
            self.cut_to(offset)?;
            return Err(SpoolError::Io { action: "append to", path: self.path.clone(), source });
        }
        self.length += bytes.len() as u64;
        Ok(offset)
    }

    /// Cuts the file back to `length` bytes.
    pub(super) fn cut_to(&mut self, length: u64) -> Result<(), SpoolError> {
        self.length = length;
        let cut = self.file.set_len(length);
        cut.map_err(|source| SpoolError::Io { action: "cut", path: self.path.clone(), source })
    }

    pub(super) fn sync(&mut self) -> Result<(), SpoolError> {
        let wanted = Faults::from_env().sync(FailPoint::SPOOL_SYNC, Synced::File);
        let synced = wanted.and_then(|wanted| if wanted { self.file.sync_data() } else { Ok(()) });
        synced.map_err(|source| SpoolError::Io { action: "sync", path: self.path.clone(), source })
    }

    /// Payload of the record `seq` that begins at `offset`.
    pub(super) fn read_at(&self, offset: u64, seq: u64) -> Result<Vec<u8>, SpoolError> {
        let failed = |source| SpoolError::Io { action: "read", path: self.path.clone(), source };
        let mut head = [0; FRAME_HEAD];
        self.file.read_exact_at(&mut head, offset).map_err(failed)?;
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let mut bytes = head.to_vec();
        bytes.resize(FRAME_HEAD + length.min(MAX_BODY), 0);
        self.file.read_exact_at(&mut bytes[FRAME_HEAD..], offset + FRAME_HEAD as u64).map_err(failed)?;
        match Frame::decode(&bytes, offset) {
            Some((frame, _)) if frame.seq == seq => Ok(frame.payload),
            _ => Err(SpoolError::Record {
                path: self.path.clone(),
                seq,
                reason: "its frame is damaged or another one".to_owned(),
            }),
        }
    }

    /// Replaces the file by one of the same id that holds `frames` only.
    pub(super) fn replace(&mut self, frames: &[Frame]) -> Result<(), SpoolError> {
        *self = Self::create(&self.path, &self.id, frames)?;
        Ok(())
    }
}

/// Whether unreadable bytes are more than the beginning of one interrupted write: a whole frame is there and wrong.
fn is_damage(tail: &[u8]) -> bool {
    let Some(length) = tail.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes) else {
        return false;
    };
    tail.len() >= FRAME_HEAD + length as usize
}
