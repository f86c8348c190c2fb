//! A rank that holds the others up is named, and gives way to a spare where the spec says so.

use serde_json::Value;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;

/// Each step of a slow rank takes so much longer: several times as long as the others' steps.
const SLOW: &str = "step.begin:*:wait150";

/// Steps that take long enough, and enough of them, for a healthy rank to be named if one could be.
fn job(scratch: &Scratch) -> Job {
    Job { steps: 120, ckpt_every: 60, val_every: 60, ..Job::new(scratch.join("run")).slow() }
}

/// A coordinator and two workers, the second of which is slow.
fn daemons(scratch: &Scratch) -> (Coordinator, Vec<Process>) {
    let state = scratch.join("state");
    let coordinator = Coordinator::start(scratch, &state);
    let slow = scratch.join("slow-trainer");
    scratch.write_trainer(&slow, &format!("export TRAINCTL_FAULT='{SLOW}'\nexec \"$TRAINER\" \"$@\""));
    let worker = |index| daemons::start_worker(scratch, &state, index, (index == 1).then_some(slow.as_path()));
    (coordinator, (0..2).map(worker).collect())
}

/// The worker that carried a rank.
fn worker_of(run: &Run, rank: u64, generation: u64) -> String {
    let started = run.events_of("trainer_started").into_iter();
    let mut of_rank = started.filter(|event| event["rank"] == rank && event["generation"] == generation);
    of_rank.next().unwrap()["worker"].as_str().unwrap().to_owned()
}

#[test]
fn a_slow_rank_is_named_and_nobody_in_a_healthy_run() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("straggler");
    let job = job(&scratch);
    let healthy = unbroken(&job);
    assert_eq!(healthy.events_of("straggler"), Vec::<Value>::new());

    let (coordinator, _workers) = daemons(&scratch);
    let id = daemons::submit(&scratch, &coordinator.state_dir, &job.write(scratch.join("job.yaml")));
    let named = |status: &Value| status["ranks"].as_array().unwrap().iter().any(|rank| rank["straggler"] == true);
    let status = daemons::wait_for_status(&scratch, &coordinator.state_dir, &id, "a straggler in the status", named);
    let slow: Vec<&Value> =
        status["ranks"].as_array().unwrap().iter().filter(|rank| rank["straggler"] == true).collect();
    assert_eq!(slow.len(), 1, "{status:#}");
    assert!(slow[0]["compute_seconds"].as_f64().unwrap() > 0.15 && slow[0]["straggler_score"].as_f64().unwrap() > 3.5);
    let text = scratch.trainctl(["status", &id, "--coordinator", coordinator.state_dir.to_str().unwrap()]).wait();
    text.expect_code(0).expect_said("STRAGGLER (score ");
    daemons::wait_for_success(&scratch, &coordinator.state_dir, &id);

    let run = Run::new(&job.run_dir);
    let events = run.events_of("straggler");
    assert_eq!((events.len(), &events[0]["rank"]), (1, &slow[0]["rank"]), "{events:?}");
    assert!(events[0]["step"].as_u64().unwrap() < 90, "within some steps of its first 32: {}", events[0]);
    assert_eq!(run.generations().len(), 1, "observe only");
    assert_same_rows(&run, &healthy, job.steps);
}

#[test]
fn p4_with_evict_a_slow_rank_gives_way_to_a_spare_and_no_bit_changes() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("evicted");
    let job = job(&scratch);
    let want = unbroken(&job);
    let (coordinator, _workers) = daemons(&scratch);
    let spec = scratch.join("job.yaml");
    let yaml = job.yaml().replace("fault_tolerance:\n", "fault_tolerance:\n  stragglers: evict\n");
    std::fs::write(&spec, yaml).unwrap();
    let id = daemons::submit(&scratch, &coordinator.state_dir, &spec);
    let run = Run::new(&job.run_dir);
    run.wait_for_step(1);
    let _spare = daemons::start_worker(&scratch, &coordinator.state_dir, 2, None);
    daemons::wait_for_success(&scratch, &coordinator.state_dir, &id);

    let (events, lost) = (run.events_of("straggler"), run.events_of("generation_lost"));
    assert_eq!((lost.len(), run.generations().len()), (1, 2), "once: {lost:?}");
    assert_eq!(lost[0]["verdict"]["kind"], "straggler", "{}", lost[0]);
    let rank = events[0]["rank"].as_u64().unwrap();
    let generations = run.generations();
    let before_and_after = |rank| [0, 1].map(|index| worker_of(&run, rank, generations[index]));
    assert_eq!(lost[0]["verdict"]["suspect"]["rank"], rank);
    let ([before, after], [first, second]) = (before_and_after(rank), before_and_after(1 - rank));
    assert_ne!(before, after, "a spare carries it");
    assert_eq!(first, second, "the other one stays");
    let from = run.events_of("generation_formed")[1]["step"].as_u64().unwrap();
    assert!(from > 32 && from < job.steps, "it goes on from the save that was asked for: {from}");
    let said = scratch.trainctl(["explain", job.run_dir.to_str().unwrap()]).wait().expect_code(0);
    said.expect_said("times as long for a step as the others: it is moved to a spare");
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
}
