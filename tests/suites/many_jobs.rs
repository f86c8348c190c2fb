//! Twenty jobs at once through one coordinator, with a worker for each and with fewer: all succeed, each has its own rows and
//! checkpoints, and none notices that another one's trainer was killed (P4, J4).

use std::path::Path;
use std::process::Command;

use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::wait;

/// How many there are.
const NUM_JOBS: usize = 20;
/// As many different trainings: jobs of one seed must make the same rows, jobs of two seeds others.
const NUM_SEEDS: usize = 4;

fn job(run_dir: impl Into<std::path::PathBuf>, number: usize) -> Job {
    let seed = 100 + (number % NUM_SEEDS) as u64;
    Job { workers: 1, steps: 30, seed, layers: 1, ..Job::new(run_dir) }
}

/// Takes so much longer for each step, without computing: there is time to kill something.
fn worker(scratch: &Scratch, state: &Path, index: u32, trainer: &Path) -> Process {
    let mut command: Command = daemons::worker_command(scratch, state, index, Some(trainer));
    command.arg("--no-standby");
    scratch.start(command, &format!("worker-{index}"))
}

/// Runs all jobs on so many workers.
fn all_succeed(test: &str, num_workers: u32) {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new(test);
    let state = scratch.join("state");
    let _coordinator = Coordinator::start(&scratch, &state);
    let trainer = scratch.join("paced-trainer");
    scratch.write_trainer(&trainer, "export TRAINCTL_FAULT='step.begin:*:wait50'\nexec \"$TRAINER\" \"$@\"");
    let _workers: Vec<Process> = (0..num_workers).map(|index| worker(&scratch, &state, index, &trainer)).collect();
    let jobs: Vec<Job> = (0..NUM_JOBS).map(|number| job(scratch.join(&format!("run-{number}")), number)).collect();
    let submit = |(number, job): (usize, &Job)| {
        daemons::submit(&scratch, &state, &job.write(scratch.join(&format!("job-{number}.yaml"))))
    };
    let ids: Vec<String> = jobs.iter().enumerate().map(submit).collect();
    let runs: Vec<Run> = jobs.iter().map(|job| Run::new(&job.run_dir)).collect();

    // The first that has a checkpoint and steps to go.
    let in_the_middle = |run: &Run| run.last_step().is_some_and(|step| (10..25).contains(&step));
    let killed = wait::until("a job in the middle of its run", || runs.iter().position(in_the_middle));
    runs[killed].wait_for_trainers(1, 0)[0].kill9();

    for (number, id) in ids.iter().enumerate() {
        let status = wait_for_end(&scratch, &state, id);
        assert_eq!(status["phase"], "succeeded", "job {number}: {status:#}");
        assert_eq!(status["restarts"], u64::from(number == killed), "job {number}: {status:#}");
    }
    let want: Vec<Run> = (0..NUM_SEEDS).map(|number| unbroken(&job("", number))).collect();
    for (number, run) in runs.iter().enumerate() {
        let want = &want[number % NUM_SEEDS];
        assert_same_rows(run, want, jobs[number].steps);
        assert_eq!(run.latest().state_hash, want.latest().state_hash, "job {number}");
        let steps = |run: &Run| run.commits().iter().map(|commit| commit.step).collect::<Vec<_>>();
        assert_eq!(steps(run), steps(want), "job {number}");
        assert_eq!(run.generations().len(), 1 + usize::from(number == killed), "job {number}");
        assert!(run.events().iter().all(|event| event["job"].is_null() || event["job"] == ids[number].as_str()));
    }
    let mut hashes: Vec<_> = want.iter().map(|run| run.latest().state_hash).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), NUM_SEEDS, "different seeds are different trainings");
    let lost = runs[killed].events_of("generation_lost");
    assert!(lost[0]["cause"].as_str().unwrap().contains("SIGKILL"), "{lost:?}");
}

/// Twenty of them take longer than one.
fn wait_for_end(scratch: &Scratch, state: &Path, id: &str) -> serde_json::Value {
    let is_over = |status: &serde_json::Value| ["succeeded", "failed"].iter().any(|phase| status["phase"] == *phase);
    wait::within_every(std::time::Duration::from_millis(500), 3 * wait::PATIENCE, "the end of a job", || {
        daemons::status(scratch, state, id).filter(is_over)
    })
}

#[test]
fn p4_twenty_jobs_on_twenty_workers_at_once() {
    all_succeed("many-jobs", NUM_JOBS as u32);
}

#[test]
fn j4_twenty_jobs_wait_for_four_workers_and_all_get_them() {
    all_succeed("many-jobs-queued", 4);
}
