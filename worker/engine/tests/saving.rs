//! What is saved, by whom, when it is left out, and what is loaded of it, over real processes.
//!
//! Every load in these runs is verified against the manifest's state hash (`TRAINCTL_VERIFY_LOAD`).

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "helpers of tests")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::runs::{commit, commit_kind, losses, reports, spec, state_hash, tensors};
use support::world::{Case, Told};
use support::{assert_close, config};
use tch::{Kind, Tensor};
use trainctl_spec::JobSpec;
use trainctl_spec::job::{ModelInit, Precision, WhenBusy};
use trainctl_spec::report::{FinishCause, Phase, SaveKind};
use trainctl_spec::start::Keep;

/// A rank's process; see `support::world`.
#[test]
fn rank_process() {
    support::world::rank_process();
}

/// A model with tensors that are large enough to be cut between ranks.
fn wide(dir: &Path, steps: u64) -> JobSpec {
    let mut spec = spec(dir, 0.1, steps);
    let mut config = config(0.1);
    config.insert("n_embd".into(), 96.into());
    spec.model.config = serde_json::from_value(config.into()).unwrap();
    spec
}

fn saved(told: &Told, kind: SaveKind) -> Vec<u64> {
    told.reports.iter().filter(|report| report.kind == kind).map(|report| report.step).collect()
}

#[test]
fn c8_large_tensors_are_cut_and_load_at_any_world_size_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let spec = wide(dir.path(), 9);
    let (mut start_from, mut next) = (None, 0);
    // One step in each generation: what a generation loads is what the one before has saved.
    for (generation, world_size) in (1..).zip([1, 2, 3, 4, 2, 1]) {
        let case =
            Case { start_from, start_step: next, stop_at: next + 1, generation, ..Case::new(spec.clone(), world_size) };
        let told = case.run();
        assert!(matches!(told[0].ended, Some(Ok((FinishCause::UntilStep, ..)))), "{:?}", told[0].ended);
        let bytes = |rank: &Told| rank.reports[0].files.iter().map(|file| file.size).sum::<u64>() as f64;
        let all: f64 = told.iter().map(bytes).sum();
        for rank in &told {
            let share = bytes(rank) / all * f64::from(world_size);
            assert!((0.9..1.1).contains(&share), "{world_size} ranks: {share} of a fair share");
        }
        let cut = told.iter().flat_map(|rank| &rank.reports[0].tensors).filter(|tensor| tensor.3 > 0).count();
        assert_eq!(cut > 0, world_size > 1, "{world_size} ranks: {cut} tensors begin in a rank before");
        start_from = Some(commit(&spec, &told, next));
        next += 1;
    }
}

/// The state hash of the tensors whose names begin with `prefix`, from the ranks' reports of a step.
fn hash_of_tensors(told: &[Told], step: u64, prefix: &str) -> String {
    let mut all: Vec<_> = reports(told, SaveKind::Full, step).iter().flat_map(|report| report.digests()).collect();
    all.retain(|digest| digest.name.starts_with(prefix));
    trainctl_store::state_hash::combine(&all).unwrap()
}

#[test]
fn the_state_hash_of_one_state_does_not_depend_on_the_world_size() {
    let hashes: Vec<String> = [1, 2, 3]
        .map(|world_size| {
            let dir = tempfile::tempdir().unwrap();
            let mut spec = wide(dir.path(), 1);
            // Nothing is learnt, so every world saves the initial weights.
            spec.optimizer.lr = 0.0;
            hash_of_tensors(&Case::new(spec, world_size).run(), 0, "model/")
        })
        .into();
    assert_eq!((&hashes[0], &hashes[0]), (&hashes[1], &hashes[2]));
}

#[test]
fn weights_alone_are_saved_in_bf16_and_start_another_run() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = JobSpec { precision, ..wide(dir.path(), 8) };
        spec.checkpoint.weights_every_steps = Some(3);
        let told = Case::new(spec.clone(), 2).run();
        for rank in &told {
            assert_eq!(saved(rank, SaveKind::Weights), [2, 5]);
            assert_eq!(saved(rank, SaveKind::Full), [3, 7]);
        }
        let of_rank_1 = reports(&told, SaveKind::Weights, 5)[1];
        assert_eq!(of_rank_1.files.len(), 1);
        assert_eq!(of_rank_1.files[0].path, "model/shard-00001-of-00002.g1.safetensors");
        assert!(of_rank_1.tensors.iter().all(|tensor| tensor.0.starts_with("model/") && tensor.1 == "BF16"));

        let root = dir.path().join("weights");
        let (name, manifest) = commit_kind(&root, &spec, &told, SaveKind::Weights, 2);
        let full = commit(&spec, &told, 3);
        let rest = Case {
            start_from: Some((name.clone(), manifest)),
            start_store: root.display().to_string(),
            start_step: 0,
            stop_at: 1,
            generation: 2,
            ..Case::new(spec.clone(), 1)
        };
        let told_rest = rest.run();
        // The loss of the next step under weights that were rounded to bf16, and a fresh optimizer's first update.
        let (got, want) = (losses(&told_rest)[0], losses(&told)[3]);
        assert!((got - want).abs() < 0.2 * want, "{got} against {want}");
        let (names, weights) = tensors(&root, &name, "model/");
        let (_, all) = tensors(&spec.run_dir, &full.0, "model/");
        assert_close(&names, &weights, &all, 0.5);
    }
}

#[test]
fn weights_of_a_checkpoint_are_kept_exactly_and_the_optimizer_begins_anew() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (generation, precision) in (1..).zip([Precision::Fp32, Precision::Bf16]) {
        let parent = JobSpec { precision, ..wide(&dir.path().join(generation.to_string()), 4) };
        std::fs::create_dir_all(&parent.run_dir).unwrap();
        let parent = JobSpec { precision, ..wide(&parent.run_dir, 4) };
        let told = Case::new(parent.clone(), 2).run();
        let start_from = Some(commit(&parent, &told, 3));
        // With a learning rate of 0 the child's weights after a step are those that it loaded.
        let mut child = JobSpec { run_dir: other.path().to_owned(), ..parent.clone() };
        child.optimizer.lr = 0.0;
        let case = Case { start_from, keep: Keep::WEIGHTS, stop_at: 1, generation, ..Case::new(child.clone(), 3) };
        let case = Case { start_store: parent.run_dir.display().to_string(), ..case };
        let told = case.run();
        let parents = Case { generation: 9, ..Case::new(parent, 2) }.run();
        for prefix in ["model/", "optim/master."] {
            assert_eq!(
                hash_of_tensors(&told, 0, prefix),
                hash_of_tensors(&parents, 3, prefix),
                "{precision:?} {prefix}"
            );
        }
        assert_ne!(hash_of_tensors(&told, 0, "optim/exp_avg."), hash_of_tensors(&parents, 3, "optim/exp_avg."));
    }
}

#[test]
fn a_save_gives_way_to_a_busy_rank_on_every_rank_but_the_last_one_waits() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), 0.0, 16);
    spec.checkpoint.when_busy = WhenBusy::Skip;
    // Rank 1's write of step 3 ends when the last save begins to wait for it.
    let told = Case { held_save: Some((1, 3, Phase::Saving, 15)), ..Case::new(spec.clone(), 2) }.run();
    for rank in &told {
        assert!(matches!(rank.ended, Some(Ok((FinishCause::Complete, 16, _)))), "{:?}", rank.ended);
        assert_eq!(saved(rank, SaveKind::Full), [3, 15]);
        let skipped: Vec<_> = rank.skipped_saves.iter().map(|why| why.split_once(": ").unwrap()).collect();
        assert_eq!(skipped.iter().map(|(step, _)| *step).collect::<Vec<_>>(), ["7", "11"]);
        assert!(skipped.iter().all(|(_, why)| why.ends_with("checkpoint.when_busy is skip")), "{skipped:?}");
    }
    commit(&spec, &told, 15);
}

#[test]
fn a_save_waits_for_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 8);
    let told = Case { held_save: Some((1, 3, Phase::Saving, 7)), ..Case::new(spec, 2) }.run();
    for rank in told {
        assert_eq!((saved(&rank, SaveKind::Full), rank.skipped_saves), (vec![3, 7], vec![]));
    }
}

#[test]
fn a_save_that_cannot_fit_fails_on_every_rank_and_only_the_last_one_fails_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("full");
    std::fs::create_dir(&place).unwrap();
    let Some(_mounted) = Mounted::tmpfs(&place, "1m") else { return };
    let mut spec = spec(dir.path(), 0.0, 9);
    spec.checkpoint.checkpoint_dir = Some(place.display().to_string());
    // Without a stop the last save would wait for room for ever.
    for rank in (Case { stop_heard: Some((vec![0, 1], 8)), ..Case::new(spec, 2) }).run() {
        assert_eq!(rank.steps, (0..9).collect::<Vec<_>>(), "the run goes on");
        assert_eq!((rank.failed_saves.len(), rank.skipped_saves.len()), (5, 0), "steps 3, 7 and three times 8");
        let why = "2 of 2 ranks find too little free space";
        assert!(
            rank.failed_saves[0].starts_with(&format!("3: {why}: {} has ", place.display())),
            "{:?}",
            rank.failed_saves
        );
        let Some(Err(text)) = &rank.ended else { panic!("{:?}", rank.ended) };
        assert!(text.starts_with(&format!("save checkpoint epoch_0_step_8: {} has ", place.display())), "{text}");
        assert!(text.contains("free space there"), "{text}");
        assert!(rank.reports.is_empty());
    }
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_fault_at_a_point_of_the_trainer_costs_one_save_or_stops_a_load() {
    for point in ["save.snapshot", "save.report"] {
        let dir = tempfile::tempdir().unwrap();
        let spec = spec(dir.path(), 0.0, 8);
        let told = Case { fault: format!("{point}:1:eio"), ..Case::new(spec.clone(), 2) }.run();
        for rank in &told {
            assert!(matches!(rank.ended, Some(Ok(_))), "{point}: {:?}", rank.ended);
            assert_eq!(saved(rank, SaveKind::Full), [7], "{point}");
            assert_eq!(rank.failed_saves.len(), 1, "{point}");
            assert!(rank.failed_saves[0].starts_with("3: "), "{point}: {:?}", rank.failed_saves);
        }
        let start_from = Some(commit(&spec, &told, 7));
        let case = Case { start_from, fault: "load.state:1:eio".to_owned(), generation: 2, ..Case::new(spec, 1) };
        let ended = case.run()[0].ended.clone();
        assert!(matches!(&ended, Some(Err(text)) if text.starts_with("load checkpoint epoch_0_step_7: ")), "{ended:?}");
    }
}

fn shards(dir: &Path, step: u64) -> usize {
    let folder = |section| std::fs::read_dir(dir.join(format!("epoch_0_step_{step}")).join(section));
    ["model", "optim"].map(|section| folder(section).map_or(0, Iterator::count)).iter().sum()
}

#[test]
fn the_last_save_is_tried_again_with_the_snapshot_that_it_has() {
    // As the shard of the weights is written, then that of the optimizer, and when both are durable.
    for fault in ["shard.write:5:enospc", "shard.write.temp:6:enospc", "save.report:2:eio"] {
        let (dir, unbroken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let told = Case { fault: fault.to_owned(), ..Case::new(spec(dir.path(), 0.0, 8), 2) }.run();
        for rank in &told {
            assert!(matches!(rank.ended, Some(Ok((FinishCause::Complete, 8, _)))), "{fault}: {:?}", rank.ended);
            assert_eq!((saved(rank, SaveKind::Full), rank.steps.len()), (vec![3, 7], 8), "{fault}");
        }
        let failed: Vec<&String> = told.iter().flat_map(|rank| &rank.failed_saves).collect();
        assert!(!failed.is_empty(), "{fault}");
        for why in failed {
            assert!(why.starts_with("7: ") && why.ends_with("; trying again in 1 s"), "{fault}: {why}");
        }
        let want = Case::new(spec(unbroken.path(), 0.0, 8), 2).run();
        assert_eq!(state_hash(&told, 7), state_hash(&want, 7), "{fault}");
        commit(&spec(dir.path(), 0.0, 8), &told, 7);
    }
}

#[test]
fn a_write_that_fails_is_reported_before_the_next_save() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 8);
    std::fs::write(dir.path().join("epoch_0_step_3"), "a file where the checkpoint's directory belongs").unwrap();
    // The save of step 7 is the next one; step 6 does not end before the failure is reported.
    let told = Case { failure_awaited: Some((3, 6)), ..Case::new(spec, 1) }.run();
    assert!(matches!(told[0].ended, Some(Ok(_))), "{:?}", told[0].ended);
    assert_eq!(told[0].failed_saves.len(), 1, "once: {:?}", told[0].failed_saves);
}

#[test]
fn p5_a_save_that_nobody_was_told_of_goes_when_retention_would_drop_it() {
    for is_cut_off in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = spec(dir.path(), 0.0, 20);
        spec.checkpoint.max_recent_checkpoints = Some(1);
        let told = Case { is_cut_off, ..Case::new(spec.clone(), 2) }.run();
        for rank in &told {
            // When step 11 is saved that of step 7 is complete, so that of step 3 may go; and so on.
            assert_eq!(rank.withdrawn, [3, 7, 11]);
        }
        let left: Vec<u64> = [3, 7, 11, 15, 19].into_iter().filter(|step| shards(dir.path(), *step) > 0).collect();
        assert_eq!(left, if is_cut_off { vec![15, 19] } else { vec![3, 7, 11, 15, 19] });
        for step in [15, 19] {
            commit(&spec, &told, step);
        }
    }
}

#[test]
fn what_the_other_ranks_wrote_of_a_save_that_failed_goes_with_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 12);
    let place = dir.path().join("epoch_0_step_3");
    std::fs::create_dir_all(place.join("model")).unwrap();
    // Rank 1 cannot write its second file: a directory has that name.
    std::fs::create_dir_all(place.join("optim/shard-00001-of-00002.g1.safetensors/x")).unwrap();
    let told = Case::new(spec.clone(), 2).run();
    assert_eq!(told.iter().map(|rank| rank.failed_saves.len()).collect::<Vec<_>>(), [0, 1]);
    assert_eq!((saved(&told[0], SaveKind::Full), saved(&told[1], SaveKind::Full)), (vec![3, 7, 11], vec![7, 11]));
    assert_eq!(std::fs::read_dir(place.join("model")).unwrap().count(), 0, "the shards of both ranks");
    assert_eq!(std::fs::read_dir(place.join("optim")).unwrap().count(), 1, "what is not theirs stays");
    assert_eq!((shards(dir.path(), 7), shards(dir.path(), 11)), (5, 5));
    commit(&spec, &told, 11);
}

/// A small file system of its own; needs root.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(at: &Path, size: &str) -> Option<Self> {
        let options = format!("size={size}");
        let run = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).output();
        if run.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Self(at.to_owned()));
        }
        let required = std::env::var("TRAINCTL_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|what| what == "fuse"), "mount a tmpfs: {run:?}");
        eprintln!("skipped: this user may not mount a tmpfs: {run:?}");
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "{} stays mounted", self.0.display());
    }
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/hf-gpt2").join(name)
}

/// A run that starts with the weights of a directory that transformers saved.
fn pretrained(dir: &Path, name: &str) -> JobSpec {
    let mut spec = spec(dir, 0.0, 1);
    let config = std::fs::read(golden("single").join("config.json")).unwrap();
    let mut config: serde_json::Map<_, _> = serde_json::from_slice(&config).unwrap();
    config.extend(["embd_pdrop", "attn_pdrop", "resid_pdrop"].map(|key| (key.to_owned(), 0.0.into())));
    spec.model.config = serde_json::from_value(config.into()).unwrap();
    spec.model.init = ModelInit::HuggingFace(golden(name).display().to_string());
    spec
}

#[test]
fn a_hugging_face_directory_is_the_start_in_every_form() {
    let dir = tempfile::tempdir().unwrap();
    // A learning rate of 0 saves what was loaded.
    let weights = |name: &str| {
        let mut spec = pretrained(dir.path(), name);
        spec.optimizer.lr = 0.0;
        let told = Case::new(spec, 1).run();
        assert!(matches!(told[0].ended, Some(Ok(_))), "{:?}", told[0].ended);
        hash_of_tensors(&told, 0, "model/")
    };
    let single = weights("single");
    assert_eq!((&single, &single), (&weights("sharded"), &weights("hub")));
    assert_ne!(single, weights("bf16"));
}

#[test]
fn a_hugging_face_directory_of_another_model_is_refused_with_every_difference() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let mut spec = pretrained(dir.path(), "single");
        let mut config = match spec.model.config {
            trainctl_spec::job::ModelConfigSource::Inline(config) => config,
            other => panic!("{other:?}"),
        };
        change(&mut config);
        spec.model.config = serde_json::from_value(config.into()).unwrap();
        Case::new(spec, 1).run()[0].ended.clone().unwrap().unwrap_err()
    };
    let text = refused(&|config| drop(config.insert("n_layer".into(), 3.into())));
    assert!(text.contains("hf-gpt2/single does not fit the model; nothing was loaded:\n"), "{text}");
    assert!(text.contains("\n  transformer.h.2.ln_1.weight: missing, the model needs [32]"), "{text}");
    let text = refused(&|config| drop(config.insert("n_head".into(), 8.into())));
    assert!(text.contains("its config.json says n_head 4, model.config says 8"), "{text}");

    // A head of its own beside a tied model: refused, since training would throw it away.
    let place = dir.path().join("untied");
    std::fs::create_dir(&place).unwrap();
    let mut tensors = Tensor::read_safetensors(golden("single").join("model.safetensors")).unwrap();
    let head = |values: Tensor| ("lm_head.weight".to_owned(), values);
    let embedding = tensors.iter().find(|(name, _)| name == "transformer.wte.weight").unwrap().1.shallow_clone();
    tensors.push(head(&embedding + 1));
    let start = |tensors: &[(String, Tensor)]| {
        Tensor::write_safetensors(tensors, place.join("model.safetensors")).unwrap();
        let mut spec = pretrained(dir.path(), "single");
        spec.model.init = ModelInit::HuggingFace(place.display().to_string());
        Case::new(spec, 1).run()[0].ended.clone().unwrap()
    };
    let text = start(&tensors).unwrap_err();
    assert!(text.contains("lm_head.weight differs from transformer.wte.weight"), "{text}");
    tensors.pop();
    tensors.push(head(embedding.copy()));
    assert_eq!(embedding.kind(), Kind::Float);
    start(&tensors).unwrap();
}
