//! Sends the spool over one stream, in order. It waits where the owner task must not: for the disk and for room in the
//! stream.

use tokio::sync::mpsc;
use trainctl_proto::v1::{WorkerMessage, worker_message::Body};

use crate::spool::{SpoolError, SpoolHandle};

/// Records read from the disk at once.
const BATCH: usize = 256;
/// Bytes read from the disk at once, about.
const BATCH_BYTES: usize = 4 << 20;

/// Runs until the stream is gone.
///
/// # Errors
/// [`SpoolError`] when the spool cannot be read.
pub(super) async fn pump(spool: SpoolHandle, outgoing: mpsc::Sender<WorkerMessage>) -> Result<(), SpoolError> {
    let mut status = spool.watch();
    let mut sent = 0;
    loop {
        let now = *status.borrow_and_update();
        sent = sent.max(now.acked);
        if now.last <= sent {
            tokio::select! {
                changed = status.changed() => if changed.is_err() { return Ok(()) },
                () = outgoing.closed() => return Ok(()),
            }
            continue;
        }
        let records = spool.read(sent, BATCH, BATCH_BYTES).await?;
        if records.is_empty() {
            sent = now.last;
        }
        for record in records {
            let age_ms = u64::try_from(record.age.as_millis()).unwrap_or(u64::MAX);
            let message = WorkerMessage { seq: record.seq, age_ms, body: Some(Body::RankReport(record.report)) };
            if outgoing.send(message).await.is_err() {
                return Ok(());
            }
            sent = record.seq;
        }
    }
}
