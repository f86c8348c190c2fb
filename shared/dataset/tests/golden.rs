//! D1 against values that megatron-core's own helpers and numpy 2.4.6 computed (fixtures/megatron_index.json).

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use serde_json::Value;
use trainctl_dataset::blend::{exhaustive, weighted};
use trainctl_dataset::index::{Epochs, Indices, Recipe, Rules};
use trainctl_dataset::split::SplitMatrix;
use trainctl_dataset::{Ints, Split};

const LENGTHS: [u32; 8] = [5, 3, 8, 1, 7, 4, 6, 2];
const SEQ_LENGTH: u32 = 4;
const SEED: u32 = 1234;

fn golden() -> Value {
    serde_json::from_str(include_str!("fixtures/megatron_index.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<i64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        number => vec![number.as_i64().unwrap()],
    }
}

fn values(array: &Ints) -> Vec<i64> {
    array.iter().collect()
}

fn build(num_samples: Option<u64>, rules: Rules) -> (Epochs, Indices) {
    let recipe = Recipe { sequences: 0..LENGTHS.len(), num_samples, seq_length: SEQ_LENGTH, seed: SEED, rules };
    let length = |sequence: usize| LENGTHS[sequence];
    let epochs = recipe.epochs(length).unwrap();
    let indices = recipe.build(&epochs, length).unwrap();
    (epochs, indices)
}

fn assert_case(name: &str, num_samples: Option<u64>, rules: Rules) {
    let golden = &golden()[name];
    let (epochs, indices) = build(num_samples, rules);
    assert_eq!(epochs.tokens_per_epoch, golden["tokens_per_epoch"], "{name}");
    assert_eq!(epochs.num_epochs, golden["num_epochs"], "{name}");
    assert_eq!(epochs.separate_last, golden["separate"], "{name}");
    assert_eq!(epochs.samples_without_last, golden["samples_sans_final"].as_u64(), "{name}");
    assert_eq!(values(&indices.document), numbers(&golden["document_index"]), "{name}");
    assert_eq!(values(&indices.sample), numbers(&golden["sample_index"]), "{name}");
    assert_eq!(values(&indices.shuffle), numbers(&golden["shuffle_index"]), "{name}");
}

#[test]
fn d1_case_a_one_epoch() {
    assert_case("A_one_epoch", None, Rules::default());
}

#[test]
fn d1_case_b_two_epochs_the_last_apart() {
    assert_case("B_two_epochs_sep", Some(11), Rules::default());
}

#[test]
fn d1_case_c_two_epochs_together() {
    assert_case("C_two_epochs_nosep", Some(17), Rules::default());
}

#[test]
fn d1_case_d_three_epochs() {
    for num_samples in [18, 20, 22] {
        assert_case("D_three_epochs", Some(num_samples), Rules::default());
    }
}

#[test]
fn d1_case_e_no_extra_token_and_the_partial_sample_kept() {
    assert_case("E_no_extra_keep_last", None, Rules { extra_token: false, drop_last: false });
}

#[test]
fn d1_split_strings() {
    for (text, expected) in golden()["split"].as_object().unwrap() {
        let matrix = SplitMatrix::parse(text).unwrap();
        let shares = matrix.shares().map(|share| share.map(|(low, high)| vec![low, high]));
        let expected: Vec<Option<Vec<f64>>> = serde_json::from_value(expected.clone()).unwrap();
        assert_eq!(shares.to_vec(), expected, "{text}");
    }
}

#[test]
fn split_ranges_round_half_to_even_and_touch() {
    let matrix = SplitMatrix::parse("1,1,2").unwrap();
    assert_eq!(matrix.range(Split::Train, 10), 0..2);
    assert_eq!(matrix.range(Split::Validation, 10), 2..5);
    assert_eq!(matrix.range(Split::Test, 10), 5..10);
    // One sequence: 0.99 rounds up, so validation is empty.
    let matrix = SplitMatrix::parse("99,1,0").unwrap();
    assert_eq!(
        (matrix.range(Split::Train, 1), matrix.range(Split::Validation, 1), matrix.range(Split::Test, 1)),
        (0..1, 1..1, 0..0)
    );
}

#[test]
fn bad_split_strings_say_what_is_wrong() {
    let cases = [
        ("99,-1,0", "'-'"),
        ("a,b", "'a'"),
        ("0,0,0", "add up to 0"),
        ("", "add up to 0"),
        ("1.2.3", "not a number"),
        ("1,2,3,4", "4 numbers"),
        ("1e3", "'e'"),
    ];
    for (text, why) in cases {
        let message = SplitMatrix::parse(text).unwrap_err().to_string();
        assert!(message.contains(why), "{text}: {message}");
    }
}

#[test]
fn d1_blends() {
    let golden = golden();
    let cases = [
        ("blend_30_70_20", weighted(&[0.3, 0.7], 20)),
        ("blend_1_1_1_9", weighted(&[1.0 / 3.0; 3], 9)),
        ("exh_2_3_1", exhaustive(&[2, 3, 1])),
        ("exh_5_10", exhaustive(&[5, 10])),
    ];
    for (name, index) in cases {
        assert_eq!(values(&index.part), numbers(&golden[name][0]), "{name}");
        assert_eq!(values(&index.sample), numbers(&golden[name][1]), "{name}");
    }
}
