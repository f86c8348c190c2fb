//! Reads a section of the tree key by key and collects what is wrong instead of stopping.
//!
//! Serde would stop at a section's first fault and know no ranges; here every key has one line that names its type, range
//! and default, and a key that nobody asked for is unknown.

use std::fmt::Display;

use super::tree::{Entry, Node, Value};
use crate::fault::{Fault, Origin, Severity};

pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Where faults of one file gather.
pub(super) struct Sink {
    pub(super) file: String,
    pub(super) faults: Vec<Fault>,
}

impl Sink {
    pub(super) fn push(&mut self, origin: &Origin, key: &str, value: Option<String>, message: impl Into<String>) {
        self.faults.push(Fault {
            file: self.file.clone(),
            origin: origin.clone(),
            key: key.to_owned(),
            value,
            message: message.into(),
            severity: Severity::Error,
        });
    }

    pub(super) fn wrong(&mut self, node: &Node, key: &str, message: impl Into<String>) {
        self.push(&node.origin, key, Some(node.shown()), message);
    }
}

/// One mapping that is being read.
pub(super) struct Section<'t, 's> {
    sink: &'s mut Sink,
    path: String,
    origin: Origin,
    entries: &'t [Entry],
    known: Vec<&'static str>,
}

const NOTHING: &[Entry] = &[];

impl<'t, 's> Section<'t, 's> {
    /// A section; what is not a mapping is a fault and reads as empty.
    pub(super) fn new(sink: &'s mut Sink, path: &str, origin: &Origin, node: Option<&'t Node>) -> Self {
        let (entries, origin) = match node {
            None => (NOTHING, origin.clone()),
            Some(node) => match &node.value {
                Value::Map(entries) => (entries.as_slice(), origin.clone()),
                _ if node.is_null() => (NOTHING, origin.clone()),
                _ => {
                    sink.wrong(node, path, "must be a mapping of keys to values");
                    (NOTHING, origin.clone())
                }
            },
        };
        Self { sink, path: path.to_owned(), origin, entries, known: Vec::new() }
    }

    pub(super) fn path(&self, key: &str) -> String {
        join(&self.path, key)
    }

    pub(super) fn sink(&mut self) -> &mut Sink {
        self.sink
    }

    /// Makes a key known that is read elsewhere.
    pub(super) fn known(&mut self, key: &'static str) {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
    }

    /// The entry of a key, which is known from now on; null counts as absent.
    pub(super) fn entry(&mut self, key: &'static str) -> Option<&'t Entry> {
        self.known(key);
        self.entries.iter().find(|entry| entry.key == key).filter(|entry| !entry.node.is_null())
    }

    /// Reads a key with `read`, which says what is allowed when it refuses.
    pub(super) fn get<T>(&mut self, key: &'static str, read: impl FnOnce(&Node) -> Result<T, String>) -> Option<T> {
        let entry = self.entry(key)?;
        match read(&entry.node) {
            Ok(value) => Some(value),
            Err(allowed) => {
                let path = self.path(key);
                self.sink.wrong(&entry.node, &path, allowed);
                None
            }
        }
    }

    /// Like [`Self::get`], with a fault when the key is absent.
    pub(super) fn need<T>(
        &mut self,
        key: &'static str,
        what: &str,
        read: impl FnOnce(&Node) -> Result<T, String>,
    ) -> Option<T> {
        if self.entry(key).is_none() {
            // A misspelt key is named once, by `finish`.
            if self.entries.iter().any(|entry| entry.key != key && nearest(&entry.key, &[key]).is_some()) {
                return None;
            }
            let path = self.path(key);
            self.sink.push(&self.origin, &path, None, format!("missing; {what}"));
            return None;
        }
        self.get(key, read)
    }

    /// Names the keys that nobody asked for; `prefixes` are families of keys that are read elsewhere.
    pub(super) fn finish(self, prefixes: &[&str]) {
        for entry in self.entries {
            let key = entry.key.as_str();
            if self.known.contains(&key) || prefixes.iter().any(|prefix| key.starts_with(prefix)) {
                continue;
            }
            let path = join(&self.path, key);
            let near = nearest(key, &self.known);
            let message = match (key, near) {
                ("_target_", _) => "unknown key; trainctl needs no _target_: each section has one meaning".to_owned(),
                ("<<", _) => "unknown key; YAML 1.2 has no merge keys: write the keys out".to_owned(),
                (_, Some(near)) => format!("unknown key; did you mean {near}?"),
                (_, None) => format!("unknown key; allowed: {}", self.known.join(", ")),
            };
            self.sink.push(&entry.key_origin, &path, None, message);
        }
    }
}

/// The allowed key that a misspelt one most likely meant.
fn nearest<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    let near = known.iter().map(|candidate| (strsim::damerau_levenshtein(key, candidate), *candidate)).min()?;
    (near.0 <= 1 + near.1.len() / 5).then_some(near.1)
}

/// A plain scalar's text, or what is wrong with it.
fn plain<'n>(node: &'n Node, allowed: &str) -> Result<&'n str, String> {
    match &node.value {
        Value::Scalar { text, plain: true } => Ok(text),
        Value::Scalar { .. } => Err(format!("{allowed}, without quotes")),
        _ => Err(allowed.to_owned()),
    }
}

/// A whole number `least ≤ n ≤ most`.
pub(super) fn whole<T>(least: T, most: T) -> impl Fn(&Node) -> Result<T, String>
where
    T: TryFrom<i128> + Display + PartialOrd + Copy,
    i128: TryFrom<T>,
{
    move |node| {
        let unbounded = i128::try_from(most).is_ok_and(|most| most >= i128::from(u32::MAX));
        let allowed = if unbounded {
            format!("must be a whole number ≥ {least}")
        } else {
            format!("must be a whole number from {least} to {most}")
        };
        let text = plain(node, &allowed)?;
        let number = parse_whole(text).ok_or_else(|| allowed.clone())?;
        match T::try_from(number) {
            Ok(number) if number >= least && number <= most => Ok(number),
            Ok(_) | Err(_) if number > 0 => Err(format!("must be a whole number from {least} to {most}")),
            _ => Err(allowed),
        }
    }
}

/// YAML's core schema: decimal, `0x…` and `0o…`.
fn parse_whole(text: &str) -> Option<i128> {
    if let Some(digits) = text.strip_prefix("0x") {
        return i128::from_str_radix(digits, 16).ok();
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return i128::from_str_radix(digits, 8).ok();
    }
    text.parse().ok()
}

/// A finite number that `holds`; `allowed` says which.
pub(super) fn number(allowed: &'static str, holds: impl Fn(f64) -> bool) -> impl Fn(&Node) -> Result<f64, String> {
    move |node| {
        let text = plain(node, allowed)?;
        let value = parse_number(text).ok_or_else(|| allowed.to_owned())?;
        if value.is_finite() && holds(value) { Ok(value) } else { Err(allowed.to_owned()) }
    }
}

fn parse_number(text: &str) -> Option<f64> {
    // Rust also reads "nan", "inf" and "infinity", which are text in YAML.
    let starts_like_number = text.trim_start_matches(['-', '+']).starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if starts_like_number { text.parse().ok() } else { None }
}

pub(super) fn boolean(node: &Node) -> Result<bool, String> {
    match plain(node, "must be true or false")? {
        "true" | "True" | "TRUE" => Ok(true),
        "false" | "False" | "FALSE" => Ok(false),
        _ => Err("must be true or false".to_owned()),
    }
}

/// Text; a plain number is taken as written.
pub(super) fn text(node: &Node) -> Result<String, String> {
    match &node.value {
        Value::Scalar { text, .. } if text.is_empty() => Err("must not be empty".to_owned()),
        Value::Scalar { text, .. } => Ok(text.clone()),
        _ => Err("must be text".to_owned()),
    }
}

/// A path of this file system, still as written.
pub(super) fn path(node: &Node) -> Result<std::path::PathBuf, String> {
    let text = text(node).map_err(|_| "must be a path".to_owned())?;
    if text.contains('\0') {
        return Err("must be a path: it contains a zero byte".to_owned());
    }
    if text.contains("://") {
        return Err("must be a path of this machine's file system, not a URL".to_owned());
    }
    Ok(text.into())
}

/// One of a few words.
pub(super) fn choice<T: Copy>(choices: &[(&'static str, T)]) -> impl Fn(&Node) -> Result<T, String> {
    move |node| {
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        let allowed = match names.as_slice() {
            [one] => format!("must be {one}"),
            _ => format!("must be one of {}", names.join(", ")),
        };
        let word = text(node).map_err(|_| allowed.clone())?;
        choices.iter().find(|(name, _)| *name == word).map(|(_, value)| *value).ok_or(allowed)
    }
}

/// The node as JSON, by YAML's core schema.
pub(super) fn json(node: &Node) -> serde_json::Value {
    use serde_json::Value as Json;
    match &node.value {
        _ if node.is_null() => Json::Null,
        Value::Scalar { text, plain: false } => Json::String(text.clone()),
        Value::Scalar { text, plain: true } => match text.as_str() {
            "true" | "True" | "TRUE" => Json::Bool(true),
            "false" | "False" | "FALSE" => Json::Bool(false),
            _ => {
                let whole = parse_whole(text)
                    .and_then(|n| i64::try_from(n).map(Json::from).or_else(|_| u64::try_from(n).map(Json::from)).ok());
                let real = || parse_number(text).and_then(serde_json::Number::from_f64).map(Json::Number);
                whole.or_else(real).unwrap_or_else(|| Json::String(text.clone()))
            }
        },
        Value::List(items) => Json::Array(items.iter().map(json).collect()),
        Value::Map(entries) => {
            Json::Object(entries.iter().map(|entry| (entry.key.clone(), json(&entry.node))).collect())
        }
    }
}
