//! GPT-2 against published counts and names.

use serde_json::json;

use super::*;
use crate::job::Precision;

fn read(config: Value) -> Result<Architecture, ConfigError> {
    Architecture::from_config(config.as_object().unwrap())
}

#[test]
fn gpt2_small_has_its_published_count() {
    let small = read(json!({"model_type": "gpt2"})).unwrap();
    assert_eq!(small.parameter_count(), 124_439_808);
    assert_eq!(small.parameters().len(), 2 + 12 * 12 + 2);
    let untied = read(json!({"model_type": "gpt2", "tie_word_embeddings": false})).unwrap();
    assert_eq!(untied.parameter_count(), 124_439_808 + 50_257 * 768);
    let medium =
        read(json!({"architectures": ["GPT2LMHeadModel"], "n_layer": 24, "n_head": 16, "n_embd": 1024})).unwrap();
    assert_eq!(medium.parameter_count(), 354_823_168);
    assert_eq!(read(json!({"model_type": "gpt2", "architectures": ["GPT2Model"]})).unwrap(), small);
    assert_eq!(small.memory(Precision::Fp32).total(), 124_439_808 * 16);
    assert_eq!(small.memory(Precision::Bf16).total(), 124_439_808 * 18);
    // 6 · 123,532,032 matrix weights + 12 · 12 · 768 · 1024 for attention.
    assert_eq!(small.flops_per_token(1024), 6.0 * 123_532_032.0 + 113_246_208.0);
}

#[test]
fn tensors_have_hugging_face_names_shapes_and_inits() {
    let tiny = read(
        json!({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 32, "n_inner": 24}),
    );
    let tensors = tiny.unwrap().parameters();
    let block: Vec<_> = tensors
        .iter()
        .filter(|tensor| tensor.name.starts_with("transformer.h.1."))
        .map(|t| (t.name.as_str(), t.shape.as_slice()))
        .collect();
    assert_eq!(
        block,
        [
            ("transformer.h.1.ln_1.weight", [8].as_slice()),
            ("transformer.h.1.ln_1.bias", &[8]),
            ("transformer.h.1.attn.c_attn.weight", &[8, 24]),
            ("transformer.h.1.attn.c_attn.bias", &[24]),
            ("transformer.h.1.attn.c_proj.weight", &[8, 8]),
            ("transformer.h.1.attn.c_proj.bias", &[8]),
            ("transformer.h.1.ln_2.weight", &[8]),
            ("transformer.h.1.ln_2.bias", &[8]),
            ("transformer.h.1.mlp.c_fc.weight", &[8, 24]),
            ("transformer.h.1.mlp.c_fc.bias", &[24]),
            ("transformer.h.1.mlp.c_proj.weight", &[24, 8]),
            ("transformer.h.1.mlp.c_proj.bias", &[8]),
        ]
    );
    for tensor in &tensors {
        let expected = match tensor.name.as_str() {
            name if name.ends_with("c_proj.weight") => Init::Normal(0.02 / 2.0),
            name if name.contains("ln_") && name.ends_with("weight") => Init::Ones,
            name if name.ends_with("bias") => Init::Zeros,
            _ => Init::Normal(0.02),
        };
        assert_eq!(tensor.init, expected, "{}", tensor.name);
        assert_eq!(tensor.is_matrix(), tensor.shape.len() == 2);
    }
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let cases = [
        json!({}),
        json!({"model_type": "llama"}),
        json!({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}),
        json!({"model_type": "gpt2", "n_head": 7}),
        json!({"model_type": "gpt2", "n_layer": "12"}),
        json!({"model_type": "gpt2", "n_layer": 0}),
        json!({"model_type": "gpt2", "attn_pdrop": 1.0}),
        json!({"model_type": "gpt2", "activation_function": "relu"}),
        json!({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true}),
    ];
    let text: Vec<_> = cases.into_iter().map(|config| read(config).unwrap_err().to_string()).collect();
    insta::assert_snapshot!(text.join("\n"));
}
