//! [`JobSpec`] → YAML: the resolved form that goes over the wire and into each checkpoint's `config.yaml`.
//!
//! Block style, sections in the order of the struct, every value written out. [`JobSpec::from_yaml`] reads back an equal
//! spec, and `trainctl run` takes it as a job spec like any other.

use serde_json::{Map, Value};

use crate::job::JobSpec;

/// Why a spec cannot be written: a path that is not UTF-8, or a number that is not finite.
#[derive(Debug, thiserror::Error)]
#[error("write the resolved spec: {0}")]
pub struct NotWritable(#[from] serde_json::Error);

impl JobSpec {
    /// The resolved spec as YAML, ending in a newline.
    ///
    /// # Errors
    /// When a path is not UTF-8.
    pub fn to_yaml(&self) -> Result<String, NotWritable> {
        let mut out = String::new();
        if let Value::Object(map) = self.to_json()? {
            mapping(&mut out, &map, 0);
        }
        Ok(out)
    }

    /// The spec in the shape of `job.yaml`, keys that are unset left out.
    ///
    /// # Errors
    /// When a path is not UTF-8.
    pub fn to_json(&self) -> Result<Value, NotWritable> {
        let mut written = Map::new();
        if let Value::Object(map) = serde_json::to_value(self)? {
            for (key, value) in map {
                match (key.as_str(), value) {
                    ("validation_datasets", Value::Object(sets)) => {
                        for (name, set) in sets {
                            let key = if name == "default" {
                                "validation_dataset".to_owned()
                            } else {
                                format!("validation_dataset_{name}")
                            };
                            written.insert(key, without_nulls(set));
                        }
                    }
                    // The model's own config keeps its nulls: they are the user's.
                    ("model", value) => {
                        written.insert(key, value);
                    }
                    (_, Value::Null) => {}
                    (_, value) => {
                        written.insert(key, without_nulls(value));
                    }
                }
            }
        }
        Ok(Value::Object(written))
    }
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.into_iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(key, value)| (key, without_nulls(value)))
                .collect(),
        ),
        Value::Array(items) => Value::Array(items.into_iter().map(without_nulls).collect()),
        other => other,
    }
}

fn mapping(out: &mut String, map: &Map<String, Value>, indent: usize) {
    for (key, value) in map {
        write_indent(out, indent);
        text(out, key);
        out.push(':');
        nested(out, value, indent);
    }
}

/// What follows `key:` or `-`.
fn nested(out: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push('\n');
            mapping(out, map, indent + 2);
        }
        Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
            out.push('\n');
            for item in items {
                write_indent(out, indent + 2);
                out.push('-');
                match item {
                    Value::Object(map) if !map.is_empty() => {
                        // The first key stands beside the dash.
                        let mut inner = String::new();
                        mapping(&mut inner, map, indent + 4);
                        out.push(' ');
                        out.push_str(inner.trim_start());
                    }
                    _ => nested(out, item, indent + 2),
                }
            }
        }
        value => {
            out.push(' ');
            flow(out, value);
            out.push('\n');
        }
    }
}

fn flow(out: &mut String, value: &Value) {
    match value {
        Value::String(value) => text(out, value),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                flow(out, item);
            }
            out.push(']');
        }
        Value::Object(_) => out.push_str("{}"),
        // JSON's null, truth values and numbers are YAML's.
        other => out.push_str(&other.to_string()),
    }
}

/// Plain where that reads back as the same text, else in JSON's double quotes, which are YAML's.
fn text(out: &mut String, value: &str) {
    let plain = value.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && value.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/'))
        && !matches!(
            value.to_ascii_lowercase().as_str(),
            "null" | "none" | "true" | "false" | "yes" | "no" | "on" | "off" | "y" | "n"
        );
    if plain {
        out.push_str(value);
        return;
    }
    out.push('"');
    for c in value.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}') => {
                out.push_str(&format!("\\U{:08X}", c as u32))
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn write_indent(out: &mut String, indent: usize) {
    out.extend(std::iter::repeat_n(' ', indent));
}
