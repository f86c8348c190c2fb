//! Requests to an object store, again where the first answer says nothing.

use std::future::Future;
use std::time::Duration;

use object_store::path::Path as Key;
use object_store::{GetOptions, PutMode, PutOptions, PutPayload, UpdateVersion};

use super::connect::Client;
use super::fault::explain;

/// How often a body that ended too early, or a conditional put whose answer was lost, is tried.
const TRIES: u32 = 4;

/// No further try after so long.
const LONG: Duration = Duration::from_secs(20);

/// What a put under a condition came to.
pub(super) enum Put {
    Done,
    Refused,
}

/// Runs a request again while `retry` says so, with a growing pause. The client retries what the server refuses; this is for
/// what it cannot know.
pub(super) async fn again<T, F, W>(mut work: W, retry: impl Fn(&object_store::Error) -> bool) -> object_store::Result<T>
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
pub(super) fn is_transport(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::Generic { .. })
}

pub(super) async fn get(client: &Client, key: &Key) -> object_store::Result<(Vec<u8>, UpdateVersion)> {
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

pub(super) fn cut_off(got: u64, size: u64) -> object_store::Error {
    object_store::Error::Generic {
        store: "store",
        source: format!("the answer ended after {got} of {size} bytes").into(),
    }
}

pub(super) async fn put(client: &Client, key: &Key, bytes: bytes::Bytes, mode: PutMode) -> object_store::Result<Put> {
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

pub(super) fn absent_is_none<T>(result: object_store::Result<T>) -> object_store::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
