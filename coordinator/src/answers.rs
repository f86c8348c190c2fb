//! A stream of answers to a caller that may not read.
//!
//! Between who answers and who reads stand [`QUEUE`] messages; nothing is made beyond them. A reader that takes none for
//! [`Answers`]' patience is dropped: what waited for it is freed at once, and the stream ends with a status that says so,
//! which it hears if it reads again.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::task::AtomicWaker;
use tokio::sync::mpsc::{Receiver, Sender, channel, error::SendTimeoutError};
use tokio_stream::Stream;
use tonic::Status;

/// Messages of one stream that may wait.
const QUEUE: usize = 64;

/// Why a stream ended early.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The caller does not listen any more.
    #[error("the caller hung up")]
    HungUp,
    /// The caller listens and does not read.
    #[error("the caller took nothing for {0:?}: its stream was dropped")]
    TooSlow(Duration),
}

struct Shared<T> {
    /// Absent once the stream was ended from this side.
    waiting: Option<Receiver<T>>,
    end: Option<Status>,
}

struct Line<T> {
    shared: Mutex<Shared<T>>,
    reader: AtomicWaker,
}

impl<T> Line<T> {
    fn lock(&self) -> MutexGuard<'_, Shared<T>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The side that answers.
pub struct Answers<T> {
    sender: Sender<T>,
    line: Arc<Line<T>>,
    patience: Duration,
}

/// The side that is served.
pub struct AnswerStream<T>(Arc<Line<T>>);

/// A stream whose reader may stand still for `patience`.
pub fn stream<T>(patience: Duration) -> (Answers<T>, AnswerStream<T>) {
    let (sender, receiver) = channel(QUEUE);
    let shared = Mutex::new(Shared { waiting: Some(receiver), end: None });
    let line = Arc::new(Line { shared, reader: AtomicWaker::new() });
    (Answers { sender, line: line.clone(), patience }, AnswerStream(line))
}

impl<T> Answers<T> {
    /// Sends one message.
    ///
    /// # Errors
    /// [`Error`]: nothing more needs to be made.
    pub async fn send(&self, message: T) -> Result<(), Error> {
        match self.sender.send_timeout(message, self.patience).await {
            Ok(()) => Ok(()),
            Err(SendTimeoutError::Closed(_)) => Err(Error::HungUp),
            Err(SendTimeoutError::Timeout(_)) => {
                let patience = self.patience;
                self.end(Status::resource_exhausted(format!(
                    "nothing was read from this stream for {patience:?}, so it was dropped; call again to go on"
                )));
                Err(Error::TooSlow(patience))
            }
        }
    }

    /// Ends the stream with this status, ahead of what still waits.
    pub fn end(&self, status: Status) {
        let mut shared = self.line.lock();
        (shared.waiting, shared.end) = (None, Some(status));
        drop(shared);
        self.line.reader.wake();
    }

    /// Returns when the caller has hung up.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }
}

impl<T> Stream for AnswerStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // Before the look, so that an end between look and return is not missed.
        self.0.reader.register(context.waker());
        let mut shared = self.0.lock();
        match &mut shared.waiting {
            Some(waiting) => waiting.poll_recv(context).map(|message| message.map(Ok)),
            None => Poll::Ready(shared.end.take().map(Err)),
        }
    }
}

impl<T> Drop for AnswerStream<T> {
    fn drop(&mut self) {
        self.0.lock().waiting = None;
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stands_still_is_dropped_and_hears_why() {
        let (answers, mut stream) = stream(PATIENCE);
        let message = Arc::new(());
        for _ in 0..QUEUE {
            answers.send(message.clone()).await.unwrap();
        }
        assert!(stream.next().await.unwrap().is_ok());
        answers.send(message.clone()).await.unwrap();
        let start = tokio::time::Instant::now();
        assert_eq!(answers.send(message.clone()).await, Err(Error::TooSlow(PATIENCE)));
        assert_eq!(start.elapsed(), PATIENCE);
        assert_eq!(Arc::strong_count(&message), 1, "what waited is freed");
        assert_eq!(stream.next().await.unwrap().unwrap_err().code(), tonic::Code::ResourceExhausted);
        assert!(stream.next().await.is_none());
        assert_eq!(answers.send(message).await, Err(Error::HungUp));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_comes_in_time_loses_nothing() {
        let (answers, mut stream) = stream(PATIENCE);
        let reader = async {
            tokio::time::sleep(PATIENCE / 2).await;
            let mut heard = Vec::new();
            while let Some(number) = stream.next().await {
                heard.push(number.unwrap());
            }
            heard
        };
        let writer = async move {
            for number in 0..200 {
                answers.send(number).await.unwrap();
            }
        };
        let (heard, ()) = tokio::join!(reader, writer);
        assert_eq!(heard, (0..200).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn an_end_goes_ahead_of_what_waits_and_a_reader_that_left_is_noticed() {
        let (answers, mut ended) = stream(PATIENCE);
        answers.send(1).await.unwrap();
        answers.end(Status::unauthenticated("over"));
        assert_eq!(ended.next().await.unwrap().unwrap_err().message(), "over");
        let (answers, left) = stream::<u8>(PATIENCE);
        drop(left);
        answers.closed().await;
        assert_eq!(answers.send(1).await, Err(Error::HungUp));
    }
}
