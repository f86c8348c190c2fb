//! GPT-2 as a list of blocks, each a pure function of (parameters, input, draws).
//!
//! Block 0 is the embedding, blocks 1 … n_layer the transformer layers, block n_layer + 1 the final norm and, unless it is
//! tied to the token embedding, the head's matrix. The head itself lives in [`crate::head`], because its logits must never
//! exist at once. Parameter
//! names and the `[in, out]` layout of the projections (Conv1D) are Hugging Face's `GPT2LMHeadModel`.
//!
//! Shape letters: B sequences, T tokens, D width, H heads, K = D ÷ H, V vocabulary.

#![expect(non_snake_case, reason = "tensor names end in shape letters")]

mod draw;

pub use draw::{Draw, Site, dropout, mask};

use tch::{Device, Kind, Tensor};
use trainctl_spec::model::Gpt2Config;

use crate::Error;

/// Tensors of one transformer layer, in the order in which [`Gpt2::layer`] takes them.
const LAYER: [&str; 12] = [
    "ln_1.weight",
    "ln_1.bias",
    "attn.c_attn.weight",
    "attn.c_attn.bias",
    "attn.c_proj.weight",
    "attn.c_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "mlp.c_fc.weight",
    "mlp.c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
];

/// The model's functions; the parameters are arguments.
#[derive(Debug)]
pub struct Gpt2 {
    config: Gpt2Config,
    /// `[T, T]` bool, true above the diagonal: what a token may not look at.
    future_TT: Tensor,
}

impl Gpt2 {
    /// The model for sequences of up to `seq_length` tokens.
    pub fn new(config: Gpt2Config, seq_length: i64, device: Device) -> Result<Self, Error> {
        let future_TT = Tensor::f_ones([seq_length, seq_length], (Kind::Bool, device))?.f_triu(1)?;
        Ok(Self { config, future_TT })
    }

    /// The hyperparameters.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Number of blocks: embedding, layers, final norm.
    pub fn num_blocks(&self) -> usize {
        self.num_layers() + 2
    }

    /// Number of transformer layers.
    pub fn num_layers(&self) -> usize {
        self.config.n_layer as usize
    }

    /// Hugging Face parameter names by block, in the order in which the block's function takes them.
    pub fn block_names(&self) -> Vec<Vec<String>> {
        let owned = |names: &[&str]| names.iter().map(|n| format!("transformer.{n}")).collect();
        let layer = |l| LAYER.iter().map(|n| format!("transformer.h.{l}.{n}")).collect();
        let mut blocks = vec![owned(&["wte.weight", "wpe.weight"])];
        blocks.extend((0..self.num_layers()).map(layer));
        let mut last: Vec<String> = owned(&["ln_f.weight", "ln_f.bias"]);
        last.extend((!self.config.tie_word_embeddings).then(|| "lm_head.weight".to_owned()));
        blocks.push(last);
        blocks
    }

    /// Where the head's matrix `[V, D]` is: block and index within it.
    pub fn head_place(&self) -> (usize, usize) {
        if self.config.tie_word_embeddings { (0, 0) } else { (self.num_layers() + 1, 2) }
    }

    /// Block 0: `ids` `[B, T]` int64 → `[B, T, D]`. `params`: wte `[V, D]`, wpe `[positions, D]`.
    pub fn embed(&self, params: &[Tensor], ids: &Tensor, draw: Option<&Draw>) -> Result<Tensor, Error> {
        let [wte, wpe] = params else { return Err(arity("embedding", 2, params.len())) };
        let (_, t) = ids.size2()?;
        let x_BTD = Tensor::f_embedding(wte, ids, -1, false, false)?.f_add(&wpe.f_narrow(0, 0, t)?)?;
        dropout(x_BTD, self.config.embd_pdrop, Site::Embedding, draw)
    }

    /// Gradient of [`Gpt2::embed`], added to `grads` (same order and shapes as its parameters). By hand, because
    /// autograd would make a dense `[V, D]` gradient for every micro-batch; the mask is drawn again.
    pub fn embed_backward(
        &self,
        grads: &mut [Tensor],
        ids: &Tensor,
        dx_BTD: &Tensor,
        draw: Option<&Draw>,
    ) -> Result<(), Error> {
        let [dwte, dwpe] = grads else { return Err(arity("embedding", 2, grads.len())) };
        let (_, t, d) = dx_BTD.size3()?;
        let dx_BTD = match mask(dx_BTD, self.config.embd_pdrop, Site::Embedding, draw)? {
            Some(mask) => dx_BTD.f_mul(&mask)?,
            None => dx_BTD.shallow_clone(),
        };
        let dx_BTD = dx_BTD.f_to_kind(dwte.kind())?;
        drop(dwte.f_index_add_(0, &ids.f_reshape([-1])?, &dx_BTD.f_reshape([-1, d])?)?);
        drop(dwpe.f_narrow(0, 0, t)?.f_add_(&dx_BTD.f_sum_dim_intlist([0i64].as_slice(), false, None)?)?);
        Ok(())
    }

    /// Transformer layer `layer` (zero-based): `[B, T, D]` → `[B, T, D]`. `params` as `block_names` lists them.
    pub fn layer(&self, layer: usize, params: &[Tensor], x_BTD: &Tensor, draw: Option<&Draw>) -> Result<Tensor, Error> {
        let [ln1_w, ln1_b, qkv_w, qkv_b, out_w, out_b, ln2_w, ln2_b, fc_w, fc_b, proj_w, proj_b] = params else {
            return Err(arity("layer", LAYER.len(), params.len()));
        };
        let resid = self.config.resid_pdrop;
        let h_BTD = self.norm(x_BTD, ln1_w, ln1_b)?;
        let a_BTD = self.attention(layer, &linear(&h_BTD, qkv_w, qkv_b)?, draw)?;
        let a_BTD = dropout(linear(&a_BTD, out_w, out_b)?, resid, Site::AttentionOutput(layer), draw)?;
        let x_BTD = x_BTD.f_add(&a_BTD)?;
        let h_BTD = self.norm(&x_BTD, ln2_w, ln2_b)?;
        let m = linear(&h_BTD, fc_w, fc_b)?.f_gelu("tanh")?;
        let m_BTD = dropout(linear(&m, proj_w, proj_b)?, resid, Site::MlpOutput(layer), draw)?;
        Ok(x_BTD.f_add(&m_BTD)?)
    }

    /// The last block: layer norm of `[B, T, D]`. `params`: ln_f weight and bias (a matrix of the head is not read here).
    pub fn final_norm(&self, params: &[Tensor], x_BTD: &Tensor) -> Result<Tensor, Error> {
        let [w, b, ..] = params else { return Err(arity("final norm", 2, params.len())) };
        self.norm(x_BTD, w, b)
    }

    fn norm(&self, x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor, Error> {
        Ok(x.f_layer_norm(w.size(), Some(w), Some(b), self.config.layer_norm_epsilon, false)?)
    }

    /// Causal attention of packed queries, keys and values `[B, T, 3D]` → `[B, T, D]`.
    ///
    /// libtorch's fused kernels draw their own dropout, which D3 forbids, so with `attn_pdrop` > 0 the probabilities are
    /// made explicitly and masked; without (and in evaluation) the fused kernel runs.
    fn attention(&self, layer: usize, qkv: &Tensor, draw: Option<&Draw>) -> Result<Tensor, Error> {
        let (b, t, d3) = qkv.size3()?;
        let heads = i64::from(self.config.n_head);
        let (d, k) = (d3 / 3, d3 / 3 / heads);
        let split = qkv.f_view([b, t, 3, heads, k])?.f_permute([2, 0, 3, 1, 4])?;
        let (q, key, v) = (split.f_select(0, 0)?, split.f_select(0, 1)?, split.f_select(0, 2)?);
        let draw = draw.filter(|_| self.config.attn_pdrop > 0.0);
        let y_BHTK = if draw.is_some() {
            let scores = q.f_matmul(&key.f_transpose(-2, -1)?)?.f_mul_scalar((k as f64).powf(-0.5))?;
            let future_TT = self.future_TT.f_narrow(0, 0, t)?.f_narrow(1, 0, t)?;
            let p_BHTT = scores.f_masked_fill(&future_TT, f64::NEG_INFINITY)?.f_softmax(-1, None)?;
            dropout(p_BHTT, self.config.attn_pdrop, Site::Attention(layer), draw)?.f_matmul(&v)?
        } else {
            Tensor::f_scaled_dot_product_attention::<&Tensor>(&q, &key, &v, None, 0.0, true, None, false)?
        };
        Ok(y_BHTK.f_transpose(1, 2)?.f_reshape([b, t, d])?)
    }
}

/// `x` `[B, T, in]` · `w` `[in, out]` + `b`: Hugging Face's Conv1D.
fn linear(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor, Error> {
    let (n, t, d) = x.size3()?;
    let (_, out) = w.size2()?;
    Ok(b.f_addmm(&x.f_reshape([n * t, d])?, w)?.f_view([n, t, out])?)
}

fn arity(block: &str, want: usize, got: usize) -> Error {
    Error::Internal(format!("the {block} block takes {want} parameters and got {got}"))
}
