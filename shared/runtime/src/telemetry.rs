//! Logs: tracing to stderr, filter in `TRAINCTL_LOG`, no colours when stderr is not a terminal.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Environment variable with the filter, for example `info,trainctl_coordinator=debug`.
pub const FILTER_VARIABLE: &str = "TRAINCTL_LOG";

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter does not parse.
    #[error(
        "{FILTER_VARIABLE}={filter:?} is not a log filter: {reason}; use for example \"info\" or \"info,trainctl_worker=debug\""
    )]
    Filter {
        /// The variable's value.
        filter: String,
        /// What the parser says.
        reason: String,
    },
    /// A subscriber is installed already.
    #[error("logging was initialised twice: {0}")]
    Twice(String),
}

/// Installs the process's log subscriber and logs one line that names service, version and pid.
///
/// # Errors
/// [`Error::Filter`] when `TRAINCTL_LOG` does not parse, [`Error::Twice`] on a second call.
pub fn init(service: &'static str) -> Result<(), Error> {
    init_with_default(service, "info")
}

/// [`init`] with another filter for when `TRAINCTL_LOG` is not set.
///
/// # Errors
/// As [`init`].
pub fn init_with_default(service: &'static str, default_filter: &str) -> Result<(), Error> {
    let wanted = std::env::var(FILTER_VARIABLE).unwrap_or_else(|_| default_filter.to_owned());
    let filter =
        EnvFilter::try_new(&wanted).map_err(|error| Error::Filter { filter: wanted, reason: error.to_string() })?;
    tracing_subscriber::fmt()
        .compact()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init()
        .map_err(|error| Error::Twice(error.to_string()))?;
    tracing::debug!(service, version = env!("CARGO_PKG_VERSION"), pid = std::process::id(), "started");
    Ok(())
}
