//! Runs in a world without processes, sockets, disks or a real clock: the coordinator's core and the workers' session machines
//! are the real ones, all around them is a model that a seed drives. Trainers are killed, workers restart, streams break and
//! fall silent, the coordinator crashes between any two effects; after each event the invariants are checked, and in the end
//! the job must have succeeded with every step in its place.
//!
//! `TRAINCTL_SIM_SEEDS=2000` carries out so many seeds, `TRAINCTL_SEED=7` that one.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test")]

mod coordinator;
mod disk;
mod training;
mod worker;
mod world;

use world::{Faults, World};

/// Seeds of a usual run of the tests.
const SEEDS: u64 = 200;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable}={text}: a number")))
}

fn carry_out(seed: u64) -> world::Summary {
    let ended = std::panic::catch_unwind(|| World::new(seed, Faults::of(seed)).run());
    ended.unwrap_or_else(|panic| {
        eprintln!("seed: TRAINCTL_SEED={seed}");
        std::panic::resume_unwind(panic)
    })
}

#[test]
fn whatever_is_killed_delayed_or_cut_off_the_job_ends_with_every_step_in_its_place() {
    if let Some(seed) = number("TRAINCTL_SEED") {
        eprintln!("{:?}", carry_out(seed));
        return;
    }
    let seeds = number("TRAINCTL_SIM_SEEDS").unwrap_or(SEEDS);
    let mut all = world::Summary::default();
    for seed in 0..seeds {
        all.add(&carry_out(seed));
    }
    eprintln!("{seeds} seeds: {all:?}");
    // A world in which nothing happens proves nothing.
    assert!(all.generations > 2 * seeds && all.commits > 3 * seeds && all.coordinators > seeds, "{all:?}");
}
