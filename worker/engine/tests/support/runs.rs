//! A tiny run: its corpus and spec, and what its ranks reported as checkpoints.

use std::path::Path;

use tch::{Kind, Tensor};
use trainctl_dataset::indexed::{Dtype, IndexedWriter};
use trainctl_spec::JobSpec;
use trainctl_spec::report::SaveKind;
use trainctl_store::checkpoints::CheckpointStore;
use trainctl_store::layout::{CheckpointName, ShardName};
use trainctl_store::manifest::{Manifest, Metrics};
use trainctl_store::shard::ShardReader;
use trainctl_store::tenure::Unfenced;

use super::config;
use super::world::{Report, Told};

/// 60 documents with a pattern that a model can learn.
pub fn corpus(dir: &Path) {
    let mut writer = IndexedWriter::create(&dir.join("text"), Dtype::for_vocabulary(67)).unwrap();
    for document in 0..60u32 {
        let tokens: Vec<u32> = (0..40 + document % 7).map(|t| (document * 5 + t * (1 + document % 3)) % 67).collect();
        writer.push_document(&tokens).unwrap();
    }
    drop(writer.finish().unwrap());
}

/// A run in `dir` that trains on its corpus: global batch 7, micro-batches of 2, so four micro-batches the last of which is short.
pub fn spec(dir: &Path, p: f64, max_steps: u64) -> JobSpec {
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

pub fn losses(told: &[Told]) -> Vec<f64> {
    told[0].rows.iter().map(|row| row.loss).collect()
}

pub fn assert_relative(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= tolerance * b.abs(), "number {i}: {a} against {b}");
    }
}

/// The reports of one save, by rank.
pub fn reports(told: &[Told], kind: SaveKind, step: u64) -> Vec<&Report> {
    let all = told.iter().flat_map(|rank| &rank.reports);
    all.filter(|report| report.kind == kind && report.step == step).collect()
}

/// The state hash that the ranks' reports of `step` make.
pub fn state_hash(told: &[Told], step: u64) -> String {
    hash_of(&reports(told, SaveKind::Full, step))
}

pub fn hash_of(reports: &[&Report]) -> String {
    let digests: Vec<_> = reports.iter().flat_map(|report| report.digests()).collect();
    trainctl_store::state_hash::combine(&digests).unwrap()
}

/// Commits what the ranks reported of `step`, as the coordinator does; name and manifest hash.
pub fn commit(spec: &JobSpec, told: &[Told], step: u64) -> (String, String) {
    commit_kind(&spec.run_dir, spec, told, SaveKind::Full, step)
}

pub fn commit_kind(root: &Path, spec: &JobSpec, told: &[Told], kind: SaveKind, step: u64) -> (String, String) {
    let reports = reports(told, kind, step);
    assert_eq!(reports.len(), told.len(), "every rank reports step {step}");
    let draft = Manifest {
        format: 1,
        name: CheckpointName { epoch: 0, step },
        job: "tiny".into(),
        generation: ShardName::parse(&reports[0].files[0].path).unwrap().generation,
        term: 1,
        step,
        epoch: 0,
        consumed_samples: reports[0].consumed_samples,
        world_size: told.len() as u32,
        mesh: vec![],
        skipped: vec![],
        metrics: Metrics::new(reports[0].train_loss, &reports[0].val_losses),
        state_hash: hash_of(&reports),
        spec_hash: String::new(),
        max_steps: spec.step_scheduler.max_steps,
        until_step: None,
        started_from: None,
        kind,
        parent: None,
        phase: Default::default(),
        corpora: Default::default(),
        created_at: String::new(),
        files: reports.iter().flat_map(|report| report.files.clone()).collect(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = CheckpointStore::open(root);
    let outcome = runtime.block_on(store.commit(&Unfenced, draft, "name: tiny\n")).unwrap();
    (outcome.committed().name().to_string(), outcome.committed().hash.clone())
}

/// All tensors of a committed checkpoint whose names start with `prefix`.
pub fn tensors(root: &Path, name: &str, prefix: &str) -> (Vec<String>, Vec<Tensor>) {
    let reader = ShardReader::open(root, name.parse().unwrap(), None).unwrap();
    let names: Vec<String> = reader.tensors().map(|(n, _)| n.to_owned()).filter(|n| n.starts_with(prefix)).collect();
    let read = |name: &String| {
        let info = reader.info(name).unwrap().clone();
        let mut bytes = vec![0; info.bytes() as usize];
        reader.read_tensor(name, &mut bytes).unwrap();
        let kind = if info.dtype == "BF16" { Kind::BFloat16 } else { Kind::Float };
        Tensor::from_data_size(&bytes, &[info.shape.iter().product::<u64>() as i64], kind).to_kind(Kind::Float)
    };
    let read = names.iter().map(read).collect();
    (names, read)
}
