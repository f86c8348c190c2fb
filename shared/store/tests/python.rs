//! The second implementation of state_hash, in Python over the safetensors files, gives the same hash.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use std::path::Path;
use std::process::Command;

use trainctl_store::layout::{CheckpointName, Section, ShardName};
use trainctl_store::manifest::{FORMAT, Manifest, Metrics};
use trainctl_store::shard::{ShardReader, ShardWriter, Slice, TensorView};
use trainctl_store::{CheckpointStore, Unfenced, state_hash};

/// The interpreter, or `None` after saying what is missing.
fn python() -> Option<String> {
    let python = std::env::var("TRAINCTL_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = Command::new(&python).args(["-c", "import blake3"]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    let required = std::env::var("TRAINCTL_REQUIRE").unwrap_or_default();
    assert!(
        required.split(',').all(|what| what != "python"),
        "{python} has no module blake3: run `{python} -m pip install blake3`, or name another one in TRAINCTL_PYTHON"
    );
    println!(
        "skipped: {python} has no module blake3; `{python} -m pip install blake3` (TRAINCTL_PYTHON names another)"
    );
    None
}

fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count).map(|i| (i as u8).wrapping_mul(29).wrapping_add(seed)).collect()
}

#[tokio::test]
async fn python_agrees() {
    let Some(python) = python() else { return };
    let dir = tempfile::tempdir().unwrap();
    let name = CheckpointName { epoch: 0, step: 9 };
    let writer = ShardWriter::new(dir.path(), name);
    let shard = |section, rank| ShardName { section, rank, world_size: 2, generation: 2 }.to_string();
    let embedding = bytes(50 * 60 * 4, 1);
    // The second axis is cut in the middle, as tensor parallelism does.
    let half = |right: usize| -> Vec<u8> {
        embedding.chunks(60 * 4).flat_map(|row| &row[right * 120..][..120]).copied().collect()
    };
    let halves = [half(0), half(1)];
    let (norm, scalar, moment, odd) = (bytes(60 * 2, 2), bytes(4, 3), bytes(5000 * 4, 4), bytes(1025 * 4, 5));
    let view = |name, dtype, shape, bytes| TensorView { name, dtype, shape, bytes, slice: None };
    let mut files = Vec::new();
    for rank in 0..2u32 {
        let slice = Slice { shape: vec![50, 60], offset: vec![0, u64::from(rank) * 30] };
        let cut = TensorView { slice: Some(slice), ..view("wte.weight", "F32", &[50, 30], &halves[rank as usize]) };
        let mut tensors = vec![cut];
        if rank == 0 {
            tensors.push(view("größe", "BF16", &[60], &norm));
            tensors.push(view("scalar", "F32", &[], &scalar));
            tensors.push(view("none", "F32", &[0, 7], &[]));
        }
        files.push(writer.write_safetensors(&shard(Section::Model, rank), &tensors, &[]).unwrap());
    }
    let optim = [view("exp_avg.wte.weight", "F32", &[5, 1000], &moment), view("odd", "F32", &[1025], &odd)];
    files.push(writer.write_safetensors(&shard(Section::Optim, 1), &optim, &[]).unwrap());
    files.push(writer.write_bytes("optim/trainer.json", b"{}").unwrap());
    let whole = |name, dtype, shape: &[u64], bytes| state_hash::whole_tensor(name, dtype, shape, bytes).unwrap();
    let reported = state_hash::combine(&[
        whole("model/wte.weight", "F32", &[50, 60], &embedding),
        whole("model/größe", "BF16", &[60], &norm),
        whole("model/scalar", "F32", &[], &scalar),
        whole("model/none", "F32", &[0, 7], &[]),
        whole("optim/exp_avg.wte.weight", "F32", &[5, 1000], &moment),
        whole("optim/odd", "F32", &[1025], &odd),
    ])
    .unwrap();
    commit(dir.path(), name, &reported, files).await;

    assert_eq!(ShardReader::open(dir.path(), name, None).unwrap().state_hash().unwrap(), reported);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/state_hash.py");
    let output = Command::new(python).arg(script).arg(dir.path().join(name.to_string())).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), reported);
}

async fn commit(root: &Path, name: CheckpointName, state_hash: &str, files: Vec<trainctl_spec::report::ShardFile>) {
    let draft = Manifest {
        format: FORMAT,
        name,
        job: String::new(),
        generation: 2,
        term: 1,
        step: name.step,
        epoch: 0,
        consumed_samples: 80,
        world_size: 2,
        mesh: vec![],
        skipped: vec![],
        metrics: Metrics::default(),
        state_hash: state_hash.to_owned(),
        spec_hash: String::new(),
        max_steps: 10,
        until_step: None,
        started_from: None,
        kind: Default::default(),
        parent: None,
        phase: Default::default(),
        corpora: Default::default(),
        created_at: String::new(),
        files,
    };
    CheckpointStore::open(root).commit(&Unfenced, draft, "seed: 1\n").await.unwrap();
}
