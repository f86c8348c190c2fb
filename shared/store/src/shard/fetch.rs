//! Reading blocks with proof: bytes go straight to where they are wanted, and are hashed there while they are still in
//! the processor's cache. Blocks of which nothing is wanted are hashed where the system holds them.

use blake3::Hasher;

use super::BLOCK_BYTES;
use super::hash::Proof;
use crate::error::Result;
use crate::io::FileReader;

/// Reads one block of a file, fills `wanted` (by their place in the block, as in [`super::plan::Job`]) and says whether
/// the bytes are the ones that the proof is for. If not, what was filled in is of no use. `scratch` is a buffer to use.
pub(crate) fn read_block(
    reader: &FileReader,
    proof: &Proof<'_>,
    block: u64,
    wanted: &mut [(usize, &mut [u8])],
    scratch: &mut Vec<u8>,
) -> Result<bool> {
    let start = block * BLOCK_BYTES as u64;
    let size = (proof.file().size - start).min(BLOCK_BYTES as u64) as usize;
    let piece_bytes = reader.piece_bytes().min(BLOCK_BYTES);
    let mut hasher = proof.hasher(block);
    let mut first = 0;
    for from in (0..size).step_by(piece_bytes) {
        let to = size.min(from + piece_bytes);
        while wanted.get(first).is_some_and(|(at, out)| at + out.len() <= from) {
            first += 1;
        }
        let touching = wanted[first..].iter_mut().take_while(|(at, _)| *at < to);
        let mut touching: Vec<&mut (usize, &mut [u8])> = touching.filter(|(at, out)| at + out.len() > from).collect();
        if let [(at, out)] = touching.as_mut_slice()
            && *at <= from
            && *at + out.len() >= to
        {
            let (from_out, to_out) = (from - *at, to - *at);
            read_piece(reader, start + from as u64, &mut out[from_out..to_out], &mut hasher)?;
            continue;
        }
        scratch.resize(piece_bytes, 0);
        read_piece(reader, start + from as u64, &mut scratch[..to - from], &mut hasher)?;
        for (at, out) in touching {
            let (begin, end) = (from.max(*at), to.min(*at + out.len()));
            out[begin - *at..end - *at].copy_from_slice(&scratch[begin - from..end - from]);
        }
    }
    Ok(proof.holds(block, &hasher))
}

/// Whether a block of a file is the one that the proof is for. `scratch` is a buffer to use.
pub(crate) fn prove_block(reader: &FileReader, proof: &Proof<'_>, block: u64, scratch: &mut Vec<u8>) -> Result<bool> {
    let start = block * BLOCK_BYTES as u64;
    let size = (proof.file().size - start).min(BLOCK_BYTES as u64) as usize;
    let Some(view) = reader.view(start, size) else { return read_block(reader, proof, block, &mut [], scratch) };
    let mut hasher = proof.hasher(block);
    hasher.update(&view);
    Ok(proof.holds(block, &hasher))
}

/// Fills `wanted` from a block that somebody else proves.
pub(crate) fn copy_block(reader: &FileReader, block: u64, wanted: &mut [(usize, &mut [u8])]) -> Result<()> {
    let start = block * BLOCK_BYTES as u64;
    wanted.iter_mut().try_for_each(|(at, out)| reader.read_at(start + *at as u64, out))
}

fn read_piece(reader: &FileReader, offset: u64, out: &mut [u8], hasher: &mut Hasher) -> Result<()> {
    reader.read_at(offset, out)?;
    hasher.update(out);
    Ok(())
}
