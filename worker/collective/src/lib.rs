//! c10d behind a Rust API, and the few libtorch calls that tch lacks.
//!
//! The collectives are PyTorch's own: this crate holds a `c10d::Store` that asks Rust for every key ([`KeyValue`]), process
//! groups over it ([`ProcessGroup`]), and small functions over tensors. It is the only C++ of the project (`csrc/`), and the
//! only `unsafe` of this crate lies in the private module `ffi`.
//!
//! - **K-1** Every wait on a key ends: with the key, with the timeout, or at once with the [`KeyValue`]'s own error, whose text
//!   reaches the caller as [`Error::Store`] unchanged.
//! - **K-2** A panic in a [`KeyValue`] becomes an error of that call; it never crosses into C++.
//! - **K-3** A [`Work`] may be dropped at any time: c10d keeps the tensors of a running operation alive.
//! - **K-4** [`ProcessGroup::abort`] ends every wait on the group's works at once and makes the peers see a closed connection.
//! - **D3** Random values depend on an explicit seed and the element's index alone: no generator is hidden anywhere
//!   ([`random`]).
//!
//! Building needs `LIBTORCH` (`export LIBTORCH=$(scripts/libtorch.sh)`).

mod bytes;
mod error;
mod ffi;
mod group;
mod memory;
pub mod random;
mod stacks;
mod store;
mod torch;

/// Ends the process without taking anything of it down: process groups close with it and not before, and the destructors of
/// libtorch, which pull tensors from under threads that still run, do not come.
pub fn exit_at_once(code: i32) -> ! {
    ffi::exit_at_once(code)
}

/// What c10d's flight recorder has noted of this process's last collectives (`TORCH_FR_BUFFER_SIZE` of them; 0 = none), as JSON:
/// of NCCL's where its plug-in is open (compiled and not yet run on a GPU), else of Gloo's. Any thread may ask at any time.
///
/// # Errors
/// What c10d throws.
pub fn flight_record() -> Result<String, Error> {
    ffi::flight_record()
}

pub use bytes::{bytes, bytes_mut, copy_from_bytes, copy_streaming};
pub use error::Error;
pub use group::{GroupOptions, ProcessGroup, ReduceOp, Work};
pub use memory::MemoryStore;
pub use stacks::{ThreadStack, install_stack_handler, thread_stacks};
pub use store::{KeyValue, KvError, KvErrorKind, Prefixed};
pub use torch::{AdamW, fused_adamw, grad, open_cuda, set_deterministic, set_flush_denormal, set_num_threads};
