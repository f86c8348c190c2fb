//! One BLAKE3 tree gives the hash of a file and a value for each of its blocks.
//!
//! Blocks are 8 MiB of the file (the last may be short), which are complete subtrees of BLAKE3's tree. Their chaining values
//! stand in the manifest, and merged they give the file's hash; so bytes are hashed once, blocks can be hashed in any
//! order by any number of threads, and a block that is read proves itself. A file of one block has no values: its hash
//! is that of the block.
//!
//! Manifests of format 1 have the plain BLAKE3 hash of each block instead.

use blake3::hazmat::{ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};
use blake3::{Hash, Hasher};
use trainctl_spec::report::{FileHeader, ShardFile};

/// Bytes of a block: the least that can be read with proof.
pub const BLOCK_BYTES: usize = 8 << 20;

/// How many blocks a file of `size` bytes has.
pub(crate) fn block_count(size: u64) -> u64 {
    size.div_ceil(BLOCK_BYTES as u64)
}

/// A hasher for the block `block` of a file.
pub(super) fn block_hasher(block: u64) -> Hasher {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(block * BLOCK_BYTES as u64);
    hasher
}

/// The record of a file whose blocks have been hashed.
pub(super) fn record(path: &str, size: u64, blocks: &[Hasher], header: Option<FileHeader>) -> ShardFile {
    let (blake3, block_blake3) = match blocks {
        [] => (blake3::hash(&[]), Vec::new()),
        [only] => (only.finalize(), Vec::new()),
        blocks => {
            let values: Vec<ChainingValue> = blocks.iter().map(Hasher::finalize_non_root).collect();
            (root(&values), values.iter().map(|value| Hash::from_bytes(*value).to_hex().to_string()).collect())
        }
    };
    ShardFile { path: path.to_owned(), size, blake3: blake3.to_hex().to_string(), block_blake3, header }
}

/// The hash of a file from the values of its blocks, of which there are at least two.
fn root(values: &[ChainingValue]) -> Hash {
    let (left, right) = values.split_at(left_count(values.len()));
    merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
}

fn subtree(values: &[ChainingValue]) -> ChainingValue {
    match values {
        [only] => *only,
        values => {
            let (left, right) = values.split_at(left_count(values.len()));
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// Blocks of the left subtree. The last block may be short, which leaves the shape of the tree above the blocks as it is.
fn left_count(blocks: usize) -> usize {
    (left_subtree_len(blocks as u64 * BLOCK_BYTES as u64) / BLOCK_BYTES as u64) as usize
}

/// Hashes a file that is written or read from its start to its end.
#[derive(Clone, Debug, Default)]
pub struct FileHasher {
    size: u64,
    /// The last one takes the next bytes.
    blocks: Vec<Hasher>,
}

impl FileHasher {
    /// Adds the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let in_block = (self.size % BLOCK_BYTES as u64) as usize;
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - in_block));
            if in_block == 0 {
                self.blocks.push(block_hasher(self.blocks.len() as u64));
            }
            if let Some(block) = self.blocks.last_mut() {
                block.update(now);
            }
            self.size += now.len() as u64;
            bytes = later;
        }
    }

    /// The record of the file.
    pub fn finish(self, path: &str) -> ShardFile {
        record(path, self.size, &self.blocks, None)
    }
}

/// Whether the record of a file in a manifest of this format is consistent in itself.
///
/// # Errors
/// In which way it is not.
pub(crate) fn check_record(format: u32, file: &ShardFile) -> Result<(), String> {
    if let Some(header) = file.header.as_ref().filter(|header| !(8..=file.size).contains(&header.size)) {
        return Err(format!("the record of {} has a header of {} bytes in {}", file.path, header.size, file.size));
    }
    let count = block_count(file.size);
    let values = file.block_blake3.iter().map(|value| Hash::from_hex(value).map(Into::into));
    let values: Vec<ChainingValue> =
        values.collect::<Result<_, _>>().map_err(|e| format!("the record of {} has a bad hash: {e}", file.path))?;
    let expected = if format >= 2 && count < 2 { 0 } else { count };
    if values.len() as u64 != expected {
        let found = values.len();
        return Err(format!("the record of {} has {found} block hashes instead of {expected}", file.path));
    }
    let consistent = match (format, count) {
        (0 | 1, _) | (_, 1) => true,
        (_, 0) => file.blake3 == blake3::hash(&[]).to_hex().as_str(),
        _ => file.blake3 == root(&values).to_hex().as_str(),
    };
    if consistent { Ok(()) } else { Err(format!("the record of {} has the block hashes of another file", file.path)) }
}

/// What the blocks of one file are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proof<'a> {
    format: u32,
    file: &'a ShardFile,
}

impl<'a> Proof<'a> {
    /// From a manifest's format and its record of the file, which [`check_record`] has found consistent.
    pub(crate) fn new(format: u32, file: &'a ShardFile) -> Self {
        Self { format, file }
    }

    /// The record.
    pub(crate) fn file(&self) -> &'a ShardFile {
        self.file
    }

    /// A hasher for the bytes of a block.
    pub(crate) fn hasher(&self, block: u64) -> Hasher {
        if self.format >= 2 { block_hasher(block) } else { Hasher::new() }
    }

    /// Whether the hasher has seen the bytes of this block.
    pub(crate) fn holds(&self, block: u64, hasher: &Hasher) -> bool {
        let expected = self.file.block_blake3.get(block as usize).unwrap_or(&self.file.blake3);
        let found = if self.format >= 2 && block_count(self.file.size) > 1 {
            Hash::from_bytes(hasher.finalize_non_root())
        } else {
            hasher.finalize()
        };
        found.to_hex().as_str() == expected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(size: usize) -> Vec<u8> {
        (0..size as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
    }

    #[test]
    fn one_pass_gives_the_hash_of_the_file_and_of_its_blocks() {
        let bytes = content(5 * BLOCK_BYTES + 3000);
        let block = BLOCK_BYTES;
        for size in [0, 1, 1023, 1024, 1025, 5000, block - 1, block, block + 1, 2 * block, 3 * block - 1024, 3 * block]
            .into_iter()
            .chain([3 * block + 1, 4 * block, 5 * block - 1, 5 * block + 2999])
        {
            let bytes = &bytes[..size];
            let mut hasher = FileHasher::default();
            bytes.chunks(3 * block / 2 + 77).for_each(|piece| hasher.update(piece));
            let file = hasher.finish("x");
            assert_eq!(file.blake3, blake3::hash(bytes).to_hex().as_str(), "{size} bytes");
            assert_eq!(file.size, size as u64);
            assert_eq!(file.block_blake3.len(), if size <= block { 0 } else { size.div_ceil(block) });
            check_record(2, &file).unwrap();
            let proof = Proof::new(2, &file);
            for (n, piece) in bytes.chunks(block).enumerate() {
                let mut hasher = proof.hasher(n as u64);
                hasher.update(piece);
                assert!(proof.holds(n as u64, &hasher), "block {n} of {size} bytes");
                let mut hasher = proof.hasher(n as u64);
                let mut flipped = piece.to_vec();
                flipped[piece.len() / 2] ^= 4;
                hasher.update(&flipped);
                assert!(!proof.holds(n as u64, &hasher), "a flipped bit in block {n} of {size} bytes");
            }
        }
    }

    #[test]
    fn manifests_of_format_1_prove_their_blocks() {
        let bytes = content(BLOCK_BYTES + 10);
        let plain = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
        let block_blake3 = bytes.chunks(BLOCK_BYTES).map(plain).collect();
        let file =
            ShardFile { path: "x".into(), size: bytes.len() as u64, blake3: plain(&bytes), block_blake3, header: None };
        check_record(1, &file).unwrap();
        let proof = Proof::new(1, &file);
        for (n, piece) in bytes.chunks(BLOCK_BYTES).enumerate() {
            let mut hasher = proof.hasher(n as u64);
            hasher.update(piece);
            assert!(proof.holds(n as u64, &hasher));
        }
        assert!(check_record(2, &file).unwrap_err().contains("another file"));
    }

    #[test]
    fn records_that_contradict_themselves_are_refused() {
        let mut hasher = FileHasher::default();
        hasher.update(&content(2 * BLOCK_BYTES));
        let file = hasher.finish("x");
        let refused = |file: ShardFile| check_record(2, &file).unwrap_err();
        assert!(refused(ShardFile { size: file.size + 1, ..file.clone() }).contains("2 block hashes instead of 3"));
        assert!(refused(ShardFile { blake3: "00".repeat(32), ..file.clone() }).contains("another file"));
        let mut bad = file.clone();
        bad.block_blake3[1].pop();
        assert!(refused(bad).contains("bad hash"));
        let empty = ShardFile { size: 0, block_blake3: vec![], ..file };
        assert!(refused(empty).contains("another file"));
    }
}
