//! What people read while a job runs and after it: every reading verb in both formats, by hand-started daemons and from the
//! run directory, and the messages of a run that goes on without a checkpoint.

use serde_json::Value;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::programs;
use trainctl_tests::run::Run;
use trainctl_tests::scratch::Scratch;

/// Standard output of a reading verb, one JSON document a line.
fn json(scratch: &Scratch, arguments: &[&str]) -> Vec<Value> {
    let mut all = arguments.to_vec();
    all.extend(["--output", "json"]);
    let ended = scratch.trainctl(&all).wait().expect_code(0);
    ended
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{all:?}: {e}: {line}")))
        .collect()
}

#[test]
fn every_reading_verb_answers_in_text_and_json() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("reading");
    let job = Job { steps: 10, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("run")) };
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    let _coordinator = Coordinator::start(&scratch, &state);
    let _workers: Vec<Process> = (0..2).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
    let spec = job.write(scratch.join("job.yaml"));
    let at = state.to_str().unwrap();
    let followed = scratch.trainctl(["submit", spec.to_str().unwrap(), "--coordinator", at, "--follow"]).wait();
    let id = followed.expect_code(0).stdout.trim().to_owned();

    let status = &json(&scratch, &["status", &id, "--coordinator", at])[0];
    assert_eq!((&status["phase"], &status["steps_done"]), (&"succeeded".into(), &10.into()), "{status:#}");
    assert_eq!((&status["latest"], &status["world_size"]), (&"epoch_0_step_9".into(), &2.into()), "{status:#}");
    let metrics = json(&scratch, &["metrics", &id, "--coordinator", at]);
    assert_eq!(metrics.iter().filter(|row| row.get("loss").is_some()).count(), 10, "{metrics:#?}");
    let events = json(&scratch, &["events", &id, "--coordinator", at]);
    assert_eq!(events, run.events(), "events are the lines of events.jsonl");
    for kind in [
        "job_submitted",
        "generation_forming",
        "generation_formed",
        "trainer_started",
        "step_first",
        "trainer_exited",
        "checkpoint_committed",
        "pointer_moved",
        "job_finished",
    ] {
        let event = events.iter().find(|event| event["kind"] == kind).unwrap_or_else(|| panic!("no event {kind}"));
        for key in ["ts", "job", "generation"] {
            assert!(event.get(key).is_some(), "{key} in {event}");
        }
    }
    assert!(!json(&scratch, &["list", "--coordinator", at]).is_empty());
    let dir = job.run_dir.to_str().unwrap();
    assert!(json(&scratch, &["checkpoints", "list", dir])[0].to_string().contains("epoch_0_step_4"));
    json(&scratch, &["checkpoints", "verify", dir]);

    for verb in ["status", "metrics", "events", "logs"] {
        let ended = scratch.trainctl([verb, &id, "--coordinator", at]).wait().expect_code(0);
        assert!(!ended.stdout.is_empty(), "{verb} says nothing");
    }
    let log = scratch.trainctl(["logs", &id, "--rank", "1", "--coordinator", at]).wait().expect_code(0);
    assert!(log.stdout.contains("rank=1") && !log.stdout.contains("rank=0"), "{}", log.stdout);
    scratch.trainctl(["list", "--coordinator", at]).wait().expect_code(0).expect_said(&id);
    scratch.trainctl(["checkpoints", "list", dir]).wait().expect_code(0).expect_said("LATEST");

    scratch.trainctl(["status", "no-such-job", "--coordinator", at]).wait().expect_code(64).expect_said("no-such-job");
    // Submitting it again is resuming; it is done.
    scratch
        .trainctl(["submit", spec.to_str().unwrap(), "--coordinator", at])
        .wait()
        .expect_code(0)
        .expect_said("10 steps");
    assert_eq!(run.generations().len(), 1);
}

#[test]
fn without_a_coordinator_the_exit_code_is_69() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("no-coordinator");
    for verb in ["status", "list"] {
        let ended = scratch.trainctl([verb]).wait().expect_code(69);
        assert!(!ended.stderr.trim().is_empty() && ended.stdout.is_empty(), "{verb}: {ended:?}");
    }
}

#[test]
fn logs_without_a_commit_start_again_at_step_0_and_say_so() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("no-commit");
    let job = Job { steps: 100_000, ckpt_every: 50_000, val_every: 50_000, ..Job::new(scratch.join("run")).slow() };
    let (spec, run) = (job.write(scratch.join("job.yaml")), Run::new(&job.run_dir));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    run.wait_for_step(3);
    // The supervisor dies, and with it everything under it.
    trainctl.kill9();
    trainctl_tests::wait::until_true("the end of all processes", || scratch.processes().is_empty());
    assert!(run.commits().is_empty());
    let before = run.rows();

    // Another job, since the spec is another: the one that was left has ended.
    let again = scratch
        .trainctl(["run", spec.to_str().unwrap(), "--until-step", "5"])
        .wait()
        .expect_code(0)
        .expect_said("starts at step 0 in the next generation");
    drop(again);
    let rows = run.rows();
    assert_eq!(rows.iter().map(|row| row.step).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert!(rows[0].generation > before[0].generation, "{rows:?}");
    assert!(rows.iter().zip(&before).all(|(now, then)| now.bits() == then.bits()), "the same steps give the same bits");
}

#[test]
fn resume_without_a_name_takes_the_run_in_the_current_folder() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("resume-here");
    let job = Job { steps: 10, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("run")) };
    let spec = job.write(scratch.join("job.yaml"));
    scratch.trainctl(["run", spec.to_str().unwrap(), "--until-step", "5"]).wait().expect_code(0);
    let mut command = scratch.command("trainctl");
    command.current_dir(&job.run_dir).args(["resume", "--from", "LATEST"]);
    let ended = scratch.start(command, "resume").wait().expect_code(0);
    ended.expect_said(job.run_dir.to_str().unwrap()).expect_said("after 5 steps");
    assert_eq!(Run::new(&job.run_dir).latest().step, 9);
}
