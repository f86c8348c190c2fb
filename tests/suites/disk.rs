//! Real runs on disks that are full, over quota, broken or read-only, and on file systems that refuse links: the job survives,
//! or stops with the cause (`store/tests/crash/disk.rs` has the store's part, call by call).

use std::time::{Duration, Instant};

use serde_json::Value;
use trainctl_faultfs::{FaultFs, have_fuse};
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;

/// A stop with the cause comes so soon.
const SOON: Duration = Duration::from_secs(10);

/// A run directory on a file system of its own. Unmounted before the scratch folder is removed: fields are dropped in order.
pub(crate) struct Site {
    pub(crate) fs: FaultFs,
    pub(crate) job: Job,
    pub(crate) run: Run,
    pub(crate) scratch: Scratch,
}

impl Site {
    /// `None`: this machine cannot mount.
    pub(crate) fn new(test: &str) -> Option<Self> {
        if !programs::have_trainer() || !have_fuse() {
            return None;
        }
        let scratch = Scratch::new(test);
        let mounted = scratch.join("disk");
        std::fs::create_dir(&mounted).unwrap();
        let fs = FaultFs::mount(&mounted, "faultfs_server").unwrap();
        let job = Job { steps: 30, ckpt_every: 5, val_every: 5, ..Job::new(mounted.join("run")).slow() };
        Some(Self { fs, run: Run::new(&job.run_dir), job, scratch })
    }

    fn start(&self) -> Process {
        self.start_with(&[])
    }

    /// Starts the run with some keys of the spec set.
    pub(crate) fn start_with(&self, keys: &[&str]) -> Process {
        let spec = self.job.write(self.scratch.join("job.yaml"));
        let mut arguments = vec!["run", spec.to_str().unwrap()];
        keys.iter().for_each(|key| arguments.extend(["--set", key]));
        self.scratch.trainctl(arguments)
    }

    /// It ended as if nothing had happened.
    pub(crate) fn assert_unharmed(&self) {
        let want = unbroken(&self.job);
        assert_same_rows(&self.run, &want, self.job.steps);
        let newest = self.run.commits().pop().unwrap();
        assert_eq!(newest.state_hash, want.latest().state_hash);
        self.scratch.trainctl(["checkpoints", "verify", self.job.run_dir.to_str().unwrap()]).wait().expect_code(0);
    }
}

/// Something fails from the first commit on until a person makes room.
fn survives(test: &str, rule: &str, noticed: impl Fn(&Run) -> bool) {
    let Some(mut site) = Site::new(test) else { return };
    let mut trainctl = site.start();
    let first = site.run.wait_for_commit(4).step;
    site.fs.fail(rule).unwrap();
    trainctl_tests::wait::until_true(&format!("a failure by `{rule}`"), || noticed(&site.run));
    let at_failure = site.run.commits().pop().unwrap().step;
    assert!(at_failure >= first);
    site.fs.clear().unwrap();
    trainctl.wait().expect_code(0);
    site.assert_unharmed();
}

fn says(run: &Run, text: &str) -> bool {
    run.events().iter().any(|event| event.to_string().contains(text))
}

#[test]
fn p2_a_full_disk_in_a_shard_costs_that_save_only() {
    survives("disk-full", "write 3 ENOSPC /model/", |run| says(run, "No space left on device"));
}

#[test]
fn p2_a_quota_at_the_manifest_is_retried_until_there_is_room() {
    survives("disk-quota", "write 1 EDQUOT manifest.json", |run| says(run, "quota"));
}

#[test]
fn p2_an_io_error_at_the_pointer_is_retried() {
    survives("disk-pointer", "rename 1 EIO LATEST", |run| says(run, "Input/output error"));
}

#[test]
fn p2_where_symlinks_and_hard_links_are_refused_a_run_goes_through_and_resumes() {
    let Some(mut site) = Site::new("disk-links") else { return };
    site.fs.fail("symlink 1 EPERM ").unwrap();
    site.fs.fail("link 1 EPERM ").unwrap();
    let spec = site.job.write(site.scratch.join("job.yaml"));
    let run = |until: &str| site.scratch.trainctl(["run", spec.to_str().unwrap(), "--until-step", until]).wait();
    run("12").expect_code(0);
    let latest = || std::fs::read_to_string(site.job.run_dir.join("LATEST.txt")).unwrap();
    assert_eq!(latest().trim(), "epoch_0_step_11");
    let arguments = ["resume", site.job.run_dir.to_str().unwrap(), "--from", "LATEST"];
    site.scratch.trainctl(arguments).wait().expect_code(0);
    assert_eq!(latest().trim(), "epoch_0_step_29");
    site.assert_unharmed();
}

#[test]
fn p8_a_read_only_disk_is_named_at_once() {
    let Some(mut site) = Site::new("disk-read-only") else { return };
    site.fs.fail("change 1 EROFS ").unwrap();
    let started = Instant::now();
    let ended = site.start().wait();
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    assert_ne!(ended.code, Some(0));
    ended.expect_said("Read-only file system");
}

#[test]
fn j5_a_checkpoint_whose_place_is_away_is_waited_for_and_costs_no_restart() {
    let Some(mut site) = Site::new("disk-away") else { return };
    let spec = site.job.write(site.scratch.join("job.yaml"));
    site.scratch.trainctl(["run", spec.to_str().unwrap(), "--until-step", "12"]).wait().expect_code(0);
    // The coordinator looks at names and sizes: as on a mount that is away for the workers' machines alone.
    site.fs.fail("read 1 EIO /model/").unwrap();
    let mut trainctl = site.start_with(&["fault_tolerance.max_restarts=1"]);
    let lost = || site.run.events_of("generation_lost");
    trainctl_tests::wait::until_true("three looks at the checkpoint", || lost().len() >= 3);
    for event in lost() {
        let cause = event["cause"].as_str().unwrap();
        assert!(cause.contains("cannot reach the checkpoint's place while loading"), "{cause}");
        assert!(cause.contains("Input/output error") && cause.contains("/model/"), "{cause}");
    }
    site.fs.clear().unwrap();
    let ended = trainctl.wait().expect_code(0);
    assert!(!ended.stdout.contains("restarts"), "none is charged: {}", ended.stdout);
    site.assert_unharmed();
}

#[test]
fn j2_a_job_is_admitted_when_what_the_one_before_wrote_is_durable() {
    let Some(mut site) = Site::new("disk-release") else { return };
    let (state, scratch) = (site.scratch.join("state"), &site.scratch);
    let mut coordinator = Coordinator::start(scratch, &state);
    let _workers: Vec<Process> = (0..2).map(|index| daemons::start_worker(scratch, &state, index, None)).collect();
    let spec = scratch.join("job.yaml");
    std::fs::write(&spec, format!("{}on_end: 'until test -e go; do sleep 0.05; done'\n", site.job.yaml())).unwrap();
    let submission = ["submit", spec.to_str().unwrap(), "--coordinator", state.to_str().unwrap()];
    let first = scratch.trainctl(submission.into_iter().chain(["--until-step", "12"])).wait().expect_code(0);
    let first = first.stdout.trim().to_owned();
    daemons::wait_for_success(scratch, &state, &first);
    scratch.trainctl(submission).wait().expect_code(69).expect_said(&first);

    site.fs.hold("training.jsonl").unwrap();
    std::fs::write(site.job.run_dir.join("go"), "").unwrap();
    let is_held = || site.fs.held().unwrap() > 0;
    trainctl_tests::wait::until_true("the first job's last sync", is_held);
    let no_command = |status: &Value| status["commands"].as_array().is_none_or(Vec::is_empty);
    daemons::wait_for_status(scratch, &state, &first, "the end of on_end", no_command);
    let mut second = scratch.trainctl(submission);
    let log = |coordinator: &Coordinator| coordinator.process.stderr();
    trainctl_tests::wait::until_true("a submission that waits", || {
        log(&coordinator).contains("until it has let go of the directory")
    });
    assert!(second.is_running() && coordinator.process.is_running());
    site.fs.release().unwrap();
    let id = second.wait().expect_code(0).stdout.trim().to_owned();
    daemons::wait_for_success(scratch, &state, &id);
    site.assert_unharmed();
}
