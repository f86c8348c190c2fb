//! Writers of a generation that is over, and checkpoints that a run goes back behind: neither harms what is newer, and nothing
//! is left of them (C2, C4, C6, J3).

use std::path::PathBuf;

use nix::sys::signal::Signal;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Process};
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, wait};

/// So soon a machine that is frozen is taken for lost.
const LEASE_MS: &str = "2000";

/// A trainer for one worker: each start that `condition` holds for meets the fault.
fn faulty_trainer(scratch: &Scratch, condition: &str, fault: &str) -> PathBuf {
    let path = scratch.join("faulty-trainer");
    scratch.write_trainer(&path, &format!("{condition} && export TRAINCTL_FAULT={fault}\nexec \"$TRAINER\" \"$@\""));
    path
}

fn wait_until_stopped(scratch: &Scratch, what: &str) -> u32 {
    wait::until(what, || scratch.processes().into_iter().find(|pid| process::is_stopped(*pid)))
}

fn verify(scratch: &Scratch, run: &Run) {
    scratch.trainctl(["checkpoints", "verify", run.dir().to_str().unwrap()]).wait().expect_code(0);
}

#[test]
fn c2_a_writer_of_a_dead_generation_that_wakes_up_late_harms_nothing() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("late-writer");
    let job = Job { steps: 80, ..Job::new(scratch.join("run")).slow() };
    let want = unbroken(&job);
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    let mut command = scratch.command("trainctl-coordinator");
    command.arg("--state-dir").arg(&state).env("TRAINCTL_LEASE_MS", LEASE_MS);
    let coordinator = Coordinator { process: scratch.start(command, "coordinator"), state_dir: state.clone() }.ready();
    // A machine that freezes while its trainer writes the second save: it has two files to write, or three as rank 0.
    let trainer = faulty_trainer(&scratch, "true", "shard.write:4:stop");
    let frozen = daemons::start_worker(&scratch, &state, 0, Some(&trainer));
    let _survivor = daemons::start_worker(&scratch, &state, 1, None);
    let id = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));
    let old = wait_until_stopped(&scratch, "a trainer that freezes in the second save");
    frozen.signal(Signal::SIGSTOP);
    let generation = run.generations()[0];
    assert_eq!(run.latest().step, 9);

    // Another machine takes its rank, and the new generation saves the step anew.
    let _spare = daemons::start_worker(&scratch, &state, 2, None);
    let newest = run.wait_for_commit(19);
    assert!(newest.generation > generation, "{newest:?}");
    // No commit sweeps them before they were seen.
    coordinator.process.signal(Signal::SIGSTOP);
    process::send(old, Signal::SIGCONT);
    let of_old = |name: &String| name.contains(&format!(".g{generation}."));
    wait::until_true("the late shards", || run.files("epoch_0_step_19").iter().any(of_old));
    verify(&scratch, &run);
    coordinator.process.signal(Signal::SIGCONT);
    // It may have been stopped between the manifest and the pointer.
    let latest = wait::until("LATEST at the new commit", || Some(run.latest()).filter(|it| it.step >= newest.step));
    assert_eq!(latest.generation, newest.generation, "{latest:?}");

    // The next commit sweeps them; the machine comes back, and its trainer has no part in anything any more.
    let at = run.commits().pop().unwrap().step;
    run.wait_for_commit(at + 1);
    wait::until_true("the late shards' end", || !run.files("epoch_0_step_19").iter().any(of_old));
    frozen.signal(Signal::SIGCONT);
    wait::until_true("the old trainer's end", || !process::exists(old));
    daemons::wait_for_success(&scratch, &state, &id);
    assert_eq!(run.generations().len(), 2, "the machine that came back ends no generation (J4)");
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    assert_eq!(run.left_behind(), Vec::<String>::new());
    for commit in run.commits() {
        let strays: Vec<String> = run.files(&commit.name.to_string()).into_iter().filter(of_old).collect();
        assert!(commit.generation == generation || strays.is_empty(), "{strays:?}");
    }
    verify(&scratch, &run);
    drop(coordinator);
}

#[test]
fn c6_going_back_retires_what_is_later_before_a_step_is_made() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("rollback");
    let job = Job::new(scratch.join("run"));
    let want = unbroken(&job);
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    let _coordinator = Coordinator::start(&scratch, &state);
    // The second generation stops before it loads anything.
    let condition = format!("! mkdir '{}' 2>/dev/null", scratch.join("first").display());
    let trainer = faulty_trainer(&scratch, &condition, "load.state:1:stop");
    let _workers: Vec<Process> =
        (0..2).map(|index| daemons::start_worker(&scratch, &state, index, (index == 0).then_some(&*trainer))).collect();
    let spec = scratch.join("job.yaml");
    std::fs::write(&spec, format!("{}checkpoint:\n  weights_every_steps: 20\n", job.yaml())).unwrap();
    let id = daemons::submit(&scratch, &state, &spec);
    daemons::wait_for_success(&scratch, &state, &id);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);

    let words = ["resume", run.dir().to_str().unwrap(), "--from", "epoch_0_step_9", "--coordinator"];
    let ended = scratch.trainctl(words.into_iter().chain([state.to_str().unwrap()])).wait().expect_code(0);
    let id = ended.stdout.trim().to_owned();
    let stopped = wait_until_stopped(&scratch, "a trainer that is about to load");
    let names = |run: &Run| run.commits().iter().map(|commit| commit.name.to_string()).collect::<Vec<_>>();
    assert_eq!(names(&run), ["epoch_0_step_9"]);
    assert_eq!(run.pointer("LATEST").as_deref(), Some("epoch_0_step_9"));
    assert_eq!(run.pointer("LOWEST_VAL").as_deref(), Some("epoch_0_step_9"));
    assert_eq!(run.last_step(), Some(9), "rows of later steps are set aside");
    let generation = *run.generations().last().unwrap();
    let abandoned = Run::new(run.dir().join(format!("abandoned/g{generation}")));
    assert_eq!(names(&abandoned), ["epoch_0_step_19", "epoch_0_step_29", "epoch_0_step_39"]);
    let weights = Run::new(run.dir().join("weights"));
    assert_eq!(names(&weights), Vec::<String>::new(), "weights of later steps too");
    let abandoned_weights = Run::new(weights.dir().join(format!("abandoned/g{generation}")));
    assert_eq!(names(&abandoned_weights), ["epoch_0_step_19", "epoch_0_step_39"]);

    process::send(stopped, Signal::SIGCONT);
    daemons::wait_for_success(&scratch, &state, &id);
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(names(&run), names(&want));
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    assert_eq!(run.pointer("LOWEST_VAL"), want.pointer("LOWEST_VAL"));
    assert_eq!(names(&weights), ["epoch_0_step_19", "epoch_0_step_39"]);
    assert_eq!(names(&abandoned).len(), 3, "a person may want them");
    assert_eq!(run.left_behind(), Vec::<String>::new());
    verify(&scratch, &run);
}
