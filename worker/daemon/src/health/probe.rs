//! One worker's part in a round of probes: it sees the coordinator's file in the run directory, writes one that its peers must
//! see, and is reached by them at its rank's address.
//!
//! The files lie in `<run>/control/probes/` under the worker's name and the round's number; a worker removes its own. They mean
//! nothing after the round, so a crash leaves at most one for each worker.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use trainctl_proto::v1::{
    Health, Probe, ProbeBegin, ProbeBegun, ProbeCheck, ProbeChecked, ProbeFault, ProbeFaultKind as Kind, ProbePeer,
    ProbeResult, ProbeUnreached, ProbeUnseen, probe::Step, probe_result::Result as Answer,
};
use trainctl_runtime::endpoint;
use trainctl_runtime::tasks::{OnCancel, OnError, Shutdown, TaskKind, spawn};

use super::{Measure, disk};
use crate::session::machine::Event;
use crate::session::owner::Probes;

/// How long a file may take to be seen: a client of NFS may believe in an old folder for seconds.
const SEE_LIMIT: Duration = Duration::from_secs(5);
/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a peer may take to answer.
const DIAL_LIMIT: Duration = Duration::from_secs(3);
/// Nobody listens for longer, whatever became of the coordinator.
const LISTEN_LIMIT: Duration = Duration::from_secs(60);

const KIND: TaskKind = TaskKind { name: "probe", on_cancel: OnCancel::Abort, on_error: OnError::Log };
const LISTEN: TaskKind = TaskKind { name: "probe listener", on_cancel: OnCancel::Abort, on_error: OnError::Log };

/// Carries out probes.
#[derive(Debug)]
pub struct Prober {
    worker: String,
    measure: Measure,
    events: mpsc::Sender<Event>,
    shutdown: Shutdown,
    /// By round: two jobs may ask at a time.
    open: Arc<Mutex<BTreeMap<u64, Open>>>,
}

/// What a round holds until its end.
#[derive(Debug)]
struct Open {
    run_dir: PathBuf,
    began: Instant,
    listener: Option<JoinHandle<()>>,
}

impl Prober {
    /// Of the worker with this id.
    pub fn new(worker: String, measure: Measure, events: mpsc::Sender<Event>, shutdown: Shutdown) -> Self {
        Self { worker, measure, events, shutdown, open: Arc::default() }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Open>> {
        lock(&self.open)
    }
}

fn lock(open: &Mutex<BTreeMap<u64, Open>>) -> MutexGuard<'_, BTreeMap<u64, Open>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Probes for Prober {
    fn probe(&mut self, Probe { round, step }: Probe) {
        let (worker, shutdown) = (self.worker.clone(), self.shutdown.clone());
        match step {
            Some(Step::Begin(begin)) => {
                let (measure, open) = (self.measure.clone(), self.open.clone());
                let run_dir = PathBuf::from(&begin.run_dir);
                // Rounds whose end got lost with a coordinator.
                self.open().retain(|_, open| open.began.elapsed() < LISTEN_LIMIT);
                self.open().insert(round, Open { run_dir, began: Instant::now(), listener: None });
                self.answer(round, async move {
                    let (begun, listener) = begin_round(&worker, round, begin, measure, &shutdown).await;
                    match (lock(&open).get_mut(&round), listener) {
                        (Some(open), listener) => open.listener = listener,
                        (None, Some(late)) => late.abort(),
                        (None, None) => {}
                    }
                    Answer::Begun(begun)
                });
            }
            Some(Step::Check(check)) => {
                let run_dir = self.open().get(&round).map(|open| open.run_dir.clone());
                if let Some(run_dir) = run_dir {
                    self.answer(round, async move { Answer::Checked(check_round(run_dir, round, check).await) });
                }
            }
            Some(Step::End(_)) => {
                let Some(Open { run_dir, listener, .. }) = self.open().remove(&round) else { return };
                if let Some(listener) = listener {
                    listener.abort();
                }
                let removed = tokio::task::spawn_blocking(move || remove_own(&run_dir, &worker));
                drop(spawn(KIND, &self.shutdown, async move {
                    removed.await.unwrap_or_else(|error| Err(std::io::Error::other(error)))
                }));
            }
            None => tracing::warn!(round, "a probe without a step"),
        }
    }
}

impl Prober {
    fn answer(&self, round: u64, answer: impl Future<Output = Answer> + Send + 'static) {
        let events = self.events.clone();
        drop(spawn(KIND, &self.shutdown, async move {
            let result = Some(answer.await);
            events.send(Event::Probed(ProbeResult { round, result })).await
        }));
    }
}

async fn begin_round(
    worker: &str,
    round: u64,
    begin: ProbeBegin,
    measure: Measure,
    shutdown: &Shutdown,
) -> (ProbeBegun, Option<JoinHandle<()>>) {
    let (listening, port, listen_error) = match listen(&begin.address, round, shutdown).await {
        Ok(Some((task, port))) => (Some(task), port, String::new()),
        Ok(None) => (None, 0, String::new()),
        Err(error) => (None, 0, format!("{}: {error}", begin.address)),
    };
    let owner = worker.to_owned();
    let looked = tokio::task::spawn_blocking(move || {
        let run_dir = PathBuf::from(&begin.run_dir);
        let fault =
            see_coordinator(&run_dir, &begin.nonce, SEE_LIMIT).and_then(|()| write_own(&run_dir, &owner, round)).err();
        let run_free = disk::free(&run_dir).ok();
        (fault, Health { run_free, ..measure.now() })
    });
    let (fault, health) = match looked.await {
        Ok((fault, health)) => (fault, Some(health)),
        Err(error) => (Some(fault(Kind::Blind, Path::new(""), &std::io::Error::other(error))), None),
    };
    (ProbeBegun { fault, port: port.into(), listen_error, health }, listening)
}

async fn listen(address: &str, round: u64, shutdown: &Shutdown) -> std::io::Result<Option<(JoinHandle<()>, u16)>> {
    if address.is_empty() {
        return Ok(None);
    }
    let listener = TcpListener::bind((address, 0)).await?;
    let port = listener.local_addr()?.port();
    let accept = async move {
        loop {
            let (mut peer, from) = listener.accept().await?;
            if let Err(error) = peer.write_all(&token(round)).await {
                tracing::debug!(%from, %error, "a peer hung up");
            }
        }
    };
    let task = spawn(LISTEN, shutdown, async move {
        match tokio::time::timeout(LISTEN_LIMIT, accept).await {
            Ok(ended) => ended,
            Err(_) => Ok::<(), std::io::Error>(()),
        }
    });
    Ok(Some((task, port)))
}

/// What a listener says first, so that nobody takes a stranger's port for a peer's.
fn token(round: u64) -> [u8; 8] {
    round.to_be_bytes()
}

/// The coordinator's file names the coordinator that asks.
fn see_coordinator(run_dir: &Path, nonce: &str, limit: Duration) -> Result<(), ProbeFault> {
    let path = run_dir.join("control").join(endpoint::FILE_NAME);
    let look = || match endpoint::read(&path) {
        Ok(endpoint) if endpoint.incarnation == nonce => Ok(()),
        Ok(endpoint) => {
            let other = format!("it names another coordinator ({}), not the one that asks", endpoint.incarnation);
            Err(fault(Kind::Stale, &path, &std::io::Error::other(other)))
        }
        Err(endpoint::Error::Io { source, .. }) => Err(fault(Kind::Blind, &path, &source)),
        Err(error) => Err(fault(Kind::Blind, &path, &std::io::Error::other(error.to_string()))),
    };
    within(limit, look)
}

fn probes(run_dir: &Path) -> PathBuf {
    run_dir.join("control").join("probes")
}

/// A worker's name as a file's: nothing in it leads out of the folder.
fn plain(worker: &str) -> String {
    worker.chars().map(|c| if c.is_alphanumeric() || matches!(c, '-' | '_') { c } else { '_' }).collect()
}

fn file(run_dir: &Path, worker: &str, round: u64) -> PathBuf {
    probes(run_dir).join(format!("{}.{round}", plain(worker)))
}

fn content(worker: &str, round: u64) -> String {
    format!("{worker} {round}\n")
}

/// Temporary name, fsync, rename, fsync of the folder: what a shard goes through.
#[expect(clippy::disallowed_methods, reason = "nothing that is read again after the round")]
fn write_own(run_dir: &Path, worker: &str, round: u64) -> Result<(), ProbeFault> {
    let path = file(run_dir, worker, round);
    let temporary = probes(run_dir).join(format!(".{}.tmp", plain(worker)));
    let write = || {
        std::fs::create_dir_all(probes(run_dir))?;
        remove_own(run_dir, worker)?;
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(content(worker, round).as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&temporary, &path)?;
        std::fs::File::open(probes(run_dir))?.sync_all()
    };
    write().map_err(|error| fault(Kind::Unwritable, &path, &error))
}

/// Removes what this worker wrote in any round.
fn remove_own(run_dir: &Path, worker: &str) -> std::io::Result<()> {
    let own = format!("{}.", plain(worker));
    let entries = match std::fs::read_dir(probes(run_dir)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.trim_start_matches('.').starts_with(&own)) {
            match std::fs::remove_file(entry.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

async fn check_round(run_dir: PathBuf, round: u64, check: ProbeCheck) -> ProbeChecked {
    let seen = check.seen;
    let looked = tokio::task::spawn_blocking(move || look_for(&run_dir, round, &seen, SEE_LIMIT));
    let dialled = join_all(check.dial.into_iter().map(|peer| dial(peer, round)));
    let (unseen, unreached) = tokio::join!(looked, dialled);
    let unseen = unseen.unwrap_or_else(|error| {
        let error = error.to_string();
        vec![ProbeUnseen { error, ..ProbeUnseen::default() }]
    });
    ProbeChecked { unseen, unreached: unreached.into_iter().flatten().collect() }
}

fn look_for(run_dir: &Path, round: u64, workers: &[String], limit: Duration) -> Vec<ProbeUnseen> {
    let began = Instant::now();
    let mut unseen = Vec::new();
    for worker in workers {
        let path = file(run_dir, worker, round);
        let look = || match std::fs::read_to_string(&path)? {
            text if text == content(worker, round) => Ok(()),
            other => Err(std::io::Error::other(format!("it holds {other:?}"))),
        };
        if let Err(error) = within(limit.saturating_sub(began.elapsed()), look) {
            let (worker, path) = (worker.clone(), path.display().to_string());
            unseen.push(ProbeUnseen { worker, path, error: error.to_string() });
        }
    }
    unseen
}

/// Looks at least once.
fn within<E>(limit: Duration, look: impl Fn() -> Result<(), E>) -> Result<(), E> {
    let began = Instant::now();
    loop {
        match look() {
            Err(_) if began.elapsed() < limit => std::thread::sleep(LOOK_EVERY),
            looked => return looked,
        }
    }
}

async fn dial(peer: ProbePeer, round: u64) -> Option<ProbeUnreached> {
    let ProbePeer { worker, address, port } = peer;
    let at = if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") };
    let reach = async {
        let mut stream = TcpStream::connect(&at).await?;
        let mut said = [0; 8];
        stream.read_exact(&mut said).await?;
        if said == token(round) { Ok(()) } else { Err(std::io::Error::other("another program answers there")) }
    };
    let reached: std::io::Result<()> = match tokio::time::timeout(DIAL_LIMIT, reach).await {
        Ok(reached) => reached,
        Err(_) => Err(std::io::Error::other(format!("no answer within {} s", DIAL_LIMIT.as_secs()))),
    };
    reached.err().map(|error| ProbeUnreached { worker, address: at.clone(), error: error.to_string() })
}

fn fault(kind: Kind, path: &Path, error: &std::io::Error) -> ProbeFault {
    ProbeFault {
        kind: kind.into(),
        path: path.display().to_string(),
        error: error.to_string(),
        errno: error.raw_os_error().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coordinators_file(run_dir: &Path, incarnation: &str) {
        std::fs::create_dir_all(run_dir.join("control")).unwrap();
        let endpoint = endpoint::Endpoint {
            addresses: vec!["127.0.0.1".to_owned()],
            port: 1,
            incarnation: incarnation.to_owned(),
            host: "h".to_owned(),
            pid: 1,
            ca_pem: None,
            state_dir: None,
        };
        endpoint::publish(&endpoint, &run_dir.join("control")).unwrap();
    }

    fn names(run_dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(probes(run_dir)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn what_one_worker_wrote_another_one_sees_and_its_own_old_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        coordinators_file(run, "now");
        see_coordinator(run, "now", Duration::ZERO).unwrap();
        write_own(run, "host/0", 1).unwrap();
        write_own(run, "host/0", 2).unwrap();
        assert_eq!(names(run), ["host_0.2"]);
        let asked = ["host/0".to_owned()];
        assert_eq!(look_for(run, 2, &asked, Duration::ZERO), []);
        let unseen = look_for(run, 1, &asked, Duration::ZERO).pop().unwrap();
        assert!(unseen.path.ends_with("control/probes/host_0.1"), "{unseen:?}");
        assert!(unseen.error.contains("No such file"), "{unseen:?}");
        remove_own(run, "host/0").unwrap();
        assert_eq!(names(run), Vec::<String>::new());
    }

    #[test]
    fn another_coordinators_file_and_none_are_faults_with_their_path() {
        let dir = tempfile::tempdir().unwrap();
        let none = see_coordinator(dir.path(), "now", Duration::ZERO).unwrap_err();
        assert_eq!((none.kind(), none.errno), (Kind::Blind, nix::libc::ENOENT));
        coordinators_file(dir.path(), "before");
        let stale = see_coordinator(dir.path(), "now", Duration::ZERO).unwrap_err();
        assert_eq!(stale.kind(), Kind::Stale);
        assert!(stale.error.contains("another coordinator (before)"), "{stale:?}");
        assert!(stale.path.ends_with("control/endpoint.json"), "{stale:?}");
        std::fs::write(dir.path().join("control/probes"), "a file where a folder must be").unwrap();
        let fault = write_own(dir.path(), "w0", 1).unwrap_err();
        assert_eq!(fault.kind(), Kind::Unwritable);
        assert_ne!(fault.errno, 0, "{fault:?}");
    }

    #[tokio::test]
    async fn a_peer_is_reached_at_its_port_and_a_stranger_and_nobody_are_not() {
        let shutdown = Shutdown::new();
        let (task, port) = listen("127.0.0.1", 7, &shutdown).await.unwrap().unwrap();
        let peer = |port| ProbePeer { worker: "w1".to_owned(), address: "127.0.0.1".to_owned(), port };
        assert_eq!(dial(peer(port.into()), 7).await, None);
        let stranger = dial(peer(port.into()), 8).await.unwrap();
        assert!(stranger.error.contains("another program"), "{stranger:?}");
        task.abort();
        assert!(task.await.is_err());
        let gone = dial(peer(port.into()), 7).await.unwrap();
        assert!(gone.error.contains("refused") && gone.address == format!("127.0.0.1:{port}"), "{gone:?}");
        assert!(listen("", 7, &shutdown).await.unwrap().is_none());
        assert!(listen("192.0.2.1", 7, &shutdown).await.is_err(), "not an address of this machine");
    }
}
