//! A killed worker leaves no process behind, and the job goes on when there is a worker again: the proof 3.

use std::path::Path;

use serde_json::Value;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Process};
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, wait};

/// A trainer that first leaves a process behind which no process group reaches and no SIGTERM ends. Each writes its pid to
/// a file of its own.
fn script(pids: &Path) -> String {
    std::fs::create_dir_all(pids).unwrap();
    format!(
        "(setsid sh -c 'trap \"\" TERM HUP; echo $$ > \"{0}/$$.part\"; mv \"{0}/$$.part\" \"{0}/$$\"; while :; do sleep 1000; done' &)\nexec \"$TRAINER\" \"$@\"",
        pids.display()
    )
}

/// Pids of all grandchildren that were ever left.
fn grandchildren(pids: &Path) -> Vec<u32> {
    let names = std::fs::read_dir(pids).unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).collect()
}

/// Waits until each trainer has left its grandchild.
fn wait_for_grandchildren(pids: &Path, count: usize) -> Vec<u32> {
    wait::until("the grandchildren", || Some(grandchildren(pids)).filter(|found| found.len() >= count))
}

fn wait_for_death(pid: u32, what: &str) {
    wait::until_true(&format!("the end of {what} {pid}"), || !process::exists(pid));
}

/// The worker daemon above a trainer.
fn worker_of(trainer: u32) -> u32 {
    trainctl_runtime::proc::stat(trainer).unwrap().parent
}

/// Which grandchild descends from a worker: its ancestors end there, since the worker is a subreaper.
fn descends(pid: u32, ancestor: u32) -> bool {
    trainctl_runtime::proc::descendants(ancestor).iter().any(|stat| stat.pid == pid)
}

#[test]
fn by_hand_the_job_waits_for_a_worker_and_goes_on() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("killed-worker");
    let job = Job::new(scratch.join("run")).slow();
    let want = unbroken(&job);
    let (state, run, pids) = (scratch.join("state"), Run::new(&job.run_dir), scratch.join("pids"));
    let trainer = scratch.join("trainer.sh");
    scratch.write_trainer(&trainer, &script(&pids));
    let _coordinator = Coordinator::start(&scratch, &state);
    let mut workers: Vec<Process> =
        (0..2).map(|index| daemons::start_worker(&scratch, &state, index, Some(&trainer))).collect();
    let id = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));

    run.wait_for_step(12);
    let left = wait_for_grandchildren(&pids, 2);
    let trainers = run.wait_for_trainers(2, 0);
    let victim = workers[0].pid();
    let own: Vec<u32> = trainers.iter().map(|t| t.pid).filter(|pid| descends(*pid, victim)).collect();
    let own_left: Vec<u32> = left.iter().copied().filter(|pid| descends(*pid, victim)).collect();
    // A standby trainer may have left one too.
    assert!(own.len() == 1 && !own_left.is_empty(), "{trainers:?} {left:?}");
    workers[0].kill9();
    wait_for_death(own[0], "the trainer");
    own_left.into_iter().for_each(|pid| wait_for_death(pid, "the grandchild"));

    let waits =
        |status: &Value| status["reason"].as_str().is_some_and(|reason| reason.contains("waiting for 1 more worker"));
    let status = daemons::wait_for_status(&scratch, &state, &id, "the job to wait for a worker", waits);
    assert_eq!(status["phase"], "suspended", "{status:#}");
    // The other rank's trainer and what it left are gone too: its state is thrown away.
    left.into_iter().for_each(|pid| wait_for_death(pid, "the grandchild"));

    workers[0] = daemons::start_worker(&scratch, &state, 2, Some(&trainer));
    daemons::wait_for_success(&scratch, &state, &id);
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    grandchildren(&pids).into_iter().for_each(|pid| wait_for_death(pid, "the grandchild"));
}

#[test]
fn under_trainctl_run_the_worker_comes_back_by_itself() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("supervised-worker");
    let pids = scratch.join("pids");
    scratch.wrap_trainer(&script(&pids));
    let job = Job::new(scratch.join("run")).slow();
    let want = unbroken(&job);
    let run = Run::new(&job.run_dir);
    let spec = job.write(scratch.join("job.yaml"));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);

    run.wait_for_step(12);
    let left = wait_for_grandchildren(&pids, 2);
    let trainers = run.wait_for_trainers(2, 0);
    let worker = worker_of(trainers[1].pid);
    process::send(worker, nix::sys::signal::Signal::SIGKILL);
    wait_for_death(trainers[1].pid, "the trainer");
    left.into_iter().for_each(|pid| wait_for_death(pid, "the grandchild"));
    trainctl.wait().expect_code(0).expect_said("LATEST");

    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    let left = scratch.processes();
    assert!(left.is_empty(), "processes are left: {left:?}");
}
