//! Hugging Face's own reader takes our `tokenizer.json`, and what we preprocess is what it would have made of the same text.

use std::process::Command;

use trainctl_dataset::indexed::IndexedReader;
use trainctl_tests::corpus::corpus;
use trainctl_tests::programs;

/// Prints the ids of each document of a JSONL file, end-of-document token included, one line a document.
const ENCODE: &str = r#"
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
end = json.load(open(sys.argv[1] + "/tokenizer_config.json"))["eos_token"]
for line in open(sys.argv[2], encoding="utf-8"):
    ids = tokenizer.encode(json.loads(line)["text"]).ids
    print(" ".join(map(str, ids + [tokenizer.token_to_id(end)])))
"#;

#[test]
fn p7_hugging_face_reads_our_tokenizer_and_gives_the_same_tokens() {
    let Some(python) = programs::python() else { return };
    let corpus = corpus();
    let text = corpus.prefix.with_file_name("text.jsonl");
    let output = Command::new(python).args(["-c", ENCODE]).arg(&corpus.tokenizer).arg(text).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let theirs = String::from_utf8(output.stdout).unwrap();
    let ours = IndexedReader::open(&corpus.prefix).unwrap();
    assert_eq!(theirs.lines().count(), ours.num_documents());
    for (document, line) in theirs.lines().enumerate() {
        let mut tokens = Vec::new();
        for sequence in ours.document(document).unwrap() {
            let length = ours.sequence_length(sequence).unwrap() as usize;
            let mut part = Vec::new();
            ours.read_into(sequence, 0..length, &mut part).unwrap();
            tokens.append(&mut part);
        }
        let ids: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        assert_eq!(ids.join(" "), line, "document {document}");
    }
}
