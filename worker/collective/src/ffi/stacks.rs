//! The signal handler that writes down where a thread is.
//!
//! It allocates nothing and takes no lock of ours: the slots are static, and the unwinder of GCC 12 with glibc 2.35 finds
//! unwind tables without a lock (`_dl_find_object`). With an older pair it takes the loader's lock, for reading only; a thread
//! that cannot have it does not answer, which the caller reports.

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use nix::libc;

/// Slots for answers: more threads than any trainer has. They are used in turn.
const SLOTS: usize = 512;
/// Frames of a thread that are kept, innermost first.
const FRAMES: usize = 96;
/// Frames of the handler itself: the callback's caller is the handler, the next one the kernel's trampoline.
const OWN_FRAMES: usize = 2;

struct Slot {
    tid: AtomicU64,
    count: AtomicUsize,
    frames: [AtomicU64; FRAMES],
    /// Number of the answer that the slot holds, from 1; stored last.
    answer: AtomicU64,
}

static ANSWERS: [Slot; SLOTS] = [const {
    Slot {
        tid: AtomicU64::new(0),
        count: AtomicUsize::new(0),
        frames: [const { AtomicU64::new(0) }; FRAMES],
        answer: AtomicU64::new(0),
    }
}; SLOTS];

static NEXT: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    fn _Unwind_Backtrace(callback: extern "C" fn(*mut c_void, *mut c_void) -> c_int, data: *mut c_void) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// The signal of a request: a real-time one that neither glibc, libtorch nor NCCL uses.
fn signal() -> c_int {
    libc::SIGRTMIN() + 4
}

/// Installs the handler for the process. Calls that the signal interrupts are started again where the kernel can.
pub(crate) fn install() -> io::Result<()> {
    // The unwinder's first call may initialise it, so that one is made here and not in the handler.
    handle(0);
    // SAFETY: an all-zero sigaction is a valid one with an empty mask; the handler has the signature that sa_sigaction has
    // without SA_SIGINFO and touches nothing but atomics and the unwinder.
    let failed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as extern "C" fn(c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal(), &raw const action, std::ptr::null_mut())
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Asks a thread of this process. The error is ESRCH for a thread that is gone.
pub(crate) fn ask(tid: u32) -> io::Result<()> {
    let pid = libc::pid_t::try_from(std::process::id()).map_err(io::Error::other)?;
    // SAFETY: tgkill takes three numbers and touches no memory.
    let failed = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal()) };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Number of the next answer; those that come from now on have it or a later one.
pub(crate) fn next_answer() -> u64 {
    NEXT.load(Ordering::Acquire)
}

/// Complete answers from number `from` on: thread id and return addresses, innermost first.
pub(crate) fn answers(from: u64) -> Vec<(u32, Vec<u64>)> {
    let up_to = NEXT.load(Ordering::Acquire);
    let slots = (from..up_to).filter_map(|number| {
        let slot = &ANSWERS[number as usize % SLOTS];
        (slot.answer.load(Ordering::Acquire) == number + 1).then_some(slot)
    });
    slots
        .map(|slot| {
            let count = slot.count.load(Ordering::Relaxed).min(FRAMES);
            let frames = slot.frames[..count].iter().map(|frame| frame.load(Ordering::Relaxed)).collect();
            (slot.tid.load(Ordering::Relaxed) as u32, frames)
        })
        .collect()
}

struct Walk {
    slot: &'static Slot,
    skipped: usize,
    count: usize,
}

extern "C" fn handle(_: c_int) {
    // SAFETY: errno belongs to this thread; the interrupted code must find it unchanged.
    let errno = unsafe { *libc::__errno_location() };
    let number = NEXT.fetch_add(1, Ordering::AcqRel);
    let slot = &ANSWERS[number as usize % SLOTS];
    slot.answer.store(0, Ordering::Release);
    // SAFETY: gettid takes nothing and cannot fail.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) };
    slot.tid.store(tid as u64, Ordering::Relaxed);
    let mut walk = Walk { slot, skipped: 0, count: 0 };
    // SAFETY: `frame` gets the pointer to `walk`, which outlives the call.
    unsafe { _Unwind_Backtrace(frame, (&raw mut walk).cast()) };
    slot.count.store(walk.count, Ordering::Relaxed);
    slot.answer.store(number + 1, Ordering::Release);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

extern "C" fn frame(context: *mut c_void, data: *mut c_void) -> c_int {
    /// `_URC_NO_REASON` and `_URC_END_OF_STACK` of the Itanium C++ ABI.
    const GO_ON: c_int = 0;
    const STOP: c_int = 5;
    // SAFETY: `data` is the pointer that `handle` passed; nobody else has it while the walk lasts.
    let walk = unsafe { &mut *data.cast::<Walk>() };
    if walk.skipped < OWN_FRAMES {
        walk.skipped += 1;
        return GO_ON;
    }
    if walk.count == FRAMES {
        return STOP;
    }
    // SAFETY: the unwinder passes a valid context.
    let ip = unsafe { _Unwind_GetIP(context) };
    if ip == 0 {
        // The outermost frame of a thread has no caller.
        return STOP;
    }
    walk.slot.frames[walk.count].store(ip as u64, Ordering::Relaxed);
    walk.count += 1;
    GO_ON
}
