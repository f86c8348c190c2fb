//! Answers the C++ store's calls from a [`KeyValue`]. Mirrors csrc/store.h.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::store::{KeyValue, KvError};

#[repr(C)]
pub(super) struct Slice {
    data: *const u8,
    len: usize,
}

#[repr(C)]
pub(super) struct Request {
    op: i32,
    keys: *const Slice,
    num_keys: usize,
    value: Slice,
    desired: Slice,
    number: i64,
    timeout_ms: i64,
}

#[repr(C)]
pub(super) struct Reply {
    data: *mut u8,
    len: usize,
    capacity: usize,
    number: i64,
}

/// `tc_kv`: what the C++ store holds. Passing it to C++ passes ownership of `context`.
#[repr(C)]
pub(super) struct Callbacks {
    context: *mut c_void,
    call: unsafe extern "C" fn(*mut c_void, *const Request, *mut Reply) -> i32,
    release: unsafe extern "C" fn(*mut Reply),
    drop: unsafe extern "C" fn(*mut c_void),
}

/// The last error that a store gave, so that it reaches the caller as it was (K-1) and not as c10d worded it.
#[derive(Clone, Default)]
pub(super) struct LastError(Arc<Mutex<Option<KvError>>>);

impl LastError {
    fn put(&self, error: KvError) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// The error whose text c10d's message carries, if there is one.
    pub(super) fn named_by(&self, message: &str) -> Option<KvError> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.filter(|error| message.contains(&error.message))
    }
}

struct Context {
    store: Arc<dyn KeyValue>,
    last_error: LastError,
}

/// Makes the callbacks for `store`. Whoever gets them must hand them to C++, which drops the store when it is done.
pub(super) fn callbacks(store: Arc<dyn KeyValue>) -> (Callbacks, LastError) {
    let last_error = LastError::default();
    let context = Box::new(Context { store, last_error: last_error.clone() });
    (Callbacks { context: Box::into_raw(context).cast(), call, release, drop: drop_context }, last_error)
}

/// What a call answers with.
enum Answer {
    Bytes(Vec<u8>),
    Number(i64),
}

/// The borrowed form of a [`Request`].
struct Asked<'a> {
    op: i32,
    keys: Vec<&'a str>,
    value: &'a [u8],
    desired: &'a [u8],
    number: i64,
    timeout: Duration,
}

impl Asked<'_> {
    fn one_key(&self) -> Result<&str, KvError> {
        self.keys.first().copied().ok_or_else(|| KvError::other("c10d asked for no key"))
    }

    fn answer(&self, store: &dyn KeyValue) -> Result<Answer, KvError> {
        Ok(match self.op {
            0 => store.set(self.one_key()?, self.value).map(|()| Answer::Number(0))?,
            1 => Answer::Bytes(store.get(self.one_key()?, self.timeout)?),
            2 => Answer::Number(store.add(self.one_key()?, self.number)?),
            3 => Answer::Number(store.check(&self.keys)?.into()),
            4 => store.wait(&self.keys, self.timeout).map(|()| Answer::Number(0))?,
            5 => Answer::Number(store.delete(self.one_key()?)?.into()),
            6 => Answer::Bytes(store.compare_set(self.one_key()?, self.value, self.desired)?),
            7 => Answer::Number(store.num_keys()?),
            other => return Err(KvError::other(format!("unknown key-value operation {other}"))),
        })
    }
}

/// SAFETY: `slice` must name `len` readable bytes that live for `'a`.
unsafe fn borrow<'a>(slice: &Slice) -> &'a [u8] {
    if slice.len == 0 {
        return &[];
    }
    // SAFETY: the caller's contract; a pointer with a length above 0 is not null.
    unsafe { std::slice::from_raw_parts(slice.data, slice.len) }
}

/// SAFETY: `request` must be a valid request of csrc/store.cpp that lives for `'a`.
unsafe fn asked<'a>(request: *const Request) -> Result<Asked<'a>, KvError> {
    // SAFETY: the caller's contract. csrc lends every slice for the length of the call.
    unsafe {
        let request = &*request;
        let keys = if request.num_keys == 0 {
            Vec::new()
        } else {
            std::slice::from_raw_parts(request.keys, request.num_keys)
                .iter()
                .map(|key| str::from_utf8(borrow(key)).map_err(|_| KvError::other("c10d used a key that is not UTF-8")))
                .collect::<Result<_, _>>()?
        };
        Ok(Asked {
            op: request.op,
            keys,
            value: borrow(&request.value),
            desired: borrow(&request.desired),
            number: request.number,
            timeout: Duration::from_millis(u64::try_from(request.timeout_ms).unwrap_or(0)),
        })
    }
}

/// SAFETY: called by csrc/store.cpp only, with the context of [`callbacks`], a request and an empty reply, all valid for the
/// call. The context is only read, and is Sync, so calls may overlap.
unsafe extern "C" fn call(context: *mut c_void, request: *const Request, reply: *mut Reply) -> i32 {
    // SAFETY: see above; C++ drops the context only after its last call.
    let context = unsafe { &*context.cast::<Context>() };
    let answer = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: see above.
        let asked = unsafe { asked(request) }?;
        asked.answer(&*context.store)
    }))
    .unwrap_or_else(|panic| Err(KvError::other(format!("the key-value store panicked: {}", text_of(&*panic)))));
    let (code, bytes, number) = match answer {
        Ok(Answer::Bytes(bytes)) => (0, bytes, 0),
        Ok(Answer::Number(number)) => (0, Vec::new(), number),
        Err(error) => {
            let text = error.message.clone().into_bytes();
            context.last_error.put(error);
            (1, text, 0)
        }
    };
    let mut bytes = ManuallyDrop::new(bytes);
    // SAFETY: `reply` points to a reply that C++ made for this call. The bytes go back to `release`.
    unsafe {
        *reply = Reply { data: bytes.as_mut_ptr(), len: bytes.len(), capacity: bytes.capacity(), number };
    }
    code
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

/// SAFETY: called once for each reply that [`call`] filled.
unsafe extern "C" fn release(reply: *mut Reply) {
    // SAFETY: the parts are those of the vector that `call` let go.
    unsafe {
        let reply = &*reply;
        drop(Vec::from_raw_parts(reply.data, reply.len, reply.capacity));
    }
}

/// SAFETY: called once, when the last C++ store that uses the context is gone.
unsafe extern "C" fn drop_context(context: *mut c_void) {
    // SAFETY: the pointer comes from Box::into_raw in `callbacks`.
    let context = unsafe { Box::from_raw(context.cast::<Context>()) };
    // A KeyValue that panics in drop must not unwind into C++; there is nobody to tell.
    drop(catch_unwind(AssertUnwindSafe(move || drop(context))));
}
