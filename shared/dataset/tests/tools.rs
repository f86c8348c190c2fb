//! Corpus, tokenizer, preprocessing and inspection, end to end on real files.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use trainctl_dataset::corpus::{CorpusOptions, corpus};
use trainctl_dataset::indexed::{Dtype, IndexedReader};
use trainctl_dataset::inspect::{InspectOptions, inspect};
use trainctl_dataset::preprocess::{PreprocessOptions, preprocess};
use trainctl_dataset::tokenizer::{END_OF_TEXT, Tokenizer, TrainOptions, train};
use trainctl_dataset::{Counts, Error, Progress, expand_paths};

/// Keeps all that it is told.
#[derive(Default)]
struct Seen(Vec<Counts>);

impl Progress for Seen {
    fn update(&mut self, counts: &Counts) {
        self.0.push(*counts);
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A JSONL file of this crate's own sources, `copies` times.
fn own_sources(path: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    for folder in ["src", "src/indexed", "tests"] {
        let mut files: Vec<PathBuf> = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        texts.extend(
            files
                .iter()
                .filter(|file| file.extension().is_some_and(|e| e == "rs"))
                .map(|file| fs::read_to_string(file).unwrap()),
        );
    }
    write_jsonl(path, &texts);
    texts
}

fn write_jsonl(path: &Path, texts: &[String]) {
    let lines: Vec<String> = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string()).collect();
    fs::write(path, lines.join("\n") + "\n").unwrap();
}

fn small_tokenizer(folder: &Path) -> PathBuf {
    own_sources(&folder.join("train.jsonl"));
    let mut options = TrainOptions::new(folder.join("train.jsonl"), folder.join("tokenizer"));
    options.vocabulary_size = 600;
    train(&options, &mut ()).unwrap();
    options.output
}

#[test]
fn trained_tokenizer_is_reproducible_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let texts = own_sources(&folder.path().join("in.jsonl"));
    let mut files = Vec::new();
    for name in ["a", "b"] {
        let mut options = TrainOptions::new(folder.path().join("in.jsonl"), folder.path().join(name));
        options.vocabulary_size = 600;
        let mut seen = Seen::default();
        let trained = train(&options, &mut seen).unwrap();
        assert_eq!((trained.vocabulary_size, trained.documents, trained.every), (600, texts.len() as u64, 1));
        let last = seen.0.last().unwrap();
        assert_eq!((last.bytes, last.documents), (last.total_bytes, texts.len() as u64));
        assert_eq!(names(&options.output), ["tokenizer.json", "tokenizer_config.json"]);
        files.push(fs::read(options.output.join("tokenizer.json")).unwrap());
        assert!(matches!(train(&options, &mut ()), Err(Error::Exists(_))));
    }
    assert!(files[0] == files[1], "two trainings differ");
    let tokenizer = Tokenizer::load(&folder.path().join("a")).unwrap();
    assert_eq!((tokenizer.vocabulary_size(), tokenizer.end_of_document()), (600, Some(0)));
    let texts = ["fn main() {\n\t\"héllo wörld 🦀\"  \n}", " leading", "\u{0}\u{7f}\r\n"];
    for (ids, text) in tokenizer.encode_batch(texts.to_vec(), true).unwrap().iter().zip(texts) {
        assert_eq!(tokenizer.decode(ids).unwrap(), text);
    }
}

#[test]
fn a_sample_takes_every_kth_document() {
    let folder = tempfile::tempdir().unwrap();
    let texts: Vec<String> = (0..100).map(|n| format!("document number {n} ").repeat(20)).collect();
    write_jsonl(&folder.path().join("in.jsonl"), &texts);
    let size = fs::metadata(folder.path().join("in.jsonl")).unwrap().len();
    let mut options = TrainOptions::new(folder.path().join("in.jsonl"), folder.path().join("out"));
    (options.vocabulary_size, options.sample_bytes) = (300, size / 4);
    let trained = train(&options, &mut ()).unwrap();
    let every = size.div_ceil(size / 4);
    assert_eq!((trained.every, trained.documents), (every, 100u64.div_ceil(every)));
    assert!(every == 4 || every == 5, "{every}");
    options.vocabulary_size = 256;
    assert!(train(&options, &mut ()).unwrap_err().to_string().contains("257"));
}

#[test]
fn preprocess_writes_each_document_and_inspect_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = small_tokenizer(folder.path());
    let input = folder.path().join("in.jsonl");
    let lines = [
        r#"{"text": "first document"}"#,
        r#"{"text": ["two", "parts"], "other": 1}"#,
        r#"{"text": ""}"#,
        "",
        r#"{"text": null}"#,
        r#"{"other": 2}"#,
        r#"{"text": "last"}"#,
    ];
    fs::write(&input, lines.join("\n")).unwrap();
    let mut options = PreprocessOptions::new(input, tokenizer.clone(), folder.path().join("out/web"));
    options.append_eod = true;
    let mut seen = Seen::default();
    let made = preprocess(&options, &mut seen).unwrap();
    assert_eq!(names(&folder.path().join("out")), ["web_text_document.bin", "web_text_document.idx"]);
    assert_eq!((made.documents, made.skipped, made.sequences, made.dtype), (3, 3, 4, Dtype::U16));
    let last = seen.0.last().unwrap();
    assert_eq!((last.bytes, last.documents, last.tokens), (last.total_bytes, 3, made.tokens));

    let reader = IndexedReader::open(&made.prefix).unwrap();
    let loaded = Tokenizer::load(&tokenizer).unwrap();
    let text = |sequence: usize| {
        let ids: Vec<u32> = reader.sequence(sequence).unwrap().iter().map(|id| u32::try_from(*id).unwrap()).collect();
        loaded.decode(&ids).unwrap()
    };
    let expected = ["first document<|endoftext|>", "two", "parts<|endoftext|>", "last<|endoftext|>"];
    assert_eq!((0..4).map(text).collect::<Vec<_>>(), expected);
    assert_eq!(reader.document(1), Some(1..3));

    let summary = inspect(&InspectOptions {
        prefix: made.prefix.clone(),
        tokenizer: Some(tokenizer),
        num_documents: 2,
        scan: false,
    })
    .unwrap();
    assert_eq!(
        (summary.num_documents, summary.num_sequences, summary.num_tokens, summary.dtype_code),
        (3, 4, made.tokens, 8)
    );
    assert_eq!(summary.first_documents[1].text.as_deref(), Some("twoparts<|endoftext|>"));
    assert_eq!(summary.token_range.unwrap().0, 0);
    assert_eq!(summary.vocabulary_size, Some(600));
    assert!(summary.sequence_lengths.as_ref().unwrap().max >= summary.sequence_lengths.as_ref().unwrap().median);
    assert!(serde_json::to_string(&summary).unwrap().contains(r#""dtype":"u16""#));

    assert!(matches!(preprocess(&options, &mut ()), Err(Error::Exists(_))));
    options.replace = true;
    assert_eq!(preprocess(&options, &mut ()).unwrap(), made);
}

#[test]
fn failed_runs_say_where_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = small_tokenizer(folder.path());
    let good = r#"{"text": "good"}"#;
    let cases = [
        (format!("{good}\n{{\"text\": \"cut"), "in.jsonl:2: not a JSON object"),
        (format!("{good}\n\n[1]\n"), "in.jsonl:3: a JSON object with the key \"text\" is needed, not a list"),
        (format!("{good}\n{{\"text\": 7}}\n"), "in.jsonl:2: \"text\" is a number"),
        (format!("{good}\n{{\"text\": [\"a\", {{}}]}}\n"), "in.jsonl:2: \"text\" holds an object"),
        (
            "{\"body\": \"x\", \"id\": 1}\n".repeat(3),
            "no record has the key \"text\"; the first one has [\"body\", \"id\"]",
        ),
        ("{\"text\": \"\"}\n".repeat(3), "none of 3 records has any text"),
        (String::new(), "holds no record"),
    ];
    for (number, (content, expected)) in cases.iter().enumerate() {
        let (input, out) = (folder.path().join("in.jsonl"), folder.path().join(format!("out{number}")));
        fs::write(&input, content).unwrap();
        let message = preprocess(&PreprocessOptions::new(input, tokenizer.clone(), out.join("a")), &mut ())
            .unwrap_err()
            .to_string();
        assert!(message.contains(expected), "{message}");
        assert!(names(&out).is_empty(), "{message}");
    }
    let message =
        preprocess(&PreprocessOptions::new("none.jsonl".into(), tokenizer.clone(), folder.path().join("a")), &mut ())
            .unwrap_err();
    assert!(message.to_string().contains("none.jsonl"), "{message}");
    fs::write(folder.path().join("bad.json"), "{}").unwrap();
    for (path, expected) in [("bad.json", "is not a tokenizer"), ("none", "does not exist")] {
        let message = Tokenizer::load(&folder.path().join(path)).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn end_of_document_follows_the_tokenizers_config() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = small_tokenizer(folder.path());
    let config = tokenizer.join("tokenizer_config.json");
    fs::write(&config, r#"{"eos_token": {"content": "<|endoftext|>"}}"#).unwrap();
    assert_eq!(Tokenizer::load(&tokenizer).unwrap().end_of_document(), Some(0));
    fs::write(&config, r#"{"eos_token": "</s>"}"#).unwrap();
    assert!(Tokenizer::load(&tokenizer).unwrap_err().to_string().contains("\"</s>\" is not in the vocabulary"));
    fs::remove_file(&config).unwrap();
    assert_eq!(Tokenizer::load(&tokenizer.join("tokenizer.json")).unwrap().end_of_document(), Some(0));
    assert_eq!(END_OF_TEXT, "<|endoftext|>");
}

#[test]
fn inspect_refuses_tokens_that_the_tokenizer_lacks() {
    use trainctl_dataset::indexed::IndexedWriter;
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = small_tokenizer(folder.path());
    let mut writer = IndexedWriter::create(&folder.path().join("a"), Dtype::U16).unwrap();
    writer.push_document(&[1, 2]).unwrap();
    writer.push_document(&[3, 600]).unwrap();
    writer.finish().unwrap();
    let mut options =
        InspectOptions { prefix: folder.path().join("a.bin"), tokenizer: Some(tokenizer), ..InspectOptions::default() };
    let message = inspect(&options).unwrap_err().to_string();
    assert!(message.contains("at byte 6: token 600 of sequence 1; the tokenizer has 0 to 599"), "{message}");
    (options.tokenizer, options.scan) = (None, true);
    assert_eq!(inspect(&options).unwrap().token_range, Some((1, 600)));
}

#[test]
fn globs_are_sorted_and_half_pairs_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["b_2_text_document", "b_10_text_document", "a_text_document", "c"] {
        fs::write(folder.path().join(format!("{name}.idx")), "").unwrap();
        fs::write(folder.path().join(format!("{name}.bin")), "").unwrap();
    }
    fs::write(folder.path().join("notes.txt"), "").unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let short = |pattern: &str| -> Vec<String> {
        expand_paths(&at(pattern))
            .unwrap()
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(short("*_text_document"), ["a_text_document", "b_10_text_document", "b_2_text_document"]);
    assert_eq!(short("b_?_*.bin"), ["b_2_text_document"]);
    assert_eq!(short("c.idx"), ["c"]);
    let fails = |pattern: &str, expected: &str| {
        let message = expand_paths(&at(pattern)).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    fails("z*", "matches no .bin/.idx pair");
    fails("zz", "zz.idx does not exist");
    fails("", "is a directory");
    fails("[", "not a glob");
    fs::remove_file(folder.path().join("b_2_text_document.bin")).unwrap();
    fails("b*", "b_2_text_document.bin does not exist");
}

/// A crate whose lock file has two leaf crates of ours, which are on this machine because this test was built with them.
fn crate_with_two_locked(folder: &Path) -> PathBuf {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let entry = |name: &str| {
        let entry = lock.split("[[package]]").find(|entry| entry.contains(&format!("\nname = \"{name}\"\n"))).unwrap();
        let version = entry.split("version = \"").nth(1).unwrap().split('"').next().unwrap();
        (format!("[[package]]{}\n", entry.trim_end()), format!("{name} = \"={version}\"\n"))
    };
    let (fastrand, glob) = (entry("fastrand"), entry("glob"));
    let own = "[[package]]\nname = \"own\"\nversion = \"0.0.0\"\ndependencies = [\n \"fastrand\",\n \"glob\",\n]\n";
    fs::write(folder.join("Cargo.lock"), format!("version = 4\n\n{}\n{}\n{own}", fastrand.0, glob.0)).unwrap();
    let package = "[package]\nname = \"own\"\nversion = \"0.0.0\"\nedition = \"2024\"\n";
    fs::write(folder.join("Cargo.toml"), format!("{package}\n[dependencies]\n{}{}\n[workspace]\n", fastrand.1, glob.1))
        .unwrap();
    fs::create_dir(folder.join("src")).unwrap();
    fs::write(folder.join("src/lib.rs"), "// own text\n").unwrap();
    folder.join("Cargo.toml")
}

#[test]
fn corpus_is_the_sorted_text_of_the_locked_crates() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = CorpusOptions::new(crate_with_two_locked(folder.path()), folder.path().join("a.jsonl"));
    let whole = corpus(&options, &mut ()).unwrap();
    assert!(!whole.capped && whole.crates == 2 && whole.documents > 6, "{whole:?}");
    assert!(matches!(corpus(&options, &mut ()), Err(Error::Exists(_))));
    let text = fs::read_to_string(&whole.path).unwrap();
    assert_eq!(whole.bytes, text.len() as u64);
    let records: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sources: Vec<&str> = records.iter().map(|record| record["source"].as_str().unwrap()).collect();
    assert!(sources[0].starts_with("fastrand-") && sources.last().unwrap().starts_with("glob-"), "{sources:?}");
    assert!(
        sources.iter().any(|source| source.ends_with("/src/lib.rs"))
            && sources.iter().any(|source| source.ends_with(".md"))
    );
    assert!(!text.contains("// own text"));

    options.output = folder.path().join("b.jsonl");
    options.max_bytes = whole.bytes / 2;
    let cut = corpus(&options, &mut ()).unwrap();
    assert!(cut.capped && cut.bytes <= options.max_bytes && cut.documents < whole.documents);
    assert!(text.starts_with(&fs::read_to_string(&cut.path).unwrap()));

    options.output = folder.path().join("c.jsonl");
    options.max_bytes = 10;
    assert!(corpus(&options, &mut ()).unwrap_err().to_string().contains("fits 10 bytes"));
    options.manifest = folder.path().join("none/Cargo.toml");
    assert!(corpus(&options, &mut ()).unwrap_err().to_string().contains("none/Cargo.toml"));
    assert!(!options.output.exists());
}

/// The whole quickstart's data path. Prints its times; run it in release.
#[test]
#[ignore = "measures 40 MB; run with --release -- --ignored --nocapture"]
fn forty_megabytes_take_well_under_45_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let made =
        corpus(&CorpusOptions::new(root().join("Cargo.toml"), folder.path().join("corpus.jsonl")), &mut ()).unwrap();
    println!("corpus {:?}: {made:?}", start.elapsed());
    let step = Instant::now();
    let trained = train(&TrainOptions::new(made.path.clone(), folder.path().join("tokenizer")), &mut ()).unwrap();
    println!("tokenizer {:?}: {trained:?}", step.elapsed());
    let step = Instant::now();
    let mut options = PreprocessOptions::new(made.path, folder.path().join("tokenizer"), folder.path().join("quick"));
    options.append_eod = true;
    let done = preprocess(&options, &mut ()).unwrap();
    println!("preprocess {:?}: {done:?}", step.elapsed());
    let step = Instant::now();
    let summary = inspect(&InspectOptions {
        prefix: done.prefix,
        tokenizer: Some(folder.path().join("tokenizer")),
        num_documents: 1,
        scan: true,
    });
    println!("inspect {:?}: {:?}", step.elapsed(), summary.unwrap().sequence_lengths);
    assert_eq!(trained.vocabulary_size, 4096);
    assert!(start.elapsed().as_secs() < 45);
}
