//! What may be kept, and where it leads.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::parse::{Override, parse, tests::FULL};

fn spec(overrides: &[&str]) -> JobSpec {
    let overrides: Vec<_> = overrides.iter().map(|text| Override::set(text)).collect();
    parse(FULL, "job.yaml", &overrides, &Default::default()).unwrap_or_else(|faults| panic!("{faults}")).spec
}

/// Ten steps of eight samples are done, of a phase that began at step 4 with sample 100.
fn begin(parent: &JobSpec, child: &JobSpec, keep: &str, stop_at: u64) -> Result<Beginning, Vec<String>> {
    let phase = DataPhase { first_step: 4, first_sample: 100, corpora: [("old".to_owned(), 7)].into() };
    let corpora = BTreeMap::from([("a".to_owned(), 50), ("b".to_owned(), 98), ("old".to_owned(), 7)]);
    let source = Source {
        spec: parent,
        kind: SaveKind::Full,
        step: 9,
        consumed_samples: phase.position(10, 8),
        phase: &phase,
        corpora: &corpora,
    };
    let decided = decide_fork(&source, child, keep.parse().unwrap(), stop_at).unwrap();
    decided.map_err(|objections| objections.iter().map(ToString::to_string).collect())
}

#[test]
fn what_is_kept_has_one_spelling() {
    assert_eq!("schedule, weights,data".parse::<Keep>().unwrap().to_string(), "weights, data, schedule");
    assert_eq!("weights".parse::<Keep>(), Ok(Keep::WEIGHTS));
    assert_eq!("optimizer,data,schedule".parse::<Keep>(), Ok(Keep::ALL));
    for bad in ["", "weights,", "momentum", "Optimizer"] {
        assert!(bad.parse::<Keep>().is_err(), "{bad:?}");
    }
}

#[test]
fn p3_everything_kept_goes_on_at_the_next_step_and_sample() {
    let got = begin(&spec(&[]), &spec(&[]), "optimizer,data,schedule", 40).unwrap();
    assert_eq!((got.start_step, got.phase.position(10, 8), got.phase.position(12, 8)), (10, 148, 164));
    assert_eq!(got.phase.corpora, [("old".to_owned(), 7)].into(), "the blend's own samples count from its sample 0");
    assert_eq!(got.differences, []);
}

#[test]
fn without_the_schedule_steps_begin_anew_and_data_may_go_on() {
    let got = begin(&spec(&[]), &spec(&[]), "optimizer,data", 40).unwrap();
    assert_eq!((got.start_step, got.phase.position(0, 8), got.phase.position(2, 8)), (0, 148, 164));
    let got = begin(&spec(&[]), &spec(&[]), "optimizer", 40).unwrap();
    assert_eq!((got.start_step, got.phase), (0, DataPhase::default()));
    let got = begin(&spec(&[]), &spec(&[]), "schedule", 40).unwrap();
    assert_eq!((got.start_step, got.phase.position(10, 8)), (10, 0), "new data at step 10");
}

#[test]
fn another_blend_begins_at_its_sample_0_and_knows_what_was_used() {
    let child = spec(&["dataset.paths=[b, c]"]);
    let got = begin(&spec(&[]), &child, "optimizer,data", 40).unwrap();
    assert_eq!((got.phase.first_sample, got.phase.corpora["a"], got.phase.corpora["b"]), (0, 50, 98));
    let weights = spec(&["dataset.paths=[{prefix: a, weight: 0.5}, {prefix: b, weight: 0.5}]"]);
    let other = spec(&["dataset.paths=[{prefix: a, weight: 0.4}, {prefix: b, weight: 0.6}]"]);
    assert_eq!(begin(&weights, &other, "data", 40).unwrap().phase.first_sample, 0, "other weights are another blend");
    assert_eq!(begin(&weights, &weights, "data", 40).unwrap().phase.first_sample, 148);
}

#[test]
fn what_does_not_fit_is_refused_with_the_key_and_both_values() {
    let child = spec(&["precision=fp32", "dataset.seed=5", "dataset.split=\"9,1,0\"", "optimizer.lr=1e-5"]);
    let parent = spec(&["precision=bf16"]);
    let reasons = begin(&parent, &child, "optimizer,data,schedule", 10).unwrap_err();
    assert_eq!(reasons.len(), 4, "{reasons:#?}");
    for (part, reason) in [
        ("precision: \"bf16\" → \"fp32\"", &reasons[0]),
        ("dataset.seed", &reasons[1]),
        ("dataset.split", &reasons[2]),
        ("10 steps are done and the run ends at 10", &reasons[3]),
    ] {
        assert!(reasons.iter().any(|reason| reason.contains(part)), "{part}: {reason}");
    }
    // Nothing of that stands against the weights alone, and the differences are told.
    let got = begin(&parent, &child, "weights", 10).unwrap();
    let keys: Vec<&str> = got.differences.iter().map(|difference| difference.key.as_str()).collect();
    for key in ["precision", "dataset.seed", "dataset.split", "optimizer.lr"] {
        assert!(keys.contains(&key), "{key} in {keys:?}");
    }
}

#[test]
fn weights_saved_apart_give_weights_only_and_uncounted_data_no_place_in_another_blend() {
    let (here, phase, none) = (spec(&[]), DataPhase::default(), BTreeMap::new());
    let source = |kind| Source { spec: &here, kind, step: 9, consumed_samples: 80, phase: &phase, corpora: &none };
    let decide = |kind, child: &JobSpec, keep| decide_fork(&source(kind), child, keep, 40).unwrap();
    let refused = decide(SaveKind::Weights, &here, Keep::ALL).unwrap_err();
    assert_eq!(refused, [Objection::WeightsOnly { keep: Keep::ALL }]);
    assert!(decide(SaveKind::Weights, &here, Keep::WEIGHTS).is_ok());
    let keep = Keep { data: true, ..Keep::WEIGHTS };
    assert!(decide(SaveKind::Full, &here, keep).is_ok(), "the same blend needs no counts");
    assert_eq!(decide(SaveKind::Full, &spec(&["dataset.paths=[x]"]), keep), Err(vec![Objection::NotCounted]));
}

proptest! {
    /// P3, P4: a fork that keeps everything reads what the parent would have read, whatever its phase was.
    #[test]
    fn p3_a_fork_of_everything_reads_what_the_parent_would_have(first_step in 0u64..1000, first_sample in 0u64..1000, done in 0u64..1000, more in 0u64..1000) {
        let here = spec(&[]);
        let batch = here.step_scheduler.global_batch_size;
        let parent = DataPhase { first_step, first_sample, ..DataPhase::default() };
        let step = first_step + done;
        let none = BTreeMap::new();
        let source = Source { spec: &here, kind: SaveKind::Full, step, consumed_samples: parent.position(step + 1, batch), phase: &parent, corpora: &none };
        let got = decide_fork(&source, &here, Keep::ALL, u64::MAX).unwrap().unwrap();
        prop_assert_eq!(got.start_step, step + 1);
        prop_assert_eq!(got.phase.position(step + 1 + more, batch), parent.position(step + 1 + more, batch));
    }
}
