//! Tensors as bytes, for writing and hashing them without a copy.

use tch::{Device, Tensor};

use crate::error::Error;
use crate::ffi;

/// The bytes of a contiguous CPU tensor in row-major order and the machine's byte order (little-endian on x86-64).
///
/// tch's tensors share storage: while the bytes are borrowed, nothing may write to the tensor through another handle or through a
/// collective that is still running.
///
/// # Errors
/// [`Error::Argument`] for a tensor on another device or one that is not contiguous (`.contiguous()` first).
pub fn bytes(tensor: &Tensor) -> Result<&[u8], Error> {
    ffi::tensor::host_bytes(tensor).ok_or_else(|| not_host("bytes", tensor))
}

/// As [`bytes`], to write to. The exclusive borrow of the handle stands for the storage: nothing may use the tensor's memory
/// through another handle, or through a collective that is still running, while the bytes are borrowed. Not seen by autograd.
///
/// # Errors
/// [`Error::Argument`] as for [`bytes`].
pub fn bytes_mut(tensor: &mut Tensor) -> Result<&mut [u8], Error> {
    if ffi::tensor::host_bytes(tensor).is_none() {
        return Err(not_host("bytes_mut", tensor));
    }
    Ok(ffi::tensor::host_bytes_mut(tensor).unwrap_or_default())
}

/// Overwrites a contiguous CPU tensor with `source`, which must have exactly the tensor's number of bytes. The same rule on
/// other handles as for [`bytes`]. Not seen by autograd: for leaves and buffers only.
///
/// # Errors
/// [`Error::Argument`] for another device, a tensor that is not contiguous, or another number of bytes.
pub fn copy_from_bytes(tensor: &mut Tensor, source: &[u8]) -> Result<(), Error> {
    let operation = "copy_from_bytes";
    let Some(target) = ffi::tensor::host_bytes_mut(tensor) else {
        return Err(not_host(operation, tensor));
    };
    if target.len() != source.len() {
        let message = format!("the tensor has {} bytes, the source {}", target.len(), source.len());
        return Err(Error::Argument { operation, message });
    }
    target.copy_from_slice(source);
    Ok(())
}

/// Copies bytes for a reader that comes late: the copy does not enter the processor's caches, and the memory that it goes to is
/// not read first, as a plain copy of a few MiB does. On other processors than x86-64 a plain copy.
///
/// # Panics
/// If the two have different lengths.
pub fn copy_streaming(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy has as many bytes as its source");
    ffi::stream::copy(to, from);
}

fn not_host(operation: &'static str, tensor: &Tensor) -> Error {
    let message = if !tensor.defined() {
        "the tensor is undefined".to_owned()
    } else if tensor.device() != Device::Cpu {
        format!("the tensor is on {:?}: copy it to the CPU first", tensor.device())
    } else {
        format!("the tensor of shape {:?} is not contiguous: call contiguous() first", tensor.size())
    };
    Error::Argument { operation, message }
}
