//! GPT-2. Keys and defaults are those of `transformers.GPT2Config`; tensor names and shapes those of `GPT2LMHeadModel`.

use serde_json::{Map, Value};

use super::config::{ConfigError, Keys};
use super::{Init, Parameter};

/// The activation between the two layers of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `gelu_new`: ½x(1 + tanh(√(2/π)(x + 0.044715x³))).
    GeluTanh,
}

/// GPT-2's hyperparameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Blocks.
    pub n_layer: u32,
    /// Attention heads; divides `n_embd`.
    pub n_head: u32,
    /// Width of the residual stream.
    pub n_embd: u32,
    /// Learned positions: the longest sequence.
    pub n_positions: u32,
    /// Rows of the token embedding.
    pub vocab_size: u32,
    /// Width of the MLP; 4 · n_embd unless the config says otherwise.
    pub n_inner: u32,
    /// Activation of the MLP.
    pub activation_function: Activation,
    /// Added to the variance in each LayerNorm.
    pub layer_norm_epsilon: f64,
    /// Dropout of what each sub-block adds to the residual stream.
    pub resid_pdrop: f64,
    /// Dropout of the summed embeddings.
    pub embd_pdrop: f64,
    /// Dropout of the attention probabilities.
    pub attn_pdrop: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the output head is the token embedding.
    pub tie_word_embeddings: bool,
}

impl Gpt2Config {
    pub(super) fn from_config(config: &Map<String, Value>) -> Result<Self, ConfigError> {
        let keys = Keys(config);
        let n_layer = keys.size("n_layer", Some(12))?;
        let n_head = keys.size("n_head", Some(12))?;
        let n_embd = keys.size("n_embd", Some(768))?;
        if n_embd % n_head != 0 {
            return Err(ConfigError::new("n_head", n_head, format!("must divide n_embd = {n_embd}")));
        }
        let activation_function = match keys.text("activation_function", "gelu_new")?.as_str() {
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            other => {
                return Err(ConfigError::new("activation_function", other, "must be gelu_new or gelu_pytorch_tanh"));
            }
        };
        keys.only("scale_attn_weights", true, "attention scores are divided by √(n_embd ÷ n_head)")?;
        keys.only("scale_attn_by_inverse_layer_idx", false, "this scaling is not built")?;
        keys.only("reorder_and_upcast_attn", false, "this reordering is not built")?;
        keys.only("add_cross_attention", false, "this is a decoder only")?;
        let dropout = |key| keys.number(key, 0.1, "must be a probability ≥ 0 and < 1", |p| (0.0..1.0).contains(&p));
        Ok(Self {
            n_layer,
            n_head,
            n_embd,
            n_positions: keys.size("n_positions", Some(1024))?,
            vocab_size: keys.size("vocab_size", Some(50257))?,
            n_inner: match keys.optional_size("n_inner")? {
                Some(inner) => inner,
                None => n_embd.checked_mul(4).ok_or_else(|| ConfigError::new("n_embd", n_embd, "is too large"))?,
            },
            activation_function,
            layer_norm_epsilon: keys.number("layer_norm_epsilon", 1e-5, "must be a number > 0", |eps| eps > 0.0)?,
            resid_pdrop: dropout("resid_pdrop")?,
            embd_pdrop: dropout("embd_pdrop")?,
            attn_pdrop: dropout("attn_pdrop")?,
            initializer_range: keys.number("initializer_range", 0.02, "must be a number > 0", |std| std > 0.0)?,
            tie_word_embeddings: keys.boolean("tie_word_embeddings", true)?,
        })
    }

    /// Width of one head.
    #[must_use]
    pub fn head_size(&self) -> u32 {
        self.n_embd / self.n_head
    }

    /// In order of the forward pass. Initial values are `GPT2PreTrainedModel._init_weights`: normal(initializer_range), but
    /// initializer_range ÷ √(2 · n_layer) for the two projections back into the residual stream; biases 0, norms 1 and 0.
    pub(super) fn parameters(&self) -> Vec<Parameter> {
        let embd = u64::from(self.n_embd);
        let inner = u64::from(self.n_inner);
        let normal = Init::Normal(self.initializer_range);
        let residual = Init::Normal(self.initializer_range / (2.0 * f64::from(self.n_layer)).sqrt());
        let mut all = Vec::new();
        let mut add = |name: String, shape: &[u64], init| all.push(Parameter { name, shape: shape.to_vec(), init });
        add("transformer.wte.weight".to_owned(), &[u64::from(self.vocab_size), embd], normal);
        add("transformer.wpe.weight".to_owned(), &[u64::from(self.n_positions), embd], normal);
        for layer in 0..self.n_layer {
            let mut block = |name: &str, shape: &[u64], init| add(format!("transformer.h.{layer}.{name}"), shape, init);
            block("ln_1.weight", &[embd], Init::Ones);
            block("ln_1.bias", &[embd], Init::Zeros);
            block("attn.c_attn.weight", &[embd, 3 * embd], normal);
            block("attn.c_attn.bias", &[3 * embd], Init::Zeros);
            block("attn.c_proj.weight", &[embd, embd], residual);
            block("attn.c_proj.bias", &[embd], Init::Zeros);
            block("ln_2.weight", &[embd], Init::Ones);
            block("ln_2.bias", &[embd], Init::Zeros);
            block("mlp.c_fc.weight", &[embd, inner], normal);
            block("mlp.c_fc.bias", &[inner], Init::Zeros);
            block("mlp.c_proj.weight", &[inner, embd], residual);
            block("mlp.c_proj.bias", &[embd], Init::Zeros);
        }
        add("transformer.ln_f.weight".to_owned(), &[embd], Init::Ones);
        add("transformer.ln_f.bias".to_owned(), &[embd], Init::Zeros);
        if !self.tie_word_embeddings {
            add("lm_head.weight".to_owned(), &[u64::from(self.vocab_size), embd], normal);
        }
        all
    }

    /// Forward and backward, per token: 6 FLOPs for each weight of a matrix product (2 forward, 4 backward), the head
    /// included and the embedding look-ups not, plus 12 · layers · width · sequence for attention scores and their product
    /// with the values (Chowdhery et al. 2022, appendix B; the causal half is counted whole, as there).
    pub(super) fn flops_per_token(&self, seq_length: u32) -> f64 {
        let embd = f64::from(self.n_embd);
        let layers = f64::from(self.n_layer);
        let block = embd * 3.0 * embd + embd * embd + 2.0 * embd * f64::from(self.n_inner);
        let head = embd * f64::from(self.vocab_size);
        6.0 * (layers * block + head) + 12.0 * layers * embd * f64::from(seq_length)
    }
}
