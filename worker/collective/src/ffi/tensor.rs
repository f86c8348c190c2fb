//! Safe wrappers of csrc/tensor.cpp.

use std::ffi::{c_char, c_void};

use tch::Tensor;

use super::checked;
use crate::error::Error;

unsafe extern "C" {
    fn tc_grad(
        outputs: *const *const c_void,
        grad_outputs: *const *const c_void,
        num_outputs: usize,
        inputs: *const *const c_void,
        num_inputs: usize,
        retain_graph: i32,
        gradients: *mut *mut c_void,
        message: *mut *mut c_char,
    ) -> i32;
    fn tc_fused_adamw(
        params: *const *const c_void,
        grads: *const *const c_void,
        exp_avgs: *const *const c_void,
        exp_avg_sqs: *const *const c_void,
        steps: *const *const c_void,
        count: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
        message: *mut *mut c_char,
    ) -> i32;
    fn tc_set_deterministic(on: i32, message: *mut *mut c_char) -> i32;
    fn tc_set_flush_denormal(on: i32) -> i32;
    fn tc_set_num_threads(threads: i32, message: *mut *mut c_char) -> i32;
    fn tc_num_bytes(tensor: *const c_void) -> i64;
    fn tc_host_bytes(tensor: *const c_void) -> *mut c_void;
}

/// tch's handle: a pointer to an `at::Tensor` that lives as long as the borrow.
pub(super) fn handle(tensor: &Tensor) -> *const c_void {
    tensor.as_ptr().cast()
}

fn handles<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*const c_void> {
    tensors.into_iter().map(handle).collect()
}

/// `outputs` and `grad_outputs` must have one length.
pub(crate) fn grad(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    grad_outputs: &[Option<Tensor>],
    retain_graph: bool,
) -> Result<Vec<Option<Tensor>>, Error> {
    let out = handles(outputs.iter().copied());
    let inp = handles(inputs.iter().copied());
    let seeds: Vec<_> = grad_outputs.iter().map(|t| t.as_ref().map_or(std::ptr::null(), handle)).collect();
    debug_assert_eq!(out.len(), seeds.len(), "checked by torch::grad");
    let mut found = vec![std::ptr::null_mut::<c_void>(); inputs.len()];
    checked("grad", |message| {
        // SAFETY: the arrays have the lengths given, their handles live for the call, and `found` has room for all inputs.
        unsafe {
            tc_grad(
                out.as_ptr(),
                seeds.as_ptr(),
                out.len(),
                inp.as_ptr(),
                inp.len(),
                retain_graph.into(),
                found.as_mut_ptr(),
                message,
            )
        }
    })?;
    let owned = found.into_iter().map(|raw| {
        // SAFETY: C++ made the handle with `new at::Tensor`, as torch-sys does, and gives it away.
        (!raw.is_null()).then(|| unsafe { Tensor::from_ptr(raw.cast()) })
    });
    Ok(owned.collect())
}

/// The lists of one fused AdamW call; all must have one length.
pub(crate) struct AdamWLists<'a> {
    pub(crate) params: &'a [Tensor],
    pub(crate) grads: &'a [Tensor],
    pub(crate) exp_avgs: &'a [Tensor],
    pub(crate) exp_avg_sqs: &'a [Tensor],
    pub(crate) steps: &'a [Tensor],
}

pub(crate) fn fused_adamw(
    lists: &AdamWLists<'_>,
    lr: f64,
    betas: (f64, f64),
    weight_decay: f64,
    eps: f64,
) -> Result<(), Error> {
    let [params, grads, exp_avgs, exp_avg_sqs, steps] =
        [lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.steps].map(handles);
    checked("fused_adamw", |message| {
        // SAFETY: five arrays of one length (checked by the caller) whose handles live for the call.
        unsafe {
            tc_fused_adamw(
                params.as_ptr(),
                grads.as_ptr(),
                exp_avgs.as_ptr(),
                exp_avg_sqs.as_ptr(),
                steps.as_ptr(),
                params.len(),
                lr,
                betas.0,
                betas.1,
                weight_decay,
                eps,
                message,
            )
        }
    })
}

pub(crate) fn set_deterministic(on: bool) -> Result<(), Error> {
    // SAFETY: sets flags of libtorch's global context.
    checked("set_deterministic", |message| unsafe { tc_set_deterministic(on.into(), message) })
}

pub(crate) fn set_flush_denormal(on: bool) -> bool {
    // SAFETY: sets this thread's floating-point control word; false where the CPU cannot.
    unsafe { tc_set_flush_denormal(on.into()) != 0 }
}

pub(crate) fn set_num_threads(threads: i32) -> Result<(), Error> {
    // SAFETY: sets libtorch's thread count.
    checked("set_num_threads", |message| unsafe { tc_set_num_threads(threads, message) })
}

/// The bytes of a contiguous CPU tensor; `None` for any other tensor.
pub(crate) fn host_bytes(tensor: &Tensor) -> Option<&[u8]> {
    // SAFETY: a live handle; C++ answers null unless the storage is host memory, dense and contiguous, so that `len` bytes follow.
    // The borrow keeps the tensor, and with it the storage, alive. That no alias of the tensor is written meanwhile is the
    // contract of crate::bytes.
    unsafe {
        let data = tc_host_bytes(handle(tensor));
        let len = usize::try_from(tc_num_bytes(handle(tensor))).ok()?;
        match (data.is_null(), len) {
            (_, 0) if tensor.defined() => Some(&[]),
            (true, _) => None,
            (false, len) => Some(std::slice::from_raw_parts(data.cast(), len)),
        }
    }
}

/// As [`host_bytes`], for writing.
pub(crate) fn host_bytes_mut(tensor: &mut Tensor) -> Option<&mut [u8]> {
    // SAFETY: as in `host_bytes`; the exclusive borrow of the handle stands for the storage by the contract of crate::bytes.
    unsafe {
        let data = tc_host_bytes(handle(tensor));
        let len = usize::try_from(tc_num_bytes(handle(tensor))).ok()?;
        match (data.is_null(), len) {
            (_, 0) if tensor.defined() => Some(&mut []),
            (true, _) => None,
            (false, len) => Some(std::slice::from_raw_parts_mut(data.cast(), len)),
        }
    }
}
