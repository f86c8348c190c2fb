//! Random choices of a test that can be made again.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The variable that fixes the seed.
pub const VARIABLE: &str = "TRAINCTL_SEED";

/// A generator whose seed is `TRAINCTL_SEED`, else new; the seed is printed.
///
/// # Panics
/// If `TRAINCTL_SEED` is no number.
pub fn seeded() -> StdRng {
    let seed: u64 = match std::env::var(VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{VARIABLE}={text}: must be a number")),
        Err(_) => rand::rng().random_range(0..1_000_000),
    };
    eprintln!("seed: {VARIABLE}={seed}");
    StdRng::seed_from_u64(seed)
}
