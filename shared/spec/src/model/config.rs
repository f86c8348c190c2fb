//! Typed reading of a `config.json`, with errors that name the key.

use serde_json::{Map, Value};

/// What is wrong with a model's config.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model.config.{key}: {}{allowed}", value.as_ref().map(|value| format!("{value}: ")).unwrap_or_default())]
pub struct ConfigError {
    /// Key of `config.json`.
    pub key: String,
    /// Its value; absent when the key is missing.
    pub value: Option<String>,
    /// What is allowed.
    pub allowed: String,
}

impl ConfigError {
    pub(super) fn new(key: &str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self { key: key.to_owned(), value: Some(value.to_string()), allowed: allowed.into() }
    }

    pub(super) fn missing(key: &str, allowed: &str) -> Self {
        Self { key: key.to_owned(), value: None, allowed: format!("missing; {allowed}") }
    }
}

/// The keys of a `config.json`; null counts as absent, as in `transformers`.
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl Keys<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// A whole number ≥ 1, with a default.
    pub(super) fn size(&self, key: &str, default: Option<u32>) -> Result<u32, ConfigError> {
        let allowed = "must be a whole number ≥ 1";
        match (self.value(key), default) {
            (None, Some(default)) => Ok(default),
            (None, None) => Err(ConfigError::missing(key, allowed)),
            (Some(value), _) => {
                let size = value.as_u64().and_then(|size| u32::try_from(size).ok()).filter(|size| *size >= 1);
                size.ok_or_else(|| ConfigError::new(key, value, allowed))
            }
        }
    }

    /// A whole number ≥ 1 that may be absent.
    pub(super) fn optional_size(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        self.value(key).map(|_| self.size(key, None)).transpose()
    }

    /// A number for which `holds`.
    pub(super) fn number(
        &self,
        key: &str,
        default: f64,
        allowed: &str,
        holds: impl Fn(f64) -> bool,
    ) -> Result<f64, ConfigError> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => {
                value.as_f64().filter(|number| holds(*number)).ok_or_else(|| ConfigError::new(key, value, allowed))
            }
        }
    }

    /// A truth value.
    pub(super) fn boolean(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| ConfigError::new(key, value, "must be true or false")),
        }
    }

    /// A truth value of which only one is built.
    pub(super) fn only(&self, key: &str, built: bool, why: &str) -> Result<(), ConfigError> {
        match self.boolean(key, built)? {
            value if value == built => Ok(()),
            value => Err(ConfigError::new(key, value, format!("must be {built}: {why}"))),
        }
    }

    /// Text.
    pub(super) fn text(&self, key: &str, default: &str) -> Result<String, ConfigError> {
        match self.value(key) {
            None => Ok(default.to_owned()),
            Some(value) => {
                value.as_str().map(str::to_owned).ok_or_else(|| ConfigError::new(key, value, "must be text"))
            }
        }
    }
}
