//! The crash matrix of the store (P2, C2–C6): a holder is killed, frozen, or fails, at every fail point and at every system
//! call that changes the directory; the next one finds a run whose LATEST loads, loses nothing that was promised, and leaves
//! nothing behind. The children are this test's own executable, with `TRAINCTL_FAULT` set.
//!
//! Without `TRAINCTL_MATRIX=all` each test carries out a sample that has every place at least once.

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "helpers of tests")]

mod cases;
mod check;
mod cuts;
mod cycle;
mod disk;
mod scene;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use trainctl_store::checkpoints::{Retention, Selector};
use trainctl_store::fault::FailPoint;
use trainctl_store::{CheckpointStore, Unfenced};

use crate::cases::{Case, carry_out, cases, places, points, sample};
use crate::cycle::{Plan, STEPS, coordinate};
use crate::scene::{Scene, Start, block_on, scratch};

#[test]
fn child() {
    scene::child();
}

#[test]
fn faultfs_server() {
    trainctl_faultfs::serve_if_asked();
}

#[test]
fn every_fail_point_is_in_the_matrix() {
    let passed: Vec<_> = Scene::ALL.into_iter().flat_map(places).map(|(place, _)| place).collect();
    let passed = points(passed.iter());
    let missing: Vec<_> =
        FailPoint::STORE.iter().map(|point| point.0).filter(|point| !passed.contains(*point)).collect();
    assert!(missing.is_empty(), "make the cycle or a scene pass these too: {missing:?}");
}

fn ended_in_order(status: ExitStatus, promises: &Path) -> Result<(), String> {
    if status.success() {
        return Ok(());
    }
    Err(format!("the child ended in disorder: {}", std::fs::read_to_string(scene::said(promises)).unwrap()))
}

/// One child with a fault, then a holder without one.
fn kill_or_fail(case: &Case) -> Result<(), String> {
    let scratch = scratch();
    let (dir, promises) = (scratch.path().join("run"), scratch.path().join("promises"));
    case.scene.prepare(&dir);
    let fault = case.fault();
    let start = Start { scene: case.scene, dir: &dir, promises: &promises, fault: &fault, trace: None };
    let status = start.spawn().wait().unwrap();
    match case.action {
        "exit" if status.signal() != Some(Signal::SIGKILL as i32) => return Err(format!("not reached: {status}")),
        "exit" => {}
        _ => ended_in_order(status, &promises)?,
    }
    block_on(async {
        check::loads(&dir, case.scene, &promises).await.map_err(|e| format!("after the fault: {e}"))?;
        coordinate(&dir, &Arc::default(), &Plan::default()).await.map_err(|e| format!("the next holder: {e}"))?;
        check::complete(&dir, case.scene, STEPS).await?;
        check::clean(&dir).await
    })
}

#[test]
fn a_kill_anywhere_leaves_a_run_that_loads_and_goes_on() {
    let (all, seed) = (cases(&["exit"], |_| true), cases::seed());
    let chosen = sample(all.clone(), 40, seed);
    carry_out("kills", all.len(), &chosen, seed, || (), |(), case| kill_or_fail(case));
}

#[test]
fn an_error_anywhere_leaves_a_run_that_loads_and_goes_on() {
    let (all, seed) = (cases(&["eio", "enospc"], |_| true), cases::seed());
    let chosen = sample(all.clone(), 40, seed);
    carry_out("errors", all.len(), &chosen, seed, || (), |(), case| kill_or_fail(case));
}

/// The second holder commits ten checkpoints while the first one is frozen.
fn freeze(case: &Case) -> Result<(), String> {
    const MORE: u64 = STEPS + 10;
    let scratch = scratch();
    let (dir, promises) = (scratch.path().join("run"), scratch.path().join("promises"));
    case.scene.prepare(&dir);
    let fault = case.fault();
    let mut child = Start { scene: case.scene, dir: &dir, promises: &promises, fault: &fault, trace: None }.spawn();
    let pid = Pid::from_raw(child.id() as i32);
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
    if !matches!(stopped, WaitStatus::Stopped(..)) {
        // It has ended and been waited for, if it was not stopped.
        drop(child.wait());
        return Err(format!("not reached: {stopped:?}"));
    }
    let taken_over = block_on(async {
        let plan = Plan { others_live: true, steps: MORE, ..Plan::default() };
        coordinate(&dir, &Arc::default(), &plan).await.map_err(|e| format!("the second holder: {e}"))?;
        check::complete(&dir, case.scene, MORE).await
    });
    kill(pid, Signal::SIGCONT).unwrap();
    let ended = child.wait().unwrap();
    taken_over?;
    ended_in_order(ended, &promises)?;
    block_on(async {
        // P2 holds at once; the rest when whoever holds the run looks again one lease after the takeover (C2).
        let latest = CheckpointStore::open(&dir).resolve(Selector::Latest, &Default::default()).await;
        latest.map_err(|e| format!("after the wake: {e}"))?;
        let store = CheckpointStore::open(&dir);
        store.take_over(&Unfenced, "default").await.map_err(|e| format!("the second look: {e}"))?;
        store
            .prune(&Unfenced, &Retention::newest(Some(1), "default"))
            .await
            .map_err(|e| format!("the second look: {e}"))?;
        check::complete(&dir, case.scene, MORE).await
    })
}

#[test]
fn a_holder_that_is_frozen_anywhere_and_wakes_up_after_ten_commits_of_another_does_no_harm() {
    let named = |place: &str| place != cases::ANY_CALL && !place.ends_with(".fsync") && !place.ends_with(".fsync_dir");
    // Whoever freezes before it has a term is a successor like any other when it wakes up, and may go back as it was told.
    let holds = |case: &Case| case.nth > 1 || !["numbers.take", "numbers.take.temp"].contains(&case.place.as_str());
    let (mut all, seed) = (cases(&["stop"], named), cases::seed());
    all.retain(|case| case.scene == Scene::Fresh || holds(case));
    let chosen = sample(all.clone(), 0, seed);
    carry_out("freezes", all.len(), &chosen, seed, || (), |(), case| freeze(case));
}

/// A child stands still at the fault, another holder goes on for so many steps, the child wakes up: nothing of what the
/// other one committed is gone.
fn wakes_up_beside(dir: &Path, scene: Scene, fault: &str, plan: &Plan) {
    let promises = dir.with_extension("promises");
    let mut child = Start { scene, dir, promises: &promises, fault, trace: None }.spawn();
    let pid = Pid::from_raw(child.id() as i32);
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert!(matches!(stopped, WaitStatus::Stopped(..)), "{fault}: {stopped:?}");
    let store = CheckpointStore::open(dir);
    let before = block_on(async {
        coordinate(dir, &Arc::default(), plan).await.unwrap();
        store.list().await.unwrap().committed
    });
    kill(pid, Signal::SIGCONT).unwrap();
    ended_in_order(child.wait().unwrap(), &promises).unwrap();
    block_on(async {
        assert_eq!(store.list().await.unwrap().committed, before, "{fault}");
        store.take_over(&Unfenced, "default").await.unwrap();
        check::complete(dir, scene, plan.steps).await.unwrap();
    });
}

#[test]
fn c2_a_late_rename_of_what_the_successor_committed_is_undone() {
    let scratch = scratch();
    let dir = scratch.path().join("run");
    block_on(coordinate(&dir, &Arc::default(), &Plan::default())).unwrap();
    let plan = Plan { from: Scene::Rollback.from(), others_live: true, ..Plan::default() };
    wakes_up_beside(&dir, Scene::Rollback, "retire.rename:1:stop", &plan);
}

#[test]
fn c2_a_late_removal_of_a_save_that_the_successor_has_committed_is_undone() {
    let scratch = scratch();
    let dir = scratch.path().join("run");
    let promises = scratch.path().join("promises");
    let fault = "commit.manifest:3:exit";
    let killed = Start { scene: Scene::Fresh, dir: &dir, promises: &promises, fault, trace: None };
    assert_eq!(killed.spawn().wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    let plan = Plan { others_live: true, steps: 3, ..Plan::default() };
    wakes_up_beside(&dir, Scene::Fresh, "retire.rename:1:stop", &plan);
}

#[test]
fn c2_a_late_prune_of_what_the_successor_committed_anew_is_undone() {
    let scratch = scratch();
    let dir = scratch.path().join("run");
    let plan = Plan { from: Scene::Rollback.from(), others_live: true, steps: 3, ..Plan::default() };
    wakes_up_beside(&dir, Scene::Fresh, "prune.rename:2:stop", &plan);
}
