//! `config.json` and `generation_config.json`, as `transformers` writes them.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use trainctl_spec::Architecture;

use super::Dtype;
use super::tokenizer::TokenIds;

/// The model's own config with what the export knows better: class, type of the weights, and the ids of the tokenizer
/// where the config has none.
pub(super) fn config_json(config: &Map<String, Value>, model: &Architecture, dtype: Dtype, ids: TokenIds) -> Value {
    let mut keys: BTreeMap<String, Value> = config.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    keys.insert("architectures".into(), vec![model.class_name()].into());
    keys.insert("model_type".into(), model.model_type().into());
    keys.insert("tie_word_embeddings".into(), model.ties_embeddings().into());
    // `dtype` since transformers 4.56; older ones and most inference servers read `torch_dtype`.
    keys.insert("dtype".into(), dtype.torch().into());
    keys.insert("torch_dtype".into(), dtype.torch().into());
    let TokenIds { bos, eos } = resolve_ids(config, model, ids);
    for (key, id) in [("bos_token_id", bos), ("eos_token_id", eos)] {
        keys.entry(key.to_owned()).or_insert(id.into());
    }
    keys.into_iter().collect::<Map<_, _>>().into()
}

/// What `GenerationConfig.from_model_config` takes from such a config.
pub(super) fn generation_json(config: &Map<String, Value>, model: &Architecture, ids: TokenIds) -> Value {
    let TokenIds { bos, eos } = resolve_ids(config, model, ids);
    let mut keys = Map::new();
    keys.insert("_from_model_config".into(), true.into());
    for (key, id) in [("bos_token_id", bos), ("eos_token_id", eos)] {
        let value = config.get(key).cloned().unwrap_or(id.into());
        if !value.is_null() {
            keys.insert(key.into(), value);
        }
    }
    keys.into()
}

/// The tokenizer's ids, else the architecture's defaults, which are written out only as "none": a reader would take 50256
/// for GPT-2, an id that a smaller vocabulary does not have.
fn resolve_ids(config: &Map<String, Value>, model: &Architecture, ids: TokenIds) -> TokenIds {
    let vocabulary = model.vocab_size();
    let (bos, eos) = model.default_token_ids();
    let pick = |key: &str, known: Option<u32>, default: u32| {
        let known = known.filter(|id| *id < vocabulary);
        if config.contains_key(key) { None } else { known.or(Some(default).filter(|id| *id < vocabulary)) }
    };
    TokenIds { bos: pick("bos_token_id", ids.bos, bos), eos: pick("eos_token_id", ids.eos, eos) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn model(more: Value) -> (Map<String, Value>, Architecture) {
        let mut config = json!({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 300});
        let all = config.as_object_mut().unwrap();
        all.extend(more.as_object().unwrap().clone());
        (all.clone(), Architecture::from_config(all).unwrap())
    }

    #[test]
    fn ids_are_the_configs_then_the_tokenizers_then_none_that_do_not_exist() {
        let known = TokenIds { bos: None, eos: Some(7) };
        for (more, ids, eos, bos) in [
            (json!({}), known, json!(7), Value::Null),
            (json!({}), TokenIds { bos: Some(300), eos: None }, Value::Null, Value::Null),
            (json!({"eos_token_id": 5, "bos_token_id": 6}), known, json!(5), json!(6)),
            (json!({"eos_token_id": [5, 9]}), known, json!([5, 9]), Value::Null),
            (json!({"vocab_size": 50257}), TokenIds::default(), json!(50256), json!(50256)),
        ] {
            let (config, model) = model(more);
            let written = config_json(&config, &model, Dtype::Bf16, ids);
            assert_eq!((&written["eos_token_id"], &written["bos_token_id"]), (&eos, &bos), "{written}");
            let generation = generation_json(&config, &model, ids);
            assert_eq!(generation.get("eos_token_id").unwrap_or(&Value::Null), &eos, "{generation}");
            assert_eq!(generation.get("bos_token_id").unwrap_or(&Value::Null), &bos, "{generation}");
        }
    }

    #[test]
    fn the_users_keys_stay_and_ours_are_true() {
        let (config, model) = model(json!({"attn_pdrop": 0.0, "n_inner": null, "torch_dtype": "float64"}));
        let written = config_json(&config, &model, Dtype::Bf16, TokenIds::default());
        let expected = json!({
            "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.0, "bos_token_id": null, "dtype": "bfloat16",
            "eos_token_id": null, "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_inner": null, "n_layer": 1,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 300,
        });
        assert_eq!(written, expected);
    }
}
