//! Where a coordinator is. It publishes `endpoint.json`; workers and `trainctl` read it again before every dial, since
//! address and port may change when it restarts.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files;

/// Name of the file in a control directory.
pub const FILE_NAME: &str = "endpoint.json";
/// Environment variable that names a coordinator when no flag does.
pub const VARIABLE: &str = "TRAINCTL_COORDINATOR";

/// The content of `endpoint.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Addresses to try, best first: `127.0.0.1` for a loopback listener, else every non-loopback address.
    pub addresses: Vec<String>,
    /// TCP port.
    pub port: u16,
    /// New at every start of the coordinator.
    pub incarnation: String,
    /// Host name, for people.
    pub host: String,
    /// Process id on that host.
    pub pid: u32,
    /// Certificate of the run's CA; present exactly when the listener speaks TLS.
    pub ca_pem: Option<String>,
    /// The coordinator's state directory, where its owner finds `owner.json`.
    #[serde(default)]
    pub state_dir: Option<PathBuf>,
}

impl Endpoint {
    /// The addresses with the port, for messages: `127.0.0.1:4711, 10.0.0.7:4711`.
    #[must_use]
    pub fn display(&self) -> String {
        self.addresses.iter().map(|address| join_host_port(address, self.port)).collect::<Vec<_>>().join(", ")
    }
}

/// `host:port`, with brackets around an IPv6 address.
pub(crate) fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Why an endpoint could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read or written.
    #[error("{action} {path}: {source}")]
    Io {
        /// "read" or "publish".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file is not an endpoint.
    #[error("{path} is not an endpoint file: {reason}; delete it and start the coordinator again")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        reason: String,
    },
    /// No endpoint file in any of the places.
    #[error("no coordinator found; looked at {}; start one with `trainctl coordinator` or name one with --coordinator DIR", list(.0))]
    NotFound(Vec<String>),
}

fn list(places: &[String]) -> String {
    places.join(", ")
}

/// Writes `endpoint.json` in `dir`, by temporary name and rename.
///
/// # Errors
/// [`Error::Io`].
pub fn publish(endpoint: &Endpoint, dir: &Path) -> Result<(), Error> {
    let path = dir.join(FILE_NAME);
    let io = |source| Error::Io { action: "publish", path: path.clone(), source };
    let bytes = serde_json::to_vec_pretty(endpoint).map_err(|error| io(error.into()))?;
    files::write_atomically(&path, &bytes, 0o644).map_err(io)
}

/// Reads an endpoint from a control directory or from the file itself.
///
/// # Errors
/// [`Error::Io`] when there is none, [`Error::Malformed`] when it is something else.
pub fn read(dir_or_file: &Path) -> Result<Endpoint, Error> {
    let path = file_of(dir_or_file);
    let bytes = std::fs::read(&path).map_err(|source| Error::Io { action: "read", path: path.clone(), source })?;
    serde_json::from_slice(&bytes).map_err(|error| Error::Malformed { path, reason: error.to_string() })
}

/// `<dir>/endpoint.json` for a directory (or a path that does not exist yet and has no `.json` name), else the path.
fn file_of(dir_or_file: &Path) -> PathBuf {
    let names_a_file = dir_or_file.is_file() || dir_or_file.extension().is_some_and(|extension| extension == "json");
    if names_a_file { dir_or_file.to_owned() } else { dir_or_file.join(FILE_NAME) }
}

/// The directory of control files that belongs to `dir_or_file`.
#[must_use]
pub fn dir_of(dir_or_file: &Path) -> PathBuf {
    file_of(dir_or_file).parent().map(Path::to_owned).unwrap_or_default()
}

/// A coordinator that was found.
#[derive(Clone, Debug)]
pub struct Located {
    /// What its file says.
    pub endpoint: Endpoint,
    /// Directory of the file: the token lies there, or in `endpoint.state_dir`.
    pub dir: PathBuf,
}

/// Finds a coordinator: `explicit` (a control directory, a run directory, an `endpoint.json` or `host:port`), else
/// `TRAINCTL_COORDINATOR`, else `./control/endpoint.json`, else the user's state directory. An explicit place is the only
/// one looked at.
///
/// # Errors
/// [`Error::NotFound`] with the places looked at; [`Error::Malformed`] for a damaged file.
pub fn locate(explicit: Option<&str>) -> Result<Located, Error> {
    let named = explicit.map(str::to_owned).or_else(|| std::env::var(VARIABLE).ok().filter(|value| !value.is_empty()));
    let places = match &named {
        Some(name) => {
            if let Some(located) = from_host_port(name) {
                return Ok(located);
            }
            let path = PathBuf::from(name);
            vec![path.clone(), path.join("control")]
        }
        None => [Some(PathBuf::from("control")), user_state_dir()].into_iter().flatten().collect(),
    };
    let mut looked = Vec::new();
    for place in places {
        let file = file_of(&place);
        match read(&file) {
            Ok(endpoint) => return Ok(Located { endpoint, dir: dir_of(&file) }),
            Err(Error::Io { .. }) => looked.push(file.display().to_string()),
            Err(error) => return Err(error),
        }
    }
    Err(Error::NotFound(looked))
}

/// `host:port` without TLS; the token then comes from the user's state directory.
fn from_host_port(name: &str) -> Option<Located> {
    if name.contains('/') || Path::new(name).exists() {
        return None;
    }
    let (host, port) = name.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let dir = user_state_dir()?;
    // The file knows the CA; use it when it speaks of the same port.
    let known = read(&dir).ok();
    let port = port.parse().ok()?;
    let endpoint = match known {
        Some(known) if known.port == port => Endpoint { addresses: vec![host.to_owned()], ..known },
        _ => Endpoint {
            addresses: vec![host.to_owned()],
            port,
            incarnation: String::new(),
            host: host.to_owned(),
            pid: 0,
            ca_pem: None,
            state_dir: Some(dir.clone()),
        },
    };
    Some(Located { endpoint, dir })
}

/// `$XDG_STATE_HOME/trainctl`, else `~/.local/state/trainctl`: the state directory of a coordinator that belongs to a user
/// rather than to one run.
#[must_use]
pub fn user_state_dir() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(base.join("trainctl"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            addresses: vec!["127.0.0.1".into()],
            port: 4711,
            incarnation: "a1".into(),
            host: "node1".into(),
            pid: 12,
            ca_pem: None,
            state_dir: None,
        }
    }

    #[test]
    fn a_published_endpoint_is_read_from_directory_file_and_run_directory() {
        let run = tempfile::tempdir().expect("temporary directory");
        let control = run.path().join("control");
        std::fs::create_dir(&control).expect("create");
        publish(&endpoint(), &control).expect("publish");
        assert_eq!(read(&control).expect("directory"), endpoint());
        assert_eq!(read(&control.join(FILE_NAME)).expect("file"), endpoint());
        let located = locate(run.path().to_str()).expect("run directory");
        assert_eq!((located.endpoint, located.dir), (endpoint(), control.clone()));
        let names: Vec<_> =
            std::fs::read_dir(&control).expect("list").map(|entry| entry.expect("entry").file_name()).collect();
        assert_eq!(names, [FILE_NAME], "a temporary file is left");
    }

    #[test]
    fn a_missing_coordinator_says_where_it_looked() {
        let error = locate(Some("/nonexistent/run")).expect_err("nothing there").to_string();
        assert!(error.contains("/nonexistent/run/endpoint.json, /nonexistent/run/control/endpoint.json"), "{error}");
    }

    #[test]
    fn a_torn_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::write(dir.path().join(FILE_NAME), "{\"addresses\": [").expect("write");
        assert!(matches!(read(dir.path()), Err(Error::Malformed { .. })));
    }

    #[test]
    fn host_and_port_are_an_address() {
        let located = locate(Some("[::1]:900")).expect("address");
        assert_eq!(located.endpoint.display(), "[::1]:900");
    }
}
