//! Shards: safetensors files that are durable and hashed in one pass, and reading them back with proof.
//!
//! Each file's header says, for every tensor, where it belongs in the whole one: `__metadata__["trainctl.slices"]` is a JSON
//! object from name to `{"shape": [whole shape], "offset": [first index on each axis]}`. Any safetensors reader can read
//! the files; ours puts the pieces together.
//!
//! These functions block: the engine calls them from its own threads.

pub(crate) mod check;
pub(crate) mod describe;
pub(crate) mod fetch;
pub(crate) mod hash;
mod index;
mod plan;
mod read;
mod stream;
pub(crate) mod workers;
mod write;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use hash::{BLOCK_BYTES, FileHasher};
pub use index::TensorInfo;
pub use read::{Part, Peers, Read, ShardReader};
pub use write::{ShardWriter, TensorView, Written};

/// The key of the slices in a header's metadata.
pub(crate) const SLICES: &str = "trainctl.slices";

/// The same offsets as `torch.distributed.checkpoint.HuggingFaceStorageReader` looks for them, so that PyTorch reads the
/// shards of `model/` without us: a JSON object from name to `{"saved_offsets": […]}`.
const DCP_SHARDING_INFO: &str = "DCP_SHARDING_INFO";
/// Key and value that its writer adds.
const DCP_VERSION: (&str, &str) = ("DCP_VERSION", "1.0");

/// Where a piece belongs in its tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    /// First index of the piece on each axis.
    pub offset: Vec<u64>,
}

impl Slice {
    /// The slice that is the whole tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { shape: shape.to_owned(), offset: vec![0; shape.len()] }
    }

    /// Whether a piece of `shape` lies inside.
    fn holds(&self, shape: &[u64]) -> bool {
        self.shape.len() == shape.len()
            && self.offset.len() == shape.len()
            && (0..shape.len())
                .all(|axis| self.offset[axis].checked_add(shape[axis]).is_some_and(|end| end <= self.shape[axis]))
    }
}

type Slices = BTreeMap<String, Slice>;

#[cfg(test)]
mod tests;
