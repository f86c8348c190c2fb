//! Devices prove themselves before a generation loads: who computes wrongly gets no rank, and is named (P6); a restart with the
//! same workers does not wait for that again.

use std::path::{Path, PathBuf};

use serde_json::Value;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;

/// Long enough for some products on a busy machine.
const SECONDS: f64 = 0.3;

/// A trainer whose device miscalculates at each of its starts.
fn faulty_trainer(scratch: &Scratch, fault: &str) -> PathBuf {
    let trainer = scratch.join("faulty-trainer");
    scratch.write_trainer(&trainer, &format!("export TRAINCTL_FAULT='{fault}'\nexec \"$TRAINER\" \"$@\""));
    trainer
}

/// Runs `job` to its end: as many workers as ranks of which the second is faulty, and a spare that comes once the job has begun
/// to form on these. The job's status in the end, and the daemons.
fn run_with_spare(scratch: &Scratch, job: &Job, fault: &str) -> (Value, Coordinator, Vec<Process>) {
    let state = scratch.join("state");
    let coordinator = Coordinator::start(scratch, &state);
    let trainer = faulty_trainer(scratch, fault);
    let worker = |index: u32| {
        let trainer: Option<&Path> = (index == 1).then_some(&trainer);
        daemons::start_worker(scratch, &state, index, trainer)
    };
    let mut workers: Vec<_> = (0..job.workers).map(worker).collect();
    let id = daemons::submit(scratch, &state, &job.write(scratch.join("job.yaml")));
    daemons::wait_for_status(scratch, &state, &id, "the first formation", |status| {
        status["generation"].as_u64().is_some_and(|generation| generation > 0)
    });
    workers.push(worker(job.workers));
    (daemons::wait_for_success(scratch, &state, &id), coordinator, workers)
}

/// What `trainctl explain` says of the only loss.
fn explained(scratch: &Scratch, job: &Job) -> Value {
    let said = scratch.trainctl(["explain", job.run_dir.to_str().unwrap(), "--output", "json"]).wait().expect_code(0);
    let said: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!(said["lost"].as_array().unwrap().len(), 1, "{said:#}");
    said["lost"][0].clone()
}

/// The one worker that a burn-in has put out of service.
fn quarantined(run: &Run) -> Value {
    let mut quarantined = run.events_of("worker_quarantined");
    assert_eq!(quarantined.len(), 1, "{quarantined:?}");
    assert_eq!(quarantined[0]["by"], "burn_in");
    quarantined.remove(0)
}

#[test]
fn p6_a_device_that_differs_from_itself_gets_no_rank_and_the_run_ends_as_if_it_had_never_been_there() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("burn-in-wrong");
    let job = Job { burn_in: Some(SECONDS), ..Job::new(scratch.join("run")) };
    let want = unbroken(&job);
    assert_eq!((want.events_of("burned_in").len(), want.events_of("burn_in_failed").len()), (1, 0));

    let (status, coordinator, _workers) = run_with_spare(&scratch, &job, "burn_in.product:2:flip");
    assert_eq!(status["restarts"], 0, "no fault of the job: {status:#}");
    let run = Run::new(&job.run_dir);
    let failed = run.events_of("burn_in_failed");
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0]["named"], true);
    let faulty = failed[0]["suspects"][0].as_u64().unwrap();
    let figures = &failed[0]["ranks"][usize::try_from(faulty).unwrap()];
    assert_eq!((&figures["rank"], &figures["wrong_rounds"]), (&faulty.into(), &1.into()), "{}", failed[0]);

    let quarantined = quarantined(&run);
    assert_eq!(quarantined["worker"], figures["worker"]);
    let reason = quarantined["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("burn-in: matmul of 1024×1024 in fp32: 1 of ") && reason.contains(" gigaflop/s"),
        "{reason}"
    );
    let state = coordinator.state_dir.to_str().unwrap();
    let list = scratch.trainctl(["workers", "list", "--coordinator", state]).wait();
    list.expect_code(0).expect_said("quarantined by burn_in since ");
    let explained = explained(&scratch, &job);
    let (cause, action) = (explained["cause"].as_str().unwrap(), explained["action"].as_str().unwrap());
    let wanted = format!("rank {faulty} (worker {}", figures["worker"].as_str().unwrap());
    assert!(cause.starts_with(&wanted) && cause.contains(") failed the burn-in: matmul of 1024×1024"), "{cause}");
    assert!(explained["rank"] == faulty && action.contains("`trainctl workers release`"), "{explained:#}");

    let started = run.events_of("trainer_started");
    let of_faulty = started.iter().filter(|event| event["worker"] == quarantined["worker"]);
    assert_eq!(of_faulty.count(), 1, "it has started once and never again: {started:?}");
    assert_eq!(run.events_of("burned_in").len(), 1, "the spare had not burnt in");
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
}

#[test]
fn p6_a_device_that_is_always_wrong_in_the_same_way_is_named_by_the_majority() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("burn-in-outvoted");
    let job = Job { workers: 3, steps: 4, ckpt_every: 4, val_every: 4, warmup: 2, ..Job::new(scratch.join("run")) };
    let job = Job { burn_in: Some(SECONDS), ..job };
    let (_, _coordinator, _workers) = run_with_spare(&scratch, &job, "burn_in.product:*:flip");
    let run = Run::new(&job.run_dir);
    let failed = &run.events_of("burn_in_failed")[0];
    let ranks = failed["ranks"].as_array().unwrap();
    assert!(ranks.iter().all(|rank| rank["wrong_rounds"] == 0), "it agrees with itself: {failed}");
    let reason = quarantined(&run)["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("is not that of 2 other ranks with the same device"), "{reason}");
    assert_eq!(explained(&scratch, &job)["rank"], failed["suspects"][0]);
}

#[test]
fn p4_devices_that_are_well_burn_in_once_and_not_again_when_a_trainer_was_killed() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("burn-in-well");
    let job = Job { burn_in: Some(SECONDS), ..Job::new(scratch.join("run")).slow() };
    let want = unbroken(&Job { burn_in: None, ..job.clone() });
    assert_eq!(want.events_of("burned_in"), Vec::<Value>::new(), "CPUs do not without being asked");

    let spec = job.write(scratch.join("job.yaml"));
    let run = Run::new(&job.run_dir);
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    run.wait_for_step(12);
    run.wait_for_trainers(2, 0)[1].kill9();
    trainctl.wait().expect_code(0);
    assert_eq!(run.generations().len(), 2);
    let burned_in = run.events_of("burned_in");
    assert_eq!(burned_in.len(), 1, "{burned_in:?}");
    assert_eq!(burned_in[0]["generation"], run.generations()[0]);
    let ranks = burned_in[0]["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 2);
    for rank in ranks {
        assert!(rank["rounds"].as_u64() > Some(0) && rank["gigaflops"].as_f64() > Some(0.0), "{rank}");
        assert!(
            rank["seconds"].as_f64() >= Some(SECONDS) && rank["world_reduce_seconds"].as_f64() > Some(0.0),
            "{rank}"
        );
        assert_eq!((&rank["wrong_rounds"], &rank["wrong_world_sums"]), (&0.into(), &0.into()));
        assert_eq!(rank["digest"], ranks[0]["digest"]);
    }
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash, "it touches nothing");
}
