//! Saves that come too soon after the one before (`checkpoint.when_busy`), and saves that fail (`checkpoint.max_failures`):
//! what the run says, and that it loses nothing (P2, P4, C7).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use trainctl_tests::job::Job;
use trainctl_tests::process::Ended;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, wait};

use crate::disk::Site;

/// How long a disk hangs while training waits for it: many steps.
const HANG: Duration = Duration::from_secs(1);

fn steps_of(run: &Run, kind: &str) -> BTreeSet<u64> {
    run.events_of(kind).iter().map(|event| event["step"].as_u64().unwrap()).collect()
}

fn committed(run: &Run) -> Vec<u64> {
    run.commits().iter().map(|commit| commit.step).collect()
}

fn wait_for_event(run: &Run, kind: &str, step: u64) {
    wait::until_true(&format!("{kind} of step {step}"), || steps_of(run, kind).contains(&step));
}

/// Waits until the first save hangs on both ranks.
fn wait_for_hang(site: &mut Site) {
    wait::until_true("a save that hangs on both ranks", || site.fs.held().unwrap() >= 2);
}

#[test]
fn c7_skip_leaves_out_what_falls_due_during_a_save_and_says_so() {
    let Some(mut site) = Site::new("busy-skip") else { return };
    site.fs.hold("/model/").unwrap();
    let mut trainctl = site.start_with(&["checkpoint.when_busy=skip"]);
    wait_for_hang(&mut site);
    wait_for_event(&site.run, "save_skipped", 9);
    site.run.wait_for_step(10);
    assert!(committed(&site.run).is_empty(), "the save of step 4 hangs");
    site.fs.release().unwrap();
    let ended = trainctl.wait().expect_code(0);

    let said =
        "the save of step 9 was left out: 2 of 2 ranks still write the save before, and checkpoint.when_busy is skip";
    ended.expect_said(said);
    let skipped = steps_of(&site.run, "save_skipped");
    let due = [4, 9, 14, 19, 24, 29];
    assert!(skipped.iter().all(|step| due.contains(step)) && !skipped.contains(&29), "the last one waits: {skipped:?}");
    let kept: Vec<u64> = due.into_iter().filter(|step| !skipped.contains(step)).collect();
    assert_eq!(committed(&site.run), kept);
    assert_eq!(steps_of(&site.run, "save_failed"), BTreeSet::new());
    site.assert_unharmed();
}

#[test]
fn c7_wait_delays_training_until_the_save_before_is_written() {
    let Some(mut site) = Site::new("busy-wait") else { return };
    site.fs.hold("/model/").unwrap();
    let mut trainctl = site.start_with(&[]);
    wait_for_hang(&mut site);
    // Steps go on during a save; the next one waits. The validation of its step is the last thing before it.
    wait::until_true("the validation of step 9", || {
        site.run.lines("validation.jsonl").iter().any(|row| row["step"] == 9)
    });
    let until = Instant::now() + HANG;
    wait::until_true("the end of the hang", || Instant::now() >= until);
    assert_eq!(site.run.last_step(), Some(9), "training waits at the save of step 9");
    assert!(committed(&site.run).is_empty());
    site.fs.release().unwrap();
    trainctl.wait().expect_code(0);

    let commits = site.run.events_of("checkpoint_committed");
    let stall = commits.iter().find(|event| event["step"] == 9).unwrap()["stall_seconds"].as_f64().unwrap();
    assert!(stall >= HANG.as_secs_f64() / 2.0, "{stall} s, and training stood still for longer");
    assert_eq!(committed(&site.run), [4, 9, 14, 19, 24, 29]);
    assert_eq!(site.run.events_of("save_skipped").len(), 0);
    site.assert_unharmed();
}

#[test]
fn max_failures_stops_the_run_with_the_cause_and_it_goes_on_when_there_is_room() {
    let Some(mut site) = Site::new("max-failures") else { return };
    let mut trainctl = site.start_with(&["checkpoint.max_failures=2"]);
    site.run.wait_for_commit(4);
    site.fs.fail("write 1 ENOSPC /model/").unwrap();
    let ended = trainctl.wait().expect_code(1);
    for part in ["2 saves in a row failed (checkpoint.max_failures = 2)", "No space left on device", "/model/"] {
        assert!(ended.stderr.contains(part), "{part} in {}", ended.stderr);
    }
    let finished = site.run.events_of("job_finished");
    assert_eq!(finished.len(), 1);
    assert!(finished[0].to_string().contains("checkpoint.max_failures = 2"), "{}", finished[0]);
    // Where the disk filled up depends on the machine: after the first commit, and twice in a row.
    let before = committed(&site.run);
    let failed: Vec<u64> = steps_of(&site.run, "save_failed").into_iter().collect();
    let last = *before.last().unwrap();
    assert_eq!(failed, [last + 5, last + 10]);
    assert_eq!(site.run.latest().step, last, "what was committed can still be loaded (P2)");

    site.fs.clear().unwrap();
    site.start_with(&["checkpoint.max_failures=2"])
        .wait()
        .expect_code(0)
        .expect_said(&format!("continues from epoch_0_step_{last}"));
    assert_eq!(site.run.left_behind(), Vec::<String>::new());
    site.assert_unharmed();
}

#[test]
fn the_last_save_waits_for_room_and_nothing_is_computed_anew() {
    let Some(mut site) = Site::new("last-save") else { return };
    site.fs.fail("write 1 ENOSPC /epoch_0_step_29/model/").unwrap();
    let mut trainctl = site.start_with(&[]);
    let again = |event: &serde_json::Value| event["attempt"] == 2;
    wait::until_true("a second attempt", || site.run.events_of("save_failed").iter().any(again));
    assert_eq!(committed(&site.run), [4, 9, 14, 19, 24]);
    site.fs.clear().unwrap();
    trainctl.wait().expect_code(0).expect_said("the save of step 29 failed").expect_said("trying again in 2 s");
    assert_eq!(steps_of(&site.run, "save_failed"), [29].into());
    assert_eq!(committed(&site.run), [4, 9, 14, 19, 24, 29]);
    assert_eq!(site.run.generations().len(), 1);
    assert_eq!(site.run.left_behind(), Vec::<String>::new());
    site.assert_unharmed();
}

#[test]
fn each_attempt_of_the_last_save_counts_for_max_failures() {
    let Some(mut site) = Site::new("last-save-fails") else { return };
    site.fs.fail("write 1 ENOSPC /epoch_0_step_29/model/").unwrap();
    let ended = site.start_with(&["checkpoint.max_failures=2"]).wait().expect_code(1);
    ended.expect_said("2 saves in a row failed (checkpoint.max_failures = 2), the last one of step 29");
    assert_eq!((site.run.latest().step, site.run.generations().len()), (24, 1));
}

#[test]
fn a_cancel_that_cannot_save_ends_after_a_few_attempts() {
    let Some(mut site) = Site::new("cancelled-save") else { return };
    let mut trainctl = site.start_with(&[]);
    site.run.wait_for_commit(4);
    site.fs.fail("write 1 ENOSPC /model/").unwrap();
    trainctl.signal(nix::sys::signal::Signal::SIGINT);
    let ended = trainctl.wait();
    assert_ne!(ended.code, Some(0), "{ended:?}");
    let last = site.run.events_of("save_failed").pop().unwrap();
    assert_eq!((&last["attempt"], &last["tried_again"]), (&3.into(), &false.into()), "{last}");
    assert_eq!(site.run.latest().step, committed(&site.run).pop().unwrap());
    site.fs.clear().unwrap();
}

/// A run whose first trainer meets a fault.
fn run_with(scratch: &mut Scratch, fault: &str, keys: &[&str]) -> (Job, Run, Ended) {
    let job = Job { steps: 45, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("run")).slow() };
    scratch.inject("trainctl-trainer", &[fault]);
    let spec = job.write(scratch.join("job.yaml"));
    let mut arguments = vec!["run", spec.to_str().unwrap()];
    keys.iter().for_each(|key| arguments.extend(["--set", key]));
    let ended = scratch.trainctl(arguments).wait();
    let run = Run::new(&job.run_dir);
    (job, run, ended)
}

#[test]
fn fewer_failures_in_a_row_than_max_failures_stop_nothing() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("fewer-failures");
    // The saves are those of steps 4, 9, …; four fail, and never three without a commit in between.
    let fault: Vec<String> = [2, 3, 6, 7].map(|nth| format!("save.snapshot:{nth}:enospc")).into();
    let (job, run, ended) = run_with(&mut scratch, &fault.join(","), &["checkpoint.max_failures=3"]);
    ended.expect_code(0).expect_said("the save of step 9 failed: snapshot: No space left on device");
    assert_eq!(steps_of(&run, "save_failed"), [9, 14, 29, 34].into());
    assert_eq!(committed(&run), [4, 19, 24, 39, 44]);
    let want = unbroken(&job);
    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    assert_eq!(run.generations().len(), 1);
    assert_eq!(run.left_behind(), Vec::<String>::new(), "the other rank's shards of the saves that failed");
}

#[test]
fn weights_that_cannot_be_saved_do_not_count() {
    let Some(mut site) = Site::new("weights-fail") else { return };
    site.fs.fail("write 1 ENOSPC /weights/").unwrap();
    let ended = site.start_with(&["checkpoint.max_failures=1", "checkpoint.weights_every_steps=4"]).wait();
    ended.expect_code(0).expect_said("the save of the weights of step 3 failed").expect_said("No space left on device");
    let failed = site.run.events_of("save_failed");
    assert!(!failed.is_empty() && failed.iter().all(|event| event["save"] == "weights"), "{failed:?}");
    assert_eq!(committed(&site.run), [4, 9, 14, 19, 24, 29]);
    site.fs.clear().unwrap();
    site.assert_unharmed();
}
