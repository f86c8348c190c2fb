//! Later phases of a run: another blend over corpora of which some samples were used before.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use trainctl_dataset::indexed::{Dtype, IndexedWriter};
use trainctl_dataset::{CorpusCounts, Samples, Split, corpus_key, open_split, open_split_after, passes};
use trainctl_spec::job::{Dataset, WeightedPath};

/// Documents of uneven length whose tokens count up from `first`, so that a token tells where it came from.
fn corpus(folder: &Path, name: &str, documents: u32, first: u32) -> PathBuf {
    let prefix = folder.join(name);
    let mut writer = IndexedWriter::create(&prefix, Dtype::I32).unwrap();
    let mut next = first;
    for document in 0..documents {
        let end = next + 3 + document % 7;
        writer.push_document(&(next..end).collect::<Vec<_>>()).unwrap();
        next = end;
    }
    writer.finish().unwrap();
    prefix
}

fn dataset(paths: &[(&PathBuf, Option<f64>)], index: Option<PathBuf>) -> Dataset {
    Dataset {
        paths: paths
            .iter()
            .map(|(prefix, weight)| WeightedPath { prefix: (*prefix).clone(), weight: *weight })
            .collect(),
        index_mapping_dir: index,
        tokenizer: None,
        seq_length: 4,
        split: "1,0,0".into(),
        seed: 1234,
    }
}

fn all(samples: &Samples) -> Vec<Vec<i64>> {
    let mut out = Vec::new();
    let mut read = |id| {
        samples.tokens(id, &mut out).unwrap();
        out.clone()
    };
    (0..samples.len()).map(&mut read).collect()
}

/// The samples below `position` that come from part `part`, in order.
fn of_part(samples: &Samples, part: usize, position: u64) -> Vec<Vec<i64>> {
    let all = all(samples);
    (0..position).filter(|id| samples.part(*id) == Some(part)).map(|id| all[id as usize].clone()).collect()
}

#[test]
fn a_corpus_goes_on_behind_what_was_used_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let a = corpus(folder.path(), "a", 40, 0);
    let spec = dataset(&[(&a, None)], None);
    let whole = all(&open_split(&spec, Split::Train, Some(50)).unwrap());
    let rest = open_split_after(&spec, Split::Train, Some(30), &CorpusCounts::from([(corpus_key(&a), 20)])).unwrap();
    assert_eq!(all(&rest), whole[20..]);
    assert_eq!(rest.used(0), CorpusCounts::from([(corpus_key(&a), 20)]));
    assert_eq!(rest.used(7), CorpusCounts::from([(corpus_key(&a), 27)]));
    assert_eq!(rest.used(1000), CorpusCounts::from([(corpus_key(&a), 50)]), "not beyond the end");
    let message = rest.tokens(30, &mut Vec::new()).unwrap_err().to_string();
    assert!(message.contains("out of range"), "{message}");
    // A corpus that the section does not name changes nothing.
    let other = CorpusCounts::from([("elsewhere".to_owned(), 9)]);
    assert_eq!(all(&open_split_after(&spec, Split::Train, Some(50), &other).unwrap()), whole);
}

#[test]
fn a_new_blend_starts_at_its_sample_0_and_a_shared_corpus_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b, c) = (
        corpus(folder.path(), "a", 60, 0),
        corpus(folder.path(), "b", 60, 1_000),
        corpus(folder.path(), "c", 60, 10_000),
    );
    for index in [None, Some(folder.path().join("index"))] {
        let first = dataset(&[(&a, Some(0.3)), (&b, Some(0.7))], index.clone());
        let first = open_split(&first, Split::Train, Some(60)).unwrap();
        let used = first.used(40);
        assert_eq!(used.values().sum::<u64>(), 40);
        let second = dataset(&[(&b, Some(0.5)), (&c, Some(0.5))], index);
        let fresh = open_split(&second, Split::Train, Some(30)).unwrap();
        let second = open_split_after(&second, Split::Train, Some(30), &used).unwrap();
        // The blend's own order is that of a new run.
        let parts = |samples: &Samples| (0..30).map(|id| samples.part(id).unwrap()).collect::<Vec<_>>();
        assert_eq!(parts(&second), parts(&fresh));
        assert_eq!(of_part(&second, 1, 30), of_part(&fresh, 1, 30), "c was never read");
        // b as one run would have read it.
        let alone = all(&open_split(&dataset(&[(&b, None)], None), Split::Train, Some(60)).unwrap());
        let (before, after) = (of_part(&first, 1, 40), of_part(&second, 0, 30));
        assert_eq!(before.len() as u64, used[&corpus_key(&b)]);
        assert_eq!([before.clone(), after.clone()].concat(), alone[..before.len() + after.len()]);
        let all_used = second.used(30);
        assert_eq!(all_used[&corpus_key(&b)], (before.len() + after.len()) as u64);
        assert_eq!(all_used[&corpus_key(&c)], 30 - after.len() as u64);
    }
}

#[test]
fn the_rest_of_an_unweighted_blend_comes_exactly_once() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (corpus(folder.path(), "a", 20, 0), corpus(folder.path(), "b", 30, 1_000));
    let spec = dataset(&[(&a, None), (&b, None)], None);
    let whole = open_split(&spec, Split::Train, None).unwrap();
    let used = CorpusCounts::from([(corpus_key(&a), 5)]);
    let rest = open_split_after(&spec, Split::Train, None, &used).unwrap();
    assert_eq!(rest.len(), whole.len() - 5);
    let mut expected = all(&whole);
    let first = of_part(&whole, 0, whole.len());
    expected.retain(|tokens| !first[..5].contains(tokens));
    let mut got = all(&rest);
    expected.sort();
    got.sort();
    assert_eq!(got, expected);
    let too_many = open_split_after(&spec, Split::Train, Some(rest.len() + 1), &used).unwrap_err().to_string();
    assert!(too_many.contains(&format!("{} in all", rest.len())), "{too_many}");
    let gone = CorpusCounts::from([(corpus_key(&a), 1000)]);
    let message = open_split_after(&spec, Split::Train, Some(10), &gone).unwrap_err().to_string();
    assert!(message.contains("1000 samples of") && message.contains("weight"), "{message}");
}

#[test]
fn equal_passes_are_what_makes_an_order_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let a = corpus(folder.path(), "a", 40, 0);
    let spec = dataset(&[(&a, None)], None);
    let epoch = open_split(&spec, Split::Train, None).unwrap().len();
    let plan = |wanted, used: u64| passes(&spec, Split::Train, Some(wanted), &[(corpus_key(&a), used)].into()).unwrap();
    assert_eq!(plan(epoch, 0), plan(epoch / 2, epoch / 4));
    assert_eq!(plan(epoch, 0)[&corpus_key(&a)].num_epochs, 1);
    assert_ne!(plan(epoch, 0), plan(epoch, epoch / 2));
    // The other direction: with other passes the order is another one.
    let (one, two) = (
        all(&open_split(&spec, Split::Train, Some(epoch)).unwrap()),
        all(&open_split(&spec, Split::Train, Some(2 * epoch)).unwrap()),
    );
    assert_ne!(one[..], two[..epoch as usize]);
}

#[test]
fn a_corpus_that_is_named_twice_is_counted_once() {
    let folder = tempfile::tempdir().unwrap();
    let a = corpus(folder.path(), "a", 40, 0);
    let spec = dataset(&[(&a, Some(0.25)), (&a, Some(0.75))], None);
    let samples = open_split(&spec, Split::Train, Some(20)).unwrap();
    assert_eq!(samples.used(20), CorpusCounts::from([(corpus_key(&a), 15)]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Counting by looking at every position gives the same.
    #[test]
    fn counts_equal_those_of_every_position(weights in prop::collection::vec(1u32..100, 2..5), at in 0u64..70, before in 0u64..30) {
        let folder = tempfile::tempdir().unwrap();
        let prefixes: Vec<PathBuf> = (0..weights.len()).map(|n| corpus(folder.path(), &n.to_string(), 40, n as u32 * 1000)).collect();
        let paths: Vec<_> = prefixes.iter().zip(&weights).map(|(prefix, weight)| (prefix, Some(f64::from(*weight)))).collect();
        let used: CorpusCounts = [(corpus_key(&prefixes[0]), before)].into();
        let samples = open_split_after(&dataset(&paths, None), Split::Train, Some(64), &used).unwrap();
        let mut expected: BTreeMap<String, u64> = prefixes.iter().map(|prefix| (corpus_key(prefix), 0)).collect();
        *expected.get_mut(&corpus_key(&prefixes[0])).unwrap() += before;
        for id in 0..at.min(samples.len()) {
            *expected.get_mut(&corpus_key(&prefixes[samples.part(id).unwrap()])).unwrap() += 1;
        }
        prop_assert_eq!(samples.used(at), expected);
    }
}
