//! A file's hash and the hashes of its blocks, in one pass.

use trainctl_spec::report::ShardFile;

/// Bytes of a block: a range read can prove what it read by hashing the blocks that it touches.
pub const BLOCK_BYTES: usize = 8 << 20;

/// Hashes a file while it is written or read.
#[derive(Clone, Debug, Default)]
pub struct FileHasher {
    whole: blake3::Hasher,
    block: blake3::Hasher,
    in_block: usize,
    size: u64,
    blocks: Vec<String>,
}

impl FileHasher {
    /// Adds the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.size += bytes.len() as u64;
        self.whole.update(bytes);
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.in_block));
            self.block.update(now);
            self.in_block += now.len();
            bytes = later;
            if self.in_block == BLOCK_BYTES {
                self.end_block();
            }
        }
    }

    /// The record of the file. An empty file has no blocks.
    pub fn finish(mut self, path: &str) -> ShardFile {
        if self.in_block > 0 {
            self.end_block();
        }
        ShardFile {
            path: path.to_owned(),
            size: self.size,
            blake3: self.whole.finalize().to_hex().to_string(),
            block_blake3: self.blocks,
        }
    }

    fn end_block(&mut self) {
        self.blocks.push(self.block.finalize().to_hex().to_string());
        self.block.reset();
        self.in_block = 0;
    }
}
