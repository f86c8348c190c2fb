//! The boundary to `csrc/`: declarations, and one safe wrapper for each.
#![expect(
    unsafe_code,
    reason = "calls into the C++ of csrc/, one copy, one signal handler and `_exit`, each with a SAFETY note"
)]

pub(crate) mod cuda;
pub(crate) mod group;
pub(crate) mod kv;
pub(crate) mod random;
pub(crate) mod stacks;
pub(crate) mod stream;
pub(crate) mod tensor;

use std::ffi::{CStr, c_char, c_int};

use crate::error::{Error, classify};

/// `tc_code` of csrc/error.h.
const OK: i32 = 0;
const ABORTED: i32 = 2;

unsafe extern "C" {
    fn tc_string_free(text: *mut c_char);
    fn tc_flight_record(record: *mut *mut c_char, message: *mut *mut c_char) -> i32;
}

/// `_exit` of the C library.
pub(crate) fn exit_at_once(code: i32) -> ! {
    unsafe extern "C" {
        fn _exit(code: c_int) -> !;
    }
    // SAFETY: it takes a number and runs nothing more of this process.
    unsafe { _exit(code) }
}

/// Runs one call that reports by code and message.
fn checked(operation: &'static str, call: impl FnOnce(*mut *mut c_char) -> i32) -> Result<(), Error> {
    let mut text: *mut c_char = std::ptr::null_mut();
    let code = call(&raw mut text);
    let message = taken(text);
    match code {
        OK => Ok(()),
        ABORTED => Err(Error::Aborted { operation, reason: message }),
        _ => Err(classify(operation, message)),
    }
}

/// A text of csrc, or nothing.
fn taken(text: *mut c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: csrc hands out a NUL-terminated string made by strdup and keeps no pointer to it; it is freed once, here.
    unsafe {
        let taken = CStr::from_ptr(text).to_string_lossy().into_owned();
        tc_string_free(text);
        taken
    }
}

/// What c10d has noted of this process's last collectives: of NCCL's where its plug-in is open, else of Gloo's.
pub(crate) fn flight_record() -> Result<String, Error> {
    let mut record: *mut c_char = std::ptr::null_mut();
    // SAFETY: both write a text that is ours from then on, or none.
    checked("read the flight recorder", |message| unsafe {
        match cuda::record() {
            Some(of_nccl) => of_nccl(&raw mut record, message),
            None => tc_flight_record(&raw mut record, message),
        }
    })?;
    Ok(taken(record))
}
