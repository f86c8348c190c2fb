//! The tokenizer files of an export.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::ExportError;

/// The files that `transformers` reads a tokenizer from; nothing else of the directory is copied.
const KNOWN: [&str; 12] = [
    TOKENIZER,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
];
const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
/// What ends a document where nothing says otherwise, as in preprocessing.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Ids of special tokens, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenIds {
    /// Begin of a sequence.
    pub(super) bos: Option<u32>,
    /// End of a document.
    pub(super) eos: Option<u32>,
}

/// A tokenizer as an export needs it.
#[derive(Debug, Default)]
pub(super) struct Tokenizer {
    /// Names in the export with their sources.
    files: Vec<(&'static str, PathBuf)>,
    /// `tokenizer_config.json` where there is none.
    made_config: Option<Value>,
    /// Special ids.
    pub(super) ids: TokenIds,
}

#[derive(Deserialize)]
struct Parsed {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

impl Parsed {
    fn id(&self, content: &str) -> Option<u32> {
        self.added_tokens.iter().find(|token| token.content == content).map(|token| token.id)
    }
}

impl Tokenizer {
    /// Looks at the directory, or the `tokenizer.json`-like file, that the spec names. `None` if it does not exist.
    ///
    /// # Errors
    /// [`ExportError::Tokenizer`] for a directory without a tokenizer and for files that are not JSON.
    pub(super) fn find(path: &Path, max_positions: u32) -> Result<Option<Self>, ExportError> {
        let fail = |path: &Path, reason: String| ExportError::Tokenizer { path: path.to_owned(), reason };
        let mut files: Vec<(&'static str, PathBuf)> = Vec::new();
        if path.is_dir() {
            files.extend(KNOWN.iter().map(|name| (*name, path.join(name))).filter(|(_, file)| file.is_file()));
            if files.is_empty() {
                return Err(fail(path, format!("holds no file of a tokenizer, such as {TOKENIZER}")));
            }
        } else if path.is_file() {
            // What training read is this file, and the config beside it.
            files.push((TOKENIZER, path.to_owned()));
            let config = path.with_file_name(CONFIG);
            files.extend(config.is_file().then_some((CONFIG, config)));
        } else {
            return Ok(None);
        }
        let json = |name: &str| -> Result<Option<Vec<u8>>, ExportError> {
            let Some((_, file)) = files.iter().find(|(known, _)| *known == name) else { return Ok(None) };
            std::fs::read(file).map(Some).map_err(|e| fail(file, format!("cannot be read: {e}")))
        };
        let parsed: Option<Parsed> = match json(TOKENIZER)? {
            Some(bytes) => Some(serde_json::from_slice(&bytes).map_err(|e| fail(path, format!("{TOKENIZER}: {e}")))?),
            None => None,
        };
        let config: Option<Value> = match json(CONFIG)? {
            Some(bytes) => Some(serde_json::from_slice(&bytes).map_err(|e| fail(path, format!("{CONFIG}: {e}")))?),
            None => None,
        };
        let id = |content: &str| parsed.as_ref().and_then(|parsed| parsed.id(content));
        let names = |key: &str| config.as_ref().is_some_and(|config| !config[key].is_null());
        let named = |key: &str| {
            let token = &config.as_ref()?[key];
            token.as_str().or_else(|| token["content"].as_str()).and_then(id)
        };
        let (ids, made_config) = if config.is_some() {
            // Preprocessing ends documents by the same rule.
            let eos = if names("eos_token") { named("eos_token") } else { id(END_OF_TEXT) };
            (TokenIds { bos: named("bos_token"), eos }, None)
        } else {
            let end = id(END_OF_TEXT);
            (TokenIds { bos: end, eos: end }, Some(bare_config(end.is_some(), max_positions)))
        };
        // A slow tokenizer without tokenizer.json knows its class without our help.
        let made_config = made_config.filter(|_| parsed.is_some());
        Ok(Some(Self { files, made_config, ids }))
    }

    /// Every file with its bytes, one at a time.
    pub(super) fn files(&self) -> impl Iterator<Item = Result<(&'static str, Vec<u8>), ExportError>> + '_ {
        let copied = self.files.iter().map(|(name, path)| {
            let bytes = std::fs::read(path);
            let fail = |e| ExportError::Tokenizer { path: path.clone(), reason: format!("cannot be read: {e}") };
            bytes.map(|bytes| (*name, bytes)).map_err(fail)
        });
        let made = self.made_config.iter().map(|config| Ok((CONFIG, format!("{config:#}\n").into_bytes())));
        copied.chain(made)
    }
}

/// With this `AutoTokenizer` takes `tokenizer.json` as it is.
fn bare_config(has_end: bool, max_positions: u32) -> Value {
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "model_max_length": max_positions,
    });
    if let (true, Value::Object(keys)) = (has_end, &mut config) {
        for key in ["bos_token", "eos_token", "unk_token"] {
            keys.insert(key.into(), END_OF_TEXT.into());
        }
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tokenizer: &Tokenizer) -> Vec<&'static str> {
        tokenizer.files().map(|file| file.unwrap().0).collect()
    }

    #[test]
    fn only_the_files_of_a_tokenizer_are_copied_and_a_bare_one_gets_a_config() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("tokenizer.json", r#"{"added_tokens": [{"id": 3, "content": "<|endoftext|>", "special": true}]}"#);
        write("notes.txt", "mine");
        let bare = Tokenizer::find(dir.path(), 64).unwrap().unwrap();
        assert_eq!(names(&bare), ["tokenizer.json", "tokenizer_config.json"]);
        assert_eq!(bare.ids, TokenIds { bos: Some(3), eos: Some(3) });
        let config: Value = serde_json::from_slice(&bare.files().last().unwrap().unwrap().1).unwrap();
        assert_eq!((&config["model_max_length"], &config["eos_token"]), (&64.into(), &"<|endoftext|>".into()));

        write("tokenizer_config.json", r#"{"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<s>"}"#);
        write("merges.txt", "#version: 0.2\n");
        let whole = Tokenizer::find(dir.path(), 64).unwrap().unwrap();
        assert_eq!(names(&whole), ["tokenizer.json", "tokenizer_config.json", "merges.txt"]);
        assert_eq!(whole.ids, TokenIds { bos: None, eos: Some(3) });
        let file = Tokenizer::find(&dir.path().join("tokenizer.json"), 64).unwrap().unwrap();
        assert_eq!(names(&file), ["tokenizer.json", "tokenizer_config.json"]);
    }

    #[test]
    fn what_is_no_tokenizer_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Tokenizer::find(&dir.path().join("gone"), 64).unwrap().is_none());
        let error = Tokenizer::find(dir.path(), 64).unwrap_err().to_string();
        assert!(error.contains("holds no file of a tokenizer"), "{error}");
        std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
        let error = Tokenizer::find(dir.path(), 64).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}
