//! What every thread of this process is doing, as raw return addresses.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use crate::ffi::stacks;

/// Pause between two looks at the answers.
const PAUSE: Duration = Duration::from_millis(5);

/// One thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadStack {
    /// Thread id.
    pub tid: u32,
    /// Its name, 15 bytes at most.
    pub name: String,
    /// Return addresses, innermost first; none if the thread did not answer: it blocks the signal, or the kernel holds it.
    pub addresses: Vec<u64>,
}

/// Installs the handler of the signal that [`thread_stacks`] sends. Call it once, before there are threads to be asked.
///
/// # Errors
/// When the system refuses the handler.
pub fn install_stack_handler() -> io::Result<()> {
    stacks::install()
}

/// Asks every thread of this process where it is and waits until all have answered, for `limit` at most. The threads go on
/// undisturbed. Threads that end meanwhile are left out.
///
/// # Errors
/// When `/proc/self/task` cannot be read.
pub fn thread_stacks(limit: Duration) -> io::Result<Vec<ThreadStack>> {
    let from = stacks::next_answer();
    let mut threads = BTreeMap::new();
    for entry in std::fs::read_dir("/proc/self/task")? {
        let entry = entry?;
        let Some(tid) = entry.file_name().to_str().and_then(|tid| tid.parse::<u32>().ok()) else { continue };
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default().trim_end().to_owned();
        if stacks::ask(tid).is_ok() {
            threads.insert(tid, ThreadStack { tid, name, addresses: Vec::new() });
        }
    }
    let asked_at = Instant::now();
    loop {
        for (tid, addresses) in stacks::answers(from) {
            if let Some(thread) = threads.get_mut(&tid) {
                thread.addresses = addresses;
            }
        }
        if asked_at.elapsed() >= limit || threads.values().all(|thread| !thread.addresses.is_empty()) {
            return Ok(threads.into_values().collect());
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[inline(never)]
    fn waits_here(done: &mpsc::Receiver<()>) {
        done.recv().unwrap();
    }

    #[test]
    fn every_thread_says_where_it_is_and_goes_on() {
        install_stack_handler().unwrap();
        let (go, done) = mpsc::channel();
        let (say, heard) = mpsc::channel();
        let waiting = std::thread::Builder::new().name("waiting".to_owned()).spawn(move || {
            say.send(()).unwrap();
            waits_here(&done);
        });
        heard.recv().unwrap();
        for _ in 0..3 {
            let stacks = thread_stacks(Duration::from_secs(10)).unwrap();
            let waiting = stacks.iter().find(|thread| thread.name == "waiting").unwrap();
            assert!(waiting.addresses.len() > 3, "{waiting:?}");
            assert!(waiting.addresses.iter().all(|address| *address > 4096), "{waiting:?}");
            assert!(stacks.iter().all(|thread| !thread.addresses.is_empty()), "{stacks:?}");
        }
        go.send(()).unwrap();
        waiting.unwrap().join().unwrap();
    }
}
