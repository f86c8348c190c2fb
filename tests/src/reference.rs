//! Unbroken runs to compare with. The first test that needs one makes it; it is kept as long as the programs stay the same.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::SystemTime;

use crate::corpus::once;
use crate::job::Job;
use crate::programs;
use crate::run::Run;
use crate::scratch::Scratch;

/// The run of `job` by one `trainctl run`, without any interruption.
///
/// # Panics
/// If that run does not succeed.
pub fn unbroken(job: &Job) -> Run {
    unbroken_until(job, job.steps)
}

/// The first `steps` steps of that run.
///
/// # Panics
/// If that run does not succeed.
pub fn unbroken_until(job: &Job, steps: u64) -> Run {
    let root = programs::scratch_root().canonicalize().unwrap();
    let programs_key = programs_key();
    let job = Job { run_dir: "unbroken".into(), ..job.clone() };
    let mut hasher = DefaultHasher::new();
    (job.yaml(), steps).hash(&mut hasher);
    let dir = root.join(format!("reference-{programs_key:016x}-{:016x}", hasher.finish()));
    once(&root.join("reference.lock"), &dir, |dir| {
        forget_others(&root, programs_key);
        let scratch = Scratch::new("reference");
        let job = Job { run_dir: dir.join("run"), ..job.clone() };
        let spec = job.write(scratch.join("job.yaml"));
        scratch.trainctl(["run", spec.to_str().unwrap(), "--until-step", &steps.to_string()]).wait().expect_code(0);
        let run = Run::new(&job.run_dir);
        assert_eq!(run.latest().step, steps - 1);
        assert_eq!(run.generations().len(), 1, "an unbroken run has one generation");
    });
    Run::new(dir.join("run"))
}

/// Changes with the programs.
fn programs_key() -> u64 {
    let mut hasher = DefaultHasher::new();
    for name in ["trainctl", "trainctl-coordinator", "trainctl-worker", "trainctl-trainer"] {
        let metadata = fs::metadata(programs::path(name)).unwrap();
        let modified = metadata.modified().unwrap().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        (metadata.len(), modified.as_nanos()).hash(&mut hasher);
    }
    hasher.finish()
}

/// Removes the references of earlier builds.
fn forget_others(root: &Path, programs_key: u64) {
    let keep = format!("reference-{programs_key:016x}-");
    for entry in fs::read_dir(root).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_other = name.starts_with("reference-") && !name.starts_with(&keep) && name.matches('-').count() == 2;
        // Another checkout's tests may use this folder too and be removing the same.
        if is_other && !name.ends_with(".lock") {
            fs::remove_dir_all(entry.path()).unwrap_or_default();
        }
    }
}
