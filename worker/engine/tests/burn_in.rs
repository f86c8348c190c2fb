//! The burn-in in whole runs: real processes, real process groups.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use support::runs::{spec, state_hash};
use support::world::{BurnIn, Case, Told};

#[test]
fn rank_process() {
    support::world::rank_process();
}

/// What each rank said of its burn-in.
fn burn_ins(told: &[Told]) -> Vec<BurnIn> {
    told.iter()
        .map(|rank| {
            assert!(matches!(rank.ended, Some(Ok(_))), "{:?}", rank.ended);
            assert_eq!((rank.burn_ins.len(), rank.formed), (1, 1));
            rank.burn_ins[0].clone()
        })
        .collect()
}

#[test]
fn p4_devices_that_are_well_agree_and_the_run_is_the_same_as_without() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.1, 4);
    let without = Case::new(spec.clone(), 3).run();
    assert!(without.iter().all(|rank| rank.burn_ins.is_empty()));
    let hosts = vec![vec![0, 2], vec![1]];
    let with = Case { burn_in_ms: 50, hosts, generation: 2, ..Case::new(spec, 3) }.run();
    let said = burn_ins(&with);
    for burn_in in &said {
        assert!(burn_in.rounds > 0 && burn_in.wrong_rounds == 0 && burn_in.gigaflops > 0.0, "{burn_in:?}");
        assert_eq!((burn_in.digest, &burn_in.device), (said[0].digest, &said[0].device));
        assert_eq!(burn_in.work, "matmul of 1024×1024 in fp32");
    }
    let sums: Vec<_> = said.iter().map(|burn_in| burn_in.wrong_sums).collect();
    assert_eq!(sums, [[Some(0), Some(0)], [None, Some(0)], [Some(0), Some(0)]], "host, world");
    assert_eq!(state_hash(&with, 3), state_hash(&without, 3));
}

#[test]
fn ranks_of_one_host_sum_once_and_a_single_rank_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 1);
    for (world_size, wanted) in [(2, [None, Some(0)]), (1, [None, None])] {
        let generation = world_size.into();
        let told = Case { burn_in_ms: 1, generation, ..Case::new(spec.clone(), world_size) }.run();
        let sums: Vec<_> = burn_ins(&told).into_iter().map(|burn_in| burn_in.wrong_sums).collect();
        assert_eq!(sums, vec![wanted; world_size as usize]);
    }
}

#[test]
fn a_wrong_product_is_counted_and_a_device_that_is_always_wrong_has_another_digest() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 1);
    for (generation, (fault, digests_differ)) in (1..).zip([
        ("burn_in.product:2:flip", false),
        ("burn_in.product:1:flip", true),
        ("burn_in.product:*:flip", true),
    ]) {
        let case =
            Case { fault: fault.to_owned(), faulty: Some(1), generation, burn_in_ms: 1, ..Case::new(spec.clone(), 2) };
        let said = burn_ins(&case.run());
        assert_eq!(said[0].wrong_rounds, 0, "{fault}");
        assert_eq!(said[0].digest != said[1].digest, digests_differ, "{fault}");
        let wrong = match fault {
            "burn_in.product:2:flip" => 1,
            // The first product is what the others are compared with.
            "burn_in.product:1:flip" => said[1].rounds,
            _ => 0,
        };
        assert_eq!(said[1].wrong_rounds, wrong, "{fault}");
    }
}
