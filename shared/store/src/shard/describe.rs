//! What is said of damage: which bytes, and what lies there.

use trainctl_spec::report::ShardFile;

use super::BLOCK_BYTES;

/// Of a header that is not the one in the manifest's record.
pub(crate) const HEADER: &str = "its safetensors header has other bytes than were written";

/// At most so many tensors are named.
const NAMED: usize = 12;

/// Of a block. `tensors` names what lies between two bytes of the file.
pub(crate) fn block<'a>(file: &ShardFile, block: u64, tensors: impl FnOnce(u64, u64) -> Vec<&'a str>) -> String {
    let from = block * BLOCK_BYTES as u64;
    let to = file.size.min(from + BLOCK_BYTES as u64);
    let names = tensors(from, to);
    let place = match names.as_slice() {
        [] => String::new(),
        [only] => format!(", where tensor {only} lies"),
        names if names.len() <= NAMED => format!(", where the tensors {} lie", names.join(", ")),
        names => format!(", where the tensors {} and {} more lie", names[..NAMED].join(", "), names.len() - NAMED),
    };
    format!("has other bytes than were written between byte {from} and byte {to}{place}")
}
