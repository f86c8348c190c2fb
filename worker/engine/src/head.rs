//! Output head: linear + cross-entropy, summed over rows.
//!
//! `chunked` makes logits for a few hundred rows at a time in one reused buffer, turns them into their own gradient in
//! place and multiplies that back at once, so `[rows, V]` logits never exist: at V = 50,257 they are most of the memory
//! of a small model's step. `masked` is the plain reference by autograd; the two agree to rounding.
//!
//! Shape letters: N rows (sequences × tokens), C rows of a chunk, D width, V vocabulary. The head's weight is the token
//! embedding `[V, D]` (tied).

#![expect(non_snake_case, reason = "tensor names end in shape letters")]

use tch::{Kind, Reduction, Tensor};
use trainctl_spec::job::LossFn;

use crate::Error;

/// Rows per chunk. Below 128 the weight is read too often, far above 256 the buffer leaves the cache.
const CHUNK: i64 = 256;

/// The head and its workspace.
#[derive(Debug)]
pub struct Head {
    loss_fn: LossFn,
    /// fp32 `[CHUNK, V]`, made at first use.
    logits_CV: Option<Tensor>,
    chunk: i64,
}

/// Result of [`Head::forward_backward`].
#[derive(Debug)]
pub struct HeadOutput {
    /// Σ of the rows' cross-entropies, unscaled.
    pub loss_sum: f64,
    /// Gradient of `scale · loss_sum` by the rows, `[N, D]` in the rows' type.
    pub dh_ND: Tensor,
}

impl Head {
    /// A head that computes the loss the way `loss_fn` says.
    pub fn new(loss_fn: LossFn) -> Self {
        Self { loss_fn, logits_CV: None, chunk: CHUNK }
    }

    /// The same with another chunk size (tests).
    pub fn with_chunk(loss_fn: LossFn, chunk: i64) -> Self {
        Self { loss_fn, logits_CV: None, chunk: chunk.max(1) }
    }

    /// Loss and gradients of rows `h_ND` against `targets` `[N]` int64. The weight's gradient of `scale · loss_sum` is
    /// added to `dw_VD` (fp32).
    pub fn forward_backward(
        &mut self,
        h_ND: &Tensor,
        w_VD: &Tensor,
        targets: &Tensor,
        scale: f64,
        dw_VD: &mut Tensor,
    ) -> Result<HeadOutput, Error> {
        match self.loss_fn {
            LossFn::Chunked => tch::no_grad(|| self.chunked(h_ND, w_VD, targets, scale, dw_VD)),
            LossFn::Masked => masked(h_ND, w_VD, targets, scale, dw_VD),
        }
    }

    /// Σ of the rows' cross-entropies only.
    pub fn loss(&mut self, h_ND: &Tensor, w_VD: &Tensor, targets: &Tensor) -> Result<f64, Error> {
        tch::no_grad(|| {
            let mut loss_sum = 0.0;
            let rows = h_ND.size2()?.0;
            for start in (0..rows).step_by(self.chunk as usize) {
                let count = self.chunk.min(rows - start);
                let mut logits = self.logits(&h_ND.f_narrow(0, start, count)?, w_VD)?;
                let (loss, _) = softmax_in_place(&mut logits, &targets.f_narrow(0, start, count)?)?;
                loss_sum += loss;
            }
            Ok(loss_sum)
        })
    }

    fn chunked(
        &mut self,
        h_ND: &Tensor,
        w_VD: &Tensor,
        targets: &Tensor,
        scale: f64,
        dw_VD: &mut Tensor,
    ) -> Result<HeadOutput, Error> {
        let rows = h_ND.size2()?.0;
        let dh_ND = h_ND.f_empty_like()?;
        let mut loss_sum = 0.0;
        for start in (0..rows).step_by(self.chunk as usize) {
            let count = self.chunk.min(rows - start);
            let h_CD = h_ND.f_narrow(0, start, count)?;
            let mut g_CV = self.logits(&h_CD, w_VD)?;
            let (loss, targets_C1) = softmax_in_place(&mut g_CV, &targets.f_narrow(0, start, count)?)?;
            loss_sum += loss;
            // d(scale · loss) / d(logits) = scale · (softmax − one-hot)
            let minus_one = Tensor::f_full([count, 1], -1.0, (Kind::Float, g_CV.device()))?;
            drop(g_CV.f_scatter_add_(1, &targets_C1, &minus_one)?);
            drop(g_CV.f_mul_scalar_(scale)?);
            if w_VD.kind() == Kind::Float {
                drop(g_CV.f_mm_out(&dh_ND.f_narrow(0, start, count)?, w_VD)?);
                drop(dw_VD.f_addmm_(&g_CV.f_tr()?, &h_CD)?);
            } else {
                let g_CV = g_CV.f_to_kind(w_VD.kind())?;
                dh_ND.f_narrow(0, start, count)?.f_copy_(&g_CV.f_mm(w_VD)?)?;
                drop(dw_VD.f_add_(&g_CV.f_tr()?.f_mm(&h_CD)?.f_to_kind(Kind::Float)?)?);
            }
        }
        Ok(HeadOutput { loss_sum, dh_ND })
    }

    /// fp32 logits of a chunk, in the workspace.
    fn logits(&mut self, h_CD: &Tensor, w_VD: &Tensor) -> Result<Tensor, Error> {
        let (count, _) = h_CD.size2()?;
        let vocab = w_VD.size2()?.0;
        let buffer = match self.logits_CV.take() {
            Some(buffer) if buffer.size2()? == (self.chunk, vocab) => buffer,
            _ => Tensor::f_empty([self.chunk, vocab], (Kind::Float, w_VD.device()))?,
        };
        let mut logits_CV = buffer.f_narrow(0, 0, count)?;
        self.logits_CV = Some(buffer);
        if w_VD.kind() == Kind::Float {
            drop(h_CD.f_mm_out(&logits_CV, &w_VD.f_tr()?)?);
        } else {
            logits_CV.f_copy_(&h_CD.f_mm(&w_VD.f_tr()?)?)?;
        }
        Ok(logits_CV)
    }
}

/// Replaces logits `[C, V]` by their softmax. Returns the summed cross-entropy (in f64) and the targets as `[C, 1]`.
fn softmax_in_place(x_CV: &mut Tensor, targets: &Tensor) -> Result<(f64, Tensor), Error> {
    let targets_C1 = targets.f_unsqueeze(1)?;
    drop(x_CV.f_sub_(&x_CV.f_amax([1i64].as_slice(), true)?)?);
    let picked = x_CV.f_gather(1, &targets_C1, false)?;
    drop(x_CV.f_exp_()?);
    let sum_C1 = x_CV.f_sum_dim_intlist([1i64].as_slice(), true, None)?;
    drop(x_CV.f_div_(&sum_C1)?);
    let loss = sum_C1.f_log()?.f_sub(&picked)?.f_sum(Kind::Double)?;
    Ok((f64::try_from(&loss)?, targets_C1))
}

fn masked(h_ND: &Tensor, w_VD: &Tensor, targets: &Tensor, scale: f64, dw_VD: &mut Tensor) -> Result<HeadOutput, Error> {
    let h_ND = h_ND.f_detach()?.f_set_requires_grad(true)?;
    let w_VD = w_VD.f_detach()?.f_set_requires_grad(true)?;
    let logits_NV = h_ND.f_mm(&w_VD.f_tr()?)?.f_to_kind(Kind::Float)?;
    let loss = logits_NV.f_cross_entropy_loss::<&Tensor>(targets, None, Reduction::Sum, -100, 0.0)?;
    let seed = Tensor::f_full([0i64; 0], scale, (Kind::Float, loss.device()))?;
    let mut grads = crate::executor::grad(&loss, &[&h_ND, &w_VD], &seed)?.into_iter();
    let (Some(dh_ND), Some(dw)) = (grads.next(), grads.next()) else {
        return Err(Error::Internal("autograd returned too few gradients".to_owned()));
    };
    drop(dw_VD.f_add_(&dw.f_to_kind(Kind::Float)?)?);
    Ok(HeadOutput { loss_sum: f64::try_from(&loss.f_detach()?)?, dh_ND })
}
