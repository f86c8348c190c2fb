//! JSON Schema of `job.yaml`, for editors and other tools. Committed as `docs/job.schema.json`; a test holds it current.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::job::{FlatValidationDataset, JobSpec, ValidationDataset};

/// The schema of what a person writes.
///
/// It is derived from the types of the resolved spec; where the written form is wider (paths in several forms, validation
/// sets as keys of their own that inherit) this module says so.
#[must_use]
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(JobSpec).to_value();
    if let Some(root) = schema.as_object_mut() {
        root.insert("title".to_owned(), json!("trainctl job spec"));
        if let Some(properties) = root.get_mut("properties").and_then(Value::as_object_mut) {
            let reference = json!({"$ref": "#/$defs/ValidationDataset"});
            let written = properties.iter().map(|(key, value)| match key.as_str() {
                "validation_datasets" => ("validation_dataset".to_owned(), reference.clone()),
                _ => (key.clone(), value.clone()),
            });
            *properties = written.collect::<Map<_, _>>();
            root.insert(
                "patternProperties".to_owned(),
                json!({"^validation_dataset_[A-Za-z0-9][A-Za-z0-9._-]*$": reference}),
            );
        }
    }
    schema
}

/// The schema as the committed file has it.
#[must_use]
pub fn schema_text() -> String {
    format!("{:#}\n", schema())
}

/// The forms of `dataset.paths` before resolving.
pub(crate) fn paths(generator: &mut SchemaGenerator) -> Schema {
    let weighted = generator.subschema_for::<crate::job::WeightedPath>();
    json_schema!({
        "anyOf": [
            {"type": "string", "description": "A prefix of a .bin/.idx pair, or a glob"},
            {"type": "array", "minItems": 1, "items": {"type": "string"}, "description": "Prefixes or globs"},
            {"type": "array", "minItems": 2, "items": {"type": ["number", "string"]}, "description": "weight, prefix, weight, prefix, …"},
            {"type": "array", "minItems": 1, "items": weighted},
        ],
    })
}

/// `checkpoint.save_consolidated` is a boolean in NeMo AutoModel: true is read as `every`.
pub(crate) fn save_consolidated(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "enum": [false, true, "false", "final", "every"],
        "default": "final",
        "description": "When a Hugging Face directory (`model/consolidated/`) is written into a checkpoint: never, into the last one of a run that reaches its end, into each",
    })
}

impl JsonSchema for ValidationDataset {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ValidationDataset".into()
    }

    /// A dataset of which nothing must be said, since it inherits: neither requirements nor defaults of its own.
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = FlatValidationDataset::json_schema(generator);
        schema.insert(
            "description".to_owned(),
            json!("A validation set. What it does not say it inherits from `dataset`."),
        );
        schema.remove("required");
        if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
            for property in properties.values_mut().filter_map(Value::as_object_mut) {
                property.remove("default");
            }
        }
        schema
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::resume;

    /// Key paths of the schema's leaves; what a `$ref` leads to is walked, lists and free-form mappings are leaves.
    fn keys() -> BTreeSet<String> {
        fn walk(root: &Value, node: &Value, path: &str, out: &mut BTreeSet<String>) {
            let node = match node.get("$ref").and_then(Value::as_str) {
                Some(reference) => root.pointer(reference.trim_start_matches('#')).unwrap(),
                None => node,
            };
            match node.get("properties").and_then(Value::as_object) {
                Some(properties) => {
                    for (key, value) in properties {
                        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                        walk(root, value, &path, out);
                    }
                }
                None => drop(out.insert(path.to_owned())),
            }
        }
        let schema = schema();
        let mut out = BTreeSet::new();
        walk(&schema, &schema, "", &mut out);
        out
    }

    #[test]
    fn every_key_has_its_line_in_the_resume_table_and_every_line_its_key() {
        let keys = keys();
        assert!(keys.contains("validation_dataset.num_val_samples") && keys.contains("model.config"), "{keys:?}");
        for key in &keys {
            assert_ne!(resume::field(key).key, "", "{key} is not in resume::FIELDS");
        }
        for field in resume::FIELDS {
            assert!(keys.iter().any(|key| resume::field(key) == *field), "{} is no key of the spec", field.key);
        }
    }

    /// The parser's keys and the types' keys are written twice; this holds them together.
    #[test]
    fn the_parser_reads_exactly_the_keys_of_the_schema() {
        let full = crate::parse::tests::FULL;
        let parsed = crate::parse::parse(full, "job.yaml", &[], &Default::default()).unwrap();
        for key in keys() {
            let alias = key.replace("validation_dataset.", "dataset.");
            assert!(parsed.spans.is_written(&key) || parsed.spans.is_written(&alias), "the full example lacks {key}");
        }
    }

    #[test]
    fn the_committed_schema_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/job.schema.json");
        if std::env::var_os("UPDATE_SCHEMA").is_some() {
            std::fs::write(&path, schema_text()).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == schema_text(), "run: UPDATE_SCHEMA=1 cargo test -p trainctl-spec schema");
    }
}
