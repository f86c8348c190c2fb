//! Who is there, and who takes no rank: `trainctl workers`, quarantine, and probes before a formation (J6, P6).

use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{Ended, Process};
use trainctl_tests::programs;
use trainctl_tests::run::Run;
use trainctl_tests::scratch::Scratch;
use trainctl_tests::wait;

fn workers(scratch: &Scratch, state: &Path, arguments: &[&str]) -> Ended {
    let mut all = vec!["workers"];
    all.extend(arguments);
    all.extend(["--coordinator", state.to_str().unwrap()]);
    scratch.trainctl(all).wait()
}

fn list(scratch: &Scratch, state: &Path) -> Vec<Value> {
    let ended = workers(scratch, state, &["list", "--output", "json"]).expect_code(0);
    serde_json::from_str(&ended.stdout).unwrap()
}

/// Waits until the list satisfies a condition.
fn wait_for_list(scratch: &Scratch, state: &Path, what: &str, holds: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    wait::until(what, || Some(list(scratch, state)).filter(|found| holds(found)))
}

fn states(list: &[Value]) -> Vec<&str> {
    let mut states: Vec<&str> = list.iter().map(|worker| worker["state"].as_str().unwrap()).collect();
    states.sort_unstable();
    states
}

/// The worker that a process is.
fn of<'a>(list: &'a [Value], process: &Process) -> &'a Value {
    list.iter().find(|worker| worker["pid"] == process.pid()).unwrap()
}

fn id(worker: &Value) -> String {
    worker["id"].as_str().unwrap().to_owned()
}

#[test]
fn a_quarantine_moves_the_rank_to_a_spare_and_outlives_the_coordinator() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("workers");
    let state = scratch.join("state");
    let mut coordinator = Coordinator::start(&scratch, &state);
    let daemons: Vec<Process> = (0..3).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
    let is_measured = |worker: &Value| worker["health"]["memory_available"].as_u64() > Some(0);
    let is_known = |worker: &Value| is_measured(worker) && worker["clock_ms"].is_number();
    let all_known = |list: &[Value]| list.len() == 3 && list.iter().all(is_known);
    let idle = wait_for_list(&scratch, &state, "three measured workers", all_known);
    assert_eq!(states(&idle), ["idle"; 3]);
    for worker in &idle {
        let (skew, error) = (worker["clock_ms"].as_f64().unwrap(), worker["clock_error_ms"].as_f64().unwrap());
        assert!(skew.abs() <= error + 2.0, "one clock: {skew} ± {error} ms");
        assert_eq!(worker["warnings"].as_array().unwrap().len(), 0, "{worker:#}");
    }

    let job = Job { steps: 4000, ckpt_every: 5, val_every: 1000, ..Job::new(scratch.join("run")) };
    let run = Run::new(&job.run_dir);
    let submitted = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));
    run.wait_for_commit(4);
    let busy = list(&scratch, &state);
    assert_eq!(states(&busy), ["running", "running", "spare"]);
    let carrier = busy.iter().find(|worker| worker["rank"] == 1).unwrap();
    assert_eq!(carrier["job"], submitted.as_str());
    let (victim, spare) = (id(carrier), id(busy.iter().find(|worker| worker["state"] == "spare").unwrap()));

    workers(&scratch, &state, &["quarantine", "nobody", "--reason", "x"]).expect_code(64).expect_said("workers list");
    workers(&scratch, &state, &["quarantine", &victim, "--reason", "fan 3 is slow"])
        .expect_code(0)
        .expect_said("rank 1 of");
    coordinator.process.kill9();
    coordinator = Coordinator::start(&scratch, &state);
    let reattached = |list: &[Value]| states(list) == ["quarantined", "running", "spare"];
    let after = wait_for_list(&scratch, &state, "the workers at the next coordinator", reattached);
    let out = after.iter().find(|worker| worker["state"] == "quarantined").unwrap();
    assert_eq!((id(out), out["rank"].as_u64()), (victim.clone(), Some(1)), "its rank goes on: {out:#}");
    assert_eq!(out["quarantine"]["reason"], "fan 3 is slow");
    assert_eq!(run.generations().len(), 1);
    workers(&scratch, &state, &["list"]).expect_code(0).expect_said("quarantined by person since");

    let first = run.trainers();
    first[0].kill9();
    let second = run.wait_for_trainers(2, first[0].generation);
    let moved = wait_for_list(&scratch, &state, "the spare at work", |list| {
        list.iter().any(|worker| id(worker) == spare && worker["state"] == "running")
    });
    let out = moved.iter().find(|worker| id(worker) == victim).unwrap();
    assert_eq!((&out["state"], &out["rank"]), (&"quarantined".into(), &Value::Null));

    workers(&scratch, &state, &["release", &victim]).expect_code(0);
    let back = |list: &[Value]| list.iter().any(|worker| id(worker) == victim && worker["state"] == "spare");
    wait_for_list(&scratch, &state, "the worker back as a spare", back);
    // Given up at once: the spare that was released takes the rank.
    run.wait_for_step(run.last_step().unwrap() + 1);
    workers(&scratch, &state, &["quarantine", &spare, "--reason", "board", "--now"]).expect_code(0);
    run.wait_for_trainers(2, second[0].generation);
    let lost = run.events_of("generation_lost").pop().unwrap();
    assert!(lost["cause"].as_str().unwrap().contains("was taken out of service"), "{lost}");
    let status = daemons::status(&scratch, &state, &submitted).unwrap();
    assert_eq!(status["restarts"], 1, "a person's word is not charged: {status:#}");

    // Frozen: unknown, then lost.
    let carriers =
        wait_for_list(&scratch, &state, "two running", |list| states(list) == ["quarantined", "running", "running"]);
    let frozen = daemons.iter().find(|process| of(&carriers, process)["state"] == "running").unwrap();
    frozen.signal(Signal::SIGSTOP);
    let unknown = wait_for_list(&scratch, &state, "UNKNOWN", |list| states(list).contains(&"UNKNOWN"));
    let seen = of(&unknown, frozen);
    assert!(seen["silent_ms"].as_u64() < Some(5_000) && seen["rank"].is_number(), "within its lease: {seen:#}");
    assert!(seen["reason"].as_str().unwrap().contains("lost after 5 s"), "{seen:#}");
    wait_for_list(&scratch, &state, "the loss", |list| list.iter().all(|worker| worker["pid"] != frozen.pid()));
    frozen.signal(Signal::SIGCONT);
    daemons::cancel(&scratch, &state, &submitted);
    drop(coordinator);
}

/// Whether a process may have mounts of its own here.
fn have_unshare() -> bool {
    let own = std::process::Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/mnt"]).status();
    own.is_ok_and(|status| status.success())
}

#[test]
fn p6_a_worker_that_does_not_see_the_run_directory_is_quarantined_by_name_and_the_job_runs_on_the_others() {
    if !programs::have_trainer() || !have_unshare() {
        return;
    }
    let scratch = Scratch::new("blind-worker");
    let (state, shared) = (scratch.join("state"), scratch.join("shared"));
    std::fs::create_dir(&shared).unwrap();
    let _coordinator = Coordinator::start(&scratch, &state);
    // Another file system where the others have the run.
    let mut command = std::process::Command::new("unshare");
    let program = programs::path("trainctl-worker");
    command.args(["-m", "sh", "-c", "mount -t tmpfs none \"$0\" && exec \"$@\""]).arg(&shared).arg(program);
    command.args(["--name", "a-blind"]).arg("--state-dir").arg(scratch.join("w-blind"));
    command.arg("--coordinator").arg(&state);
    let _blind = scratch.start(command, "worker-blind");
    let only = |list: &[Value]| list.len() == 1;
    assert_eq!(id(&wait_for_list(&scratch, &state, "the blind worker", only)[0]), "a-blind");
    let _others: Vec<Process> = (0..2).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
    wait_for_list(&scratch, &state, "three workers", |list| list.len() == 3);

    let job = Job::new(shared.join("run"));
    let submitted = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));
    daemons::wait_for_success(&scratch, &state, &submitted);
    let list = list(&scratch, &state);
    let blind = list.iter().find(|worker| id(worker) == "a-blind").unwrap();
    assert_eq!((&blind["state"], &blind["quarantine"]["by"]), (&"quarantined".into(), &"probe".into()));
    let reason = blind["quarantine"]["reason"].as_str().unwrap();
    let path = job.run_dir.join("control/endpoint.json").display().to_string();
    for words in ["does not see the run directory", &path, "errno 2"] {
        assert!(reason.contains(words), "{words}: {reason}");
    }
    assert!(blind["quarantine"]["figures"].as_str().unwrap().contains("of memory available"), "{blind:#}");
    let run = Run::new(&job.run_dir);
    let event = run.events_of("worker_quarantined").pop().unwrap();
    assert_eq!((&event["worker"], &event["reason"]), (&"a-blind".into(), &reason.into()));
    assert_eq!(run.generations().len(), 1, "it cost no generation");
    let left = || std::fs::read_dir(job.run_dir.join("control/probes")).unwrap().count();
    wait::until_true("the probes' files are gone", || left() == 0);
}
