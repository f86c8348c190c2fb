//! Safe handles of csrc/group.cpp.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::Tensor;

use super::kv::{self, Callbacks, LastError};
use super::{checked, cuda, tensor};
use crate::error::Error;
use crate::store::KeyValue;

#[repr(C)]
struct RawGroup {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawWork {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn tc_group_gloo(
        callbacks: Callbacks,
        rank: i32,
        size: i32,
        address: *const c_char,
        timeout_ms: i64,
        out: *mut *mut RawGroup,
        message: *mut *mut c_char,
    ) -> i32;
    fn tc_store_new(callbacks: Callbacks, timeout_ms: i64) -> *mut c_void;
    fn tc_group_of_backend(backend: *mut c_void) -> *mut RawGroup;
    fn tc_group_abort(group: *mut RawGroup, reason: *const c_char, message: *mut *mut c_char) -> i32;
    fn tc_group_free(group: *mut RawGroup);
    fn tc_all_reduce(
        group: *mut RawGroup,
        tensor: *const c_void,
        op: i32,
        out: *mut *mut RawWork,
        message: *mut *mut c_char,
    ) -> i32;
    fn tc_broadcast(
        group: *mut RawGroup,
        tensor: *const c_void,
        root: i32,
        out: *mut *mut RawWork,
        message: *mut *mut c_char,
    ) -> i32;
    fn tc_all_gather(
        group: *mut RawGroup,
        output: *const c_void,
        input: *const c_void,
        out: *mut *mut RawWork,
        message: *mut *mut c_char,
    ) -> i32;
    fn tc_reduce_scatter(
        group: *mut RawGroup,
        output: *const c_void,
        input: *const c_void,
        op: i32,
        out: *mut *mut RawWork,
        message: *mut *mut c_char,
    ) -> i32;
    fn tc_barrier(group: *mut RawGroup, out: *mut *mut RawWork, message: *mut *mut c_char) -> i32;
    fn tc_work_wait(work: *mut RawWork, message: *mut *mut c_char) -> i32;
    fn tc_work_done(work: *mut RawWork) -> i32;
    fn tc_work_free(work: *mut RawWork);
}

/// A `tc_group`. Operations are started under the mutex, since c10d numbers them in the order of the calls and does not lock.
pub(crate) struct Group {
    raw: *mut RawGroup,
    starting: Mutex<()>,
}

// SAFETY: csrc/group.cpp locks its state; starting operations is serialised by `starting`; abort and free touch only what
// Gloo locks itself.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

/// A `tc_work`.
pub(crate) struct Work {
    raw: *mut RawWork,
}

// SAFETY: a work is a reference-counted C++ object with its own locks, used by one thread at a time.
unsafe impl Send for Work {}

/// What an operation starts with.
pub(crate) enum Start<'a> {
    AllReduce { tensor: &'a Tensor, op: i32 },
    Broadcast { tensor: &'a Tensor, root: i32 },
    AllGather { output: &'a Tensor, input: &'a Tensor },
    ReduceScatter { output: &'a Tensor, input: &'a Tensor, op: i32 },
    Barrier,
}

/// Text for C, cut at the first NUL byte.
fn c_text(text: &str) -> CString {
    CString::new(text.split('\0').next().unwrap_or_default()).unwrap_or_default()
}

impl Group {
    pub(crate) fn gloo(
        store: Arc<dyn KeyValue>,
        rank: i32,
        size: i32,
        address: &str,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let operation = "form a Gloo group";
        let address = c_text(address);
        let timeout_ms = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        let (callbacks, last_error) = kv::callbacks(store);
        let mut raw = std::ptr::null_mut();
        let made = checked(operation, |message| {
            // SAFETY: C++ takes ownership of the callbacks in every case; the other pointers live for the call.
            unsafe { tc_group_gloo(callbacks, rank, size, address.as_ptr(), timeout_ms, &raw mut raw, message) }
        });
        made.map_err(|error| with_store_error(operation, error, &last_error))?;
        Ok(Self { raw, starting: Mutex::new(()) })
    }

    /// As [`gloo`](Self::gloo), by the plug-in at `plugin`, for the CUDA device `device`.
    pub(crate) fn nccl(
        store: Arc<dyn KeyValue>,
        rank: i32,
        size: i32,
        device: i32,
        timeout: Duration,
        plugin: &Path,
    ) -> Result<Self, Error> {
        let operation = "form an NCCL group";
        let make = cuda::open_plugin(plugin)?;
        let timeout_ms = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        let (callbacks, last_error) = kv::callbacks(store);
        let mut backend = std::ptr::null_mut();
        let made = checked(operation, |message| {
            // SAFETY: the store takes over the callbacks, the plug-in takes over the store in every case.
            unsafe {
                let store = tc_store_new(callbacks, timeout_ms);
                make(store, rank, size, device, timeout_ms, &raw mut backend, message)
            }
        });
        made.map_err(|error| with_store_error(operation, error, &last_error))?;
        // SAFETY: the plug-in gave a backend with one reference, which passes to the group.
        Ok(Self { raw: unsafe { tc_group_of_backend(backend) }, starting: Mutex::new(()) })
    }

    pub(crate) fn start(&self, operation: &'static str, start: &Start<'_>) -> Result<Work, Error> {
        let _serial = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut raw = std::ptr::null_mut();
        checked(operation, |message| {
            let out = &raw mut raw;
            // SAFETY: the group lives as long as self; the tensors are live handles of tch, and C++ takes its own references.
            unsafe {
                match *start {
                    Start::AllReduce { tensor: t, op } => tc_all_reduce(self.raw, tensor::handle(t), op, out, message),
                    Start::Broadcast { tensor: t, root } => {
                        tc_broadcast(self.raw, tensor::handle(t), root, out, message)
                    }
                    Start::AllGather { output, input } => {
                        tc_all_gather(self.raw, tensor::handle(output), tensor::handle(input), out, message)
                    }
                    Start::ReduceScatter { output, input, op } => {
                        tc_reduce_scatter(self.raw, tensor::handle(output), tensor::handle(input), op, out, message)
                    }
                    Start::Barrier => tc_barrier(self.raw, out, message),
                }
            }
        })?;
        Ok(Work { raw })
    }

    pub(crate) fn abort(&self, reason: &str) -> Result<(), Error> {
        let reason = c_text(reason);
        // SAFETY: the group lives as long as self; C++ copies the text.
        checked("abort", |message| unsafe { tc_group_abort(self.raw, reason.as_ptr(), message) })
    }
}

/// Puts the store's own error in the place of c10d's wording of it.
fn with_store_error(operation: &'static str, error: Error, last: &LastError) -> Error {
    match last.named_by(&error.to_string()) {
        Some(source) => Error::Store { operation, source },
        None => error,
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: `raw` came from csrc and is freed once; works hold what they need themselves.
        unsafe { tc_group_free(self.raw) }
    }
}

impl Work {
    pub(crate) fn wait(&self, operation: &'static str) -> Result<(), Error> {
        // SAFETY: `raw` lives as long as self.
        checked(operation, |message| unsafe { tc_work_wait(self.raw, message) })
    }

    pub(crate) fn is_done(&self) -> bool {
        // SAFETY: `raw` lives as long as self.
        unsafe { tc_work_done(self.raw) != 0 }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: `raw` came from csrc and is freed once; c10d keeps its own reference while the work runs.
        unsafe { tc_work_free(self.raw) }
    }
}
