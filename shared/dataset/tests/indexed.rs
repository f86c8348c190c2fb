//! The `.bin/.idx` pair: golden bytes, round trips, and every way in which a file can be wrong.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use trainctl_dataset::Error;
use trainctl_dataset::indexed::{Dtype, IndexedReader, IndexedWriter};

fn write(prefix: &Path, dtype: Dtype, documents: &[&[u32]]) {
    let mut writer = IndexedWriter::create(prefix, dtype).unwrap();
    for document in documents {
        writer.push_document(document).unwrap();
    }
    writer.finish().unwrap();
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn d1_index_equals_megatrons_bytes() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("fixtures/megatron_index.json")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a_text_document");
    write(&prefix, Dtype::U16, &[&[1, 2, 65535], &[4, 5]]);
    let idx = fs::read(prefix.with_extension("idx")).unwrap();
    assert_eq!(hex(&idx), golden["idx_uint16_lens_3_2"]["hex"]);
    assert_eq!(hex(&fs::read(prefix.with_extension("bin")).unwrap()), "01000200ffff04000500");
}

#[test]
fn value_type_follows_megatrons_rule() {
    assert_eq!(Dtype::for_vocabulary(4096), Dtype::U16);
    assert_eq!(Dtype::for_vocabulary(65_499), Dtype::U16);
    assert_eq!(Dtype::for_vocabulary(65_500), Dtype::I32);
    for code in 0..=255 {
        assert!(Dtype::from_code(code).is_none_or(|dtype| dtype.code() == code));
    }
}

#[test]
fn a_dropped_writer_leaves_nothing_and_a_pair_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("deep/er/a");
    let mut writer = IndexedWriter::create(&prefix, Dtype::U16).unwrap();
    writer.push_document(&[1]).unwrap();
    drop(writer);
    assert_eq!(fs::read_dir(folder.path().join("deep/er")).unwrap().count(), 0);
    write(&prefix, Dtype::U16, &[&[1]]);
    assert!(matches!(IndexedWriter::create(&prefix, Dtype::U16), Err(Error::Exists(_))));
    let mut writer = IndexedWriter::create_or_replace(&prefix, Dtype::I32).unwrap();
    writer.push_document(&[7, 8]).unwrap();
    writer.finish().unwrap();
    assert_eq!(IndexedReader::open(&prefix).unwrap().sequence(0).unwrap(), [7, 8]);
    assert_eq!(fs::read_dir(folder.path().join("deep/er")).unwrap().count(), 2);
}

#[test]
fn tokens_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = IndexedWriter::create(&folder.path().join("a"), Dtype::U16).unwrap();
    let message = writer.push_document(&[1, 65_536]).unwrap_err().to_string();
    assert!(message.contains("65536") && message.contains("65535"), "{message}");
}

#[test]
fn missing_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    write(&prefix, Dtype::U16, &[&[1]]);
    fs::remove_file(prefix.with_extension("bin")).unwrap();
    let message = IndexedReader::open(&prefix).unwrap_err().to_string();
    assert!(message.contains("a.bin does not exist"), "{message}");
}

#[test]
fn a_prefix_may_carry_its_extension() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    write(&prefix, Dtype::U16, &[&[1, 2]]);
    for name in ["a.bin", "a.idx", "a"] {
        assert_eq!(IndexedReader::open(&folder.path().join(name)).unwrap().prefix(), prefix);
    }
}

/// Each edit of a good index, and a text that the error must hold.
#[test]
fn every_broken_invariant_is_named_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    // S = 2, D = 3: lengths at 34, offsets at 42, bounds at 58, 82 bytes.
    write(&prefix, Dtype::U16, &[&[1, 2, 3], &[4, 5]]);
    let good = fs::read(prefix.with_extension("idx")).unwrap();
    let cases: [(usize, u8, &str); 11] = [
        (0, b'X', "at byte 0"),
        (9, 2, "at byte 9: version 2"),
        (17, 6, "at byte 17: type code 6"),
        (17, 0, "at byte 17: type code 0"),
        (18, 3, "at byte 18: 3 sequences"),
        (26, 9, "9 document bounds"),
        (37, 0x80, "at byte 34: sequence 0 has length -2147483645"),
        (42, 1, "at byte 42: sequence 0 starts at 1"),
        (50, 7, "at byte 50: sequence 1 starts at 7"),
        (58, 1, "at byte 58: document bound 0 is 1"),
        (74, 1, "at byte 74: the last document bound is 1"),
    ];
    for (at, value, expected) in cases {
        let mut bad = good.clone();
        bad[at] = value;
        fs::write(prefix.with_extension("idx"), &bad).unwrap();
        let message = IndexedReader::open(&prefix).unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("a.idx"), "{at}: {message}");
    }
    for len in 0..good.len() {
        fs::write(prefix.with_extension("idx"), &good[..len]).unwrap();
        assert!(IndexedReader::open(&prefix).is_err(), "cut to {len}");
    }
    fs::write(prefix.with_extension("idx"), &good).unwrap();
    for bytes in [0, 9, 11] {
        fs::write(prefix.with_extension("bin"), vec![0; bytes]).unwrap();
        let message = IndexedReader::open(&prefix).unwrap_err().to_string();
        assert!(message.contains("a.bin") && message.contains("not a pair"), "{message}");
    }
}

#[test]
fn reads_beyond_the_end_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("a");
    write(&prefix, Dtype::I32, &[&[1, 2, 3], &[]]);
    let reader = IndexedReader::open(&prefix).unwrap();
    let mut out = vec![9];
    reader.read_into(0, 1..3, &mut out).unwrap();
    assert_eq!(out, [9, 2, 3]);
    assert!(reader.read_into(0, 1..4, &mut out).is_err());
    assert!(reader.read_into(2, 0..0, &mut out).is_err());
    assert!(reader.sequence(1).unwrap().is_empty());
    assert_eq!((reader.document(1), reader.document(2)), (Some(1..2), None));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read(
        documents in prop::collection::vec(prop::collection::vec(prop::collection::vec(0u32..120, 0..9), 0..3), 0..9),
        code in prop::sample::select(vec![1u8, 2, 3, 4, 5, 8]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("a");
        let dtype = Dtype::from_code(code).unwrap();
        let mut writer = IndexedWriter::create(&prefix, dtype).unwrap();
        for document in &documents {
            for sequence in document {
                writer.push_sequence(sequence).unwrap();
            }
            writer.end_document();
        }
        let written = writer.finish().unwrap();
        let reader = IndexedReader::open(&prefix).unwrap();
        let tokens: usize = documents.iter().flatten().map(Vec::len).sum();
        prop_assert_eq!((written.num_tokens, reader.num_tokens()), (tokens as u64, tokens as u64));
        prop_assert_eq!(reader.dtype(), dtype);
        prop_assert_eq!(reader.num_documents(), documents.len());
        for (number, document) in documents.iter().enumerate() {
            let sequences = reader.document(number).unwrap();
            prop_assert_eq!(sequences.len(), document.len());
            for (id, sequence) in sequences.zip(document) {
                let expected: Vec<i64> = sequence.iter().map(|token| i64::from(*token)).collect();
                prop_assert_eq!(reader.sequence(id).unwrap(), expected);
            }
        }
    }

    /// Whatever bytes an index holds, opening it answers and does not panic.
    #[test]
    fn random_index_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), keep_header in any::<bool>(), s in 0u64..9, d in 0u64..9) {
        let folder = tempfile::tempdir().unwrap();
        if keep_header && bytes.len() >= 34 {
            bytes[..9].copy_from_slice(b"MMIDIDX\0\0");
            bytes[9..17].copy_from_slice(&1u64.to_le_bytes());
            bytes[17] = 8;
            bytes[18..26].copy_from_slice(&s.to_le_bytes());
            bytes[26..34].copy_from_slice(&d.to_le_bytes());
            bytes.truncate((34 + 12 * s + 8 * d) as usize);
        }
        fs::write(folder.path().join("a.idx"), &bytes).unwrap();
        fs::write(folder.path().join("a.bin"), [0u8; 16]).unwrap();
        prop_assert!(IndexedReader::open(&folder.path().join("a")).is_err() || bytes.len() >= 42);
    }
}
