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
    let message = if text.is_null() {
        String::new()
    } else {
        // SAFETY: csrc hands out a NUL-terminated string made by strdup and keeps no pointer to it; it is freed once, here.
        unsafe {
            let message = CStr::from_ptr(text).to_string_lossy().into_owned();
            tc_string_free(text);
            message
        }
    };
    match code {
        OK => Ok(()),
        ABORTED => Err(Error::Aborted { operation, reason: message }),
        _ => Err(classify(operation, message)),
    }
}
