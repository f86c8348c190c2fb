//! Runs in a world without processes, sockets, disks or a real clock: the coordinators' cores, the workers' session machines and
//! the store's pure decisions (tenure, pointers, retention) are the real ones; networks, disks, the order of a commit's steps and
//! the trainers are models that a seed drives. Processes are killed, freeze and wake up late, streams break, fall silent in one
//! direction or both, commands arrive twice, wall clocks jump, disks are slow, and a second coordinator takes the place of one
//! that is frozen. After each event the invariants are checked (`checks.rs`, each with its number); in the end every job must
//! have come to the end that was wanted for it.
//!
//! `TRAINCTL_SIM_SEEDS=2000` carries out so many seeds, `TRAINCTL_SEED=7` that one. A seed that fails is carried out again, with
//! a trace of its last events (of so many: `TRAINCTL_SIM_TRACE=5000`).

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test")]

mod checks;
mod coordinator;
mod daemon;
mod disk;
mod faults;
mod flapping;
mod network;
mod owner;
mod scenario;
mod task;
mod training;
mod worker;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use scenario::Scenario;
use world::{Summary, World};

/// One trace is enough.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Seeds of a usual run of the tests.
const SEEDS: u64 = 200;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable}={text}: a number")))
}

/// Runs a seed; if it fails, once more with a trace.
fn carry_out(seed: u64) -> Summary {
    let mut world = World::new(Scenario::of(seed), false);
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| world.run())) else { return world.seen };
    if FAILED.swap(true, Ordering::Relaxed) {
        resume_unwind(panic);
    }
    let mut again = World::new(Scenario::of(seed), true);
    let repeated = catch_unwind(AssertUnwindSafe(|| again.run())).is_err();
    let trace: Vec<String> = again.trace.unwrap_or_default().into();
    eprintln!("the last events of seed {seed}:\n{}", trace.join("\n"));
    eprintln!(
        "seed: TRAINCTL_SEED={seed}{}",
        if repeated { "" } else { " (it does not fail again: not deterministic)" }
    );
    eprintln!("replay: TRAINCTL_SEED={seed} cargo test --release --workspace --test sim -- --nocapture");
    resume_unwind(panic)
}

#[test]
fn whatever_is_killed_frozen_or_cut_off_the_invariants_hold_and_every_job_ends_as_wanted() {
    if let Some(seed) = number("TRAINCTL_SEED") {
        eprintln!("{:?}", carry_out(seed));
        return;
    }
    let seeds = number("TRAINCTL_SIM_SEEDS").unwrap_or(SEEDS);
    let mut all = Summary::default();
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
    std::thread::scope(|scope| {
        let part = |thread: u64| {
            let own = (thread..seeds).step_by(threads as usize);
            own.take_while(|_| !FAILED.load(Ordering::Relaxed)).map(carry_out).collect::<Vec<_>>()
        };
        let parts: Vec<_> = (0..threads).map(|thread| scope.spawn(move || part(thread))).collect();
        for part in parts {
            let done = part.join().unwrap_or_else(|panic| resume_unwind(panic));
            done.iter().for_each(|seen| all.add(seen));
        }
    });
    eprintln!("{seeds} seeds: {all:?}");
    // A world in which nothing happens proves nothing.
    let is_eventful = all.generations > 2 * seeds && all.commits > 3 * seeds && all.coordinators > 2 * seeds;
    assert!(is_eventful && all.takeovers > seeds / 10 && all.late_changes > 0, "{all:?}");
}
