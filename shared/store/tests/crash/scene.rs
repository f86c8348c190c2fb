//! Where a case begins, and the processes in it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use trainctl_store::checkpoints::Selector;
use trainctl_store::fault::{ENV, ENV_TRACE};
use trainctl_store::layout::{LATEST, MANIFEST};
use trainctl_store::manifest::Manifest;

use crate::cycle::{AnyError, Plan, coordinate};

const DIR: &str = "TRAINCTL_STORE_CRASH_DIR";
const FROM: &str = "TRAINCTL_STORE_CRASH_FROM";
const PROMISES: &str = "TRAINCTL_STORE_CRASH_PROMISES";

/// How a run directory looks when the child finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scene {
    /// There is none.
    Fresh,
    /// A whole run that goes back to step 1, with what a killed holder leaves everywhere and a late rename to undo.
    Rollback,
}

impl Scene {
    pub(crate) const ALL: [Self; 2] = [Self::Fresh, Self::Rollback];

    /// What the child starts from.
    pub(crate) fn from(self) -> Selector {
        match self {
            Self::Fresh => Selector::Latest,
            Self::Rollback => "epoch_0_step_1".parse().unwrap(),
        }
    }

    /// The step below which nothing may fall, whatever happens.
    pub(crate) fn committed(self) -> Option<u64> {
        match self {
            Self::Fresh => None,
            Self::Rollback => Some(1),
        }
    }

    /// Makes the directory.
    pub(crate) fn prepare(self, dir: &Path) {
        match self {
            Self::Fresh => {}
            Self::Rollback => copy(template(), dir),
        }
    }
}

/// A finished run and its dirt, made once.
fn template() -> &'static Path {
    static TEMPLATE: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
    let made = TEMPLATE.get_or_init(|| {
        let dir = scratch();
        // A thread of its own: the caller may be in a runtime already.
        let run = dir.path().to_owned();
        std::thread::spawn(move || block_on(coordinate(&run, &Arc::default(), &Plan::default())).unwrap())
            .join()
            .unwrap();
        soil(dir.path());
        dir
    });
    made.path()
}

/// Leaves what killed processes leave: temporary files, a save that never ended, a torn row, an export in the making. And
/// what a frozen holder does that wakes up late: it renames a checkpoint that is not its own.
fn soil(dir: &Path) {
    let write = |path: &str, bytes: &[u8]| {
        let path = dir.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    write("epoch_0_step_9/model/shard-00000-of-00002.g2.safetensors", b"half");
    write("epoch_0_step_9/model/.tmp-shard-00001-of-00002.g2.safetensors-1-00000000-0", b"half");
    write("control/.tmp-holder.json-1-00000000-0", b"{");
    write("control/pins/.tmp-epoch_0_step_1.export.12345678.json-1-00000000-0", b"{");
    write("control/numbers/.tmp-00000003.json-1-00000000-0", b"{");
    std::os::unix::fs::symlink("epoch_0_step_2", dir.join(".tmp-LATEST-1-00000000-0")).unwrap();
    write(&format!(".export-{}.1.2/config.json", crate::cycle::EXPORT), b"{");
    std::fs::remove_dir_all(dir.join(crate::cycle::EXPORT)).unwrap();
    let mut rows = std::fs::read(dir.join("training.jsonl")).unwrap();
    rows.extend_from_slice(b"{\"step\": 4");
    std::fs::write(dir.join("training.jsonl"), rows).unwrap();
    let newest = std::fs::read_link(dir.join(LATEST)).unwrap();
    let (manifest, _) = Manifest::parse(&std::fs::read(dir.join(&newest).join(MANIFEST)).unwrap()).unwrap();
    let abandoned = dir.join(format!("abandoned/g{}", manifest.generation));
    std::fs::create_dir_all(&abandoned).unwrap();
    #[expect(clippy::disallowed_methods, reason = "does what a late holder does")]
    std::fs::rename(dir.join(&newest), abandoned.join(&newest)).unwrap();
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if from.is_symlink() {
            std::os::unix::fs::symlink(std::fs::read_link(&from).unwrap(), &to).unwrap();
        } else if from.is_dir() {
            copy(&from, &to);
        } else {
            std::fs::copy(&from, &to).unwrap();
        }
    }
}

pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// In memory where there is a tmpfs: the page cache survives a SIGKILL anyway, and every fsync of a disk costs 10 ms.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A child that works on a directory.
pub(crate) struct Start<'a> {
    pub(crate) scene: Scene,
    pub(crate) dir: &'a Path,
    /// What is done for good is written there.
    pub(crate) promises: &'a Path,
    pub(crate) fault: &'a str,
    /// A folder for its trace.
    pub(crate) trace: Option<&'a Path>,
}

/// What a child said.
pub(crate) fn said(promises: &Path) -> PathBuf {
    promises.with_extension("err")
}

impl Start<'_> {
    pub(crate) fn spawn(&self) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child", "--nocapture", "--test-threads", "1"])
            .env(DIR, self.dir)
            .env(FROM, self.scene.from().to_string())
            .env(PROMISES, self.promises)
            .env(ENV, self.fault)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(said(self.promises)).unwrap());
        if let Some(trace) = self.trace {
            command.env(ENV_TRACE, trace);
        }
        command.spawn().unwrap()
    }
}

/// The children's entry; without the variables there is nothing to do.
pub(crate) fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let from = std::env::var(FROM).unwrap().parse().unwrap();
    let promises = std::env::var_os(PROMISES).map(PathBuf::from);
    let plan = Plan { from, promises, ..Plan::default() };
    let done = block_on(coordinate(Path::new(&dir), &trainctl_store::fault::Faults::from_env(), &plan));
    if let Err(error) = done {
        assert!(is_orderly(&error), "{error}");
    }
}

/// What a holder may end with that met a fault, or was frozen and wakes up fenced, or finds its half-written directory gone.
fn is_orderly(error: &AnyError) -> bool {
    use trainctl_store::{Error, checkpoints::ResolveError, export::ExportError, tenure::AcquireError};
    let ours = |error: &Error| {
        use Error::{Commit, Io, NotCommitted, Superseded, Swept};
        matches!(error, Superseded { .. } | Swept { .. } | Io { .. } | Commit { .. } | NotCommitted { .. })
    };
    let (store, acquire) = (error.downcast_ref::<Error>(), error.downcast_ref::<AcquireError>());
    let (resolve, export) = (error.downcast_ref::<ResolveError>(), error.downcast_ref::<ExportError>());
    // The cycle's own litter, for which there is no directory any more.
    let gone = error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound);
    gone
        || store.is_some_and(ours)
        || matches!(acquire, Some(AcquireError::Store(error)) if ours(error))
        || matches!(resolve, Some(ResolveError::Store(error)) if ours(error))
        || matches!(export, Some(ExportError::Store(error)) if ours(error))
        // Another process has made it meanwhile.
        || matches!(export, Some(ExportError::Target { .. }))
}
