//! Opens libtorch_cuda and the NCCL plug-in at run time.

use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::Error;

/// `tc_nccl_backend` of csrc/nccl_plugin.cpp: (store, rank, size, device, timeout_ms, out, message) → code.
pub(super) type MakeBackend =
    unsafe extern "C" fn(*mut c_void, i32, i32, i32, i64, *mut *mut c_void, *mut *mut c_char) -> i32;

/// `tc_nccl_flight_record` of csrc/nccl_plugin.cpp: (record, message) → code.
pub(super) type Record = unsafe extern "C" fn(*mut *mut c_char, *mut *mut c_char) -> i32;

/// The plug-in's, once it is open.
static RECORD: OnceLock<Record> = OnceLock::new();

/// NCCL's flight recorder, if the plug-in was opened.
pub(super) fn record() -> Option<Record> {
    RECORD.get().copied()
}

const LIBTORCH_CUDA: &str = "libtorch_cuda.so";

/// Opens a shared object for the rest of the process.
fn open(operation: &'static str, library: &Path, remedy: &str) -> Result<Library, Error> {
    // SAFETY: loading runs the library's initialisers; libtorch's register the CUDA backend, the plug-in has none of its own.
    unsafe { Library::open(Some(library), RTLD_NOW | RTLD_GLOBAL) }.map_err(|error| Error::Library {
        operation,
        library: library.display().to_string(),
        message: format!("{error}; {remedy}"),
    })
}

/// Opens libtorch_cuda once. The hooks are cached at the first question about CUDA, so this must come before it.
pub(crate) fn open_cuda() -> Result<(), Error> {
    static OPENED: OnceLock<Result<(), Error>> = OnceLock::new();
    OPENED
        .get_or_init(|| {
            let remedy = "a GPU node needs the whole torch 2.13.0 install (cuDNN, cuBLAS, NCCL) behind LIBTORCH";
            let library = open("open_cuda", Path::new(LIBTORCH_CUDA), remedy)?;
            // The registered backend must never go away.
            std::mem::forget(library);
            Ok(())
        })
        .clone()
}

/// The constructor in the plug-in at `path`. Opens libtorch_cuda first.
pub(super) fn open_plugin(path: &Path) -> Result<MakeBackend, Error> {
    open_cuda()?;
    let operation = "open the NCCL plug-in";
    let library = open(operation, path, "build it with worker/collective/nccl/build.sh")?;
    let failed = |error: libloading::Error| Error::Library {
        operation,
        library: path.display().to_string(),
        message: format!("{error}; build it anew with worker/collective/nccl/build.sh"),
    };
    // SAFETY: the symbols have the types that csrc/nccl_plugin.cpp gives them.
    let (make, record) = unsafe {
        let make = library.get::<MakeBackend>(b"tc_nccl_backend\0").map_err(failed)?;
        (*make, *library.get::<Record>(b"tc_nccl_flight_record\0").map_err(failed)?)
    };
    RECORD.get_or_init(|| record);
    // The function and the backends that it makes live in the plug-in.
    std::mem::forget(library);
    Ok(make)
}
