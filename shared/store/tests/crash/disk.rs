//! Disks that are full, over quota, broken or read-only, and file systems that refuse links or show names late: a holder stops
//! with the cause, or goes on; the run loads, and goes on when there is room again.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trainctl_store::checkpoints::{CommitOutcome, ResolveOptions, Selector};
use trainctl_store::layout::{CheckpointName, LATEST, LOWEST_VAL};
use trainctl_store::{CheckpointStore, Error, Unfenced};

use crate::check;
use crate::cuts::{Mounted, cut};
use crate::cycle::{self, Plan, STEPS, coordinate};
use crate::scene::{Scene, block_on};

const ERRORS: [(&str, &str); 4] = [
    ("ENOSPC", "No space left on device"),
    ("EDQUOT", "quota exceeded"),
    ("EIO", "Input/output error"),
    ("EROFS", "Read-only file system"),
];

/// In the middle of a shard, at the manifest, at the pointer: calls, and what the message must name.
const PLACES: [(&str, &str, &str); 5] = [
    ("write 3", "model/", "model/shard-"),
    ("fsync 2", "model/", "model/shard-"),
    ("write 1", "manifest.json", "manifest.json"),
    ("link 2", "manifest.json", "manifest.json"),
    ("rename 2", "LATEST", "LATEST"),
];

#[test]
fn a_disk_that_fails_in_a_save_at_the_manifest_or_at_the_pointer_stops_the_holder_with_the_cause() {
    if !trainctl_faultfs::have_fuse() {
        return;
    }
    let mut mounted = Mounted::new();
    let nothing_promised = Path::new("");
    for (errno, text) in ERRORS {
        for (calls, path, named) in PLACES {
            let context = format!("{calls} {errno} {path}");
            let run = mounted.run(Scene::Fresh);
            mounted.fs.fail(&context).unwrap();
            let started = Instant::now();
            let error = block_on(coordinate(&run, &Arc::default(), &Plan::default())).expect_err(&context);
            assert!(started.elapsed() < Duration::from_secs(10), "{context}: {:?}", started.elapsed());
            let error = error.to_string();
            assert!(error.contains(text) && error.contains(named), "{context}: {error}");
            block_on(async {
                check::loads(&run, Scene::Fresh, nothing_promised).await.unwrap_or_else(|e| panic!("{context}: {e}"));
                mounted.fs.clear().unwrap();
                coordinate(&run, &Arc::default(), &Plan::default()).await.unwrap_or_else(|e| panic!("{context}: {e}"));
                check::complete(&run, Scene::Fresh, STEPS).await.unwrap_or_else(|e| panic!("{context}: {e}"));
                check::clean(&run).await.unwrap_or_else(|e| panic!("{context}: {e}"));
            });
        }
    }
}

#[test]
fn a_full_disk_leaves_what_was_committed_and_a_larger_one_goes_on() {
    if !trainctl_faultfs::have_fuse() {
        return;
    }
    let mut mounted = Mounted::new();
    let run = mounted.run(Scene::Fresh);
    mounted.fs.set_capacity(12_000).unwrap();
    let error = block_on(coordinate(&run, &Arc::default(), &Plan::default())).expect_err("a full disk");
    assert!(error.to_string().contains("No space left on device"), "{error}");
    let store = CheckpointStore::open(&run);
    block_on(async {
        let latest = store.resolve(Selector::Latest, &ResolveOptions::default()).await.unwrap();
        check::loads(&run, Scene::Fresh, Path::new("")).await.unwrap();
        mounted.fs.set_capacity(0).unwrap();
        coordinate(&run, &Arc::default(), &Plan::default()).await.unwrap();
        check::complete(&run, Scene::Fresh, STEPS).await.unwrap();
        assert!(latest.checkpoint.manifest.step < STEPS - 1, "the disk was never full");
    });
}

#[test]
fn where_symlinks_are_refused_pointers_are_automodels_text_files() {
    if !trainctl_faultfs::have_fuse() {
        return;
    }
    let mut mounted = Mounted::new();
    let run = mounted.run(Scene::Fresh);
    mounted.fs.fail("symlink 1 EPERM ").unwrap();
    let store = CheckpointStore::open(&run);
    block_on(async {
        coordinate(&run, &Arc::default(), &Plan::default()).await.unwrap();
        for (pointer, name) in [(LATEST, "epoch_0_step_3"), (LOWEST_VAL, "epoch_0_step_1")] {
            assert_eq!(std::fs::read_to_string(run.join(format!("{pointer}.txt"))).unwrap().trim(), name);
            assert!(!run.join(pointer).exists());
            assert_eq!(store.io().read_link(pointer).await.unwrap().as_deref(), Some(name));
        }
        let latest = store.resolve(Selector::Latest, &ResolveOptions::default()).await.unwrap();
        assert_eq!((latest.checkpoint.name().step, latest.notes), (3, vec![]));
        check::clean(&run).await.unwrap();
        // The directory comes to another file system.
        mounted.fs.clear().unwrap();
        let plan = Plan { steps: STEPS + 1, ..Plan::default() };
        coordinate(&run, &Arc::default(), &plan).await.unwrap();
        assert_eq!(std::fs::read_link(run.join(LATEST)).unwrap().to_str(), Some("epoch_0_step_4"));
        assert!(!run.join("LATEST.txt").exists(), "there is one LATEST");
        store.take_over(&Unfenced, "default").await.unwrap();
        assert_eq!(store.io().read_link(LOWEST_VAL).await.unwrap().as_deref(), Some("epoch_0_step_1"));
    });
}

#[test]
fn where_hard_links_are_refused_a_run_goes_through_and_survives_power_cuts_at_each_manifest_and_number() {
    if !trainctl_faultfs::have_fuse() {
        return;
    }
    let mut mounted = Mounted::new();
    let run = mounted.run(Scene::Fresh);
    mounted.fs.fail("link 1 EPERM ").unwrap();
    block_on(async {
        coordinate(&run, &Arc::default(), &Plan::default()).await.unwrap();
        check::complete(&run, Scene::Fresh, STEPS).await.unwrap();
        check::clean(&run).await.unwrap();
    });
    // Here a file may be torn that has its name already: at every sync of it, and before.
    for place in ["commit.manifest.fsync", "commit.manifest.temp", "commit.manifest.fsync_dir", "numbers.take.fsync"] {
        for nth in 1..=4 {
            for write_back in [None, Some(nth)] {
                let fault = format!("{place}:{nth}:exit");
                let outcome = cut(&mut mounted, Scene::Fresh, &fault, write_back);
                outcome.unwrap_or_else(|e| panic!("{fault}, write-back {write_back:?}: {e}"));
            }
        }
    }
}

/// A rank writes on one host, the coordinator sees its names later on another.
#[test]
fn a_coordinator_that_sees_names_late_waits_for_them_and_never_commits_or_reads_half_a_checkpoint() {
    if !trainctl_faultfs::have_fuse() {
        return;
    }
    let late = Duration::from_millis(400);
    let mut mounted = Mounted::new();
    let run = mounted.run(Scene::Fresh);
    std::fs::create_dir_all(&run).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::thread::sleep(late);
    mounted.fs.mount_again(elsewhere.path(), late).unwrap();
    let (ranks, coordinator) = (run.clone(), elsewhere.path().join("run"));
    let name = CheckpointName { epoch: 0, step: 0 };
    let draft = cycle::save(&ranks, name).unwrap();
    block_on(async {
        let store = CheckpointStore::open(&coordinator);
        let mut refusals = 0;
        let committed = loop {
            match store.commit(&Unfenced, draft.clone(), "seed: 1\n").await {
                Ok(outcome) => break outcome,
                Err(Error::Commit { reason, .. }) => {
                    assert!(reason.contains("is missing"), "{reason}");
                    refusals += 1;
                }
                Err(error) => panic!("{error}"),
            }
        };
        assert!(matches!(committed, CommitOutcome::Committed(_)) && refusals > 0, "{refusals} refusals");
        store.repair_pointers(&Unfenced, "default").await.unwrap();
        assert!(store.verify(name, &|_, _| {}).await.unwrap().faults.is_empty());
        // And the other way round: who reads elsewhere sees nothing at first, and then all.
        let written = cycle::save(&ranks, CheckpointName { epoch: 0, step: 1 });
        CheckpointStore::open(&ranks).commit(&Unfenced, written.unwrap(), "seed: 1\n").await.unwrap();
        let mut looks = 0;
        loop {
            let listing = store.list().await.unwrap();
            assert_eq!(listing.damaged, vec![]);
            if listing.committed.len() == 2 {
                break;
            }
            looks += 1;
        }
        assert!(looks > 0, "the names were there at once");
        let latest = store.resolve(Selector::Latest, &ResolveOptions::default()).await.unwrap();
        assert_eq!(latest.checkpoint.name().step, 1);
    });
}
