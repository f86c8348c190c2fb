//! Reading: only the blocks that are needed, and never a byte that was not written.

use crate::scene::{Scene, tail};

#[test]
fn a_rank_downloads_only_the_blocks_that_it_needs() {
    let scene = Scene::new();
    scene.must("save-large", "run");
    let before = scene.server.requests().len();
    scene.must("read model/w1", "run");
    let requests = scene.server.requests().split_off(before);
    let shards: Vec<_> = requests.iter().filter(|r| r.method == "GET" && r.path.contains(".safetensors")).collect();
    assert!(shards.iter().all(|request| request.bounds().is_some()), "only ranges: {shards:?}");
    let read = |rank: &str| -> u64 {
        let of_rank = shards.iter().filter(|request| request.path.contains(rank)).filter_map(|r| r.bounds());
        of_rank.map(|(first, last)| last - first + 1).sum()
    };
    let (own, other) = (read("shard-00001-"), read("shard-00000-"));
    assert!(own >= 40 << 20, "its own shard: {own} bytes");
    assert!(other <= 8 << 20, "of the other shard the header's block and no more: {other} bytes");
}

#[test]
fn a_flipped_bit_is_found_by_verify_and_by_load() {
    let scene = Scene::new();
    scene.must("save-large", "run");
    let shard = scene.server.keys().into_iter().find(|key| key.contains("shard-00001-of-00002")).unwrap();
    let path = scene.server.object(&shard);
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let verified = scene.must("verify", "run");
    assert!(verified.contains("fault: model/shard-00001"), "{}", tail(&verified));
    let read = scene.must("read model/w0,model/w1", "run");
    assert!(read.contains("blake3 of model/w0") && read.contains("refused: s3://checkpoints/run/"), "{}", tail(&read));
}
