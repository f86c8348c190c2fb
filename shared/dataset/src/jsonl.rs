//! Documents from a JSONL file, in chunks, so that memory is bounded whatever the file's size.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};

/// What one record holds under the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Text {
    /// Texts of one document: a string is one, a list of strings is as many. None is empty.
    Parts(Vec<String>),
    /// The key is there, but null or without text.
    Empty,
    /// The record lacks the key.
    Missing,
}

/// Reads a JSONL file line by line. Blank lines are skipped.
#[derive(Debug)]
pub(crate) struct Records {
    path: PathBuf,
    key: String,
    input: BufReader<File>,
    line: Vec<u8>,
    number: u64,
    /// Bytes read so far.
    pub(crate) bytes: u64,
    /// Size of the file.
    pub(crate) total_bytes: u64,
    /// Keys of the first record, for the message about a key that none has.
    first_keys: Option<Vec<String>>,
    num_with_key: u64,
}

impl Records {
    pub(crate) fn open(path: &Path, key: &str) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let metadata = file.metadata().map_err(Error::io("read the size of", path))?;
        if metadata.is_dir() {
            return Err(Error::NothingUsable {
                path: path.to_owned(),
                why: "is a directory; give a JSONL file".to_owned(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            key: key.to_owned(),
            input: BufReader::with_capacity(1 << 20, file),
            line: Vec::new(),
            number: 0,
            bytes: 0,
            total_bytes: metadata.len(),
            first_keys: None,
            num_with_key: 0,
        })
    }

    /// The next record; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Text>> {
        loop {
            self.line.clear();
            let read = self.input.read_until(b'\n', &mut self.line).map_err(Error::io("read", &self.path))?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            self.bytes += read as u64;
            if !self.line.iter().all(u8::is_ascii_whitespace) {
                return self.parse().map(Some);
            }
        }
    }

    fn parse(&mut self) -> Result<Text> {
        let record: Value = serde_json::from_slice(&self.line).map_err(|error| {
            let shown = String::from_utf8_lossy(&self.line[..self.line.len().min(60)]).trim_end().to_owned();
            self.fault(format!(
                "not a JSON object on one line (column {}): {}; the line begins {shown:?}",
                error.column(),
                reason(&error)
            ))
        })?;
        let Value::Object(mut record) = record else {
            return Err(self.fault(format!(
                "a JSON object with the key \"{}\" is needed, not {}",
                self.key,
                kind(&record)
            )));
        };
        if self.first_keys.is_none() {
            self.first_keys = Some(record.keys().cloned().collect());
        }
        let Some(value) = record.remove(&self.key) else { return Ok(Text::Missing) };
        self.num_with_key += 1;
        let parts = match value {
            Value::Null => Vec::new(),
            Value::String(text) => vec![text],
            Value::Array(items) => items
                .into_iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text),
                    Value::Null => Ok(String::new()),
                    other => Err(self.fault(format!(
                        "\"{}\" holds {} in its list; only strings can be tokenized",
                        self.key,
                        kind(&other)
                    ))),
                })
                .collect::<Result<_>>()?,
            other => {
                return Err(self.fault(format!(
                    "\"{}\" is {}; a string or a list of strings is needed",
                    self.key,
                    kind(&other)
                )));
            }
        };
        let parts: Vec<String> = parts.into_iter().filter(|text| !text.is_empty()).collect();
        Ok(if parts.is_empty() { Text::Empty } else { Text::Parts(parts) })
    }

    /// At the end: an error if no record had the key.
    pub(crate) fn check_key(&self) -> Result<()> {
        if self.num_with_key > 0 {
            return Ok(());
        }
        let why = match &self.first_keys {
            None => "holds no record".to_owned(),
            Some(keys) => format!(
                "no record has the key \"{}\"; the first one has {keys:?}: choose one of them with --json-key",
                self.key
            ),
        };
        Err(Error::NothingUsable { path: self.path.clone(), why })
    }

    /// An error at the line read last.
    pub(crate) fn fault(&self, why: String) -> Error {
        Error::Record { path: self.path.clone(), line: self.number, why }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// serde_json's message without its own line number, which is always 1 here.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
