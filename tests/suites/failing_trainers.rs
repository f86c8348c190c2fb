//! A trainer that fails for a reason of its own stops the job instead of restarting for ever (J5, P6).

use serde_json::Value;
use trainctl_tests::job::Job;
use trainctl_tests::programs;
use trainctl_tests::run::Run;
use trainctl_tests::scratch::Scratch;

const SCRIPT: &str = "echo 'trainctl-trainer: error: index 12 is out of bounds' >&2\nexit 1";

#[test]
fn j5_the_same_failure_twice_fails_the_job_and_says_why() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("failing-trainer");
    scratch.wrap_trainer(SCRIPT);
    let job = Job::new(scratch.join("run"));
    let spec = job.write(scratch.join("job.yaml"));
    let ended = scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(1);
    for part in ["failed twice in the same way", "index 12 is out of bounds", "rank", "trainctl logs"] {
        let said = format!("{}{}", ended.stdout, ended.stderr);
        assert!(said.contains(part), "{part} in {said}");
    }
    let run = Run::new(&job.run_dir);
    assert_eq!(run.generations().len(), 2, "the first failure restarts, the second does not");
    let finished: Vec<Value> = run.events_of("job_finished");
    assert_eq!(finished.len(), 1);
    assert!(finished[0].to_string().contains("index 12 is out of bounds"), "{}", finished[0]);
    assert!(scratch.processes().is_empty(), "processes are left");
    let explained = scratch.trainctl(["explain", job.run_dir.to_str().unwrap()]).wait().expect_code(0);
    for part in ["failed; 2 generations were lost", "its log ends", "index 12 is out of bounds", "to do"] {
        assert!(explained.stdout.contains(part), "{part} in {}", explained.stdout);
    }
}

#[test]
fn j5_the_budget_ends_the_job_when_failures_differ() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("spent-budget");
    // The kernel's random uuid in letters: fingerprints leave numbers out.
    scratch.wrap_trainer(
        "word=$(tr 0-9- g-q </proc/sys/kernel/random/uuid)\necho \"trainctl-trainer: error: $word\" >&2\nexit 1",
    );
    let job = Job { max_restarts: 2, workers: 1, ..Job::new(scratch.join("run")) };
    let spec = job.write(scratch.join("job.yaml"));
    let ended = scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(1);
    let said = format!("{}{}", ended.stdout, ended.stderr);
    assert!(said.contains("max_restarts"), "{said}");
    assert_eq!(Run::new(&job.run_dir).generations().len(), 3);
}
