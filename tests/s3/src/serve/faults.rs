//! What the switches do to a request or to an answer.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use nix::sys::signal::{Signal, raise};

use super::{AnyError, Body, Control};
use crate::switches::Switches;

/// S3 refuses requests whose time differs by more.
const MAX_SKEW_SECONDS: i64 = 15 * 60;

/// An answer instead of the store's, and the fault's name in the log.
pub(super) fn refusal(
    request: &Request<Incoming>,
    control: &Control,
    switches: &Switches,
) -> Option<(&'static str, Response<Body>)> {
    let signed_at = request.headers().get("x-amz-date").and_then(|date| date.to_str().ok()).and_then(parse_amz_date);
    let now = jiff::Timestamp::now().as_second() + switches.clock_offset_seconds;
    if signed_at.is_some_and(|at| (at - now).abs() > MAX_SKEW_SECONDS) {
        let message = "The difference between the request time and the current time is too large.";
        return Some(("skewed", error(StatusCode::FORBIDDEN, "RequestTimeTooSkewed", message)));
    }
    if !control.draw(switches.refuse) {
        return None;
    }
    Some((
        "refused",
        match control.draw(0.5) {
            true => error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "We encountered an internal error."),
            false => error(StatusCode::SERVICE_UNAVAILABLE, "SlowDown", "Reduce your request rate."),
        },
    ))
}

/// `20261130T015958Z` in seconds since 1970.
fn parse_amz_date(text: &str) -> Option<i64> {
    let time = jiff::civil::DateTime::strptime("%Y%m%dT%H%M%SZ", text).ok()?;
    Some(time.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp().as_second())
}

/// The body of a request; for the part that a switch names the process ends in the middle of it.
pub(super) fn part_that_kills(
    entry: &serde_json::Value,
    body: Incoming,
    control: &Control,
    switches: &Switches,
) -> s3s::Body {
    let is_part =
        entry["method"] == "PUT" && entry["query"].as_str().is_some_and(|query| query.contains("partNumber="));
    if !is_part {
        return body.into();
    }
    let number = control.parts.fetch_add(1, Ordering::AcqRel) + 1;
    if switches.die_at_part != Some(number) {
        return body.into();
    }
    let dying = body.into_data_stream().map(|data| {
        if data.as_ref().is_ok_and(|data| !data.is_empty()) {
            raise(Signal::SIGKILL).unwrap();
        }
        data
    });
    s3s::Body::http_body_unsync(StreamBody::new(dying.map(|data| data.map(Frame::data).map_err(AnyError::from))))
}

/// The first `length` bytes of a body, then the end of the connection.
pub(super) fn truncated(body: Body, length: u64) -> Body {
    let mut left = length;
    let frames = body.into_data_stream().map(move |data| {
        let data = data?;
        let now = data.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        left -= now as u64;
        match now {
            0 => Err(AnyError::from("cut off on purpose")),
            now => Ok(Frame::data(data.slice(..now))),
        }
    });
    StreamBody::new(frames).boxed_unsync()
}

/// A body at so many bytes per second.
pub(super) fn paced(body: Body, bytes_per_second: u64) -> Body {
    let frames = body.into_data_stream().then(move |data| async move {
        if let Ok(data) = &data {
            tokio::time::sleep(Duration::from_secs_f64(data.len() as f64 / bytes_per_second as f64)).await;
        }
        data.map(Frame::data)
    });
    StreamBody::new(frames).boxed_unsync()
}

/// An error in S3's form.
pub(super) fn error(status: StatusCode, code: &str, message: &str) -> Response<Body> {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    );
    plain(status, text)
}

pub(super) fn plain(status: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    response
}
