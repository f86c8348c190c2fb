//! Whole runs over real processes: rows, validation, saves, stops, resumes, world sizes.
//!
//! Coverage: D2, D3 `world_sizes_agree_on_losses_and_gradients`; P4 `a_resumed_run_equals_the_unbroken_one_bit_for_bit`; C2
//! (shard names) and C8 `a_checkpoint_loads_at_another_world_size`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use support::world::{Case, Told};
use support::{assert_close, config};
use tch::Tensor;
use trainctl_dataset::indexed::{Dtype, IndexedWriter};
use trainctl_spec::job::Precision;
use trainctl_spec::report::{FinishCause, Phase};
use trainctl_spec::{JobSpec, lr};
use trainctl_store::checkpoints::CheckpointStore;
use trainctl_store::layout::CheckpointName;
use trainctl_store::manifest::{Manifest, Metrics};
use trainctl_store::shard::ShardReader;
use trainctl_store::tenure::Unfenced;

/// A rank's process; see `support::world`.
#[test]
fn rank_process() {
    support::world::rank_process();
}

/// 60 documents with a pattern that a model can learn.
fn corpus(dir: &Path) {
    let mut writer = IndexedWriter::create(&dir.join("text"), Dtype::for_vocabulary(67)).unwrap();
    for document in 0..60u32 {
        let tokens: Vec<u32> = (0..40 + document % 7).map(|t| (document * 5 + t * (1 + document % 3)) % 67).collect();
        writer.push_document(&tokens).unwrap();
    }
    drop(writer.finish().unwrap());
}

/// A run in `dir` that trains on its corpus: global batch 7, micro-batches of 2, so four micro-batches the last of which is short.
fn spec(dir: &Path, p: f64, max_steps: u64) -> JobSpec {
    if !dir.join("text.idx").exists() {
        corpus(dir);
    }
    let data = serde_json::json!({
        "paths": [{"prefix": dir.join("text")}], "seq_length": 16, "split": "80,20,0",
        "index_mapping_dir": dir.join("index"),
    });
    let mut validation = data.clone();
    validation["num_val_samples"] = 9.into();
    serde_json::from_value(serde_json::json!({
        "name": "tiny", "run_dir": dir, "seed": 5,
        "model": {"config": config(p)},
        "dataset": data,
        "validation_datasets": {"default": validation},
        "step_scheduler": {
            "global_batch_size": 7, "local_batch_size": 2, "max_steps": max_steps, "ckpt_every_steps": 4,
            "val_every_steps": 3,
        },
        "optimizer": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "dist_env": {"timeout_minutes": 1.0},
    }))
    .unwrap()
}

fn losses(told: &[Told]) -> Vec<f64> {
    told[0].rows.iter().map(|row| row.loss).collect()
}

fn assert_relative(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= tolerance * b.abs(), "number {i}: {a} against {b}");
    }
}

/// The state hash that the ranks' reports of `step` make.
fn state_hash(told: &[Told], step: u64) -> String {
    let reports = told.iter().flat_map(|rank| &rank.reports).filter(|report| report.step == step);
    let digests: Vec<_> = reports.flat_map(|report| report.digests()).collect();
    trainctl_store::state_hash::combine(&digests).unwrap()
}

/// Commits what the ranks reported of `step`, as the coordinator does; name and manifest hash.
fn commit(spec: &JobSpec, told: &[Told], step: u64) -> (String, String) {
    let reports: Vec<_> = told.iter().flat_map(|rank| &rank.reports).filter(|report| report.step == step).collect();
    assert_eq!(reports.len(), told.len(), "every rank reports step {step}");
    let draft = Manifest {
        format: 1,
        name: CheckpointName { epoch: 0, step },
        job: "tiny".into(),
        generation: 1,
        term: 1,
        step,
        epoch: 0,
        consumed_samples: reports[0].consumed_samples,
        world_size: told.len() as u32,
        mesh: vec![],
        skipped: vec![],
        metrics: Metrics::new(reports[0].train_loss, &reports[0].val_losses),
        state_hash: state_hash(told, step),
        spec_hash: String::new(),
        max_steps: spec.step_scheduler.max_steps,
        until_step: None,
        started_from: None,
        kind: Default::default(),
        parent: None,
        phase: Default::default(),
        corpora: Default::default(),
        created_at: String::new(),
        files: reports.iter().flat_map(|report| report.files.clone()).collect(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = CheckpointStore::open(&spec.run_dir);
    let outcome = runtime.block_on(store.commit(&Unfenced, draft, "name: tiny\n")).unwrap();
    (outcome.committed().name().to_string(), outcome.committed().hash.clone())
}

/// All fp32 tensors of a committed checkpoint whose names start with `prefix`.
fn tensors(spec: &JobSpec, name: &str, prefix: &str) -> (Vec<String>, Vec<Tensor>) {
    let mut reader = ShardReader::open(&spec.run_dir, name.parse().unwrap(), None).unwrap();
    let names: Vec<String> = reader.tensors().map(|(n, _)| n.to_owned()).filter(|n| n.starts_with(prefix)).collect();
    let read = |name: &String| {
        let info = reader.info(name).unwrap().clone();
        let mut bytes = vec![0; info.bytes() as usize];
        reader.read_tensor(name, &mut bytes).unwrap();
        let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        Tensor::from_slice(&values)
    };
    let read = names.iter().map(read).collect();
    (names, read)
}

#[test]
fn one_rank_learns_reports_validates_and_saves() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 30);
    let told = Case::new(spec.clone(), 1).run();
    let rank = &told[0];
    assert_eq!(rank.ended, Some(Ok((FinishCause::Complete, 30, rank.rows.last().map(|row| row.loss)))));
    assert_eq!(rank.formed, 1);
    assert_eq!(rank.steps, (0..30).collect::<Vec<_>>());
    let steps: Vec<u64> = rank.rows.iter().map(|row| row.step).collect();
    assert_eq!(steps, rank.steps);
    let schedule = lr::Schedule::of(&spec);
    for row in &rank.rows {
        assert_eq!(row.lr, schedule.logged(trainctl_spec::Step(row.step)));
        assert_eq!((row.num_tokens_per_step, row.num_label_tokens), (7 * 16, 7 * 16));
        assert!(row.mem > 0.0 && row.tps > 0.0 && row.grad_norm > 0.0 && row.mfu.is_none());
        assert!(row.timestamp.ends_with('Z') && row.timestamp.len() == 24, "{}", row.timestamp);
    }
    let losses = losses(&told);
    assert!((losses[0] - 67f64.ln()).abs() < 0.3, "a fresh model guesses: {}", losses[0]);
    assert!(losses[29] < losses[0] - 0.5, "{losses:?}");
    // N = 3, K = 4, last = 29.
    let validated: Vec<u64> = rank.validation.iter().map(|(_, row)| row.step).collect();
    assert_eq!(validated, [2, 3, 5, 7, 8, 11, 14, 15, 17, 19, 20, 23, 26, 27, 29]);
    assert!(rank.validation.iter().all(|(name, row)| name == "default" && row.num_label_tokens == 9 * 16));
    let saved: Vec<u64> = rank.reports.iter().map(|report| report.step).collect();
    assert_eq!(saved, [3, 7, 11, 15, 19, 23, 27, 29]);
    let last = rank.reports.last().unwrap();
    assert_eq!((last.checkpoint.as_str(), last.consumed_samples), ("epoch_0_step_29", 210));
    assert_eq!(last.val_losses, BTreeMap::from([("default".to_owned(), rank.validation.last().unwrap().1.val_loss)]));
    let paths: Vec<&str> = last.files.iter().map(|file| file.path.as_str()).collect();
    let shard = "shard-00000-of-00001.g1.safetensors";
    assert_eq!(paths, [format!("model/{shard}"), format!("optim/{shard}"), "optim/trainer.json".into()]);
    assert_eq!(rank.phases.first(), Some(&(Phase::Rendezvous, 0)));
    assert_eq!(rank.phases[1..3], [(Phase::Loading, 0), (Phase::Stepping, 0)]);
    assert_eq!(rank.phases.last(), Some(&(Phase::Finished, 30)));
    commit(&spec, &told, 29);
}

#[test]
fn world_sizes_agree_on_losses_and_gradients() {
    let runs: Vec<_> = (1..=3)
        .map(|world_size| {
            let dir = tempfile::tempdir().unwrap();
            let mut spec = spec(dir.path(), 0.1, 6);
            // The first moments after one step are 0.1 × the gradients, as long as nothing is clipped.
            spec.step_scheduler.ckpt_every_steps = 1;
            spec.clip_grad_norm.max_norm = 1e6;
            let told = Case::new(spec.clone(), world_size).run();
            let (name, _) = commit(&spec, &told, 0);
            let gradients = tensors(&spec, &name, "optim/exp_avg.");
            (told, gradients)
        })
        .collect();
    let (one, (names, gradients)) = &runs[0];
    assert_eq!(names.len(), 28);
    for (told, (_, other)) in &runs[1..] {
        assert_relative(&losses(told), &losses(one), 1e-5);
        let norms = |told: &[Told]| told[0].rows.iter().map(|row| row.grad_norm).collect::<Vec<_>>();
        assert_relative(&norms(told), &norms(one), 1e-4);
        let val = |told: &[Told]| told[0].validation.iter().map(|(_, row)| row.val_loss).collect::<Vec<_>>();
        assert_relative(&val(told), &val(one), 1e-5);
        assert_close(names, other, gradients, 1e-5);
        for rank in told {
            assert_eq!(rank.ended.as_ref().unwrap().as_ref().unwrap().2, Some(*losses(told).last().unwrap()));
        }
        assert!(told[1..].iter().all(|rank| rank.rows.is_empty() && rank.validation.is_empty()));
    }
}

#[test]
fn a_resumed_run_equals_the_unbroken_one_bit_for_bit() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let (whole_dir, broken_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let spec = |dir: &Path| JobSpec { precision, ..spec(dir, 0.1, 8) };
        let whole = Case::new(spec(whole_dir.path()), 2).run();
        let spec = spec(broken_dir.path());
        let first = Case { stop_at: 4, ..Case::new(spec.clone(), 2) }.run();
        assert!(matches!(first[0].ended, Some(Ok((FinishCause::UntilStep, 4, _)))));
        assert_eq!(state_hash(&first, 3), state_hash(&whole, 3));
        let checkpoint = commit(&spec, &first, 3);
        let second =
            Case { start_from: Some(checkpoint), start_step: 4, generation: 2, ..Case::new(spec.clone(), 2) }.run();
        assert_eq!([losses(&first), losses(&second)].concat(), losses(&whole));
        assert_eq!(state_hash(&second, 7), state_hash(&whole, 7));
        assert!(second[1].reports[0].files[0].path.ends_with("shard-00001-of-00002.g2.safetensors"));
        let masters = second[0].reports[0].tensors.iter().filter(|t| t.0.starts_with("optim/master.")).count();
        assert_eq!(masters > 0, precision == Precision::Bf16);
    }
}

#[test]
fn a_checkpoint_loads_at_another_world_size() {
    let (whole_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = Case::new(spec(whole_dir.path(), 0.1, 8), 2).run();
    let spec = spec(dir.path(), 0.1, 8);
    let checkpoint = commit(&spec, &Case { stop_at: 4, ..Case::new(spec.clone(), 2) }.run(), 3);
    for world_size in [1, 3] {
        let case = Case::new(spec.clone(), world_size);
        let rest = Case { start_from: Some(checkpoint.clone()), start_step: 4, generation: 2, ..case }.run();
        assert_relative(&losses(&rest), &losses(&whole)[4..], 1e-5);
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_every_difference() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), 0.0, 4);
    let checkpoint = commit(&spec, &Case::new(spec.clone(), 1).run(), 3);
    let mut other = config(0.0);
    other.insert("vocab_size".into(), 99.into());
    other.insert("n_layer".into(), 1.into());
    spec.model.config = serde_json::from_value(other.into()).unwrap();
    let case = |from| Case { start_from: Some(from), start_step: 4, ..Case::new(spec.clone(), 1) };
    let told = case(checkpoint.clone()).run();
    let Some(Err(text)) = &told[0].ended else { panic!("{:?}", told[0].ended) };
    for part in [
        "checkpoint epoch_0_step_3 does not fit the model; nothing was loaded",
        "model/transformer.wte.weight: F32 [67, 24] in the checkpoint, F32 [99, 24] in the model",
        "optim/exp_avg.transformer.h.1.ln_1.weight: [24] in the checkpoint, unknown to the model",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let told = case((checkpoint.0, "0".repeat(64))).run();
    let Some(Err(text)) = &told[0].ended else { panic!("{:?}", told[0].ended) };
    assert!(text.contains("load checkpoint epoch_0_step_3"), "{text}");
}

#[test]
fn requests_heard_by_one_rank_act_on_all_at_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 100);
    let told = Case { save_heard: Some((0, 1)), stop_heard: Some((1, 5)), ..Case::new(spec.clone(), 2) }.run();
    for rank in &told {
        assert!(matches!(rank.ended, Some(Ok((FinishCause::Stopped, 6, _)))), "{:?}", rank.ended);
        let saved: Vec<u64> = rank.reports.iter().map(|report| report.step).collect();
        assert_eq!(saved, [1, 3, 5]);
    }
    commit(&spec, &told, 5);
}

#[test]
fn a_loss_that_is_not_finite_stops_or_skips_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), 0.0, 5);
    spec.optimizer.lr = 1e30;
    let told = Case::new(spec.clone(), 2).run();
    let stopped: Vec<_> = told.iter().map(|rank| rank.ended.clone().unwrap().unwrap_err()).collect();
    assert!(stopped[0].starts_with("step 1: loss ") && stopped[0].contains("skip_step"), "{}", stopped[0]);
    assert_eq!(stopped[0], stopped[1]);
    spec.fault_tolerance.on_nonfinite = serde_json::from_value("skip_step".into()).unwrap();
    let told = Case { generation: 2, ..Case::new(spec, 2) }.run();
    assert!(matches!(told[0].ended, Some(Ok((FinishCause::Complete, 5, _)))), "{:?}", told[0].ended);
    assert_eq!((losses(&told).len(), told[0].not_finite.clone()), (1, vec![1, 2, 3, 4]));
}

#[test]
fn a_failed_last_save_fails_the_run_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 6);
    // A file where the checkpoint's directory belongs.
    std::fs::write(dir.path().join("epoch_0_step_3"), "").unwrap();
    let told = Case::new(spec.clone(), 1).run();
    assert!(matches!(told[0].ended, Some(Ok(_))), "the run goes on after a failed save: {:?}", told[0].ended);
    assert_eq!(told[0].failed_saves.len(), 1);
    std::fs::write(dir.path().join("epoch_0_step_4"), "").unwrap();
    let told = Case { stop_at: 5, generation: 2, ..Case::new(spec, 1) }.run();
    let Some(Err(text)) = &told[0].ended else { panic!("{:?}", told[0].ended) };
    assert!(text.contains("save checkpoint epoch_0_step_4"), "{text}");
}
