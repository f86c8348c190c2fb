//! What stays for good, weights that are saved apart, and what dead generations leave.

use std::fs;
use std::path::Path;

use super::super::tests::{commit, committed_steps, name};
use super::*;
use crate::Unfenced;
use crate::layout::LATEST;

fn store() -> (tempfile::TempDir, CheckpointStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path());
    (dir, store)
}

fn put(root: &Path, key: &str) {
    let path = root.join(key);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, b"left").unwrap();
}

#[tokio::test]
async fn a_checkpoint_after_a_multiple_of_keep_every_steps_stays() {
    let (_dir, store) = store();
    for step in [9, 19, 29, 39, 49] {
        commit(&store, step, None).await;
    }
    let retention = Retention { keep_every_steps: Some(20), ..Retention::newest(Some(1), "default") };
    let plan = store.plan_prune(&retention).await.unwrap();
    let why: Vec<_> = plan.verdicts.iter().map(|(name, verdict)| (name.step, *verdict)).collect();
    let stays = |reason| Verdict::Keep(reason);
    assert_eq!(
        why,
        [
            (9, Verdict::Remove),
            (19, stays(KeepReason::Milestone)),
            (29, Verdict::Remove),
            (39, stays(KeepReason::Milestone)),
            (49, stays(KeepReason::Recent))
        ]
    );
    store.prune(&Unfenced, &retention).await.unwrap();
    assert_eq!(committed_steps(&store.list().await.unwrap()), [19, 39, 49]);
}

#[tokio::test]
async fn weights_that_are_saved_apart_have_their_own_limit_and_no_pointers() {
    let (dir, store) = store();
    let weights = store.weights();
    commit(&store, 9, Some(1.0)).await;
    for step in [4, 9, 14] {
        commit(&weights, step, Some(0.5)).await;
    }
    let report = weights.prune(&Unfenced, &Retention::newest(Some(1), "")).await.unwrap();
    assert_eq!(report.removed, [name(4), name(9)], "LOWEST_VAL of the weights is nobody's");
    assert_eq!(committed_steps(&weights.list().await.unwrap()), [14]);
    assert!(!dir.path().join("weights").join(LATEST).exists());
    assert_eq!(committed_steps(&store.list().await.unwrap()), [9], "and the checkpoints are another store's");
    let retired = weights.retire_after(&Unfenced, Some(9), 7, "default").await.unwrap();
    assert_eq!(retired[0].moved_to.as_deref(), Some("abandoned/g7/epoch_0_step_14"));
}

#[tokio::test]
async fn c4_what_dead_generations_leave_in_a_committed_checkpoint_goes_with_the_next_pruning() {
    let (dir, store) = store();
    commit(&store, 9, None).await;
    commit(&store, 19, None).await;
    let left = [
        // Generation 1 died in mid-save and its slowest rank came back after generation 2's commit of the same step.
        "epoch_0_step_19/model/shard-00001-of-00002.g1.safetensors",
        "epoch_0_step_9/optim/shard-00000-of-00002.g1.safetensors",
        "epoch_0_step_9/model/.tmp-shard-00000-of-00002.g1.safetensors-7-0-0",
        "epoch_0_step_9/.tmp-manifest.json-7-0-0",
        "epoch_0_step_19/model/.export-consolidated.7.1/config.json",
    ];
    let stays = [
        "epoch_0_step_19/model/consolidated/config.json",
        // A holder that looks late must not touch what a later generation writes into a directory of the same name.
        "epoch_0_step_9/model/shard-00000-of-00001.g3.safetensors",
        "epoch_0_step_9/notes.txt",
    ];
    left.iter().chain(&stays).for_each(|key| put(dir.path(), key));
    let report = store.prune(&Unfenced, &Retention::newest(None, "default")).await.unwrap();
    assert_eq!(report.strays.len(), left.len(), "{report:?}");
    for key in left {
        assert!(!dir.path().join(key).exists(), "{key}");
    }
    for key in stays {
        assert!(dir.path().join(key).exists(), "{key}");
    }
    let listing = store.list().await.unwrap();
    for committed in &listing.committed {
        assert!(store.check_sizes(&committed.manifest).await.unwrap().is_none(), "what the manifest names is there");
    }
    assert_eq!(store.prune(&Unfenced, &Retention::newest(None, "default")).await.unwrap(), PruneReport::default());
}

#[tokio::test]
async fn an_export_of_a_pinned_checkpoint_is_left_alone() {
    let (dir, store) = store();
    commit(&store, 9, None).await;
    let staging = "epoch_0_step_9/model/.export-consolidated.7.1/config.json";
    put(dir.path(), staging);
    store.pin(name(9), "export").await.unwrap();
    store.prune(&Unfenced, &Retention::newest(None, "default")).await.unwrap();
    assert!(dir.path().join(staging).exists());
}
