//! Samples through the spec's own type: contents, blends, caches (D1, D4).

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use trainctl_dataset::index::{Recipe, Rules};
use trainctl_dataset::indexed::{Dtype, IndexedReader, IndexedWriter};
use trainctl_dataset::{Error, Samples, Split, open_split};
use trainctl_spec::job::{Dataset, WeightedPath};

const LENGTHS: [u32; 8] = [5, 3, 8, 1, 7, 4, 6, 2];

/// A corpus whose tokens count up from `first`, so that a token tells where it came from.
fn corpus(prefix: &Path, lengths: &[u32], first: u32) {
    let mut writer = IndexedWriter::create_or_replace(prefix, Dtype::U16).unwrap();
    let mut next = first;
    for length in lengths {
        writer.push_document(&(next..next + length).collect::<Vec<_>>()).unwrap();
        next += length;
    }
    writer.finish().unwrap();
}

fn dataset(prefixes: &[(PathBuf, Option<f64>)], cache: Option<PathBuf>) -> Dataset {
    Dataset {
        paths: prefixes
            .iter()
            .map(|(prefix, weight)| WeightedPath { prefix: prefix.clone(), weight: *weight })
            .collect(),
        index_mapping_dir: cache,
        tokenizer: None,
        seq_length: 4,
        split: "1,0,0".into(),
        seed: 1234,
    }
}

fn all(samples: &Samples) -> Vec<Vec<i64>> {
    let mut out = Vec::new();
    (0..samples.len())
        .map(|id| {
            samples.tokens(id, &mut out).unwrap();
            out.clone()
        })
        .collect()
}

/// The same samples by the definition: write out the shuffled documents' tokens, cut every L, take L + 1.
fn by_definition(lengths: &[u32], first: u32, num_samples: Option<u64>) -> Vec<Vec<i64>> {
    let recipe =
        Recipe { sequences: 0..lengths.len(), num_samples, seq_length: 4, seed: 1234, rules: Rules::default() };
    let epochs = recipe.epochs(|sequence| lengths[sequence]).unwrap();
    let indices = recipe.build(&epochs, |sequence| lengths[sequence]).unwrap();
    let start = |sequence: usize| i64::from(first + lengths[..sequence].iter().sum::<u32>());
    let stream: Vec<i64> = indices
        .document
        .iter()
        .flat_map(|id| start(id as usize)..start(id as usize) + i64::from(lengths[id as usize]))
        .collect();
    let wanted = num_samples.unwrap_or(u64::MAX) as usize;
    indices.shuffle.iter().take(wanted).map(|row| stream[row as usize * 4..][..5].to_vec()).collect()
}

#[test]
fn d1_samples_are_windows_of_the_shuffled_stream() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a_text_document");
    corpus(&prefix, &LENGTHS, 100);
    for num_samples in [None, Some(3), Some(11), Some(17), Some(20), Some(100)] {
        let samples = open_split(&dataset(&[(prefix.clone(), None)], None), Split::Train, num_samples).unwrap();
        assert_eq!(samples.len(), num_samples.unwrap_or(8));
        assert_eq!(all(&samples), by_definition(&LENGTHS, 100, num_samples), "{num_samples:?}");
    }
    let mut out = vec![1];
    let samples = open_split(&dataset(&[(prefix, None)], None), Split::Train, Some(3)).unwrap();
    assert!(matches!(samples.tokens(3, &mut out), Err(Error::OutOfRange { id: 3, len: 3, .. })));
    assert!(out.is_empty());
}

#[test]
fn splits_do_not_overlap() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    corpus(&prefix, &[20; 10], 0);
    let mut spec = dataset(&[(prefix, None)], None);
    spec.split = "80,20,0".into();
    let (train, validation) =
        (open_split(&spec, Split::Train, None).unwrap(), open_split(&spec, Split::Validation, None).unwrap());
    assert!(all(&train).iter().flatten().all(|token| *token < 160));
    assert!(all(&validation).iter().flatten().all(|token| *token >= 160));
    let message = open_split(&spec, Split::Test, None).unwrap_err().to_string();
    assert!(message.contains("test split has no sample") && message.contains("80,20,0"), "{message}");
    spec.seq_length = 40;
    let message = open_split(&spec, Split::Validation, None).unwrap_err().to_string();
    assert!(message.contains("40 tokens") && message.contains("seq_length"), "{message}");
}

#[test]
fn cache_files_have_megatrons_names_and_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a_text_document");
    corpus(&prefix, &LENGTHS, 100);
    let spec = dataset(&[(prefix.clone(), None)], None);
    let first = all(&open_split(&spec, Split::Train, Some(11)).unwrap());
    let cache = prefix.join("cache/GPTDataset_indices");
    let mut names: Vec<String> =
        fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let endings: Vec<&str> = names.iter().map(|name| &name[32..]).collect();
    assert_eq!(
        endings,
        [
            "-GPTDataset-train-description.txt",
            "-GPTDataset-train-document_index.npy",
            "-GPTDataset-train-fingerprint.json",
            "-GPTDataset-train-sample_index.npy",
            "-GPTDataset-train-shuffle_index.npy"
        ]
    );
    let time = |name: &str| fs::metadata(cache.join(name)).unwrap().modified().unwrap();
    let before: Vec<_> = names.iter().map(|name| time(name)).collect();
    assert_eq!(all(&open_split(&spec, Split::Train, Some(11)).unwrap()), first);
    assert_eq!(names.iter().map(|name| time(name)).collect::<Vec<_>>(), before, "a usable cache was rewritten");
}

#[test]
fn d4_new_data_at_the_old_path_gets_a_new_index() {
    let folder = tempfile::tempdir().unwrap();
    let (prefix, cache) = (folder.path().join("a"), Some(folder.path().join("index")));
    corpus(&prefix, &LENGTHS, 100);
    let spec = dataset(&[(prefix.clone(), None)], cache);
    assert_eq!(all(&open_split(&spec, Split::Train, None).unwrap()), by_definition(&LENGTHS, 100, None));
    // As many sequences and tokens, so the names, sizes and the .bin file are the same: only .idx differs.
    let lengths = [2, 6, 4, 7, 1, 8, 3, 5];
    corpus(&prefix, &lengths, 100);
    assert_eq!(all(&open_split(&spec, Split::Train, None).unwrap()), by_definition(&lengths, 100, None));
}

#[test]
fn d4_torn_and_foreign_cache_files_are_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let (prefix, cache) = (folder.path().join("a"), folder.path().join("index"));
    corpus(&prefix, &LENGTHS, 100);
    let spec = dataset(&[(prefix, None)], Some(cache.clone()));
    let expected = all(&open_split(&spec, Split::Train, Some(11)).unwrap());
    let files: Vec<PathBuf> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 5);
    for file in &files {
        let whole = fs::read(file).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        for damaged in [Vec::new(), whole[..whole.len() / 2].to_vec(), whole[..whole.len() - 1].to_vec(), flipped] {
            fs::write(file, &damaged).unwrap();
            assert_eq!(all(&open_split(&spec, Split::Train, Some(11)).unwrap()), expected, "{}", file.display());
        }
        fs::remove_file(file).unwrap();
        assert_eq!(all(&open_split(&spec, Split::Train, Some(11)).unwrap()), expected);
        fs::write(file, &whole).unwrap();
    }
}

#[test]
fn d4_threads_that_build_at_once_agree() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    corpus(&prefix, &LENGTHS, 100);
    let spec = dataset(&[(prefix, None)], Some(folder.path().join("index")));
    let expected = by_definition(&LENGTHS, 100, Some(20));
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| all(&open_split(&spec, Split::Train, Some(20)).unwrap()))).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), expected);
        }
    });
    assert_eq!(fs::read_dir(folder.path().join("index")).unwrap().count(), 5, "temporary files stayed behind");
}

#[test]
fn an_index_folder_that_cannot_be_made_is_no_obstacle() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    corpus(&prefix, &LENGTHS, 100);
    fs::write(folder.path().join("file"), "").unwrap();
    let spec = dataset(&[(prefix, None)], Some(folder.path().join("file/index")));
    assert_eq!(all(&open_split(&spec, Split::Train, None).unwrap()), by_definition(&LENGTHS, 100, None));
}

#[test]
fn d1_weighted_blend_repeats_small_parts() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    corpus(&a, &LENGTHS, 100);
    corpus(&b, &[30; 30], 1000);
    for cache in [None, Some(folder.path().join("index"))] {
        let spec = dataset(&[(a.clone(), Some(30.0)), (b.clone(), Some(70.0))], cache);
        for _ in 0..2 {
            let samples = open_split(&spec, Split::Train, Some(100)).unwrap();
            assert_eq!(samples.len(), 100);
            let parts: Vec<usize> = (0..20).map(|id| samples.part(id).unwrap()).collect();
            assert_eq!(parts, [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]);
            // Each part is built with ⌈⌈size · weight⌉ · 1.005⌉ samples.
            let (mut from_a, mut from_b) = (
                by_definition(&LENGTHS, 100, Some(31)).into_iter(),
                by_definition(&[30; 30], 1000, Some(71)).into_iter(),
            );
            for (id, tokens) in all(&samples).into_iter().enumerate() {
                let expected = if samples.part(id as u64) == Some(0) { from_a.next() } else { from_b.next() };
                assert_eq!(Some(tokens), expected, "sample {id}");
            }
        }
    }
    let mut blends: Vec<String> = fs::read_dir(folder.path().join("index"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| name.split_once("-BlendedDataset-").map(|(_, ending)| ending.to_owned()))
        .collect();
    blends.sort();
    let endings = ["dataset_index.npy", "dataset_sample_index.npy", "description.txt", "fingerprint.json"];
    assert_eq!(blends, endings.map(|ending| format!("train-{ending}")));
    let spec = dataset(&[(a, Some(0.5)), (b, Some(0.5))], None);
    assert!(open_split(&spec, Split::Train, None).unwrap_err().to_string().contains("no natural size"));
}

#[test]
fn unweighted_blend_has_each_sample_once() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    corpus(&a, &LENGTHS, 100);
    corpus(&b, &[41], 1000);
    let spec = dataset(&[(a.clone(), None), (b.clone(), None)], None);
    let samples = open_split(&spec, Split::Train, None).unwrap();
    assert_eq!(samples.len(), 8 + 10);
    let mut seen = all(&samples);
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 18);
    assert_eq!(open_split(&spec, Split::Train, Some(12)).unwrap().len(), 12);
    let message = open_split(&spec, Split::Train, Some(19)).unwrap_err().to_string();
    assert!(message.contains("19 samples") && message.contains("18 in all") && message.contains("weight"), "{message}");
    let mixed = dataset(&[(a, Some(1.0)), (b, None)], None);
    assert!(open_split(&mixed, Split::Train, Some(1)).unwrap_err().to_string().contains("1 of 2 parts have a weight"));
    let none = dataset(&[], None);
    assert!(open_split(&none, Split::Train, Some(1)).is_err());
}

#[test]
fn an_absurd_request_is_an_error_and_no_abort() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    corpus(&prefix, &LENGTHS, 100);
    for num_samples in [1 << 60, u64::MAX] {
        let message = open_split(&dataset(&[(prefix.clone(), None)], None), Split::Train, Some(num_samples))
            .unwrap_err()
            .to_string();
        assert!(message.contains("does not fit memory"), "{message}");
    }
}

/// Larger than one shuffle block and of uneven lengths: no sample is lost or doubled in an epoch.
#[test]
fn an_epoch_covers_the_corpus_once() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    let lengths: Vec<u32> = (0..997).map(|n| n * 7 % 61).collect();
    corpus(&prefix, &lengths, 0);
    let samples = open_split(&dataset(&[(prefix.clone(), None)], None), Split::Train, None).unwrap();
    let mut inputs: Vec<i64> = all(&samples).iter().flat_map(|tokens| tokens[..4].to_vec()).collect();
    inputs.sort_unstable();
    let total = IndexedReader::open(&prefix).unwrap().num_tokens();
    assert_eq!(inputs.len() as u64, (total - 1) / 4 * 4);
    inputs.dedup();
    assert_eq!(inputs.len() as u64, (total - 1) / 4 * 4);
}
