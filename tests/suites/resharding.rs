//! A run goes on at other world sizes, and not a bit of its state changes in between (C8).

use std::fs;
use std::path::Path;

use trainctl_store::Manifest;
use trainctl_tests::job::Job;
use trainctl_tests::programs;
use trainctl_tests::run::{Row, Run};
use trainctl_tests::scratch::Scratch;

/// Trainers of each leg.
const LEGS: [u32; 6] = [1, 2, 3, 4, 2, 1];
/// Steps of one leg.
const STEPS: u64 = 2;
const ALL_STEPS: u64 = STEPS * LEGS.len() as u64;
/// Relative, of losses at different world sizes.
const TOLERANCE: f64 = 1e-5;

fn job(run_dir: &Path) -> Job {
    Job { workers: LEGS[0], steps: ALL_STEPS, ckpt_every: ALL_STEPS, val_every: ALL_STEPS, ..Job::new(run_dir) }
}

/// Runs one leg after the other, each with new processes, and gives the manifest that each has left. Every trainer hashes
/// what it has loaded.
fn legs(scratch: &Scratch, run: &Run) -> Vec<Manifest> {
    let spec = job(run.dir()).write(run.dir().with_extension("yaml"));
    let (spec, dir) = (spec.to_str().unwrap(), run.dir().to_str().unwrap());
    let mut manifests: Vec<Manifest> = Vec::new();
    for (leg, workers) in LEGS.into_iter().enumerate() {
        let until = (STEPS * (leg as u64 + 1)).to_string();
        let mut command = scratch.command("trainctl");
        command.env("TRAINCTL_VERIFY_LOAD", "1");
        match leg {
            0 => command.args(["run", spec, "--until-step", &until]),
            _ => command.args(["resume", dir, "--workers", &workers.to_string(), "--until-step", &until]),
        };
        scratch.start(command, &format!("leg-{leg}")).wait().expect_code(0);
        let manifest = run.latest();
        assert_eq!((manifest.world_size, manifest.step), (workers, STEPS * (leg as u64 + 1) - 1));
        if let Some(before) = manifests.last() {
            assert_loaded(run, &manifest, before);
        }
        manifests.push(manifest);
    }
    manifests
}

/// Each rank of the generation that wrote `after` had the state of `before` in memory, bit for bit.
fn assert_loaded(run: &Run, after: &Manifest, before: &Manifest) {
    for rank in 0..after.world_size {
        let path = run.dir().join(format!("logs/g{:04}/rank-{rank:05}.log", after.generation));
        let log = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let line = log.lines().find(|line| line.contains("the loaded state has the manifest's hash"));
        let line = line.unwrap_or_else(|| panic!("{}: the state was not verified:\n{log}", path.display()));
        assert!(line.contains(&before.state_hash), "{line}: {} had {}", before.name, before.state_hash);
    }
}

/// Every rank wrote about as much as every other: its shards' sizes, as parts of a fair share.
fn assert_even(manifest: &Manifest) {
    let mut shares = vec![0; manifest.world_size as usize];
    for file in manifest.files.iter().filter(|file| file.path.ends_with(".safetensors")) {
        let shard = trainctl_store::layout::ShardName::parse(&file.path).unwrap();
        shares[shard.rank as usize] += file.size;
    }
    let fair = shares.iter().sum::<u64>() as f64 / shares.len() as f64;
    assert!(shares.iter().all(|share| (0.9..1.1).contains(&(*share as f64 / fair))), "{}: {shares:?}", manifest.name);
}

fn assert_agree(rows: &[Row], alone: &[Row]) {
    assert_eq!(rows.iter().map(|row| row.step).collect::<Vec<_>>(), (0..ALL_STEPS).collect::<Vec<_>>());
    assert_eq!(rows.len(), alone.len());
    for (row, want) in rows.iter().zip(alone) {
        let apart = (row.loss - want.loss).abs() / want.loss;
        assert!(apart <= TOLERANCE, "{apart:e}\n{row:?}\n{want:?}");
    }
}

#[test]
fn c8_from_1_to_2_3_4_2_and_1_trainers_the_state_stays_the_same() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("resharding");
    let run = Run::new(scratch.join("run"));
    let manifests = legs(&scratch, &run);
    manifests.iter().for_each(assert_even);

    // One trainer all the way computes the same, but for the order of sums.
    let alone = job(&scratch.join("alone"));
    let spec = alone.write(scratch.join("alone.yaml"));
    scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(0);
    assert_agree(&run.rows(), &Run::new(&alone.run_dir).rows());

    // P4: the same layouts in the same order give the same bits.
    let again = legs(&scratch, &Run::new(scratch.join("again")));
    let hashes = |manifests: &[Manifest]| manifests.iter().map(|m| m.state_hash.clone()).collect::<Vec<_>>();
    assert_eq!(hashes(&again), hashes(&manifests));
}
