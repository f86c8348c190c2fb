//! Properties over random input: parsing never panics, and the resolved form reads back equal.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Map, Value};
use trainctl_spec::job::{JobSpec, ModelConfigSource};
use trainctl_spec::{Override, parse};

const SOUND: &str = "\
name: tiny
run_dir: runs/tiny
model: {config: {model_type: gpt2}}
dataset:
  paths: [0.5, data/a, 0.5, data/b]
  seq_length: 64
validation_dataset_web: {num_val_samples: 8}
step_scheduler: {max_steps: 40}
";

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter("JSON has finite numbers only", |n| n.is_finite()).prop_map(Value::from),
        "\\PC*".prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        "(null|true|no|~|1e5|0x1f|-|: |# |<<|gpt2|\\.5|'a')".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map("[ -~]{0,12}", inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn the_resolved_form_reads_back_equal(
        config in prop::collection::btree_map("\\PC{0,12}", json(), 0..5),
        dir in "/\\PC{1,20}",
        lr in 1e-300f64..1e300,
        seed in any::<u64>(),
    ) {
        prop_assume!(!dir.contains("://"));
        let mut spec = parse(SOUND, "job.yaml", &[], &BTreeMap::new()).unwrap().spec;
        spec.model.config = ModelConfigSource::Inline(config.into_iter().collect::<Map<_, _>>());
        spec.run_dir = dir.into();
        spec.optimizer.lr = lr;
        spec.seed = seed;
        let yaml = spec.to_yaml().unwrap();
        let back = JobSpec::from_yaml(&yaml).map_err(|faults| TestCaseError::fail(format!("{faults}\n{yaml}")))?;
        prop_assert_eq!(back, spec, "{}", yaml);
    }

    #[test]
    fn no_text_makes_parsing_panic(text in any::<String>()) {
        drop(parse(&text, "job.yaml", &[], &BTreeMap::new()));
    }

    #[test]
    fn no_damage_makes_parsing_panic(at in 0..SOUND.len(), cut in 0usize..20, noise in "[-{}\\[\\]:,&*!|>'\"%@`#\t\n ${}a-z0-9]{0,6}") {
        let end = (at + cut).min(SOUND.len());
        let text = format!("{}{noise}{}", &SOUND[..at], &SOUND[end..]);
        if let Err(faults) = parse(&text, "job.yaml", &[], &BTreeMap::new()) {
            prop_assert!(faults.has_errors());
        }
    }

    #[test]
    fn no_override_makes_parsing_panic(text in "[a-z_.]{0,20}=?[\\[\\]{}a-z0-9:, .\"'$-]{0,20}") {
        drop(parse(SOUND, "job.yaml", &[Override::set(&text), Override::bare(&text)], &BTreeMap::new()));
    }
}

#[test]
fn aliases_cannot_blow_a_spec_up() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let alias = format!("*a{}", level - 1);
        text += &format!("a{level}: &a{level} [{}]\n", vec![alias; 10].join(", "));
    }
    let faults = parse(&text, "job.yaml", &[], &BTreeMap::new()).unwrap_err();
    assert!(faults.to_string().contains("too many values"), "{faults}");
    let deep = "[".repeat(10_000);
    assert!(parse(&deep, "job.yaml", &[], &BTreeMap::new()).is_err());
}
