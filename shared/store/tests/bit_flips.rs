//! One flipped bit anywhere in any file of a checkpoint is noticed by verify and by a load, and the message says where.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use trainctl_store::checkpoints::{CheckpointStore, Depth, ResolveOptions, Selector};
use trainctl_store::layout::{CheckpointName, Section, ShardName};
use trainctl_store::manifest::{FORMAT, Manifest};
use trainctl_store::shard::{Part, Read, ShardReader, ShardWriter, TensorView, Written};
use trainctl_store::{Error, Unfenced, state_hash};

const NAME: CheckpointName = CheckpointName { epoch: 0, step: 9 };
const FLIPS: usize = 200;

/// Tensors of a rank: one longer than a block of 8 MiB, some that share a block, odd sizes, another dtype.
const SHAPES: [(&str, &str, &[u64]); 5] = [
    ("wte.weight", "F32", &[1200, 2000]),
    ("h.0.ln.weight", "F32", &[777]),
    ("h.0.attn.weight", "BF16", &[64, 33]),
    ("h.0.mlp.weight", "F32", &[300, 200]),
    ("scalar", "F32", &[]),
];

fn seed() -> u64 {
    let seed = std::env::var("TRAINCTL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) ^ 0x5EED_0000);
    println!("seed: TRAINCTL_SEED={seed}");
    seed
}

/// A committed checkpoint of two ranks.
async fn checkpoint(root: &Path, random: &mut StdRng) -> Manifest {
    let mut files = Vec::new();
    let mut digests = Vec::new();
    for rank in 0..2 {
        for section in [Section::Model, Section::Optim] {
            // The long tensor lies in one of the shards, so that the others are quick to read.
            let shapes = if files.is_empty() { &SHAPES[..] } else { &SHAPES[1..] };
            let names: Vec<String> = shapes.iter().map(|(name, ..)| format!("r{rank}.{name}")).collect();
            let contents: Vec<Vec<u8>> = shapes
                .iter()
                .map(|(_, dtype, shape)| {
                    let size = state_hash::element_bytes(dtype).unwrap() as u64 * state_hash::elements(shape);
                    let mut bytes = vec![0; size as usize];
                    random.fill(bytes.as_mut_slice());
                    bytes
                })
                .collect();
            let views: Vec<TensorView<'_>> = shapes
                .iter()
                .zip(names.iter().zip(&contents))
                .map(|((_, dtype, shape), (name, bytes))| TensorView { name, dtype, shape, bytes, slice: None })
                .collect();
            let shard = ShardName { section, rank, world_size: 2, generation: 1 };
            let Written { file, tensors } = ShardWriter::new(root, NAME).write_shard(shard, &views, &[]).unwrap();
            files.push(file);
            digests.extend(tensors);
        }
    }
    files.push(ShardWriter::new(root, NAME).write_bytes("optim/trainer.json", b"{\"step\": 9, \"epoch\": 0}").unwrap());
    let draft: Manifest = serde_json::from_value(serde_json::json!({
        "format": FORMAT, "name": NAME, "generation": 1, "term": 1, "step": NAME.step, "epoch": NAME.epoch,
        "consumed_samples": 80, "world_size": 2, "state_hash": state_hash::combine(&digests).unwrap(),
        "spec_hash": "", "max_steps": 10, "created_at": "", "files": files,
        "metrics": {"train_loss": 3.5},
    }))
    .unwrap();
    let store = CheckpointStore::open(root);
    store.commit(&Unfenced, draft, "seed: 1\noptimizer: adamw\n").await.unwrap().committed().manifest.clone()
}

/// What a rank does: everything is read.
fn load(root: &Path) -> Result<(), Error> {
    let reader = ShardReader::open(root, NAME, None)?;
    let names = reader.in_file_order();
    let mut buffers: Vec<Vec<u8>> =
        names.iter().map(|name| vec![0; reader.info(name).unwrap().bytes() as usize]).collect();
    reader.read_into(names.iter().zip(&mut buffers).map(|(name, out)| Read { name, part: Part::Whole, out }))
}

/// Where in a shard a byte lies: `None` in the header, else the tensor, as the file itself says.
fn tensor_at(file: &[u8], section: &str, at: usize) -> Option<String> {
    let (header_size, metadata) = safetensors::SafeTensors::read_metadata(file).unwrap();
    let at = at.checked_sub(8 + header_size)?;
    let holds = |info: &safetensors::tensor::TensorInfo| (info.data_offsets.0..info.data_offsets.1).contains(&at);
    let found = metadata.tensors().into_iter().find(|(_, info)| holds(info));
    Some(format!("{section}/{}", found.unwrap().0))
}

#[tokio::test]
async fn every_flipped_bit_is_noticed_and_named() {
    let mut random = StdRng::seed_from_u64(seed());
    let dir = tempfile::tempdir().unwrap();
    let manifest = checkpoint(dir.path(), &mut random).await;
    load(dir.path()).unwrap();
    let store = CheckpointStore::open(dir.path());
    let mut paths: Vec<String> = manifest.files.iter().map(|file| file.path.clone()).collect();
    paths.push("manifest.json".into());
    assert_eq!(paths.len(), 8, "four shards, trainer.json, config.yaml, losses.json, manifest.json");
    let mut originals: BTreeMap<&String, Vec<u8>> = BTreeMap::new();
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for n in 0..FLIPS {
        // Each file in turn, then any. Headers are short and would hardly be hit by chance.
        let path = if n < 3 * paths.len() { &paths[n % paths.len()] } else { paths.choose(&mut random).unwrap() };
        let on_disk = dir.path().join(NAME.to_string()).join(path);
        let original = originals.entry(path).or_insert_with(|| std::fs::read(&on_disk).unwrap());
        let file = File::options().write(true).open(&on_disk).unwrap();
        let header = manifest.file(path).and_then(|file| file.header.as_ref()).map(|header| header.size as usize);
        let range = header.filter(|_| n % 4 == 0).unwrap_or(original.len());
        let (at, bit) = (random.random_range(0..range), random.random_range(0..8));
        file.write_all_at(&[original[at] ^ 1 << bit], at as u64).unwrap();
        let flip = format!("bit {bit} of byte {at} of {path}");

        let verified = match store.verify(NAME, &|_, _| {}).await {
            Ok(verified) => verified.faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
            Err(error) => error.to_string(),
        };
        let loaded = load(dir.path()).expect_err(&flip).to_string();
        let section = path.split('/').next().unwrap();
        let wanted = match header {
            Some(_) => {
                let tensor = tensor_at(original, section, at);
                *kinds.entry(if tensor.is_none() { "header" } else { "tensor" }).or_default() += 1;
                tensor.unwrap_or_else(|| "header".to_owned())
            }
            None => {
                *kinds.entry(path.as_str()).or_default() += 1;
                path.clone()
            }
        };
        for (who, message) in [("verify", verified), ("load", loaded)] {
            assert!(message.contains(path.as_str()), "{who} does not name the file of {flip}: {message}");
            assert!(message.contains(&wanted), "{who} does not name {wanted} for {flip}: {message}");
        }
        // With every byte looked at, the damaged one is not what a resume starts from.
        if n == 0 {
            let options = ResolveOptions { depth: Depth::Hashes, ..ResolveOptions::default() };
            assert!(store.resolve(Selector::Latest, &options).await.is_err(), "{flip}");
        }
        file.write_all_at(&original[at..=at], at as u64).unwrap();
    }
    println!("flips by kind: {kinds:?}");
    assert_eq!(kinds.len(), 6, "every kind of file was hit");
    assert!(store.verify(NAME, &|_, _| {}).await.unwrap().faults.is_empty() && load(dir.path()).is_ok());
}
