//! Writing safetensors files batch by batch: memory does not grow with the tensors.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use safetensors::tensor::{Metadata, TensorInfo};

use super::dtype::{CastReport, cast};
use super::plan::{Plan, PlannedFile, PlannedTensor};
use super::{Dtype, ExportError, Progress};
use crate::batches::{self, Item, Whole};
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::{Disk, DiskWriter};
use crate::shard::ShardReader;

/// Batches in memory: one is read while the one before is written.
const BUFFERS: usize = 2;
/// Bytes that are cast at a time; a whole number of elements of every type.
const CAST_BYTES: usize = 1 << 20;

type Batch = Result<Vec<u8>>;

/// What the casts of a whole export did.
#[derive(Debug, Default)]
pub(super) struct Casts {
    /// Values other than zero that became zero.
    pub(super) flushed: u64,
}

/// Writes the planned files into `folder`. One thread reads and proves the bytes, this one casts and writes them.
pub(super) fn write_files(
    reader: &ShardReader,
    plan: &Plan,
    batch_bytes: u64,
    disk: &Disk,
    folder: &str,
    progress: &mut Progress<'_>,
) -> Result<Casts, ExportError> {
    let planned: Vec<&PlannedTensor> = plan.tensors().collect();
    let tensors: Vec<Whole<'_>> = planned.iter().map(|tensor| tensor.whole()).collect();
    let batches = batches::batches(&tensors, batch_bytes);
    let (read, full) = sync_channel::<Batch>(BUFFERS);
    let (free, buffers) = sync_channel::<Vec<u8>>(BUFFERS);
    for _ in 0..BUFFERS {
        // The channel holds as many; it cannot be full or closed here.
        free.try_send(Vec::new()).unwrap_or_default();
    }
    thread::scope(|scope| {
        let (tensors, batches) = (&tensors, &batches);
        let reading = thread::Builder::new().name("export-read".to_owned()).spawn_scoped(scope, move || {
            read_all(reader, tensors, batches, &buffers, &read);
        });
        if let Err(error) = reading {
            return Err(Error::Stopped(format!("start a thread: {error}")).into());
        }
        // Dropped at the end, whatever it is: that ends a reader that is ahead of a failed writer.
        let mut source = Source { full, free, items: batches.iter(), batch: [].iter(), buffer: Vec::new(), at: 0 };
        let (mut casts, mut done, total) = (Casts::default(), 0, plan.source_bytes());
        for file in &plan.files {
            let mut writer = disk.writer(&format!("{folder}/{}", file.path), FailPoint::EXPORT_FILE)?;
            let header = header(file)?;
            writer.write(&(header.len() as u64).to_le_bytes())?;
            writer.write(&header)?;
            for tensor in &file.tensors {
                let mut left = tensor.source_bytes();
                while left > 0 {
                    let bytes = source.next(tensors)?;
                    put(&mut writer, tensor, bytes, &mut casts)?;
                    left -= bytes.len() as u64;
                    done += bytes.len() as u64;
                    if progress(done, total).is_break() {
                        return Err(ExportError::Stopped);
                    }
                }
            }
            writer.finish()?;
        }
        Ok(casts)
    })
}

/// Ends early when nobody takes batches any more, and after an error.
fn read_all(
    reader: &ShardReader,
    tensors: &[Whole<'_>],
    batches: &[Vec<Item>],
    buffers: &Receiver<Vec<u8>>,
    full: &SyncSender<Batch>,
) {
    for batch in batches {
        let Ok(mut buffer) = buffers.recv() else { return };
        let read = batches::read(reader, tensors, batch, &mut buffer).map(|()| buffer);
        let failed = read.is_err();
        if full.send(read).is_err() || failed {
            return;
        }
    }
}

/// The bytes of all tensors, in order.
struct Source<'a> {
    full: Receiver<Batch>,
    free: SyncSender<Vec<u8>>,
    items: std::slice::Iter<'a, Vec<Item>>,
    batch: std::slice::Iter<'a, Item>,
    buffer: Vec<u8>,
    at: usize,
}

impl Source<'_> {
    /// The next part that holds anything.
    fn next(&mut self, tensors: &[Whole<'_>]) -> Result<&[u8]> {
        loop {
            if let Some(item) = self.batch.next() {
                let start = self.at;
                self.at += batches::bytes_of(tensors, item);
                if start < self.at {
                    return Ok(&self.buffer[start..self.at]);
                }
                continue;
            }
            let ended = || Error::Stopped("the reading thread ended".to_owned());
            self.batch = self.items.next().ok_or_else(ended)?.iter();
            let used = std::mem::take(&mut self.buffer);
            if used.capacity() > 0 {
                // The reader may have read its last batch.
                self.free.send(used).unwrap_or_default();
            }
            self.buffer = self.full.recv().map_err(|_| ended())??;
            self.at = 0;
        }
    }
}

fn put(writer: &mut DiskWriter, tensor: &PlannedTensor, bytes: &[u8], casts: &mut Casts) -> Result<(), ExportError> {
    if tensor.from == tensor.to {
        return Ok(writer.write(bytes)?);
    }
    let mut converted = Vec::new();
    for piece in bytes.chunks(CAST_BYTES) {
        let CastReport { overflow, flushed } = cast(tensor.from, tensor.to, piece, &mut converted);
        if let Some(value) = overflow {
            return Err(ExportError::Overflow { name: tensor.name.clone(), value, dtype: tensor.to });
        }
        casts.flushed += flushed;
        writer.write(&converted)?;
    }
    Ok(())
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
