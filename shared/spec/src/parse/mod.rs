//! `job.yaml` as text → [`JobSpec`] with the place of every key, or all faults at once.
//!
//! Steps: YAML to a tree with positions, overrides into the tree, `${VAR}` expanded, then section by section. The result is
//! what was written with defaults that need nothing from outside filled in; [`crate::resolve()`] does the rest.

mod overrides;
mod reader;
mod sections;
mod tree;

use std::collections::BTreeMap;

pub use self::overrides::Override;
use self::reader::Sink;
pub(crate) use self::sections::VALIDATION;
use self::tree::{Node, Value};
use crate::fault::{Faults, Origin, Spans};
use crate::job::JobSpec;

/// A spec as it was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// Paths are as written (relative, globs), `model.config` may still be a path, optional values may be unset.
    pub spec: JobSpec,
    /// Where each key was written.
    pub spans: Spans,
}

/// Parses `source`; `file` is how messages name it.
///
/// `env` is what `${VAR}` may use.
///
/// # Errors
/// All faults of the spec. YAML syntax errors come alone, since nothing after them can be trusted.
pub fn parse(
    source: &str,
    file: &str,
    overrides: &[Override],
    env: &BTreeMap<String, String>,
) -> Result<Parsed, Faults> {
    let mut root =
        tree::load(source, file, &|line, column| Origin::At { line, column }).map_err(|fault| Faults(vec![*fault]))?;
    let mut sink = Sink { file: file.to_owned(), faults: Vec::new() };
    for over in overrides {
        if let Err(fault) = overrides::apply(&mut root, over, file) {
            sink.faults.push(*fault);
        }
    }
    overrides::expand(&mut root, "", file, env, &mut sink.faults);
    read(&root, sink)
}

impl JobSpec {
    /// Reads the resolved form that [`JobSpec::to_yaml`] writes: nothing is expanded. Equal to what was written.
    ///
    /// # Errors
    /// All faults, as [`parse`].
    pub fn from_yaml(source: &str) -> Result<Self, Faults> {
        let file = "resolved spec";
        let root = tree::load(source, file, &|line, column| Origin::At { line, column })
            .map_err(|fault| Faults(vec![*fault]))?;
        read(&root, Sink { file: file.to_owned(), faults: Vec::new() }).map(|parsed| parsed.spec)
    }
}

fn read(root: &Node, mut sink: Sink) -> Result<Parsed, Faults> {
    let mut spans = Spans::nowhere(&sink.file);
    collect_spans(root, "", &mut spans);
    let spec = sections::job(&mut sink, root);
    let mut faults = Faults(sink.faults);
    faults.keep_first_of_each_key();
    faults.sort();
    match spec {
        Some(spec) if faults.is_empty() => Ok(Parsed { spec, spans }),
        _ => Err(faults),
    }
}

fn collect_spans(node: &Node, path: &str, spans: &mut Spans) {
    match &node.value {
        Value::Scalar { .. } => {}
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                let path = format!("{path}[{index}]");
                spans.insert(path.clone(), item.origin.clone());
                collect_spans(item, &path, spans);
            }
        }
        Value::Map(entries) => {
            for entry in entries {
                let path = reader::join(path, &entry.key);
                spans.insert(path.clone(), entry.key_origin.clone());
                collect_spans(&entry.node, &path, spans);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
