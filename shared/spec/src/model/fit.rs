//! Whether tensors that somebody else saved are those of an architecture. Pure: names, types and shapes only.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::{Architecture, ConfigError, Parameter};

/// Element types that weights are read from, in safetensors' spelling.
pub const WEIGHT_TYPES: [&str; 3] = ["F32", "BF16", "F16"];

/// A saved tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// safetensors' spelling.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
}

impl fmt::Display for Saved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// What is wrong with one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorFault {
    /// The model needs it and it was not saved.
    Missing {
        /// Its name, for example `model/transformer.wte.weight`.
        name: String,
        /// The shape that the model needs.
        want: Vec<u64>,
    },
    /// It was saved and the model has no such tensor.
    Unknown {
        /// Its name.
        name: String,
        /// What was saved.
        found: Saved,
    },
    /// Both have it, with different shapes or types.
    Differs {
        /// Its name.
        name: String,
        /// What the model has.
        want: Saved,
        /// What was saved.
        found: Saved,
    },
}

/// All faults, one a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFaults(pub Vec<TensorFault>);

impl fmt::Display for TensorFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name, want } => write!(f, "{name}: missing, the model needs {want:?}"),
            Self::Unknown { name, found } => write!(f, "{name}: saved as {found}, unknown to the model"),
            Self::Differs { name, want, found } => write!(f, "{name}: saved as {found}, the model has {want}"),
        }
    }
}

impl fmt::Display for TensorFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

/// Where each parameter lies among saved tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// The saved name of each of [`Architecture::parameters`], in their order.
    pub names: Vec<String>,
    /// A head that was saved although it is tied: it must be equal to the token embedding, `names[0]`.
    pub tied_head: Option<String>,
}

impl Architecture {
    /// Finds the parameters among the tensors of a Hugging Face directory: under their own names or without the prefix of
    /// the language-model class, as the base model saves them. Buffers that are no parameters are passed over.
    ///
    /// # Errors
    /// Every tensor that is missing, unknown, of another shape, or of a type that is none of [`WEIGHT_TYPES`].
    pub fn fit(&self, saved: &BTreeMap<String, Saved>) -> Result<Fit, TensorFaults> {
        let parameters = self.parameters();
        let mut by_name: BTreeMap<String, &str> = BTreeMap::new();
        let mut faults = Vec::new();
        for (name, found) in saved {
            let Some(canonical) = canonical(name) else { continue };
            let is_known = canonical == HEAD || parameters.iter().any(|parameter| parameter.name == canonical);
            if !is_known || by_name.insert(canonical, name).is_some() {
                faults.push(TensorFault::Unknown { name: name.clone(), found: found.clone() });
            }
        }
        let mut names = Vec::with_capacity(parameters.len());
        for parameter in &parameters {
            match by_name.get(&parameter.name) {
                None => {
                    faults.push(TensorFault::Missing { name: parameter.name.clone(), want: parameter.shape.clone() })
                }
                Some(name) => {
                    faults.extend(differs(name, parameter, &saved[*name]));
                    names.push((*name).to_owned());
                }
            }
        }
        let tied_head = by_name.get(HEAD).filter(|_| self.ties_embeddings()).map(|name| (*name).to_owned());
        if let (Some(name), Some(embedding)) = (&tied_head, parameters.first()) {
            faults.extend(differs(name, embedding, &saved[name]));
        }
        if faults.is_empty() { Ok(Fit { names, tied_head }) } else { Err(TensorFaults(faults)) }
    }

    /// Reads the `config.json` that lies beside saved weights. The class that saved them may be another one of the same
    /// family: the base model's weights are part of ours.
    ///
    /// # Errors
    /// As [`Architecture::from_config`].
    pub fn of_weights(config: &Map<String, Value>) -> Result<Self, ConfigError> {
        let mut config = config.clone();
        config.remove("architectures");
        Self::from_config(&config)
    }

    /// Hyperparameters that no shape shows and with which `other`'s weights would compute something else: key, this value,
    /// the other's.
    #[must_use]
    pub fn disagreements(&self, other: &Self) -> Vec<(&'static str, String, String)> {
        let (Self::Gpt2(mine), Self::Gpt2(theirs)) = (self, other);
        let rows = [
            ("n_head", mine.n_head.to_string(), theirs.n_head.to_string()),
            ("layer_norm_epsilon", mine.layer_norm_epsilon.to_string(), theirs.layer_norm_epsilon.to_string()),
        ];
        rows.into_iter().filter(|(_, mine, theirs)| mine != theirs).collect()
    }
}

const HEAD: &str = "lm_head.weight";
const PREFIX: &str = "transformer.";

/// The name that `GPT2LMHeadModel` uses; `None` for the causal masks, which older versions saved as buffers.
fn canonical(name: &str) -> Option<String> {
    if name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") {
        return None;
    }
    Some(if name == HEAD || name.starts_with(PREFIX) { name.to_owned() } else { format!("{PREFIX}{name}") })
}

fn differs(name: &str, parameter: &Parameter, found: &Saved) -> Option<TensorFault> {
    let is_weight = WEIGHT_TYPES.contains(&found.dtype.as_str());
    (found.shape != parameter.shape || !is_weight).then(|| TensorFault::Differs {
        name: name.to_owned(),
        want: Saved { dtype: WEIGHT_TYPES.join("|"), shape: parameter.shape.clone() },
        found: found.clone(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn model(tied: bool) -> Architecture {
        let config = json!({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 10,
            "n_positions": 4, "tie_word_embeddings": tied});
        Architecture::from_config(config.as_object().unwrap()).unwrap()
    }

    fn saved(model: &Architecture, prefix: bool) -> BTreeMap<String, Saved> {
        let name = |name: String| if prefix { name } else { name.trim_start_matches(PREFIX).to_owned() };
        let tensor = |shape| Saved { dtype: "F32".to_owned(), shape };
        model.parameters().into_iter().map(|p| (name(p.name), tensor(p.shape))).collect()
    }

    #[test]
    fn names_fit_with_and_without_prefix_and_buffers_are_passed_over() {
        for prefix in [true, false] {
            let mut saved = saved(&model(true), prefix);
            let mask = Saved { dtype: "U8".to_owned(), shape: vec![1, 1, 4, 4] };
            saved.insert("h.0.attn.bias".to_owned(), mask.clone());
            saved.insert("transformer.h.0.attn.masked_bias".to_owned(), mask);
            let fit = model(true).fit(&saved).unwrap();
            assert_eq!(fit.names.len(), model(true).parameters().len());
            assert_eq!(fit.names[0], if prefix { "transformer.wte.weight" } else { "wte.weight" });
            assert!(fit.names.iter().any(|name| name.ends_with("attn.c_attn.bias")), "a bias is no mask");
            assert_eq!(fit.tied_head, None);
        }
    }

    #[test]
    fn a_head_that_was_saved_is_the_models_own_or_must_be_equal_to_the_embedding() {
        let untied = saved(&model(false), true);
        assert_eq!(model(false).fit(&untied).unwrap().names.last().map(String::as_str), Some(HEAD));
        assert_eq!(model(true).fit(&untied).unwrap().tied_head.as_deref(), Some(HEAD));
        let TensorFaults(faults) = model(false).fit(&saved(&model(true), true)).unwrap_err();
        assert_eq!(faults, [TensorFault::Missing { name: HEAD.to_owned(), want: vec![10, 8] }]);
    }

    #[test]
    fn every_difference_is_listed() {
        let mut saved = saved(&model(true), false);
        let wte = saved.remove("wte.weight").unwrap();
        saved.get_mut("wpe.weight").unwrap().shape = vec![9, 8];
        saved.get_mut("ln_f.bias").unwrap().dtype = "I64".to_owned();
        saved.insert("h.1.ln_1.bias".to_owned(), wte);
        let faults = model(true).fit(&saved).unwrap_err().to_string();
        let lines: Vec<&str> = faults.trim().lines().map(str::trim).collect();
        assert_eq!(
            lines,
            [
                "h.1.ln_1.bias: saved as F32 [10, 8], unknown to the model",
                "transformer.wte.weight: missing, the model needs [10, 8]",
                "wpe.weight: saved as F32 [9, 8], the model has F32|BF16|F16 [4, 8]",
                "ln_f.bias: saved as I64 [8], the model has F32|BF16|F16 [8]",
            ]
        );
    }

    #[test]
    fn what_no_shape_shows_is_compared() {
        let mut config = json!({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8});
        let mine = Architecture::from_config(config.as_object().unwrap()).unwrap();
        config["n_head"] = 4.into();
        config["resid_pdrop"] = 0.5.into();
        let theirs = Architecture::from_config(config.as_object().unwrap()).unwrap();
        assert_eq!(mine.disagreements(&theirs), [("n_head", "2".to_owned(), "4".to_owned())]);
    }
}
