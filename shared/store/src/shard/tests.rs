use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::checkpoints::CheckpointStore;
use crate::layout::{CheckpointName, Section, ShardName};
use crate::manifest::{Manifest, tests::example};
use crate::state_hash;
use crate::{Error, Unfenced};

fn view<'a>(name: &'a str, shape: &'a [u64], bytes: &'a [u8]) -> TensorView<'a> {
    TensorView { name, dtype: "F32", shape, bytes, slice: None }
}

fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count * 4).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn shard(rank: u32, world_size: u32) -> String {
    ShardName { section: Section::Model, rank, world_size, generation: 2 }.to_string()
}

/// Commits a checkpoint of the given files.
fn commit(root: &Path, step: u64, files: Vec<trainctl_spec::report::ShardFile>) -> CheckpointName {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let draft = Manifest { files, ..example(step, None) };
    let outcome = runtime.block_on(CheckpointStore::open(root).commit(&Unfenced, draft, "seed: 1\n")).unwrap();
    outcome.committed().name()
}

#[test]
fn the_formats_own_reader_reads_our_files() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ShardWriter::new(dir.path(), CheckpointName { epoch: 0, step: 3 });
    let (weights, half) = (bytes(6, 1), bytes(1, 2));
    let tensors =
        [TensorView { name: "h", dtype: "BF16", shape: &[2], bytes: &half, slice: None }, view("w", &[2, 3], &weights)];
    let record = writer.write_safetensors(&shard(0, 1), &tensors, &[("step", "3")]).unwrap();
    let file = std::fs::read(dir.path().join("epoch_0_step_3").join(&record.path)).unwrap();
    assert_eq!(record.size, file.len() as u64);
    assert_eq!(record.blake3, blake3::hash(&file).to_hex().as_str());
    assert_eq!(record.block_blake3, Vec::<String>::new(), "one block: its hash is the file's");
    let header = record.header.as_ref().unwrap();
    assert_eq!(header.size % 4096, 0, "tensors begin at a page");
    assert_eq!(header.blake3, blake3::hash(&file[..header.size as usize]).to_hex().as_str());
    let read = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(read.tensor("w").unwrap().data(), weights);
    assert_eq!(read.tensor("w").unwrap().shape(), [2, 3]);
    assert_eq!(read.tensor("h").unwrap().dtype(), safetensors::Dtype::BF16);
    let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["step"], "3");
}

#[test]
fn pytorchs_reader_finds_where_a_piece_belongs() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ShardWriter::new(dir.path(), CheckpointName { epoch: 0, step: 3 });
    let rows = bytes(6, 1);
    let piece =
        TensorView { slice: Some(Slice { shape: vec![5, 3], offset: vec![2, 0] }), ..view("w", &[2, 3], &rows) };
    let record = writer.write_safetensors(&shard(0, 2), &[piece, view("b", &[6], &rows)], &[]).unwrap();
    let file = std::fs::read(dir.path().join("epoch_0_step_3").join(&record.path)).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
    // As torch/distributed/checkpoint/hf_storage.py of PyTorch 2.13 reads it; `make oracle` runs that reader.
    let offsets = &header.metadata().as_ref().unwrap()["DCP_SHARDING_INFO"];
    let expected = serde_json::json!({"b": {"saved_offsets": [0]}, "w": {"saved_offsets": [2, 0]}});
    assert_eq!(serde_json::from_str::<serde_json::Value>(offsets).unwrap(), expected);
}

#[test]
fn files_of_several_blocks_are_written_in_order_and_hashed_as_one() {
    let dir = tempfile::tempdir().unwrap();
    for threads in 1..4 {
        let threads = std::num::NonZeroUsize::new(threads).unwrap();
        let writer = ShardWriter::new(dir.path(), CheckpointName { epoch: 0, step: 3 }).with_threads(threads);
        let content: Vec<u8> = (0..2 * BLOCK_BYTES + 5).map(|i| (i / 1000) as u8).collect();
        let record = writer.write_bytes("optim/big", &content).unwrap();
        assert_eq!(std::fs::read(dir.path().join("epoch_0_step_3/optim/big")).unwrap(), content);
        let mut hasher = FileHasher::default();
        hasher.update(&content);
        assert_eq!(record, hasher.finish("optim/big"));
        assert_eq!(record.blake3, blake3::hash(&content).to_hex().as_str());
        assert_eq!(record.block_blake3.len(), 3);
        let empty = writer.write_bytes("optim/empty", &[]).unwrap();
        assert_eq!((empty.size, empty.block_blake3), (0, vec![]));
        assert_eq!(empty.blake3, blake3::hash(&[]).to_hex().as_str());
    }
}

#[test]
fn digests_of_a_shard_are_those_of_its_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ShardWriter::new(dir.path(), CheckpointName { epoch: 0, step: 3 });
    // Unaligned on purpose: state blocks lie across the borders of pieces and of file blocks.
    let (odd, big, half) = (bytes(1025, 1), bytes(BLOCK_BYTES / 2 + 300, 2), bytes(1500, 3));
    let tensors = [
        view("big", &[BLOCK_BYTES as u64 / 2 + 300], &big),
        view("a.odd", &[1025], &odd),
        view("none", &[0, 7], &[]),
        TensorView { name: "half", dtype: "BF16", shape: &[3000], bytes: &half, slice: None },
    ];
    let shard = ShardName { section: Section::Optim, rank: 0, world_size: 1, generation: 2 };
    let written = writer.write_shard(shard, &tensors, &[]).unwrap();
    for (view, digest) in tensors.iter().zip(&written.tensors) {
        let name = format!("optim/{}", view.name);
        let expected = state_hash::whole_tensor(&name, view.dtype, view.shape, view.bytes).unwrap();
        assert_eq!(digest, &expected, "{name}");
    }
    let name = commit(dir.path(), 3, vec![written.file]);
    let reader = ShardReader::open(dir.path(), name, None).unwrap();
    assert_eq!(reader.state_hash().unwrap(), state_hash::combine(&written.tensors).unwrap());
}

#[test]
fn pieces_between_state_blocks_have_digests_and_others_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let shape = [70, 96];
    let whole = bytes(70 * 96, 9);
    let cuts = state_hash::row_cuts(&shape, 3);
    assert_eq!(cuts, [0..32, 32..64, 64..70], "1,024 elements are 10.7 rows, so cuts are at multiples of 32 rows");
    let shard = |rank| ShardName { section: Section::Model, rank, world_size: 3, generation: 2 };
    let writer = ShardWriter::new(dir.path(), CheckpointName { epoch: 0, step: 3 });
    let write = |rank, rows: std::ops::Range<u64>| {
        let piece = &whole[rows.start as usize * 384..rows.end as usize * 384];
        let slice = Some(Slice { shape: shape.to_vec(), offset: vec![rows.start, 0] });
        let piece_shape = [rows.end - rows.start, 96];
        writer.write_shard(shard(rank), &[TensorView { slice, ..view("w", &piece_shape, piece) }], &[])
    };
    let written: Vec<_> = (0..).zip(cuts).map(|(rank, rows)| write(rank, rows).unwrap()).collect();
    let digests: Vec<_> = written.iter().flat_map(|written| &written.tensors).collect();
    assert_eq!(digests[2].first_block, 6);
    let expected = state_hash::whole_tensor("model/w", "F32", &shape, &whole).unwrap();
    assert_eq!(state_hash::combine(digests).unwrap(), state_hash::combine([&expected]).unwrap());
    let error = write(0, 0..10).unwrap_err().to_string();
    assert!(error.contains("not cut between blocks"), "{error}");
}

#[test]
fn contradictory_views_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ShardWriter::new(dir.path(), CheckpointName { epoch: 0, step: 3 });
    let data = bytes(6, 0);
    let beyond = Slice { shape: vec![2, 4], offset: vec![0, 2] };
    for (tensors, what) in [
        (vec![view("w", &[2, 2], &data)], "needs 16"),
        (vec![view("w", &[6], &data), view("w", &[6], &data)], "twice"),
        (vec![TensorView { dtype: "F31", ..view("w", &[6], &data) }], "F31"),
        (vec![TensorView { slice: Some(beyond), ..view("w", &[2, 3], &data) }], "beyond"),
    ] {
        let error = writer.write_safetensors(&shard(0, 1), &tensors, &[]).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_damaged_block_is_noticed_where_it_is_read_and_nowhere_else() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let writer = ShardWriter::new(root, CheckpointName { epoch: 0, step: 3 });
    let (a, b) = (bytes(BLOCK_BYTES / 4, 1), bytes(BLOCK_BYTES / 4, 2));
    let shape = [BLOCK_BYTES as u64 / 4];
    let record = writer.write_safetensors(&shard(0, 1), &[view("a", &shape, &a), view("b", &shape, &b)], &[]).unwrap();
    let name = commit(root, 3, vec![record.clone()]);
    let path = root.join(name.to_string()).join(&record.path);
    let mut file = std::fs::read(&path).unwrap();
    let last = file.len() - 1;
    file[last] ^= 1;
    std::fs::write(&path, file).unwrap();
    let reader = ShardReader::open(root, name, None).unwrap();
    let mut out = vec![0; BLOCK_BYTES];
    reader.read_tensor("model/a", &mut out).unwrap();
    assert_eq!(out, a);
    let error = reader.read_tensor("model/b", &mut out).unwrap_err();
    assert!(matches!(&error, Error::Damaged { reason, .. } if reason.contains("where tensor model/b lies")), "{error}");
}

#[test]
fn of_peers_exactly_one_proves_each_block() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let writer = ShardWriter::new(root, CheckpointName { epoch: 0, step: 3 });
    let (a, b) = (bytes(BLOCK_BYTES / 2, 1), bytes(BLOCK_BYTES / 2, 2));
    let shape = [BLOCK_BYTES as u64 / 2];
    let records = [("a", &a, 0), ("b", &b, 1)].map(|(name, bytes, rank)| {
        writer.write_safetensors(&shard(rank, 2), &[view(name, &shape, bytes)], &[]).unwrap()
    });
    let name = commit(root, 3, records.to_vec());
    let load = |peers| {
        let reader = ShardReader::open(root, name, None).unwrap().with_peers(peers);
        let mut out = [vec![0; a.len()], vec![0; b.len()]];
        let reads = ["model/a", "model/b"].into_iter().zip(&mut out);
        reader.read_into(reads.map(|(name, out)| Read { name, part: Part::Whole, out })).map(|()| out)
    };
    for count in [1, 2, 3] {
        for index in 0..count {
            let out = load(Peers { index, count }).unwrap();
            assert!(out == [a.clone(), b.clone()], "{index} of {count}");
        }
    }
    for record in &records {
        let path = root.join(name.to_string()).join(&record.path);
        let whole = std::fs::read(&path).unwrap();
        let header = record.header.as_ref().unwrap().size as usize;
        for at in (0..whole.len()).step_by(BLOCK_BYTES).map(|block| block.max(header)).chain([whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 16;
            std::fs::write(&path, damaged).unwrap();
            for count in [1, 2, 3] {
                let loads: Vec<_> = (0..count).map(|index| load(Peers { index, count })).collect();
                assert_eq!(loads.iter().filter(|load| load.is_err()).count(), 1, "byte {at} with {count} peers");
            }
            for peers in [Peers { index: 7, count: 2 }, Peers { index: 0, count: 0 }] {
                assert!(load(peers).is_err(), "{peers:?} proves everything");
            }
        }
        std::fs::write(&path, whole).unwrap();
    }
}

#[test]
fn reading_names_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let name = CheckpointName { epoch: 0, step: 3 };
    assert!(matches!(ShardReader::open(dir.path(), name, None), Err(Error::NotCommitted { .. })));
    let data = bytes(6, 1);
    let half = TensorView { slice: Some(Slice { shape: vec![12], offset: vec![0] }), ..view("half", &[6], &data) };
    let writer = ShardWriter::new(dir.path(), name);
    let record = writer.write_safetensors(&shard(0, 1), &[half], &[]).unwrap();
    commit(dir.path(), 3, vec![record]);
    let error = ShardReader::open(dir.path(), name, None).unwrap_err().to_string();
    assert!(error.contains("6 of 12"), "{error}");
    let other = ShardReader::open(dir.path(), name, Some("00")).unwrap_err();
    assert!(matches!(other, Error::OtherManifest { .. }), "C9: exactly the named manifest");

    let name = CheckpointName { epoch: 0, step: 4 };
    let writer = ShardWriter::new(dir.path(), name);
    let record = writer.write_safetensors(&shard(0, 1), &[view("w", &[6], &data)], &[]).unwrap();
    let extra = writer.write_bytes("optim/trainer.json", b"{}").unwrap();
    commit(dir.path(), 4, vec![record, extra]);
    let reader = ShardReader::open(dir.path(), name, None).unwrap();
    assert_eq!(reader.read_file("optim/trainer.json").unwrap().as_deref(), Some(&b"{}"[..]));
    assert_eq!(reader.read_trainer_state().unwrap().as_deref(), Some(&b"{}"[..]), "its name of before");
    assert_eq!(reader.read_file("optim/other.json").unwrap(), None);
    assert!(reader.read_tensor("model/x", &mut []).unwrap_err().to_string().contains("not in this checkpoint"));
    assert!(reader.read_tensor("model/w", &mut [0; 3]).unwrap_err().to_string().contains("24 bytes"));
    let mut out = [0; 24];
    reader.read_tensor("model/w", &mut out).unwrap();
    assert_eq!(out[..], data);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// C8: however a tensor is cut along two axes over ranks, it reads as one, and its state hash is the same.
    #[test]
    fn any_cut_reads_back_as_the_whole(
        shape in prop::array::uniform3(1u64..5), cut_first in 0u64..5, cut_last in 0u64..5, seed in any::<u8>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let name = CheckpointName { epoch: 0, step: 3 };
        let writer = ShardWriter::new(dir.path(), name);
        let [x, y, z] = shape;
        let whole = bytes((x * y * z) as usize, seed);
        let (a, c) = (cut_first.min(x), cut_last.min(z));
        let mut files = Vec::new();
        for (rank, (xs, zs)) in [(0..a, 0..c), (0..a, c..z), (a..x, 0..c), (a..x, c..z)].into_iter().enumerate() {
            let mut piece = Vec::new();
            for i in xs.clone() {
                for j in 0..y {
                    for k in zs.clone() {
                        let at = (((i * y + j) * z + k) * 4) as usize;
                        piece.extend_from_slice(&whole[at..at + 4]);
                    }
                }
            }
            let piece_shape = [xs.end - xs.start, y, zs.end - zs.start];
            let slice = Some(Slice { shape: shape.to_vec(), offset: vec![xs.start, 0, zs.start] });
            let tensor = TensorView { slice, ..view("w", &piece_shape, &piece) };
            files.push(writer.write_safetensors(&shard(rank as u32, 4), &[tensor], &[]).unwrap());
        }
        commit(dir.path(), 3, files);
        let reader = ShardReader::open(dir.path(), name, None).unwrap();
        let mut out = vec![0; whole.len()];
        reader.read_tensor("model/w", &mut out).unwrap();
        prop_assert_eq!(&out, &whole);
        let (from, to) = (cut_last.min(x), cut_first.min(x).max(cut_last.min(x)));
        let mut rows = vec![0; ((to - from) * y * z * 4) as usize];
        let corner = [a.min(x - 1), 0, c.min(z - 1)];
        let extent = [x - corner[0], y, z - corner[2]];
        let mut part = vec![0; (extent.iter().product::<u64>() * 4) as usize];
        reader.read_into([
            Read { name: "model/w", part: Part::Rows(from..to), out: &mut rows },
            Read { name: "model/w", part: Part::Box { offset: corner.into(), shape: extent.into() }, out: &mut part },
        ]).unwrap();
        prop_assert_eq!(&rows, &whole[(from * y * z * 4) as usize..(to * y * z * 4) as usize]);
        let mut expected = Vec::new();
        for i in corner[0]..x {
            for j in 0..y {
                for k in corner[2]..z {
                    let at = (((i * y + j) * z + k) * 4) as usize;
                    expected.extend_from_slice(&whole[at..at + 4]);
                }
            }
        }
        prop_assert_eq!(part, expected);
        let report = state_hash::whole_tensor("model/w", "F32", &shape, &whole).unwrap();
        prop_assert_eq!(reader.state_hash().unwrap(), state_hash::combine([&report]).unwrap());
    }
}
