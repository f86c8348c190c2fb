//! Runs that stand still without anything having died: each is found within its deadline, the rank is named, the stacks say
//! where it stands, and the run comes back with the same bits (P4, P6).

use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;
use trainctl_faultfs::{FaultFs, have_fuse};
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Process};
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, wait};

/// Floors of the deadlines: far above what a phase takes here, far below the defaults.
const DEADLINE_MS: u64 = 6_000;
/// What a machine that is busy with other tests may add before a hang is seen.
const SLACK_MS: u64 = 6_000;

fn keys() -> Vec<String> {
    let floor = |stage: &str| format!("fault_tolerance.hang.{stage}_seconds={}", DEADLINE_MS / 1_000);
    let floors = ["start", "rendezvous", "load", "first_step", "step", "validate", "save"].map(floor);
    let keys = floors.into_iter().chain(["fault_tolerance.hang.factor=2".to_owned()]);
    keys.flat_map(|key| ["--set".to_owned(), key]).collect()
}

/// The first hang that was found.
fn wait_for_hang(run: &Run) -> Value {
    wait::until("a hang to be found", || run.events_of("hang_detected").into_iter().next())
}

/// The run ended as if nothing had happened, and the hang is told as it was: the rank, that it was found in time, and what
/// its thread stood in.
fn assert_told(scratch: &Scratch, run: &Run, job: &Job, rank: u64, stands_in: &str) {
    let want = unbroken(job);
    assert_same_rows(run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);

    let hang = &run.events_of("hang_detected")[0];
    assert_eq!(hang["rank"], rank, "{hang}");
    let stands = hang["stands_ms"].as_u64().unwrap();
    assert!((DEADLINE_MS..DEADLINE_MS + SLACK_MS).contains(&stands), "{hang}");
    let explained = scratch.trainctl(["explain", run.dir().to_str().unwrap(), "--output", "json"]).wait();
    let explained: Value = serde_json::from_str(&explained.expect_code(0).stdout).unwrap();
    let lost = &explained["lost"][0];
    assert_eq!(lost["rank"], rank, "{explained:#}");
    assert!(lost["cause"].as_str().unwrap().contains("made no progress"), "{explained:#}");
    assert!(lost["stack"].to_string().contains(stands_in), "{stands_in} is not in {:#}", lost["stack"]);
    // Every rank's stacks are kept beside its log.
    let stacks = run.events_of("stacks");
    assert_eq!(stacks.iter().filter(|row| row["generation"] == hang["generation"]).count(), 2, "{stacks:?}");
    assert!(stacks.iter().any(|row| row["collectives_path"].is_string()), "no rank told its collectives: {stacks:?}");
    for row in &stacks {
        let text = std::fs::read_to_string(run.dir().join(row["path"].as_str().unwrap())).unwrap();
        assert!(text.contains("thread "), "{text}");
        if let Some(path) = row["collectives_path"].as_str() {
            let record = std::fs::read_to_string(run.dir().join(path)).unwrap();
            let record: Value = serde_json::from_str(&record).unwrap();
            assert!(record["entries"].as_array().is_some_and(|entries| !entries.is_empty()), "{record}");
        }
    }
}

/// The rank of the trainer that met the fault: the only one with the variable in its environment.
fn faulty_rank(run: &Run, fault: &str) -> u64 {
    let of = |pid: u32| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let has = |pid: u32| String::from_utf8_lossy(&of(pid)).contains(fault);
    let found = wait::until("the trainer with the fault", || run.trainers().into_iter().find(|t| has(t.pid)));
    found.rank
}

/// A rank's thread stands still at a fail point of its main thread, in the second generation's or any later step.
fn stands_still_at(test: &str, fault: &str, stands_in: &str) {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new(test);
    let job = Job::new(scratch.join("run")).slow();
    let run = Run::new(&job.run_dir);
    scratch.inject("trainctl-trainer", &[fault]);
    let spec = job.write(scratch.join("job.yaml"));
    let mut arguments = vec!["run".to_owned(), spec.display().to_string()];
    arguments.extend(keys());
    let mut trainctl = scratch.trainctl(arguments);
    let rank = faulty_rank(&run, fault);
    let hang = wait_for_hang(&run);
    assert_eq!(hang["waiting"], 1, "{hang}");
    assert!(hang["collective"].as_str().unwrap().starts_with("all-reduce"), "{hang}");
    trainctl.wait().expect_code(0);
    assert_told(&scratch, &run, &job, rank, stands_in);
}

#[test]
fn p6_a_rank_that_sleeps_in_the_data_loader_is_named() {
    stands_still_at("hang-data", "data.batch:29:hang", "batch (data.rs:");
}

#[test]
fn p6_a_rank_that_spins_in_compute_is_named() {
    stands_still_at("hang-compute", "compute.batch:26:spin", "forward_backward");
}

#[test]
fn p6_a_rank_whose_process_is_stopped_is_named() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("hang-stopped");
    let job = Job::new(scratch.join("run")).slow();
    let run = Run::new(&job.run_dir);
    let spec = job.write(scratch.join("job.yaml"));
    let mut arguments = vec!["run".to_owned(), spec.display().to_string()];
    arguments.extend(keys());
    let mut trainctl = scratch.trainctl(arguments);
    run.wait_for_step(12);
    let stopped = run.wait_for_trainers(2, 0)[1];
    process::send(stopped.pid, Signal::SIGSTOP);
    trainctl.wait().expect_code(0);
    assert_told(&scratch, &run, &job, stopped.rank, "stopped by a signal");
    // It could not say where it was: its stack was walked from outside.
    let stacks = run.events_of("stacks");
    let path = stacks.iter().find(|row| row["rank"] == stopped.rank).unwrap()["path"].as_str().unwrap();
    let text = std::fs::read_to_string(run.dir().join(path)).unwrap();
    let main = text.split("thread ").find(|thread| thread.starts_with(&format!("{} ", stopped.pid))).unwrap();
    assert!(main.lines().count() > 4, "{main}");
}

/// Starts a worker that sees `dead` where others see `data`.
fn start_worker_elsewhere(scratch: &Scratch, state: &Path, index: u32, dead: &Path, data: &Path) -> Process {
    let own = scratch.command("trainctl-worker");
    let mut command = Command::new("unshare");
    command.arg("--mount").args(["sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\""]);
    command.arg(dead).arg(data).arg(own.get_program());
    command.arg("--state-dir").arg(scratch.join(&format!("w{index}"))).arg("--coordinator").arg(state);
    for (key, value) in own.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    command.current_dir(scratch.path());
    scratch.start(command, &format!("worker-{index}"))
}

#[test]
fn p6_a_rank_that_reads_from_a_dead_file_system_is_named() {
    if !programs::have_trainer() || !have_fuse() || !nix::unistd::geteuid().is_root() {
        return;
    }
    let scratch = Scratch::new("hang-dead-disk");
    let mut job = Job::new(scratch.join("run")).slow();
    // The same files in a folder of this test and on a file system of its own.
    let (data, disk) = (scratch.join("data"), scratch.join("disk"));
    std::fs::create_dir_all(&data).unwrap();
    std::fs::create_dir_all(&disk).unwrap();
    let mut fs = FaultFs::mount(&disk, "faultfs_server").unwrap();
    let folder = job.corpus.prefix.parent().unwrap().to_owned();
    for file in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()) {
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), data.join(file.file_name())).unwrap();
            std::fs::copy(file.path(), disk.join(file.file_name())).unwrap();
        }
    }
    job.corpus.prefix = data.join(job.corpus.prefix.file_name().unwrap());
    let state = scratch.join("state");
    let run = Run::new(&job.run_dir);
    let _coordinator = Coordinator::start(&scratch, &state);
    let _near = daemons::start_worker(&scratch, &state, 0, None);
    let _far = start_worker_elsewhere(&scratch, &state, 1, &disk, &data);
    fs.hold_reads(".bin").unwrap();
    let spec = job.write(scratch.join("job.yaml"));
    let mut arguments: Vec<String> =
        ["submit", spec.to_str().unwrap(), "--coordinator", state.to_str().unwrap()].map(str::to_owned).into();
    arguments.extend(keys());
    let id = scratch.trainctl(arguments).wait().expect_code(0).stdout.trim().to_owned();
    let hang = wait_for_hang(&run);
    let rank = hang["rank"].as_u64().unwrap();
    let of_rank = |event: &Value| event["rank"] == rank && event["generation"] == hang["generation"];
    let started = run.events_of("trainer_started").into_iter().find(of_rank).unwrap();
    let far = std::fs::read_to_string(scratch.join("w1/worker-id")).unwrap_or_default();
    assert!(started["worker"].as_str().unwrap().ends_with(far.trim()), "{started}: not the worker {far}");
    // The dead file system comes back once the generation is over.
    wait::until("the lost generation", || run.events_of("generation_lost").into_iter().next());
    fs.release().unwrap();
    daemons::wait_for_success(&scratch, &state, &id);
    assert_told(&scratch, &run, &job, rank, "read");
}
