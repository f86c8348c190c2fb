//! What changes the tree before it is read: overrides from the command line, and `${VAR}`.

use std::collections::BTreeMap;

use super::tree::{self, Entry, Node, Value};
use crate::fault::{Fault, Origin, Severity};

/// One `a.b=c` from the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// As it was typed, for messages: `--set a.b=c`.
    pub typed: String,
    /// `a.b=c`.
    assignment: String,
}

impl Override {
    /// The value of a `--set`.
    #[must_use]
    pub fn set(assignment: &str) -> Self {
        Self { typed: format!("--set {assignment}"), assignment: assignment.to_owned() }
    }

    /// A bare `a.b=c` or `--a.b=c`, as people's fingers know them.
    #[must_use]
    pub fn bare(argument: &str) -> Self {
        Self { typed: argument.to_owned(), assignment: argument.trim_start_matches("--").to_owned() }
    }

    fn fault(&self, file: &str, key: &str, message: &str) -> Box<Fault> {
        Box::new(Fault {
            file: file.to_owned(),
            origin: Origin::Override(self.typed.clone()),
            key: key.to_owned(),
            value: None,
            message: message.to_owned(),
            severity: Severity::Error,
        })
    }
}

/// Applies an override: its value is YAML, so `--set optimizer.betas=[0.9,0.95]` works; missing sections are made.
pub(super) fn apply(root: &mut Node, over: &Override, file: &str) -> Result<(), Box<Fault>> {
    let Some((key, value)) = over.assignment.split_once('=') else {
        return Err(over.fault(file, "", "must be key=value, for example optimizer.lr=1e-4"));
    };
    let key = key.trim();
    if key.is_empty() || key.split('.').any(str::is_empty) {
        return Err(over.fault(file, "", "must begin with a key, for example optimizer.lr=1e-4"));
    }
    let origin = Origin::Override(over.typed.clone());
    let mut new = tree::load(value, file, &|_, _| origin.clone())
        .map_err(|fault| Box::new(Fault { key: key.to_owned(), value: Some(value.to_owned()), ..*fault }))?;
    new.origin = origin.clone();
    let mut node = root;
    let mut walked = String::new();
    let mut parts = key.split('.').peekable();
    while let Some(part) = parts.next() {
        if node.is_null() {
            node.value = Value::Map(Vec::new());
        }
        let Value::Map(entries) = &mut node.value else {
            return Err(over.fault(file, key, &format!("{walked} is not a section, so it has no key {part}")));
        };
        let index = match entries.iter().position(|entry| entry.key == part) {
            Some(index) => index,
            None => {
                let empty = Node { value: Value::Map(Vec::new()), origin: origin.clone() };
                entries.push(Entry { key: part.to_owned(), key_origin: origin.clone(), node: empty });
                entries.len() - 1
            }
        };
        let entry = &mut entries[index];
        if parts.peek().is_none() {
            entry.key_origin = origin.clone();
            entry.node = new;
            return Ok(());
        }
        if !walked.is_empty() {
            walked.push('.');
        }
        walked.push_str(part);
        node = &mut entry.node;
    }
    Ok(())
}

/// Expands `${VAR}` and `${VAR,default}` in every scalar; a variable that is neither set nor defaulted is a fault.
pub(super) fn expand(node: &mut Node, path: &str, file: &str, env: &BTreeMap<String, String>, faults: &mut Vec<Fault>) {
    match &mut node.value {
        Value::Scalar { text, .. } => {
            if !text.contains("${") {
                return;
            }
            match expand_text(text, env) {
                Ok(expanded) => *text = expanded,
                Err(message) => faults.push(Fault {
                    file: file.to_owned(),
                    origin: node.origin.clone(),
                    key: path.to_owned(),
                    value: Some(text.clone()),
                    message,
                    severity: Severity::Error,
                }),
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                expand(item, &format!("{path}[{index}]"), file, env, faults);
            }
        }
        Value::Map(entries) => {
            for entry in entries {
                let path = super::reader::join(path, &entry.key);
                expand(&mut entry.node, &path, file, env, faults);
            }
        }
    }
}

fn expand_text(text: &str, env: &BTreeMap<String, String>) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        out.push_str(&rest[..start]);
        let inner = &rest[start + 2..];
        let Some(end) = inner.find('}') else {
            return Err("`${` without `}`".to_owned());
        };
        let (name, default) = match inner[..end].split_once(',') {
            Some((name, default)) => (name.trim(), Some(default.trim())),
            None => (inner[..end].trim(), None),
        };
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err("must be ${VARIABLE} or ${VARIABLE,default}".to_owned());
        }
        match env.get(name).map(String::as_str).or(default) {
            Some(value) => out.push_str(value),
            None => {
                return Err(format!("environment variable {name} is not set; set it, or write ${{{name},default}}"));
            }
        }
        rest = &inner[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}
