//! One number for all the state that a rank holds, so that replicas can be compared.
//!
//! Under data parallelism every rank holds the same weights, moments and masters, bit for bit: the reduced gradient is one and
//! the same on all, and so is the update. A rank whose memory or arithmetic fails drifts away unseen, and writes its share of
//! the next checkpoint from what it has. So at each save every rank says what it holds, and only a state on which all agree
//! becomes a commit (C2).
//!
//! The state is cut into the blocks of the state hash (1,024 elements). With the block's little-endian 8-byte words w and odd
//! constants k, h = Σ kᵢ · wᵢ mod 2¹²⁸; the digest is Σ F(h, place of the block) mod 2¹²⁸, where F is a bijection of h for
//! each place (four Feistel rounds of SplitMix64's finaliser).
//! - **Any change within one word is seen**, so any flipped bit: 0 < |Δw| < 2⁶⁴ and 0 < k < 2⁶⁴ make 0 < |k · Δw| < 2¹²⁸, F is a
//!   bijection, and no other block changes.
//! - A change of several words of one block is missed by at most one value in 2⁶³ of each constant (Carter & Wegman's
//!   argument for multilinear hashing: for two constants the products differ by less than 2¹²⁸); one of several blocks by chance,
//!   one in 2¹²⁸. The constants are fixed: the bound is against faults, not against somebody who knows them.
//! - Pieces add up: what the ranks wrote is, summed, what each holds.
//!
//! blake3, which proves files, would take ten times as long for all that a rank holds. What corrupts the *gradient* before
//! it is reduced reaches every replica alike and is not seen here.
//!
//! Nobody waits for it (C7): it is taken on a thread beside the next step, whose forward and backward only read the state. The
//! update that ends that step waits until it is done ([`Digest::wait`]).

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use tch::Tensor;
use trainctl_store::state_hash::BLOCK_ELEMENTS;

use super::snapshot::State;
use crate::Error;

/// 8-byte words of the longest block: elements of 4 bytes.
const WORDS: usize = BLOCK_ELEMENTS as usize / 2;
/// The golden ratio's fraction: SplitMix64's increment.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// One odd constant for each word of a block.
static KEYS: [u64; WORDS] = keys();

const fn keys() -> [u64; WORDS] {
    let mut keys = [0; WORDS];
    let mut index = 0;
    while index < WORDS {
        keys[index] = mix(STEP.wrapping_mul(index as u64 + 1)) | 1;
        index += 1;
    }
    keys
}

/// SplitMix64's finaliser (Steele, Lea & Flood 2014; Stafford's variant 13).
const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// Σ kᵢ · wᵢ; a short last word is filled with zeros.
fn block(bytes: &[u8]) -> u128 {
    let product = |key: &u64, word: [u8; 8]| u128::from(*key) * u128::from(u64::from_le_bytes(word));
    let (words, tail) = bytes.as_chunks::<8>();
    let mut sums = [0_u128; 4];
    let (fours, rest) = words.as_chunks::<4>();
    let (key_fours, _) = KEYS.as_chunks::<4>();
    for (words, keys) in fours.iter().zip(key_fours) {
        for ((sum, word), key) in sums.iter_mut().zip(words).zip(keys) {
            *sum = sum.wrapping_add(product(key, *word));
        }
    }
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    let late = rest.iter().copied().chain([last]).zip(KEYS.iter().skip(4 * fours.len()));
    let late = late.map(|(word, key)| product(key, word));
    sums.into_iter().chain(late).fold(0, u128::wrapping_add)
}

/// The bijection for the block `index` of the tensor `place`.
fn placed(hash: u128, place: u64, index: u64) -> u128 {
    let (mut left, mut right) = ((hash >> 64) as u64, hash as u64);
    let key = mix(place.wrapping_mul(STEP)) ^ index;
    for round in 1..=4_u64 {
        let key = mix(key.wrapping_add(round.wrapping_mul(STEP)));
        (left, right) = (right, left ^ mix(right.wrapping_add(key)));
    }
    u128::from(left) << 64 | u128::from(right)
}

/// The digest of a piece of the tensor `place` that begins with its block `first_block`. `element_bytes` ≤ 4.
pub(super) fn piece(place: u64, first_block: u64, element_bytes: usize, bytes: &[u8]) -> u128 {
    debug_assert!((1..=4).contains(&element_bytes));
    let blocks = bytes.chunks(BLOCK_ELEMENTS as usize * element_bytes);
    let placed = (first_block..).zip(blocks).map(|(index, bytes)| placed(block(bytes), place, index));
    placed.fold(0, u128::wrapping_add)
}

/// The digest of all of a state that is saved, taken in the background.
#[derive(Clone, Debug)]
pub(super) struct Digest(Arc<Mutex<Taken>>);

#[derive(Debug)]
enum Taken {
    Running(JoinHandle<Result<u128, Error>>),
    Done(Result<u128, String>),
}

impl Digest {
    /// Begins to take it. Until [`Digest::wait`] has returned nothing may change the state.
    pub(super) fn begin(state: State<'_>) -> Self {
        let tensors: Vec<(u64, Tensor)> =
            state.tensors().map(|(place, tensor)| (place, tensor.shallow_clone())).collect();
        let spawned = thread::Builder::new().name("digest".to_owned()).spawn(move || held(&tensors));
        let taken = match spawned {
            Ok(thread) => Taken::Running(thread),
            Err(error) => Taken::Done(Err(format!("start a thread: {error}"))),
        };
        Self(Arc::new(Mutex::new(taken)))
    }

    /// The digest, once it is there; or why it could not be taken.
    pub(super) fn wait(&self) -> Result<u128, String> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Taken::Running(_) = &*taken
            && let Taken::Running(thread) =
                std::mem::replace(&mut *taken, Taken::Done(Err("its thread panicked".to_owned())))
            && let Ok(result) = thread.join()
        {
            *taken = Taken::Done(result.map_err(|error| error.to_string()));
        }
        match &*taken {
            Taken::Done(result) => result.clone(),
            Taken::Running(_) => Err("it is still being taken".to_owned()),
        }
    }
}

fn held(tensors: &[(u64, Tensor)]) -> Result<u128, Error> {
    let mut sum = 0_u128;
    for (place, tensor) in tensors {
        let bytes = trainctl_collective::bytes(tensor).map_err(Error::Shim)?;
        sum = sum.wrapping_add(piece(*place, 0, tensor.kind().elt_size_in_bytes(), bytes));
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(len: usize, seed: u64) -> Vec<u8> {
        (0..len as u64).map(|i| mix(seed ^ i) as u8).collect()
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_seen(elements in 1usize..5000, size in prop_oneof![Just(2usize), Just(4)], at in any::<u32>(), zero: bool) {
            let mut state = if zero { vec![0; elements * size] } else { bytes(elements * size, 1) };
            let before = piece(3, 0, size, &state);
            let bit = at as usize % (state.len() * 8);
            state[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(before, piece(3, 0, size, &state));
        }

        #[test]
        fn pieces_that_are_cut_between_blocks_add_up(elements in 1usize..9000, cut in 0usize..9, size in prop_oneof![Just(2usize), Just(4)]) {
            let state = bytes(elements * size, 2);
            let middle = (cut * BLOCK_ELEMENTS as usize * size).min(state.len());
            let (first, second) = state.split_at(middle);
            let sum = piece(9, 0, size, first).wrapping_add(piece(9, cut as u64, size, second));
            prop_assert_eq!(sum, piece(9, 0, size, &state));
        }
    }

    #[test]
    fn signs_that_change_together_blocks_that_change_places_and_tensors_that_do_are_seen() {
        let plain = vec![0; 16 << 10];
        let mut signs = plain.clone();
        (signs[3], signs[19], signs[35]) = (0x80, 0x80, 0x80);
        assert_ne!(piece(0, 0, 4, &signs), piece(0, 0, 4, &plain), "sums mod 2⁶⁴ would lose an even number of them");
        let state = bytes(8 << 10, 3);
        let swapped = [&state[4096..], &state[..4096]].concat();
        assert_ne!(piece(0, 0, 4, &state), piece(0, 0, 4, &swapped));
        assert_ne!(piece(0, 0, 4, &state), piece(1, 0, 4, &state));
    }

    #[test]
    fn each_place_has_a_bijection() {
        // A Feistel network can be run backwards.
        let back = |hash: u128, place: u64, index: u64| {
            let (mut left, mut right) = ((hash >> 64) as u64, hash as u64);
            let key = mix(place.wrapping_mul(STEP)) ^ index;
            for round in (1..=4_u64).rev() {
                let key = mix(key.wrapping_add(round.wrapping_mul(STEP)));
                (left, right) = (right ^ mix(left.wrapping_add(key)), left);
            }
            u128::from(left) << 64 | u128::from(right)
        };
        for (hash, place) in [(0, 0), (1, 7), (u128::MAX, 1 << 56), (1 << 64, 3), (0x1234_5678 << 70, u64::MAX)] {
            assert_eq!(back(placed(hash, place, 11), place, 11), hash);
        }
    }
}
