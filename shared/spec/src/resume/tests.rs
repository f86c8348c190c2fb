//! The table at work.

use super::*;
use crate::parse::{Override, parse, tests::FULL};

fn spec(overrides: &[&str]) -> JobSpec {
    let overrides: Vec<_> = overrides.iter().map(|text| Override::set(text)).collect();
    parse(FULL, "job.yaml", &overrides, &Default::default()).unwrap_or_else(|faults| panic!("{faults}")).spec
}

#[test]
fn equal_specs_do_not_differ() {
    assert_eq!(differences(&spec(&[]), &spec(&[])).unwrap(), []);
}

#[test]
fn differences_name_key_values_and_rule() {
    let new = [
        "optimizer.lr=1e-3",
        "fault_tolerance.max_restarts=3",
        "resources.workers=4",
        "checkpoint.max_recent_checkpoints=null",
        "validation_dataset_web.split=\"1,1,0\"",
        "validation_dataset_code.num_val_samples=5",
        "dataset.paths=[a, b]",
        "model.config={model_type: gpt2, n_layer: 3}",
    ];
    let differences = differences(&spec(&["model.config={model_type: gpt2, n_head: 2}"]), &spec(&new)).unwrap();
    let text: Vec<_> = differences.iter().map(|difference| format!("{:?} {difference}", difference.rule)).collect();
    insta::assert_snapshot!(text.join("\n"));
    assert_eq!(forbidden(&differences).len(), differences.iter().filter(|d| d.rule == Rule::Keep).count());
}

#[test]
fn an_unknown_key_must_be_kept() {
    assert_eq!(field("surprise.key").rule, Rule::Keep);
    assert_eq!(
        field("validation_datasetter.seed").key,
        "",
        "a family is `validation_dataset` or `validation_dataset_<name>`"
    );
}
