use std::path::Path;

use proptest::prelude::*;
use trainctl_spec::report::ShardFile;

use super::*;
use crate::layout::{LATEST, LOWEST_VAL, Section, ShardName};
use crate::manifest::Metrics;
use crate::manifest::tests::example;
use crate::shard::{ShardWriter, TensorView};
use crate::{Fence, Unfenced};

pub(super) fn name(step: u64) -> CheckpointName {
    CheckpointName { epoch: 0, step }
}

fn write_shard(root: &Path, step: u64) -> ShardFile {
    write_shard_of(root, step, 2)
}

fn write_shard_of(root: &Path, step: u64, generation: u64) -> ShardFile {
    let path = ShardName { section: Section::Model, rank: 0, world_size: 1, generation }.to_string();
    let bytes = [step as u8; 16];
    let tensor = TensorView { name: "w", dtype: "F32", shape: &[4], bytes: &bytes, slice: None };
    ShardWriter::new(root, name(step)).write_safetensors(&path, &[tensor], &[]).unwrap()
}

pub(super) async fn commit(store: &CheckpointStore, step: u64, val_loss: Option<f64>) -> CommitOutcome {
    let draft = Manifest { files: vec![write_shard(store.root(), step)], ..example(step, val_loss) };
    let outcome = store.commit(&Unfenced, draft, "seed: 1\n").await.unwrap();
    store.repair_pointers(&Unfenced, "default").await.unwrap();
    outcome
}

/// A commit by another generation than the others' second one.
async fn commit_of(store: &CheckpointStore, step: u64, generation: u64) -> Result<CommitOutcome> {
    let files = vec![write_shard_of(store.root(), step, generation)];
    let state_hash = format!("{generation:064}");
    let draft = Manifest { files, generation, state_hash, ..example(step, Some(1.0)) };
    store.commit(&Unfenced, draft, &format!("seed: {generation}\n")).await
}

async fn store_with(losses: &[(u64, f64)]) -> (tempfile::TempDir, CheckpointStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path());
    for (step, loss) in losses {
        commit(&store, *step, Some(*loss)).await;
    }
    (dir, store)
}

fn link(store: &CheckpointStore, pointer: &str) -> Option<String> {
    std::fs::read_link(store.root().join(pointer)).ok().map(|target| target.to_string_lossy().into_owned())
}

pub(super) fn committed_steps(listing: &Listing) -> Vec<u64> {
    listing.committed.iter().map(|c| c.name().step).collect()
}

async fn latest(store: &CheckpointStore, allow_older: bool) -> Result<Resolved, ResolveError> {
    store.resolve(Selector::Latest, &ResolveOptions { allow_older, ..ResolveOptions::default() }).await
}

/// A fence that is passed a number of times, then closed: a higher term appeared in between.
#[derive(Debug)]
struct ClosesAfter(std::sync::atomic::AtomicU64);

#[async_trait::async_trait]
impl Fence for ClosesAfter {
    async fn pass(&self) -> Result<()> {
        self.pass_blocking()
    }

    fn pass_blocking(&self) -> Result<()> {
        let left = self.0.fetch_update(std::sync::atomic::Ordering::SeqCst, std::sync::atomic::Ordering::SeqCst, |n| {
            n.checked_sub(1)
        });
        left.map(|_| ()).map_err(|_| Error::Superseded { mine: 1, theirs: 2 })
    }
}

#[tokio::test]
async fn a_commit_is_listed_pointed_at_and_verified() {
    let (_dir, store) = store_with(&[(9, 3.0), (19, 2.0), (29, 2.5)]).await;
    assert_eq!(committed_steps(&store.list().await.unwrap()), [9, 19, 29]);
    assert_eq!(link(&store, LATEST).as_deref(), Some("epoch_0_step_29"));
    assert_eq!(link(&store, LOWEST_VAL).as_deref(), Some("epoch_0_step_19"));
    let verified = store.verify(name(19), &|_, _| {}).await.unwrap();
    assert_eq!((verified.files, verified.faults), (3, vec![]));
    let losses = std::fs::read_to_string(store.path(name(19)).join("losses.json")).unwrap();
    assert_eq!(losses, "{\"train_loss\":0.30000000000000004,\"val_loss\":2.0}\n");
    let manifest = store.read_manifest(name(19)).await.unwrap().manifest;
    assert_eq!(manifest.spec_hash, blake3::hash(b"seed: 1\n").to_hex().as_str());
}

#[tokio::test]
async fn a_manifest_is_never_replaced() {
    let (_dir, store) = store_with(&[(9, 3.0)]).await;
    let before = std::fs::read(store.path(name(9)).join(MANIFEST)).unwrap();
    let draft = Manifest { term: 99, files: vec![], ..example(9, Some(1.0)) };
    let outcome = store.commit(&Unfenced, draft, "seed: 2\n").await.unwrap();
    assert!(matches!(outcome, CommitOutcome::AlreadyCommitted(c) if c.manifest.term == 1));
    assert_eq!(std::fs::read(store.path(name(9)).join(MANIFEST)).unwrap(), before, "C2");
    assert_eq!(std::fs::read(store.path(name(9)).join("config.yaml")).unwrap(), b"seed: 1\n");
    assert!(store.verify(name(9), &|_, _| {}).await.unwrap().faults.is_empty());
}

#[tokio::test]
async fn a_commit_of_missing_or_short_shards_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path());
    let shard = write_shard(dir.path(), 9);
    let mut cases = vec![
        (vec![ShardFile { path: "model/x".into(), ..shard.clone() }], "model/x is missing"),
        (vec![ShardFile { size: shard.size + 1, ..shard.clone() }], "instead of 4113"),
        (vec![ShardFile { size: 1, ..shard.clone() }], "a header of 4096 bytes in 1"),
        (vec![shard.clone(), shard.clone()], "twice"),
    ];
    for (files, what) in cases.drain(..) {
        let error = store.commit(&Unfenced, Manifest { files, ..example(9, None) }, "").await.unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    let wrong_name = Manifest { name: name(8), ..example(9, None) };
    assert!(store.commit(&Unfenced, wrong_name, "").await.unwrap_err().to_string().contains("another step"));
    assert_eq!(store.list().await.unwrap().committed, vec![]);
}

#[tokio::test]
async fn a_closed_fence_stops_every_change() {
    let (_dir, store) = store_with(&[(9, 3.0), (19, 2.0), (29, 2.5)]).await;
    let closed = || ClosesAfter(0.into());
    let draft = Manifest { files: vec![write_shard(store.root(), 39)], ..example(39, None) };
    for passes in 0..3 {
        let fence = ClosesAfter(passes.into());
        assert!(matches!(store.commit(&fence, draft.clone(), "").await, Err(Error::Superseded { .. })), "J2");
    }
    std::fs::remove_file(store.root().join(LATEST)).unwrap();
    assert!(store.repair_pointers(&closed(), "default").await.is_err());
    assert!(store.prune(&closed(), &Retention::newest(Some(1), "default")).await.is_err());
    assert!(store.retire_after(&closed(), Some(9), 5, "default").await.is_err());
    assert_eq!(committed_steps(&store.list().await.unwrap()), [9, 19, 29]);
}

#[tokio::test]
async fn an_interrupted_commit_is_taken_up_with_other_content() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path());
    let draft = Manifest { files: vec![write_shard(dir.path(), 9)], ..example(9, None) };
    let interrupted = store.commit(&ClosesAfter(2.into()), draft.clone(), "seed: 1\n").await;
    assert!(interrupted.is_err() && store.path(name(9)).join("config.yaml").exists());
    assert_eq!(store.list().await.unwrap().uncommitted, [name(9)], "C1");
    assert!(matches!(store.commit(&Unfenced, draft, "seed: 2\n").await.unwrap(), CommitOutcome::Committed(_)));
    assert!(store.verify(name(9), &|_, _| {}).await.unwrap().faults.is_empty());
}

#[tokio::test]
async fn a_commit_that_failed_anywhere_can_be_tried_again() {
    let points = ["commit.config", "commit.losses", "commit.sync", "commit.manifest", "pointer.latest"];
    for (point, stage) in points.iter().flat_map(|point| ["", ".temp", ".done"].map(|stage| (point, stage))) {
        if (*point, stage) == ("commit.sync", ".temp") || (*point, stage) == ("commit.sync", ".done") {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let fault = format!("{point}{stage}:1:eio");
        let io = Io::with_faults(dir.path(), std::sync::Arc::new(crate::fault::Faults::parse(&fault).unwrap()));
        let store = CheckpointStore::with_io(io, Io::new(dir.path().join("control")));
        let draft = Manifest { files: vec![write_shard(dir.path(), 9)], ..example(9, Some(1.0)) };
        let save = async || -> Result<()> {
            store.commit(&Unfenced, draft.clone(), "seed: 1\n").await?;
            store.repair_pointers(&Unfenced, "default").await?;
            Ok(())
        };
        assert!(matches!(save().await, Err(Error::Io { .. })), "{fault} was not passed");
        save().await.unwrap();
        assert!(store.verify(name(9), &|_, _| {}).await.unwrap().faults.is_empty(), "{fault}");
        assert_eq!(link(&store, LATEST).as_deref(), Some("epoch_0_step_9"), "{fault}");
    }
}

#[tokio::test]
async fn missing_dangling_and_stale_pointers_are_recomputed_and_noted() {
    let (_dir, store) = store_with(&[(9, 3.0), (19, 2.0)]).await;
    assert_eq!(latest(&store, false).await.unwrap().notes, []);
    let path = store.root().join(LATEST);
    for (target, text) in
        [(None, "missing"), (Some("epoch_0_step_77"), "not a committed"), (Some("epoch_0_step_9"), "manifests say")]
    {
        std::fs::remove_file(&path).ok();
        if let Some(target) = target {
            std::os::unix::fs::symlink(target, &path).unwrap();
        }
        let before = link(&store, LATEST);
        let resolved = latest(&store, false).await.unwrap();
        assert_eq!(resolved.checkpoint.name(), name(19), "C5");
        assert!(resolved.notes.iter().any(|note| note.to_string().contains(text)), "{:?}", resolved.notes);
        assert_eq!(link(&store, LATEST), before, "resolving writes nothing");
        let moves = store.repair_pointers(&Unfenced, "default").await.unwrap();
        assert_eq!(moves, [PointerMove { pointer: LATEST, from: before, to: Some(name(19)) }]);
        assert_eq!(store.repair_pointers(&Unfenced, "default").await.unwrap(), []);
    }
}

#[tokio::test]
async fn directories_without_a_manifest_are_no_fresh_start() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path());
    assert!(matches!(latest(&store, false).await, Err(ResolveError::Empty { .. })));
    write_shard(dir.path(), 9);
    commit(&store, 19, None).await;
    std::fs::write(store.path(name(19)).join(MANIFEST), b"{\n \"format\": 1").unwrap();
    let error = latest(&store, true).await.unwrap_err();
    assert!(matches!(error, ResolveError::NoneCommitted { damaged: false, .. }));
    let message = error.to_string();
    assert!(message.contains("epoch_0_step_9 (no manifest)") && message.contains("epoch_0_step_19"), "{message}");
}

#[tokio::test]
async fn names_and_metrics_that_are_not_there_list_what_is() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path());
    commit(&store, 9, None).await;
    let options = ResolveOptions::default();
    let unknown = store.resolve("epoch_0_step_8".parse().unwrap(), &options).await.unwrap_err().to_string();
    assert!(unknown.contains("epoch_0_step_8") && unknown.contains("epoch_0_step_9"), "{unknown}");
    let none = store.resolve(Selector::LowestVal, &options).await.unwrap_err().to_string();
    assert!(none.contains("default") && none.contains("epoch_0_step_9"), "{none}");
    assert!("epoch_0".parse::<Selector>().is_err());
}

#[tokio::test]
async fn a_damaged_newest_is_reported_and_the_next_older_valid_one_offered() {
    type Damage = fn(&Path);
    let damages: [Damage; 4] = [
        |dir| std::fs::remove_dir_all(dir.join("model")).unwrap(),
        |dir| std::fs::write(dir.join("config.yaml"), b"seed: 12\n").unwrap(),
        |dir| std::fs::write(dir.join("config.yaml"), b"seed: 7\n").unwrap(),
        |dir| {
            let mut bytes = std::fs::read(dir.join(MANIFEST)).unwrap();
            bytes[20] ^= 1;
            std::fs::write(dir.join(MANIFEST), bytes).unwrap();
        },
    ];
    for damage in damages {
        let (_dir, store) = store_with(&[(9, 3.0), (19, 2.0), (29, 2.5)]).await;
        damage(&store.path(name(29)));
        std::fs::remove_dir_all(store.path(name(19)).join("model")).unwrap();
        let options = ResolveOptions { depth: Depth::Hashes, ..ResolveOptions::default() };
        for wanted in [Selector::Latest, Selector::Name(name(29))] {
            let error = store.resolve(wanted, &options).await.unwrap_err();
            assert!(matches!(&error, ResolveError::Damaged { offer, .. } if *offer == Some(name(9))), "{error}");
            assert!(error.to_string().contains("--allow-older"), "{error}");
            let older = ResolveOptions { allow_older: true, ..options };
            let taken = store.resolve(wanted, &older).await.unwrap();
            assert_eq!(taken.checkpoint.name(), name(9));
            assert!(matches!(taken.notes.last(), Some(Note::Older { .. })));
        }
    }
}

#[tokio::test]
async fn a_generation_that_starts_earlier_retires_what_is_later() {
    let (_dir, store) = store_with(&[(9, 3.0), (19, 2.0), (29, 1.0)]).await;
    write_shard(store.root(), 39);
    write_shard(store.root(), 4);
    let retired = store.retire_after(&Unfenced, Some(9), 5, "default").await.unwrap();
    let moved: Vec<_> = retired.iter().map(|r| (r.name.step, r.moved_to.as_deref())).collect();
    assert_eq!(
        moved,
        [(19, Some("abandoned/g5/epoch_0_step_19")), (29, Some("abandoned/g5/epoch_0_step_29")), (39, None)]
    );
    assert_eq!(
        (link(&store, LATEST), link(&store, LOWEST_VAL)),
        (Some(name(9).to_string()), Some(name(9).to_string()))
    );
    let listing = store.list().await.unwrap();
    assert_eq!((committed_steps(&listing), listing.uncommitted), (vec![9], vec![name(4)]));
    let abandoned = CheckpointStore::open(store.root().join("abandoned/g5"));
    assert!(abandoned.verify(name(29), &|_, _| {}).await.unwrap().faults.is_empty());

    commit(&store, 19, Some(0.5)).await;
    let again = store.retire_after(&Unfenced, None, 5, "default").await.unwrap();
    assert_eq!(again[2].moved_to.as_deref(), Some("abandoned/g5/epoch_0_step_19.1"), "nothing is overwritten");
    assert_eq!((link(&store, LATEST), link(&store, LOWEST_VAL)), (None, None));
}

/// Its holder was frozen between its last look and the manifest, and generation 5 saves the same step by then.
#[tokio::test]
async fn c2_a_dead_generations_late_commit_is_not_taken_for_ones_own() {
    let (_dir, store) = store_with(&[(9, 3.0)]).await;
    commit_of(&store, 19, 4).await.unwrap();
    let shards = store.path(name(19)).join("model");
    std::fs::remove_dir_all(&shards).unwrap();
    let ours = commit_of(&store, 19, 5).await.unwrap();
    assert!(matches!(ours, CommitOutcome::Committed(_)), "{ours:?}");
    let found = store.read_manifest(name(19)).await.unwrap();
    assert_eq!((found.manifest.generation, &found.hash), (5, &ours.committed().hash));
    assert!(store.verify(name(19), &|_, _| {}).await.unwrap().faults.is_empty(), "its own shards and config.yaml");
    assert!(matches!(commit_of(&store, 19, 5).await.unwrap(), CommitOutcome::AlreadyCommitted(_)));
    let late = commit_of(&store, 19, 4).await.unwrap_err().to_string();
    assert!(late.contains("generation 5 committed it"), "{late}");
}

#[tokio::test]
async fn c2_a_commit_of_other_content_under_the_same_generation_is_refused() {
    let (_dir, store) = store_with(&[(9, 3.0)]).await;
    let draft = Manifest { files: vec![write_shard(store.root(), 9)], ..example(9, Some(3.0)) };
    let other = Manifest { state_hash: "f".repeat(64), ..draft.clone() };
    assert!(matches!(store.commit(&Unfenced, draft, "").await, Ok(CommitOutcome::AlreadyCommitted(_))));
    let error = store.commit(&Unfenced, other, "").await.unwrap_err().to_string();
    assert!(error.contains("with other content"), "{error}");
}

#[tokio::test]
async fn c2_a_torn_manifest_is_made_anew() {
    let (_dir, store) = store_with(&[(9, 3.0)]).await;
    let path = store.path(name(9)).join(MANIFEST);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    assert!(matches!(commit(&store, 9, Some(3.0)).await, CommitOutcome::Committed(_)));
    assert_eq!(committed_steps(&store.list().await.unwrap()), [9]);
}

#[tokio::test]
async fn c6_a_dead_generations_late_commit_is_retired_before_pointers_move() {
    let (_dir, store) = store_with(&[(9, 3.0)]).await;
    assert_eq!(store.retire_after(&Unfenced, Some(9), 5, "default").await.unwrap(), []);
    commit_of(&store, 19, 4).await.unwrap();
    commit_of(&store, 14, 5).await.unwrap();
    let listing = store.list().await.unwrap();
    let late = store.retire_late(&Unfenced, &listing, Some(9), 5, "default").await.unwrap();
    let moved = Retired { name: name(19), moved_to: Some("abandoned/g5/epoch_0_step_19".into()) };
    assert_eq!(late, [moved]);
    store.repair_pointers(&Unfenced, "default").await.unwrap();
    assert_eq!(link(&store, LATEST), Some(name(14).to_string()));
    let listing = store.list().await.unwrap();
    std::fs::remove_file(store.root().join(LATEST)).unwrap();
    assert_eq!(store.retire_late(&Unfenced, &listing, Some(9), 5, "default").await.unwrap(), []);
    assert_eq!(link(&store, LATEST), None, "with nothing to retire nothing moves");
}

#[tokio::test]
async fn what_a_pin_or_a_pointer_names_is_not_swept_though_its_manifest_is_cut_off() {
    let (_dir, store) = store_with(&[(9, 1.0), (19, 3.0), (29, 2.0), (39, 2.0)]).await;
    for step in [9, 19, 29] {
        std::fs::write(store.path(name(step)).join(MANIFEST), b"{").unwrap();
    }
    store.pin_for_good(name(19), "me").await.unwrap();
    assert_eq!(link(&store, LOWEST_VAL), Some(name(9).to_string()));
    let report = store.prune(&Unfenced, &Retention::newest(None, "default")).await.unwrap();
    assert_eq!(report.swept, [name(29)]);
}

#[tokio::test]
async fn pruning_keeps_the_newest_the_targets_and_what_is_pinned() {
    let (_dir, store) = store_with(&[(9, 3.0), (19, 1.0), (29, 2.0), (39, 2.0), (49, 2.0), (59, 2.0)]).await;
    write_shard(store.root(), 14);
    write_shard(store.root(), 69);
    store.pin(name(29), "generation 7").await.unwrap();
    store.pin(name(29), "export").await.unwrap();
    store.unpin(name(29), "export").await.unwrap();
    let report = store.prune(&Unfenced, &Retention::newest(Some(2), "default")).await.unwrap();
    let steps = |names: Vec<CheckpointName>| names.iter().map(|n| n.step).collect::<Vec<_>>();
    assert_eq!((steps(report.removed), steps(report.swept)), (vec![9, 39], vec![14]));
    let listing = store.list().await.unwrap();
    assert_eq!((committed_steps(&listing), steps(listing.uncommitted)), (vec![19, 29, 49, 59], vec![69]));

    store.unpin(name(29), "generation 7").await.unwrap();
    assert_eq!(steps(store.prune(&Unfenced, &Retention::newest(Some(2), "default")).await.unwrap().removed), [29]);
    assert_eq!(store.prune(&Unfenced, &Retention::newest(None, "default")).await.unwrap(), PruneReport::default());
}

#[tokio::test]
async fn pins_are_honoured_for_a_day() {
    let (dir, store) = store_with(&[(9, 3.0)]).await;
    let pins = dir.path().join("control/pins");
    store.pin(name(9), "export").await.unwrap();
    let file = std::fs::read_dir(&pins).unwrap().next().unwrap().unwrap().path();
    let old = Pin { at: "2020-01-01T00:00:00.000Z".into(), ..Pin::new(name(9), "export") };
    std::fs::write(&file, serde_json::to_vec(&old).unwrap()).unwrap();
    assert!(store.pinned().await.unwrap().is_empty());
    std::fs::write(&file, b"").unwrap();
    assert!(store.pinned().await.unwrap().contains(&name(9)), "an unreadable pin is honoured");
    store.pin(name(9), "export").await.unwrap();
    assert_eq!(std::fs::read_dir(&pins).unwrap().count(), 1, "a pin is renewed, not doubled");
}

#[tokio::test]
async fn c9_a_pin_for_good_is_honoured_until_it_is_removed() {
    let (_dir, store) = store_with(&[(9, 3.0), (19, 2.0), (29, 1.0)]).await;
    store.pin_for_good(name(9), "anna").await.unwrap();
    let old = Pin { at: "2020-01-01T00:00:00.000Z".into(), ..Pin::new(name(19), "anna") };
    store.place_pin(&old.clone().for_good().because("the best on code")).await.unwrap();
    store.place_pin(&Pin { who: "an old reader".into(), ..old.clone() }).await.unwrap();
    assert_eq!(store.pinned().await.unwrap(), [name(9), name(19)].into());
    assert_eq!(store.prune(&Unfenced, &Retention::newest(Some(1), "default")).await.unwrap().removed, []);
    assert!(store.pins().await.unwrap().iter().any(|pin| pin.for_good && pin.why == "the best on code"));
    assert!(store.unpin(name(19), "anna").await.unwrap());
    assert!(!store.unpin(name(19), "anna").await.unwrap(), "removed already");
    assert_eq!(store.prune(&Unfenced, &Retention::newest(Some(1), "default")).await.unwrap().removed, [name(19)]);
}

fn summaries() -> impl Strategy<Value = Vec<Summary>> {
    let loss = prop_oneof![3 => (0u8..6).prop_map(|l| Some(f64::from(l))), 1 => Just(None), 1 => Just(Some(f64::NAN))];
    prop::collection::btree_map(0u64..40, loss, 0..12).prop_map(|map| {
        map.into_iter()
            .map(|(step, loss)| {
                let val_losses = [("default".to_owned(), loss)].into();
                Summary { name: name(step), metrics: Metrics { train_loss: None, val_losses } }
            })
            .collect()
    })
}

proptest! {
    /// C6: a pure function of the set: LATEST is the highest step, LOWEST_VAL the earliest of the lowest finite ones.
    #[test]
    fn pointers_follow_the_manifests(committed in summaries().prop_shuffle()) {
        let pointers = pointer_targets(&committed, "default");
        prop_assert_eq!(pointers.latest, committed.iter().map(|s| s.name).max());
        let finite = |s: &Summary| s.metrics.val_loss("default");
        match pointers.lowest_val {
            None => prop_assert!(committed.iter().all(|s| finite(s).is_none())),
            Some(lowest) => {
                let best = committed.iter().find(|s| s.name == lowest).and_then(finite).unwrap();
                for other in &committed {
                    if let Some(loss) = finite(other) {
                        prop_assert!(best < loss || (best == loss && lowest <= other.name));
                    }
                }
            }
        }
        prop_assert_eq!(pointer_targets(&committed, "another").lowest_val, None);
    }

    /// C4, C9: never a target, the newest, a milestone or a pinned one; exactly the newest `keep` and those exceptions stay.
    #[test]
    fn pruning_never_removes_what_is_needed(
        committed in summaries().prop_shuffle(), keep in prop::option::of(0usize..6),
        pinned in prop::collection::btree_set((0u64..40).prop_map(name), 0..4), on_disk in 0usize..12,
        every in prop::option::of(1u64..12),
    ) {
        let targets = pointer_targets(&committed, "default");
        let pointers = Pointers { latest: committed.get(on_disk).map(|s| s.name), lowest_val: None };
        let input = PruneInput {
            committed: committed.clone(), pointers, targets, pinned: pinned.clone(), keep, keep_every_steps: every,
        };
        let verdicts = decide_prune(&input);
        prop_assert_eq!(verdicts.len(), committed.len());
        let newer = |name| committed.iter().filter(|s| s.name > name).count();
        for (name, verdict) in verdicts {
            let needed = keep.is_none_or(|keep| newer(name) < keep.max(1))
                || targets.holds(name) || pointers.holds(name) || pinned.contains(&name)
                || every.is_some_and(|every| (name.step + 1).is_multiple_of(every));
            prop_assert_eq!(verdict == Verdict::Remove, !needed, "{}", name);
        }
    }
}
