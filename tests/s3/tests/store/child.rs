//! What a child does. Its parent gives it the place, the credentials and the fault in the environment.

use std::path::PathBuf;
use std::sync::Arc;

use trainctl_store::checkpoints::{Depth, ResolveError, ResolveOptions, Retention, Selector};
use trainctl_store::fault::Faults;
use trainctl_store::io::{Files, Io};
use trainctl_store::layout::{LATEST, LOWEST_VAL};
use trainctl_store::shard::ShardReader;
use trainctl_store::{CheckpointStore, Error, Location, Unfenced};

use crate::cycle::{self, STEPS};

pub(crate) const TASK: &str = "TRAINCTL_S3_TASK";
pub(crate) const URL: &str = "TRAINCTL_S3_URL";
/// Set: everything is logged.
pub(crate) const LOG_ALL: &str = "TRAINCTL_S3_LOG_ALL";
pub(crate) const CONTROL: &str = "TRAINCTL_S3_CONTROL";

/// The place of a child.
pub(crate) struct Place {
    pub(crate) location: Location,
    pub(crate) control: PathBuf,
    pub(crate) faults: Arc<Faults>,
}

impl Place {
    pub(crate) fn control_io(&self) -> Io {
        Io::with_faults(&self.control, Arc::clone(&self.faults))
    }

    pub(crate) fn files(&self) -> Result<Files, Error> {
        Files::with_faults(&self.location, Arc::clone(&self.faults))
    }

    pub(crate) fn store(&self) -> Result<CheckpointStore, Error> {
        Ok(CheckpointStore::with_io(Io::over(self.files()?), self.control_io()))
    }
}

pub(crate) fn run() {
    let Ok(task) = std::env::var(TASK) else { return };
    let level = if std::env::var_os(LOG_ALL).is_some() { tracing::Level::TRACE } else { tracing::Level::INFO };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).init();
    let place = Place {
        location: std::env::var(URL).unwrap().parse().unwrap(),
        control: std::env::var_os(CONTROL).unwrap().into(),
        faults: Faults::from_env(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (task, argument) = task.split_once(' ').unwrap_or((&task, ""));
    match task {
        "save" => {
            let options = cycle::Options { from: argument.parse().unwrap_or(Selector::Latest), ..Default::default() };
            report(runtime.block_on(cycle::coordinate(&place, &options)));
        }
        "save-large" => {
            report(runtime.block_on(cycle::coordinate(&place, &cycle::Options::large())));
        }
        "save-beside" => {
            let from = argument.parse().unwrap_or(Selector::Latest);
            let options = cycle::Options { from, ..cycle::Options::beside_a_frozen_one() };
            report(runtime.block_on(cycle::coordinate(&place, &options)));
        }
        // After a fault: what is there loads, the next holder goes on, and then all is there.
        "recover" => runtime.block_on(async {
            check(&place).await;
            cycle::coordinate(&place, &cycle::Options::default()).await.unwrap();
            complete(&place, STEPS).await;
        }),
        "recover-large" => runtime.block_on(async {
            cycle::coordinate(&place, &cycle::Options::large()).await.unwrap();
            complete(&place, 1).await;
        }),
        "check" => runtime.block_on(check(&place)),
        "complete" => runtime.block_on(complete(&place, STEPS)),
        "complete-large" => runtime.block_on(complete(&place, 1)),
        "look-again" => runtime.block_on(async {
            let store = place.store().unwrap();
            store.take_over(&Unfenced, "default").await.unwrap();
            store.prune(&Unfenced, &Retention::newest(Some(1), "default")).await.unwrap();
        }),
        "read" => read(&place, argument),
        "verify" => runtime.block_on(verify(&place)),
        other => panic!("no task {other}"),
    }
}

/// A child that was frozen wakes up fenced, or finds that somebody else moved on.
#[expect(clippy::exit, reason = "the code tells the parent that the child ended in order")]
fn report(outcome: Result<(), cycle::AnyError>) {
    let Err(error) = outcome else { return };
    eprintln!("ended: {error}");
    match error.downcast_ref::<Error>() {
        Some(Error::Superseded { .. } | Error::Object { .. } | Error::Commit { .. } | Error::Io { .. }) => {
            std::process::exit(3)
        }
        _ => panic!("{error}"),
    }
}

/// P2: whatever happened, what is committed is whole, and what LATEST names loads.
async fn check(place: &Place) {
    let store = place.store().unwrap();
    let listing = store.list().await.unwrap();
    assert!(listing.damaged.is_empty(), "{:?}", listing.damaged);
    for committed in &listing.committed {
        let verified = store.verify(committed.name(), &|_, _| {}).await.unwrap();
        assert_eq!(verified.faults, vec![], "{} is half there", committed.name());
    }
    if let Some(latest) = place.files().unwrap().read_link(LATEST).unwrap() {
        assert!(listing.get(latest.parse().unwrap()).is_some(), "LATEST names {latest}, which is not committed");
    }
    let options = ResolveOptions { depth: Depth::Hashes, ..ResolveOptions::default() };
    match store.resolve(Selector::Latest, &options).await {
        Ok(_) => {}
        Err(ResolveError::Empty { .. } | ResolveError::NoneCommitted { .. }) => assert!(listing.committed.is_empty()),
        Err(error) => panic!("{error}"),
    }
}

/// After an undisturbed cycle exactly this is there.
async fn complete(place: &Place, steps: u64) {
    check(place).await;
    let store = place.store().unwrap();
    let listing = store.list().await.unwrap();
    let steps_there: Vec<_> = listing.committed.iter().map(|c| c.name().step).collect();
    let wanted = if steps == STEPS { vec![1, 3] } else { vec![0] };
    assert_eq!((steps_there, &listing.uncommitted), (wanted.clone(), &vec![]));
    let files = place.files().unwrap();
    let link = |pointer| files.read_link(pointer).unwrap().unwrap();
    assert_eq!(link(LATEST), format!("epoch_0_step_{}", wanted.last().unwrap()));
    assert_eq!(link(LOWEST_VAL), format!("epoch_0_step_{}", wanted[0]));
    for committed in &listing.committed {
        let reader = ShardReader::open_at(&place.location, committed.name(), Some(&committed.hash)).unwrap();
        assert_eq!(reader.state_hash().unwrap(), committed.manifest.state_hash);
    }
}

/// Reads the tensors that the argument names, as a rank does that needs no others.
fn read(place: &Place, tensors: &str) {
    let name = place.files().unwrap().read_link(LATEST).unwrap().unwrap().parse().unwrap();
    let reader = ShardReader::open_at(&place.location, name, None).unwrap();
    for tensor in tensors.split(',') {
        let mut bytes = vec![0; usize::try_from(reader.info(tensor).unwrap().bytes()).unwrap()];
        match reader.read_tensor(tensor, &mut bytes) {
            Ok(()) => eprintln!("blake3 of {tensor}: {}", blake3::hash(&bytes)),
            Err(error) => eprintln!("refused: {error}"),
        }
    }
}

async fn verify(place: &Place) {
    let store = place.store().unwrap();
    let name = place.files().unwrap().read_link(LATEST).unwrap().unwrap().parse().unwrap();
    for fault in store.verify(name, &|_, _| {}).await.unwrap().faults {
        eprintln!("fault: {fault}");
    }
}
