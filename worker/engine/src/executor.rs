//! Runs a model block by block.
//!
//! Forward: each block's graph ends at its output; the next block starts from a detached leaf. Backward: block by block
//! from the end, with an explicit `grad(outputs, inputs, grad_outputs)`. So the gradients of block *i* are complete
//! before the backward of block *i − 1* begins, and whoever is told ([`Sink`]) can reduce them meanwhile. With
//! `recompute` only the inputs are kept and a block's graph is made again in its backward; the draws are pure functions
//! (D3), so the result is the same bit for bit.

#![expect(non_snake_case, reason = "tensor names end in shape letters")]

use tch::Tensor;
use trainctl_store::fault::{self, FailPoint};

use crate::Error;
use crate::head::Head;
use crate::model::{Draw, Gpt2};
use crate::params::Parameters;

/// One micro-batch on the device.
#[derive(Debug)]
pub struct Batch {
    /// `[B, T]` int64.
    pub ids: Tensor,
    /// `[B · T]` int64: the token that follows each.
    pub targets: Tensor,
    /// Index within the global batch of the first sequence.
    pub first_sequence: u64,
}

/// Is told when the gradients of a block are complete for this step.
pub trait Sink {
    /// `block`'s bucket holds this rank's whole contribution.
    fn block_done(&mut self, params: &Parameters, block: usize) -> Result<(), Error>;
}

/// What the rounds before the last use: gradients only accumulate.
#[derive(Debug)]
pub struct NoSync;

impl Sink for NoSync {
    fn block_done(&mut self, _params: &Parameters, _block: usize) -> Result<(), Error> {
        Ok(())
    }
}

/// Model, head and how to run them.
#[derive(Debug)]
pub struct Executor {
    model: Gpt2,
    head: Head,
    recompute: bool,
}

/// The last block's own parameters are its norm's two; the head's matrix, if it is there, gets its gradient by hand.
const NORM: usize = 2;
const ALL: usize = usize::MAX;

/// What a block's backward needs.
struct Saved {
    input: Tensor,
    /// Absent with `recompute`.
    output: Option<Tensor>,
}

impl Executor {
    /// An executor of `model`.
    pub fn new(model: Gpt2, head: Head, recompute: bool) -> Self {
        Self { model, head, recompute }
    }

    /// The model.
    pub fn model(&self) -> &Gpt2 {
        &self.model
    }

    /// Blocks in the order in which their gradients become complete: the same on every rank (D2).
    pub fn backward_order(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.model.num_blocks()).rev()
    }

    /// Forward and backward of one micro-batch. Adds the gradients of `scale · Σ token losses` to `params` and returns
    /// Σ token losses. `draw` absent = no dropout.
    pub fn forward_backward(
        &mut self,
        params: &mut Parameters,
        batch: &Batch,
        draw: Option<&Draw>,
        scale: f64,
        sink: &mut dyn Sink,
    ) -> Result<f64, Error> {
        fault::pass(FailPoint::COMPUTE_BATCH).map_err(|error| Error::Internal(format!("compute: {error}")))?;
        let layers = self.model.num_layers();
        let mut saved = Vec::with_capacity(layers);
        let mut x = tch::no_grad(|| self.model.embed(params.block(0), &batch.ids, draw))?;
        for layer in 0..layers {
            let input = x.f_set_requires_grad(true)?;
            let forward = || self.model.layer(layer, params.block(layer + 1), &input, draw);
            let output = if self.recompute { tch::no_grad(forward)? } else { forward()? };
            x = output.f_detach()?;
            saved.push(Saved { input, output: (!self.recompute).then_some(output) });
        }

        let last = layers + 1;
        let input = x.f_set_requires_grad(true)?;
        let h_BTD = self.model.final_norm(params.block(last), &input)?;
        let (b, t, d) = h_BTD.size3()?;
        let h_ND = h_BTD.f_detach()?.f_view([b * t, d])?;
        let (head_block, head_index) = self.model.head_place();
        let w_VD = params.block(head_block)[head_index].shallow_clone();
        let dw_VD = &mut params.block_grads(head_block)[head_index];
        let out = self.head.forward_backward(&h_ND, &w_VD, &batch.targets, scale, dw_VD)?;
        let mut dx = backward(params, last, NORM, &input, &h_BTD, &out.dh_ND.f_view([b, t, d])?)?;
        drop((h_BTD, h_ND, out.dh_ND));
        sink.block_done(params, last)?;

        for layer in (0..layers).rev() {
            let Some(Saved { input, output }) = saved.pop() else {
                return Err(Error::Internal("the executor lost a block's input".to_owned()));
            };
            let output = match output {
                Some(output) => output,
                None => self.model.layer(layer, params.block(layer + 1), &input, draw)?,
            };
            dx = backward(params, layer + 1, ALL, &input, &output, &dx)?;
            drop(output);
            sink.block_done(params, layer + 1)?;
        }
        tch::no_grad(|| self.model.embed_backward(params.block_grads(0), &batch.ids, &dx, draw))?;
        sink.block_done(params, 0)?;
        Ok(out.loss_sum)
    }

    /// Σ token losses of one micro-batch, without dropout and without gradients.
    pub fn evaluate(&mut self, params: &Parameters, batch: &Batch) -> Result<f64, Error> {
        let h_BTD = self.hidden(params, batch)?;
        let (b, t, d) = h_BTD.size3()?;
        let (block, index) = self.model.head_place();
        self.head.loss(&h_BTD.f_view([b * t, d])?, &params.block(block)[index], &batch.targets)
    }

    /// The final norm's output `[B, T, D]`, without dropout and without gradients.
    pub fn hidden(&self, params: &Parameters, batch: &Batch) -> Result<Tensor, Error> {
        tch::no_grad(|| {
            let mut x_BTD = self.model.embed(params.block(0), &batch.ids, None)?;
            for layer in 0..self.model.num_layers() {
                x_BTD = self.model.layer(layer, params.block(layer + 1), &x_BTD, None)?;
            }
            self.model.final_norm(params.block(self.model.num_layers() + 1), &x_BTD)
        })
    }
}

/// Backward of one block: adds the gradients of its first `count` parameters and returns its input's.
fn backward(
    params: &mut Parameters,
    block: usize,
    count: usize,
    input: &Tensor,
    output: &Tensor,
    grad_output: &Tensor,
) -> Result<Tensor, Error> {
    let mut grads = {
        let inputs: Vec<&Tensor> = std::iter::once(input).chain(params.block(block).iter().take(count)).collect();
        grad(output, &inputs, grad_output)?.into_iter()
    };
    let dx = grads.next().ok_or_else(|| Error::Internal("autograd returned no gradient".to_owned()))?;
    tch::no_grad(|| {
        for (sum, grad) in params.block_grads(block).iter_mut().zip(grads) {
            drop(sum.f_add_(&grad)?);
        }
        Ok(dx)
    })
}

/// Gradients of ⟨`output`, `grad_output`⟩ by `inputs`; every one of them must take part.
pub(crate) fn grad(output: &Tensor, inputs: &[&Tensor], grad_output: &Tensor) -> Result<Vec<Tensor>, Error> {
    let grads = trainctl_collective::grad(&[output], inputs, &[Some(grad_output.shallow_clone())], false)
        .map_err(Error::Shim)?;
    let missing = || Error::Internal("a block does not use one of its parameters".to_owned());
    grads.into_iter().map(|grad| grad.ok_or_else(missing)).collect()
}
