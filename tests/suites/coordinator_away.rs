//! While the coordinator is away trainers keep stepping and nothing is lost (P5); a second one takes over a frozen one's
//! run, whose late writes are harmless (J2, C2, C6): the proof 2.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rand::seq::IndexedRandom;
use trainctl_runtime::endpoint;
use trainctl_store::fault::FailPoint;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Process};
use trainctl_tests::reference::{unbroken, unbroken_until};
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, seed, wait};

/// How long the coordinator is away, as the issue says.
const OUTAGE: Duration = Duration::from_secs(5);
/// How long it is frozen.
const FREEZE: Duration = Duration::from_secs(20);
/// What a busy machine of two cores may add to a step.
const SLACK_MS: i64 = 250;

/// Far more steps than any test waits for: how many there are in an outage depends on the machine. A person's cancel ends
/// it, which saves.
fn endless_job(run_dir: std::path::PathBuf) -> Job {
    Job { steps: 100_000, ckpt_every: 20, val_every: 40, ..Job::new(run_dir).slow() }
}

/// Waits until a moment: the length of an outage is part of what is proved.
fn wait_until(moment: Instant) {
    wait::until_true("the end of the outage", || Instant::now() >= moment);
}

/// P5: no gap between two steps above 3 × the median. The largest gap of the unbroken run is what a step takes whose
/// validation and snapshot come in between.
fn assert_never_stopped(run: &Run, want: &Run) {
    let gaps = |run: &Run| -> Vec<i64> { run.rows().windows(2).map(|pair| pair[1].at_ms - pair[0].at_ms).collect() };
    let (mut got, usual) = (gaps(run), gaps(want).into_iter().max().unwrap());
    let (step, largest) = got.iter().copied().enumerate().max_by_key(|(_, gap)| *gap).unwrap();
    got.sort_unstable();
    let median = got[got.len() / 2];
    let limit = (3 * median).max(usual) + SLACK_MS;
    assert!(
        largest <= limit,
        "{largest} ms between steps {step} and {}; median {median} ms, limit {limit} ms",
        step + 1
    );
    assert_eq!(run.generations().len(), 1, "a control-plane outage starts no restart (J6)");
}

#[test]
fn p5_a_killed_coordinator_is_not_missed() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("killed-coordinator");
    let job = endless_job(scratch.join("run"));
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    let mut coordinator = Coordinator::start(&scratch, &state);
    let _workers: Vec<Process> = (0..2).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
    let id = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));

    run.wait_for_step(30);
    coordinator.process.kill9();
    let killed = Instant::now();
    let (seen, trainers) = (run.last_step().unwrap(), run.trainers());
    // The save in flight when it was killed is long done: only a later one can be waiting for its commit.
    let last_commit = run.commits().pop().unwrap().step;
    wait_until(killed + OUTAGE);
    assert_eq!(run.last_step(), Some(seen), "nobody else writes the rows");
    let _second = Coordinator::start(&scratch, &state);
    run.wait_for_step(seen + 1);
    let back_at = run.last_step().unwrap();
    // Whether or not a save step lay within the outage, the next ones do lie after it: P5's pending save is committed.
    let newest = run.wait_for_commit(last_commit + 20);
    run.wait_for_step(back_at + 21);
    assert_eq!(run.trainers(), trainers, "the trainers never stop");
    daemons::cancel(&scratch, &state, &id);

    let steps = run.latest().step + 1;
    let want = unbroken_until(&job, steps);
    assert_same_rows(&run, &want, steps);
    assert_never_stopped(&run, &want);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    assert!(newest.term > 1, "{newest:?}");
    let outage_ms = i64::try_from(OUTAGE.as_millis()).unwrap();
    let rows = run.rows();
    let within = rows.iter().filter(|row| row.step > seen && row.at_ms < rows[seen as usize].at_ms + outage_ms).count();
    assert!(within > 20, "the outage must span a save step: {within} steps");
}

#[test]
fn p5_trainctl_run_brings_a_killed_coordinator_back() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("supervised-coordinator");
    let job = Job { steps: 100, ckpt_every: 20, val_every: 40, ..Job::new(scratch.join("run")).slow() };
    let want = unbroken(&job);
    let run = Run::new(&job.run_dir);
    let spec = job.write(scratch.join("job.yaml"));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    let control = job.run_dir.join("control");
    let pid = || endpoint::read(&control).unwrap().pid;

    run.wait_for_step(30);
    let first = pid();
    process::send(first, Signal::SIGKILL);
    wait::until_true("another coordinator", || pid() != first);
    trainctl.wait().expect_code(0).expect_said("LATEST");

    assert_same_rows(&run, &want, job.steps);
    assert_never_stopped(&run, &want);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
}

#[test]
fn c2_saves_that_nobody_could_commit_are_committed_by_the_next_coordinator() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("saves-of-an-outage");
    let job = Job::new(scratch.join("run")).slow();
    let want = unbroken(&job);
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    let mut coordinator = Coordinator::start(&scratch, &state);
    let _workers: Vec<Process> = (0..2).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
    let id = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));

    run.wait_for_commit(9);
    coordinator.process.kill9();
    let before = run.commits().pop().unwrap();
    let trainers = run.trainers();
    // They train to the end, save, say so to their workers, and leave.
    wait::until_true("the trainers' end", || trainers.iter().all(|trainer| !process::exists(trainer.pid)));
    assert!(before.step < job.steps - 1, "the last save must come after the kill");
    assert_eq!(run.commits().pop().unwrap(), before, "nobody commits meanwhile");
    assert!(!run.files("epoch_0_step_39").is_empty(), "the shards are there");

    let _second = Coordinator::start(&scratch, &state);
    let status = daemons::wait_for_success(&scratch, &state, &id);
    assert_eq!((&status["restarts"], run.generations().len()), (&0.into(), 1), "{status:#}");
    let last = run.latest();
    assert_eq!((last.step, last.term > before.term), (39, true), "{last:?}");
    assert_eq!(last.state_hash, want.latest().state_hash);
    // Each of them, not only the last: none was in the way of another.
    let steps = |run: &Run| run.commits().iter().map(|commit| commit.step).collect::<Vec<_>>();
    assert_eq!(steps(&run), steps(&want));
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.left_behind(), Vec::<String>::new());
    verify(&scratch, run.dir());
}

#[test]
fn p5_an_outage_leaves_as_many_saves_as_retention_keeps_and_what_failed_is_said_afterwards() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("long-outage");
    let job = Job { ckpt_every: 5, ..Job::new(scratch.join("run")).slow() };
    let want = unbroken(&job);
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    // One rank cannot save step 24, the fifth.
    let trainer = scratch.join("faulty-trainer");
    scratch.write_trainer(&trainer, "export TRAINCTL_FAULT=save.snapshot:5:enospc\nexec \"$TRAINER\" \"$@\"");
    let mut coordinator = Coordinator::start(&scratch, &state);
    let _workers: Vec<Process> =
        (0..2).map(|index| daemons::start_worker(&scratch, &state, index, (index == 0).then_some(&*trainer))).collect();
    let spec = scratch.join("job.yaml");
    std::fs::write(&spec, format!("{}checkpoint:\n  max_recent_checkpoints: 1\n", job.yaml())).unwrap();
    let id = daemons::submit(&scratch, &state, &spec);

    run.wait_for_commit(9);
    coordinator.process.kill9();
    let before = run.commits().pop().unwrap();
    let trainers = run.trainers();
    wait::until_true("the trainers' end", || trainers.iter().all(|trainer| !process::exists(trainer.pid)));
    assert!(before.step < 19, "the outage must span several saves: {}", before.step);
    let has_shards = |step: &u64| !run.files(&format!("epoch_0_step_{step}")).is_empty();
    // The coordinator may have been sent the save after its last commit. The one before the last is what the last one waited for.
    let left: Vec<u64> = (before.step + 6..40).filter(has_shards).collect();
    assert_eq!(left, [34, 39]);

    let _second = Coordinator::start(&scratch, &state);
    let status = daemons::wait_for_success(&scratch, &state, &id);
    assert_eq!((&status["restarts"], run.generations().len()), (&0.into(), 1), "{status:#}");
    let failed: Vec<_> = run.events_of("save_failed").iter().map(|event| event["step"].clone()).collect();
    assert_eq!(failed, [24]);
    let last = run.latest();
    assert_eq!((last.step, last.term > before.term), (39, true), "{last:?}");
    assert_eq!(last.state_hash, want.latest().state_hash);
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.left_behind(), Vec::<String>::new());
    verify(&scratch, run.dir());
}

/// What must hold after a frozen holder woke up: it has ended, and nothing newer is lost.
fn assert_taken_over(scratch: &Scratch, frozen: &mut Coordinator, run: &Run, before: &trainctl_store::Manifest) {
    // Its exit code is its own affair: it lost its directory, and says so.
    let ended = frozen.process.wait();
    assert!(ended.signal.is_none(), "{ended:?}");
    assert!(ended.stderr.contains("higher term"), "{}", ended.stderr);
    // The swap that it was about to make when it froze may have put LATEST back to its own commit. That one can be loaded (P2),
    // and the holder puts LATEST right with its next commit or one lease after the takeover (C2, C6).
    verify(scratch, run.dir());
    assert!(run.latest().step <= run.commits().pop().unwrap().step);
    wait::until("LATEST to be as new as before", || {
        Some(run.latest()).filter(|latest| latest.step >= before.step && latest.term >= before.term)
    });
}

/// Every committed checkpoint, byte by byte.
fn verify(scratch: &Scratch, run_dir: &Path) {
    scratch.trainctl(["checkpoints", "verify", run_dir.to_str().unwrap()]).wait().expect_code(0);
}

/// Runs the job under `first`, which freezes; a second coordinator takes over; then the first one wakes up.
fn takeover(scratch: &Scratch, mut first: Coordinator, freeze: impl FnOnce(&Coordinator, &Run)) {
    let job = endless_job(scratch.join("run"));
    let (state, run) = (first.state_dir.clone(), Run::new(&job.run_dir));
    let _workers: Vec<Process> = (0..2).map(|index| daemons::start_worker(scratch, &state, index, None)).collect();
    let id = daemons::submit(scratch, &state, &job.write(scratch.join("job.yaml")));
    freeze(&first, &run);
    let frozen_at = Instant::now();
    let last_before = run.last_step().unwrap_or(0);
    let second = Coordinator::launch(scratch, &state, None).ready();
    let committed = wait::until("a commit of the second coordinator", || {
        run.commits().pop().filter(|newest| newest.step > last_before && newest.term > 1)
    });
    wait_until(frozen_at + FREEZE);
    first.process.signal(Signal::SIGCONT);
    assert_taken_over(scratch, &mut first, &run, &committed);

    let woken_at = run.last_step().unwrap();
    run.wait_for_step(woken_at + 25);
    let status = daemons::cancel(scratch, &state, &id);
    assert_eq!(status["restarts"], 0, "{status:#}");
    let latest = run.latest().step;
    assert_eq!(run.rows().iter().map(|row| row.step).collect::<Vec<_>>(), (0..=latest).collect::<Vec<_>>());
    assert!(latest > woken_at + 20, "it goes on after the first one woke up");
    assert_eq!(run.generations().len(), 1, "the second coordinator adopts the running generation (J2)");
    verify(scratch, run.dir());
    drop(second);
}

#[test]
fn j2_a_second_coordinator_takes_over_from_a_frozen_one() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("frozen-coordinator");
    let first = Coordinator::start(&scratch, &scratch.join("state"));
    takeover(&scratch, first, |first, run| {
        run.wait_for_step(25);
        first.process.signal(Signal::SIGSTOP);
    });
}

/// Frozen between its look at the term and the end of a write: the worst moments (C2, C3, C6).
fn frozen_in_a_commit(stage: &str, name: &str) {
    if !programs::have_trainer() {
        return;
    }
    let mut random = seed::seeded();
    let points =
        [FailPoint::COMMIT_CONFIG, FailPoint::COMMIT_MANIFEST, FailPoint::POINTER_LATEST, FailPoint::ROW_APPEND];
    let point = points.choose(&mut random).unwrap().0;
    let nth = if point == FailPoint::ROW_APPEND.0 { 45 } else { 2 };
    // Rows are appended, without a temporary file.
    let stage = if point == FailPoint::ROW_APPEND.0 { "" } else { stage };
    let fault = format!("{point}{stage}:{nth}:stop");
    eprintln!("fault: {fault}");
    let scratch = Scratch::new(name);
    let first = Coordinator::launch(&scratch, &scratch.join("state"), Some(&fault)).ready();
    takeover(&scratch, first, |first, _| {
        let what = format!("the coordinator to freeze at {fault}");
        wait::until_true(&what, || process::is_stopped(first.process.pid()));
    });
}

#[test]
fn c2_frozen_before_a_step_of_the_commit() {
    frozen_in_a_commit("", "frozen-before");
}

#[test]
fn c2_frozen_within_a_step_of_the_commit() {
    frozen_in_a_commit(".temp", "frozen-within");
}
