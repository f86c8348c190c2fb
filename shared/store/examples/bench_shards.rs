//! Saves, loads or verifies the state of a GPT-2 under AdamW as the ranks of a run do, for `bench/checkpoint.py`.
//!
//! `bench_shards save|load|verify --dir RUN --ranks N --config config.json` prints `{"bytes": …, "seconds": …}`.
//!
//! Ranks are threads. `save`: each rank writes its share (whole parameters with their moments, dealt by size), then the
//! checkpoint is committed; the state is in memory before the clock starts, and what follows a commit (reading ahead) is after it. `load`: each rank fills memory of its own,
//! touched before, with the whole state, and proves its share of the blocks, as ranks of one host do. `verify`: as `trainctl checkpoints verify`.

#![allow(clippy::print_stdout, reason = "the answer is the output")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use trainctl_spec::Architecture;
use trainctl_spec::model::Parameter;
use trainctl_store::Unfenced;
use trainctl_store::checkpoints::CheckpointStore;
use trainctl_store::layout::{CheckpointName, Section, ShardName};
use trainctl_store::manifest::{FORMAT, Manifest};
use trainctl_store::shard::{Part, Peers, Read, ShardReader, ShardWriter, TensorView, Written};
use trainctl_store::state_hash::Combiner;

const NAME: CheckpointName = CheckpointName { epoch: 0, step: 0 };
/// Section and name prefix of what is kept for each parameter.
const KINDS: [(Section, &str); 3] =
    [(Section::Model, ""), (Section::Optim, "exp_avg."), (Section::Optim, "exp_avg_sq.")];

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let usage = "usage: bench_shards save|load|verify --dir RUN --ranks N --config config.json";
    let mut words = std::env::args().skip(1);
    let what = words.next().ok_or(usage)?;
    let mut options: BTreeMap<String, String> = BTreeMap::new();
    while let (Some(option), Some(value)) = (words.next(), words.next()) {
        options.insert(option, value);
    }
    let option = |name: &str| options.get(name).ok_or(usage);
    let run = PathBuf::from(option("--dir")?);
    let ranks: u32 = option("--ranks")?.parse()?;
    let config: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&std::fs::read(option("--config")?)?)?;
    let parameters = Architecture::from_config(&config)?.parameters();

    let (bytes, seconds) = match what.as_str() {
        "save" => save(&run, ranks, &parameters).await?,
        "load" => load(&run, ranks, &parameters)?,
        "verify" => {
            let started = Instant::now();
            let verified = CheckpointStore::open(&run).verify(NAME, &|_, _| {}).await?;
            if let Some(fault) = verified.faults.first() {
                return Err(format!("{}: {}", fault.path, fault.reason).into());
            }
            (verified.bytes, started.elapsed().as_secs_f64())
        }
        _ => return Err(usage.into()),
    };
    println!("{}", serde_json::json!({ "bytes": bytes, "seconds": seconds }));
    Ok(())
}

/// One tensor in memory.
struct Held<'a> {
    section: Section,
    name: String,
    shape: &'a [u64],
    bytes: Vec<u8>,
}

/// Weights and moments of `parameters`; no two tensors and no two blocks of one are alike.
fn state<'a>(parameters: &[&'a Parameter]) -> Vec<Held<'a>> {
    let mut word = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = move || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word.to_le_bytes()
    };
    let mut held = Vec::with_capacity(parameters.len() * KINDS.len());
    for parameter in parameters {
        for (section, prefix) in KINDS {
            let mut bytes = vec![0; 4 * parameter.elements() as usize];
            bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&next()[..chunk.len()]));
            held.push(Held { section, name: format!("{prefix}{}", parameter.name), shape: &parameter.shape, bytes });
        }
    }
    held
}

/// The largest first, each to the rank that has least so far.
fn deal(parameters: &[Parameter], ranks: u32) -> Vec<Vec<&Parameter>> {
    let mut hands: Vec<(u64, Vec<&Parameter>)> = vec![(0, Vec::new()); ranks as usize];
    let mut order: Vec<&Parameter> = parameters.iter().collect();
    order.sort_by_key(|parameter| std::cmp::Reverse(parameter.elements()));
    for parameter in order {
        if let Some((load, hand)) = hands.iter_mut().min_by_key(|(load, _)| *load) {
            *load += parameter.elements();
            hand.push(parameter);
        }
    }
    hands.into_iter().map(|(_, hand)| hand).collect()
}

async fn save(run: &Path, ranks: u32, parameters: &[Parameter]) -> Result<(u64, f64), Failure> {
    let states: Vec<Vec<Held<'_>>> = deal(parameters, ranks).iter().map(|hand| state(hand)).collect();
    let started = Instant::now();
    let written = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (rank, held) in (0..).zip(&states) {
            threads.push(scope.spawn(move || write(run, rank, ranks, held)));
        }
        let mut written = Vec::new();
        for thread in threads {
            written.extend(thread.join().map_err(|_| "a rank panicked")??);
        }
        Ok::<Vec<Written>, Failure>(written)
    })?;
    let mut combiner = Combiner::default();
    for tensor in written.iter().flat_map(|shard| &shard.tensors) {
        combiner.add(tensor)?;
    }
    let files: Vec<_> = written.iter().map(|shard| &shard.file).collect();
    let manifest: Manifest = serde_json::from_value(serde_json::json!({
        "format": FORMAT, "name": NAME, "generation": 1, "term": 1, "step": NAME.step, "epoch": NAME.epoch,
        "consumed_samples": 1, "world_size": ranks, "state_hash": combiner.finish()?, "spec_hash": "", "max_steps": 1,
        "created_at": "", "files": files,
    }))?;
    CheckpointStore::open(run).commit(&Unfenced, manifest, "name: bench\n").await?;
    let seconds = started.elapsed().as_secs_f64();
    // What a trainer does beside the next steps.
    let writer = ShardWriter::new(run, NAME);
    written.iter().try_for_each(|shard| writer.read_ahead(std::slice::from_ref(&shard.file)))?;
    Ok((files.iter().map(|file| file.size).sum(), seconds))
}

fn write(run: &Path, rank: u32, ranks: u32, held: &[Held<'_>]) -> Result<Vec<Written>, Failure> {
    let writer = ShardWriter::new(run, NAME);
    let mut written = Vec::new();
    for section in [Section::Model, Section::Optim] {
        let views: Vec<TensorView<'_>> = held
            .iter()
            .filter(|held| held.section == section)
            .map(|held| TensorView {
                name: &held.name,
                dtype: "F32",
                shape: held.shape,
                bytes: &held.bytes,
                slice: None,
            })
            .collect();
        written.push(writer.write_shard(ShardName { section, rank, world_size: ranks, generation: 1 }, &views, &[])?);
    }
    Ok(written)
}

fn load(run: &Path, ranks: u32, parameters: &[Parameter]) -> Result<(u64, f64), Failure> {
    let parameters: Vec<&Parameter> = parameters.iter().collect();
    let mut states: Vec<Vec<Held<'_>>> = (0..ranks).map(|_| state(&parameters)).collect();
    let bytes = states[0].iter().map(|held| held.bytes.len() as u64).sum();
    let started = Instant::now();
    thread::scope(|scope| {
        let read = |index: u32, held: &mut Vec<Held<'_>>| -> Result<(), Failure> {
            let reader = ShardReader::open(run, NAME, None)?.with_peers(Peers { index, count: ranks });
            let names: Vec<String> =
                held.iter().map(|held| format!("{}/{}", held.section.folder(), held.name)).collect();
            let outs = names.iter().zip(held);
            reader.read_into(outs.map(|(name, held)| Read { name, part: Part::Whole, out: &mut held.bytes }))?;
            Ok(())
        };
        let threads: Vec<_> =
            (0..).zip(&mut states).map(|(rank, held)| scope.spawn(move || read(rank, held))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a rank panicked")?)
    })?;
    Ok((bytes, started.elapsed().as_secs_f64()))
}
