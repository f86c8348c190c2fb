//! The libtorch calls that tch does not expose.

use tch::Tensor;

use crate::error::Error;
use crate::ffi;

/// The gradients of Σ ⟨output, grad_output⟩ with respect to `inputs`, by `torch::autograd::grad`. Accumulates nothing into `.grad`.
///
/// `grad_outputs` has one entry per output: `None` stands for 1 and is allowed for outputs of one element only. An input that no
/// output depends on gives `None`. The graph is freed unless `retain_graph`; the gradients themselves carry no graph.
///
/// # Errors
/// [`Error::Argument`] if the lengths differ; [`Error::Torch`] with libtorch's text.
pub fn grad<O, I>(
    outputs: &[O],
    inputs: &[I],
    grad_outputs: &[Option<Tensor>],
    retain_graph: bool,
) -> Result<Vec<Option<Tensor>>, Error>
where
    O: std::borrow::Borrow<Tensor>,
    I: std::borrow::Borrow<Tensor>,
{
    if outputs.len() != grad_outputs.len() {
        let message = format!("{} outputs and {} grad_outputs: give one each", outputs.len(), grad_outputs.len());
        return Err(Error::Argument { operation: "grad", message });
    }
    let outputs: Vec<&Tensor> = outputs.iter().map(std::borrow::Borrow::borrow).collect();
    let inputs: Vec<&Tensor> = inputs.iter().map(std::borrow::Borrow::borrow).collect();
    ffi::tensor::grad(&outputs, &inputs, grad_outputs, retain_graph)
}

/// The numbers of one AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first and of the second moment.
    pub betas: (f64, f64),
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
}

/// One AdamW step over lists of tensors, in place and in one pass (`at::_fused_adamw_`).
///
/// All lists have one length; the i-th tensors have one shape, kind and device. `steps` holds one fp32 scalar tensor each, the
/// number of this step counted from 1: the caller raises it before the call, libtorch only reads it. `grads` are read.
///
/// # Errors
/// [`Error::Argument`] if the lengths differ; [`Error::Torch`] with libtorch's text.
pub fn fused_adamw(
    params: &[Tensor],
    grads: &[Tensor],
    exp_avgs: &[Tensor],
    exp_avg_sqs: &[Tensor],
    steps: &[Tensor],
    numbers: AdamW,
) -> Result<(), Error> {
    let lengths = [params.len(), grads.len(), exp_avgs.len(), exp_avg_sqs.len(), steps.len()];
    if lengths.iter().any(|length| *length != params.len()) {
        let message = format!("lists of different lengths (params, grads, exp_avgs, exp_avg_sqs, steps): {lengths:?}");
        return Err(Error::Argument { operation: "fused_adamw", message });
    }
    if params.is_empty() {
        return Ok(());
    }
    let lists = ffi::tensor::AdamWLists { params, grads, exp_avgs, exp_avg_sqs, steps };
    ffi::tensor::fused_adamw(&lists, numbers.lr, numbers.betas, numbers.weight_decay, numbers.eps)
}

/// The number of threads of one operation, for operations that this thread starts: call it on the thread that trains. Another count changes bits of sums, so it belongs to the layout (P4).
///
/// # Errors
/// [`Error::Argument`] for 0.
pub fn set_num_threads(threads: usize) -> Result<(), Error> {
    let operation = "set_num_threads";
    match i32::try_from(threads) {
        Ok(threads) if threads > 0 => ffi::tensor::set_num_threads(threads),
        _ => Err(Error::Argument { operation, message: format!("{threads} threads: at least 1 is needed") }),
    }
}

/// Whether libtorch must use deterministic algorithms; an operation that has none then fails and says so. Fresh memory is not
/// filled (Python's default is to fill it), and cuDNN picks no algorithm by timing.
///
/// # Errors
/// [`Error::Torch`] with libtorch's text.
pub fn set_deterministic(on: bool) -> Result<(), Error> {
    ffi::tensor::set_deterministic(on)
}

/// Whether this thread treats subnormal numbers as zero; threads started later inherit it, so call it before the first
/// operation. Returns false where the CPU cannot.
pub fn set_flush_denormal(on: bool) -> bool {
    ffi::tensor::set_flush_denormal(on)
}

/// Opens libtorch_cuda for the rest of the process. Must come before the first question about CUDA (even
/// `tch::Cuda::is_available()`): libtorch caches the answer. Takes 0.3 s the first time.
///
/// # Errors
/// [`Error::Library`] with the loader's text where it or one of its own libraries is absent; the answer stays the same for the
/// life of the process.
pub fn open_cuda() -> Result<(), Error> {
    ffi::cuda::open_cuda()
}
