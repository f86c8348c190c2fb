//! Writing safetensors files piece by piece: memory does not grow with the tensors.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use safetensors::tensor::{Metadata, TensorInfo};

use super::dtype::{CastReport, cast};
use super::plan::{Plan, PlannedFile, PlannedTensor};
use super::{Dtype, ExportError};
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::{Disk, FileWriter};
use crate::shard::{BLOCK_BYTES, ShardReader};

/// Bytes that are read, cast and written at a time. A whole number of elements of every type.
const PIECE: usize = BLOCK_BYTES;
/// Pieces between the thread that reads and the one that writes.
const AHEAD: usize = 3;

type Piece = Result<Vec<u8>>;

/// What the casts of a whole export did.
#[derive(Debug, Default)]
pub(super) struct Casts {
    /// Values other than zero that became zero.
    pub(super) flushed: u64,
}

/// Writes the planned files into `folder`. One thread reads and proves the bytes, this one casts and writes them.
pub(super) fn write_files(
    reader: &mut ShardReader,
    plan: &Plan,
    disk: &Disk,
    folder: &str,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Casts, ExportError> {
    let (full_in, full) = sync_channel::<Piece>(AHEAD);
    let (free, free_out) = sync_channel::<Vec<u8>>(AHEAD + 1);
    for _ in 0..=AHEAD {
        // The channel holds as many; it cannot be full or closed here.
        free.try_send(Vec::new()).unwrap_or_default();
    }
    thread::scope(|scope| {
        let reading = thread::Builder::new().name("export-read".to_owned()).spawn_scoped(scope, move || {
            read_all(reader, plan, &free_out, &full_in);
        });
        let mut writing =
            Writing { full, free, total: plan.source_bytes(), done: 0, casts: Casts::default(), progress };
        let written = match &reading {
            Ok(_) => plan.files.iter().try_for_each(|file| writing.file(disk, folder, file)),
            Err(error) => Err(Error::Stopped(format!("start a thread: {error}")).into()),
        };
        // Dropping the channels ends a reader that is ahead of a failed writer.
        let casts = writing.casts;
        written.map(|()| casts)
    })
}

/// Ends early when nobody takes pieces any more, and after an error.
fn read_all(reader: &mut ShardReader, plan: &Plan, free: &Receiver<Vec<u8>>, full: &SyncSender<Piece>) {
    for tensor in plan.tensors() {
        for (start, size) in pieces(tensor) {
            let Ok(mut buffer) = free.recv() else { return };
            buffer.resize(size, 0);
            let piece = reader.read_tensor_range(&tensor.source, start, &mut buffer).map(|()| buffer);
            let failed = piece.is_err();
            if full.send(piece).is_err() || failed {
                return;
            }
        }
    }
}

/// Start and size of each piece of a tensor, bytes in the checkpoint.
fn pieces(tensor: &PlannedTensor) -> impl Iterator<Item = (u64, usize)> + use<> {
    let bytes = tensor.source_bytes();
    (0..bytes.div_ceil(PIECE as u64)).map(move |index| {
        let start = index * PIECE as u64;
        (start, (bytes - start).min(PIECE as u64) as usize)
    })
}

struct Writing<'a> {
    full: Receiver<Piece>,
    free: SyncSender<Vec<u8>>,
    total: u64,
    done: u64,
    casts: Casts,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Writing<'_> {
    fn file(&mut self, disk: &Disk, folder: &str, file: &PlannedFile) -> Result<(), ExportError> {
        let mut writer = disk.writer(&format!("{folder}/{}", file.path), FailPoint::EXPORT_FILE)?;
        let header = header(file)?;
        writer.write(&(header.len() as u64).to_le_bytes())?;
        writer.write(&header)?;
        let mut converted = Vec::new();
        for tensor in &file.tensors {
            for _ in pieces(tensor) {
                let bytes = self.full.recv().map_err(|_| Error::Stopped("the reading thread ended".to_owned()))??;
                self.piece(&mut writer, tensor, &bytes, &mut converted)?;
                self.done += bytes.len() as u64;
                (self.progress)(self.done, self.total);
                // The reader may have read its last piece.
                self.free.send(bytes).unwrap_or_default();
            }
        }
        Ok(writer.finish()?)
    }

    fn piece(
        &mut self,
        writer: &mut FileWriter,
        tensor: &PlannedTensor,
        bytes: &[u8],
        converted: &mut Vec<u8>,
    ) -> Result<(), ExportError> {
        if tensor.from == tensor.to {
            return Ok(writer.write(bytes)?);
        }
        let CastReport { overflow, flushed } = cast(tensor.from, tensor.to, bytes, converted);
        if let Some(value) = overflow {
            return Err(ExportError::Overflow { name: tensor.name.clone(), value, dtype: tensor.to });
        }
        self.casts.flushed += flushed;
        Ok(writer.write(converted)?)
    }
}

/// The header, padded with spaces to 8 bytes as the format's own writer does. `transformers` refuses a file without
/// `format`.
fn header(file: &PlannedFile) -> Result<Vec<u8>, ExportError> {
    let fault = |reason: String| Error::Tensor { name: file.path.clone(), reason };
    let mut end = 0;
    let info = |tensor: &PlannedTensor| {
        let start = end;
        end += tensor.bytes() as usize;
        let shape = tensor.shape.iter().map(|n| *n as usize).collect();
        (tensor.name.clone(), TensorInfo { dtype: Dtype::safetensors(tensor.to), shape, data_offsets: (start, end) })
    };
    let tensors = file.tensors.iter().map(info).collect();
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(about), tensors).map_err(|e| fault(e.to_string()))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|e| fault(e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}
