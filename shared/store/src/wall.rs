//! Wall-clock time as text. It is shown to people and bounds the age of pins; no decision about a lease uses it.

use std::time::Duration;

use jiff::Timestamp;

/// Now in UTC with milliseconds, for example `2026-11-29T22:31:14.123Z`.
pub(crate) fn now() -> String {
    format!("{:.3}", Timestamp::now())
}

/// How long ago `text` was; `None` if it is no timestamp. A time in the future is an age of zero.
pub(crate) fn age(text: &str) -> Option<Duration> {
    let then: Timestamp = text.parse().ok()?;
    let elapsed = Timestamp::now().duration_since(then);
    Some(Duration::try_from(elapsed).unwrap_or(Duration::ZERO))
}
