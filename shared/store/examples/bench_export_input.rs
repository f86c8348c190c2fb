//! Makes a committed weights-only checkpoint of a GPT-2 of any size, for `bench/checkpoint.py` to export.
//!
//! `bench_export_input --dir RUN --config config.json` prints `{"bytes": …}`. All tensors show the same memory, so making
//! 8 GB takes as little as the largest tensor does.

#![allow(clippy::print_stdout, reason = "the answer is the output")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use trainctl_spec::Architecture;
use trainctl_store::Unfenced;
use trainctl_store::checkpoints::CheckpointStore;
use trainctl_store::layout::{CheckpointName, Section, ShardName};
use trainctl_store::manifest::{FORMAT, Manifest};
use trainctl_store::shard::{ShardWriter, TensorView};

const RANKS: u32 = 2;
const NAME: CheckpointName = CheckpointName { epoch: 0, step: 0 };

type Failure = Box<dyn std::error::Error>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let mut options: BTreeMap<String, PathBuf> = BTreeMap::new();
    let mut words = std::env::args().skip(1);
    while let (Some(option), Some(value)) = (words.next(), words.next()) {
        options.insert(option, value.into());
    }
    let (Some(run), Some(config)) = (options.get("--dir"), options.get("--config")) else {
        return Err("usage: bench_export_input --dir RUN --config config.json".into());
    };
    let run = std::path::absolute(run)?;
    let config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&std::fs::read(config)?)?;
    let parameters = Architecture::from_config(&config)?.parameters();

    let largest = parameters.iter().map(|p| p.elements()).max().unwrap_or(0);
    let values: Vec<u8> = (0..largest).flat_map(|i| ((i % 1009) as f32 / 1009.0 - 0.5).to_le_bytes()).collect();
    let writer = ShardWriter::new(&run, NAME);
    let mut files = Vec::new();
    for rank in 0..RANKS {
        let mine = parameters.iter().skip(rank as usize).step_by(RANKS as usize);
        let views: Vec<TensorView<'_>> = mine
            .map(|p| TensorView {
                name: &p.name,
                dtype: "F32",
                shape: &p.shape,
                bytes: &values[..4 * p.elements() as usize],
                slice: None,
            })
            .collect();
        let path = ShardName { section: Section::Model, rank, world_size: RANKS, generation: 1 };
        files.push(writer.write_safetensors(&path.to_string(), &views, &[])?);
    }
    let bytes: u64 = files.iter().map(|file| file.size).sum();
    let manifest: Manifest = serde_json::from_value(serde_json::json!({
        "format": FORMAT, "name": NAME, "kind": "weights", "generation": 1, "term": 1, "step": NAME.step, "epoch": NAME.epoch,
        "consumed_samples": 1, "world_size": RANKS, "state_hash": "00".repeat(32), "spec_hash": "00".repeat(32),
        "max_steps": 1, "created_at": jiff::Timestamp::now().to_string(), "files": files,
    }))?;
    // JSON is YAML.
    let spec = serde_json::json!({
        "name": "bench", "run_dir": run, "model": {"config": config},
        "dataset": {"paths": [{"prefix": "text"}], "seq_length": 16},
        "step_scheduler": {"max_steps": 1},
    });
    CheckpointStore::open(&run).commit(&Unfenced, manifest, &spec.to_string()).await?;
    println!("{}", serde_json::json!({ "bytes": bytes }));
    Ok(())
}
