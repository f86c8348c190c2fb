//! How this process ends when it does not finish: an exit code whose class the coordinator understands, and one line.
//!
//! | code | constant | when |
//! |---|---|---|
//! | 0 | `FINISHED` | the engine finished and the worker has every report |
//! | 1 | `ERROR` | an error without a class of its own: spec, checkpoint that does not fit, libtorch |
//! | 64 | [`USAGE`] | not started by a worker |
//! | 71 | `PEER_LOST` | a collective, the rendezvous or the link lost its other side: a consequence |
//! | 74 | `DISK` | data or checkpoint could not be read or written |
//! | 75 | `STORE_AWAY` | a checkpoint could not be loaded since its place is away: a later try may succeed |
//! | 76 | `DEVICE` | CUDA or NCCL reported an error |
//! | 77 | `NON_FINITE` | loss or gradient not finite, and the spec says stop |
//! | 79 | `OUT_OF_MEMORY` | an allocation failed |
//! | 101 | `PANIC` | a panic |

use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use trainctl_engine::Error;
use trainctl_spec::state::exit::code;

/// Wrong start.
const USAGE: i32 = 64;

/// Texts of libtorch that mean "no memory", in lower case.
const OUT_OF_MEMORY: [&str; 4] = ["out of memory", "can't allocate memory", "bad_alloc", "failed to allocate"];
/// Texts of libtorch that mean "the device failed", in lower case.
const DEVICE: [&str; 4] = ["cuda error", "cublas", "cudnn", "nccl error"];

/// The last panic's text and place.
static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// An end that is not a finish.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ending {
    code: i32,
    message: String,
}

impl Ending {
    /// An error without a class of its own.
    pub(crate) fn error(message: impl Into<String>) -> Self {
        Self { code: code::ERROR, message: message.into() }
    }

    /// The worker, the coordinator or a peer is gone.
    pub(crate) fn peer_lost(message: impl Into<String>) -> Self {
        Self { code: code::PEER_LOST, message: message.into() }
    }

    /// What the last line will say.
    #[cfg(test)]
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Not started as it must be.
    pub(crate) fn usage(message: &str) -> Self {
        Self { code: USAGE, message: message.to_owned() }
    }

    /// After a panic that [`watch_panics`] saw.
    pub(crate) fn panicked() -> Self {
        let seen = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
        let message = seen.unwrap_or_else(|| "panicked".to_owned());
        // A failed allocation of libtorch may arrive as a panic of a wrapper.
        let code = class_of_text(&message).unwrap_or(code::PANIC);
        Self { code, message }
    }

    /// Writes the last line.
    #[expect(clippy::print_stderr, reason = "the last line is a contract with the worker's exit report, not a log")]
    fn say(&self) {
        eprintln!("trainctl-trainer: error: {}", one_line(&self.message));
    }

    /// Writes the last line and gives the exit code.
    pub(crate) fn report(self) -> ExitCode {
        self.say();
        ExitCode::from(u8::try_from(self.code).unwrap_or(1))
    }

    /// Writes the last line and ends the process before anything of it is taken down: no peer fails before this process has
    /// ended with its own code.
    pub(crate) fn end_at_once(self) -> ! {
        self.say();
        trainctl_collective::exit_at_once(self.code)
    }
}

impl From<&Error> for Ending {
    fn from(error: &Error) -> Self {
        let message = error.to_string();
        Self { code: class_of(error, &message), message }
    }
}

fn class_of(error: &Error, message: &str) -> i32 {
    match error {
        Error::NonFinite { .. } => code::NON_FINITE,
        Error::Collective { source, .. } | Error::Shim(source) if source.is_consequence() => code::PEER_LOST,
        Error::Load { away: true, .. } => code::STORE_AWAY,
        Error::Data { .. } | Error::Load { .. } | Error::Save { .. } => code::DISK,
        _ => class_of_text(message).unwrap_or(code::ERROR),
    }
}

fn class_of_text(message: &str) -> Option<i32> {
    let lower = message.to_lowercase();
    let says = |texts: &[&str]| texts.iter().any(|text| lower.contains(text));
    if says(&OUT_OF_MEMORY) {
        Some(code::OUT_OF_MEMORY)
    } else if says(&DEVICE) {
        Some(code::DEVICE)
    } else {
        None
    }
}

fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Remembers what the last panic said and logs it, instead of Rust's own text.
pub(crate) fn watch_panics() {
    std::panic::set_hook(Box::new(|info| {
        let what = info.payload_as_str().unwrap_or("panic without a text");
        let text = match info.location() {
            Some(place) => format!("panicked at {}:{}: {what}", place.file(), place.line()),
            None => format!("panicked: {what}"),
        };
        tracing::error!(thread = std::thread::current().name(), "{text}\n{}", std::backtrace::Backtrace::capture());
        *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }));
}

#[cfg(test)]
mod tests {
    use trainctl_collective as collective;
    use trainctl_spec::Step;

    use super::*;

    fn collective_error(source: collective::Error) -> Error {
        Error::Collective { what: "all-reduce".into(), step: Step(3), source }
    }

    fn load(why: &str, away: bool) -> Error {
        Error::Load { what: "checkpoint epoch_0_step_9".into(), why: why.into(), away }
    }

    #[test]
    fn each_class_has_its_code() {
        let lost = collective::Error::PeerLost { operation: "all_reduce", message: "connection closed by peer".into() };
        let argument = collective::Error::Argument { operation: "all_reduce", message: "shape".into() };
        let torch =
            |message: &str| Error::Shim(collective::Error::Torch { operation: "grad", message: message.into() });
        let cases = [
            (collective_error(lost), code::PEER_LOST),
            (collective_error(argument), code::ERROR),
            (Error::NonFinite { step: Step(1), loss: f64::NAN, grad_norm: 1.0 }, code::NON_FINITE),
            (load("hash", false), code::DISK),
            (load("connection refused", true), code::STORE_AWAY),
            (Error::Spec("x".into()), code::ERROR),
            (torch("CUDA out of memory. Tried to allocate 2 GiB"), code::OUT_OF_MEMORY),
            (torch("CUDA error: an illegal memory access was encountered"), code::DEVICE),
            (torch("shape mismatch"), code::ERROR),
        ];
        for (error, wanted) in cases {
            let text = error.to_string();
            assert_eq!(Ending::from(&error).code, wanted, "{text}");
        }
    }

    #[test]
    fn the_last_line_is_one_line() {
        assert_eq!(one_line("does not fit:\n  a: missing\n  b: unknown\n"), "does not fit:; a: missing; b: unknown");
    }
}
