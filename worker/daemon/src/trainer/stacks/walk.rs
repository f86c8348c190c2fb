//! The stack of a thread that does not answer, from outside.
//!
//! The kernel shows the program counter and the stack pointer of a thread that it holds (`/proc/<pid>/task/<tid>/syscall`), and a
//! process's memory to whoever may trace it; the call frame information in its binaries does the rest. Nothing is attached to
//! the process: `ptrace` could not stop a thread that waits for a dead file system, which is the one of interest, and its stops
//! would be reported to this daemon's wait for the trainer's exit as if it had ended. The price: callee-saved registers are not
//! seen, so a walk is at a loss at a function that keeps its frame in one that nobody further in has saved, as at one without
//! call frame information (MKL's kernels). There the stack is searched for the next word that can be a return address: one
//! behind a call instruction. It may be a left-over of an earlier call, so the thread's state says where guessing began.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSegment, ReadCache};

use super::threads::Left;

/// Frames of one thread.
const DEPTH: usize = 64;
/// In place of a frame register that is not known. 0 would be taken for the end of the stack; nothing is ever mapped here, so a
/// frame that needs it fails.
const UNKNOWN: u64 = 8;
/// So many bytes of a stack are searched for one return address.
const SEARCHED: usize = 64 << 10;

/// What a walk has found.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// Return addresses, innermost first, beginning with the program counter itself.
    pub(super) addresses: Vec<u64>,
    /// The first of them that is a guess.
    pub(super) guessed_from: Option<usize>,
}

/// One process's memory and the binaries in it.
pub(super) struct Walker {
    maps: Vec<Mapping>,
    memory: io::Result<File>,
    #[cfg(target_arch = "x86_64")]
    frames: Frames,
}

/// A part of the address space that holds a file's code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    addresses: Range<u64>,
    offset: u64,
    path: String,
}

#[cfg(target_arch = "x86_64")]
#[derive(Default)]
struct Frames {
    unwinder: framehop::x86_64::UnwinderX86_64<Vec<u8>>,
    cache: framehop::x86_64::CacheX86_64,
    /// Where the mappings begin that the unwinder knows, or that cannot be read.
    seen: BTreeSet<u64>,
}

impl Walker {
    /// Nothing is read of the binaries yet. What may not be read shortens the stacks.
    pub(super) fn of(pid: u32) -> Self {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let memory = File::open(format!("/proc/{pid}/mem"));
        if let Err(error) = &memory {
            tracing::info!(pid, %error, "the trainer's memory may not be read: threads that do not answer show one frame");
        }
        Self {
            maps: maps.lines().filter_map(Mapping::parse).collect(),
            memory,
            #[cfg(target_arch = "x86_64")]
            frames: Frames::default(),
        }
    }

    /// Walks one thread's stack.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn walk(&mut self, left: Left) -> Walk {
        use framehop::x86_64::UnwindRegsX86_64;
        use framehop::{FrameAddress, Unwinder};

        let mut walk = Walk { addresses: vec![left.pc], guessed_from: None };
        let Ok(memory) = &self.memory else { return walk };
        let mut word = |address: u64| {
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes, address).map_err(drop)?;
            Ok(u64::from_le_bytes(bytes))
        };
        let mut registers = UnwindRegsX86_64::new(left.pc, left.sp, UNKNOWN);
        let mut at = FrameAddress::from_instruction_pointer(left.pc);
        while walk.addresses.len() < DEPTH {
            self.frames.learn(&self.maps, at.address_for_lookup());
            let sp = registers.sp();
            let found = self.frames.unwinder.unwind_frame(at, &mut registers, &mut self.frames.cache, &mut word);
            let caller = match found {
                Ok(Some(caller)) if holding(&self.maps, caller).is_some() => caller,
                // Also at the end, which may be one only for want of a register; behind the true one there is nothing to find.
                _ => {
                    let Some((place, caller)) = search(memory, &self.maps, sp) else { break };
                    walk.guessed_from.get_or_insert(walk.addresses.len());
                    registers = UnwindRegsX86_64::new(caller, place + 8, UNKNOWN);
                    caller
                }
            };
            walk.addresses.push(caller);
            let Some(next) = FrameAddress::from_return_address(caller) else { break };
            at = next;
        }
        walk
    }

    /// Only where the thread is: call frames are read on x86-64.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn walk(&mut self, left: Left) -> Walk {
        Walk { addresses: vec![left.pc], guessed_from: None }
    }
}

#[cfg(target_arch = "x86_64")]
impl Frames {
    /// Reads the call frame information of the file whose code is at `address`, the first time.
    fn learn(&mut self, maps: &[Mapping], address: u64) {
        use framehop::Unwinder;

        let Some(mapping) = holding(maps, address).filter(|mapping| self.seen.insert(mapping.addresses.start)) else {
            return;
        };
        match mapping.module() {
            Ok(module) => self.unwinder.add_module(module),
            Err(error) => tracing::debug!(path = mapping.path, error, "no call frames of this file"),
        }
    }
}

fn holding(maps: &[Mapping], address: u64) -> Option<&Mapping> {
    maps.iter().find(|mapping| mapping.addresses.contains(&address))
}

/// The next word of a stack that can be a return address: its place and what it is.
fn search(memory: &File, maps: &[Mapping], sp: u64) -> Option<(u64, u64)> {
    let mut stack = vec![0; SEARCHED];
    let read = memory.read_at(&mut stack, sp).ok()?;
    let words = stack[..read].chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    let is_return = |address: u64| {
        let mut before = [0; LONGEST_CALL];
        holding(maps, address).is_some()
            && address
                .checked_sub(LONGEST_CALL as u64)
                .is_some_and(|from| memory.read_exact_at(&mut before, from).is_ok())
            && ends_with_call(&before)
    };
    (sp..).step_by(8).zip(words).find(|(_, word)| is_return(*word))
}

/// Bytes of the longest call instruction without prefixes.
const LONGEST_CALL: usize = 7;

/// Whether x86-64 code ends with a call: E8 with an offset of four bytes, or FF /2 with its operand.
fn ends_with_call(code: &[u8; LONGEST_CALL]) -> bool {
    let is_near = code[LONGEST_CALL - 5] == 0xE8;
    let is_indirect = |length: usize| {
        let at = LONGEST_CALL - length;
        code[at] == 0xFF && (code[at + 1] >> 3) & 7 == 2
    };
    is_near || [2, 3, 4, 6, 7].into_iter().any(is_indirect)
}

impl Mapping {
    /// A line of `/proc/<pid>/maps`, if it is a file's code: addresses, permissions, offset, device, inode, path.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (addresses, permissions, offset) = (words.next()?, words.next()?, words.next()?);
        let path = words.nth(2)?.trim_start();
        let hex = |word| u64::from_str_radix(word, 16).ok();
        let (start, end) = addresses.split_once('-')?;
        let is_code = permissions.contains('x') && path.starts_with('/');
        let (addresses, offset) = (hex(start)?..hex(end)?, hex(offset)?);
        is_code.then(|| Self { addresses, offset, path: path.to_owned() })
    }

    /// The file's call frame information, for the unwinder.
    fn module(&self) -> Result<framehop::Module<Vec<u8>>, String> {
        let file = File::open(&self.path).map_err(|error| error.to_string())?;
        let cache = ReadCache::new(file);
        let elf = ElfFile64::<object::Endianness, _>::parse(&cache).map_err(|error| error.to_string())?;
        let holds = |range: (u64, u64)| (range.0..range.0.saturating_add(range.1)).contains(&self.offset);
        let segment = elf.segments().find(|segment| segment.size() > 0 && holds(page_aligned(segment.file_range())));
        let segment = segment.ok_or("no segment of it is mapped there")?;
        let loaded_at = segment.address().wrapping_sub(segment.file_range().0).wrapping_add(self.offset);
        let bias = self.addresses.start.wrapping_sub(loaded_at);
        let section = |name: &str| {
            let section = elf.section_by_name(name)?;
            let range = section.address()..section.address().checked_add(section.size())?;
            Some((range, section.data().ok()?.to_vec()))
        };
        let (eh_frame_svma, eh_frame) = section(".eh_frame").unzip();
        let (eh_frame_hdr_svma, eh_frame_hdr) = section(".eh_frame_hdr").unzip();
        let sections = framehop::ExplicitModuleSectionInfo {
            eh_frame_svma,
            eh_frame,
            eh_frame_hdr_svma,
            eh_frame_hdr,
            ..framehop::ExplicitModuleSectionInfo::default()
        };
        Ok(framehop::Module::new(self.path.clone(), self.addresses.clone(), bias, sections))
    }
}

/// A segment's part of the file, widened to whole pages as the loader maps it: offset, size.
fn page_aligned((offset, size): (u64, u64)) -> (u64, u64) {
    let start = offset & !0xfff;
    (start, size.saturating_add(offset - start))
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::os::fd::BorrowedFd;
    use std::process::{Child, Command};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use trainctl_proto::v1::ThreadStack;

    use super::super::{symbols, threads};
    use super::*;

    /// A child that is killed at the end of its test.
    struct Process(Child);

    impl Drop for Process {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    impl Process {
        fn start(program: &str, argument: &str) -> Self {
            Self(Command::new(program).arg(argument).spawn().unwrap())
        }

        fn signal(&self, signal: Signal) {
            kill(Pid::from_raw(self.0.id().cast_signed()), signal).unwrap();
        }

        /// The main thread's state and frames, once its state begins with this.
        fn main_thread(&self, state: &str) -> Vec<String> {
            let pid = self.0.id();
            let left = loop {
                let seen = threads::look(pid, pid);
                if let Some(left) = seen.left.filter(|_| seen.text.starts_with(state)) {
                    break left;
                }
                std::thread::yield_now();
            };
            let addresses = Walker::of(pid).walk(left).addresses;
            let mut threads = [ThreadStack { addresses, ..ThreadStack::default() }];
            symbols::name(pid, &mut threads);
            std::mem::take(&mut threads[0].frames)
        }
    }

    #[test]
    fn a_mapping_is_read_only_if_it_is_a_files_code() {
        let line = "7f10000-7f20000 r-xp 00002000 fd:00 1234                       /usr/lib/a b.so";
        let path = "/usr/lib/a b.so".to_owned();
        let wanted = Mapping { addresses: 0x7f1_0000..0x7f2_0000, offset: 0x2000, path };
        assert_eq!(Mapping::parse(line), Some(wanted));
        assert_eq!(Mapping::parse(&line.replace("r-xp", "r--p")), None);
        assert_eq!(Mapping::parse("7ffd000-7ffe000 r-xp 00000000 00:00 0            [vdso]"), None);
        assert_eq!(Mapping::parse("7f10000-7f20000 rw-p 00000000 00:00 0 "), None);
    }

    #[test]
    fn a_return_address_is_one_behind_a_call() {
        // From a disassembly: call rel32; call rax; call [rax+8]; call [rip+x]; call [rax+rbx*8+x]; no calls.
        for call in [
            &[0xE8, 1, 2, 3, 4][..],
            &[0xFF, 0xD0],
            &[0xFF, 0x50, 8],
            &[0xFF, 0x15, 1, 2, 3, 4],
            &[0xFF, 0x94, 0xD8, 1, 2, 3, 4],
        ] {
            let mut code = [0x90; LONGEST_CALL];
            code[LONGEST_CALL - call.len()..].copy_from_slice(call);
            assert!(ends_with_call(&code), "{code:x?}");
        }
        for other in [[0x90; 7], [0x90, 0x90, 0xE9, 1, 2, 3, 4], [0x90, 0x90, 0x90, 0x90, 0x90, 0xFF, 0xE0]] {
            assert!(!ends_with_call(&other), "{other:x?}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_stack_of_a_process_that_sleeps_and_of_one_that_is_stopped_is_walked_to_its_beginning() {
        let process = Process::start("sleep", "600");
        let is_whole = |frames: &[String]| frames.iter().any(|frame| frame.contains("libc_start"));
        let sleeping = process.main_thread("state S");
        assert!(sleeping[0].contains("nanosleep") && is_whole(&sleeping), "{sleeping:?}");
        process.signal(Signal::SIGSTOP);
        let stopped = process.main_thread("state T");
        assert!(stopped[0].contains("nanosleep") && is_whole(&stopped), "{stopped:?}");
        process.signal(Signal::SIGCONT);
        assert_eq!(process.main_thread("state S"), sleeping, "it sleeps on where it did");
    }

    /// Keeps its frame in rbp: the compiler realigns the stack for the buffer. The call into libc saves no rbp.
    #[inline(never)]
    fn keeps_its_frame_in_rbp(pipe: BorrowedFd<'_>) -> usize {
        #[repr(align(64))]
        struct Aligned([u8; 64]);
        let mut buffer = Aligned([0; 64]);
        let read = nix::unistd::read(pipe, &mut buffer.0).unwrap();
        black_box(&buffer);
        read
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_frame_whose_register_is_not_seen_ends_no_stack() {
        use std::os::fd::AsFd;

        let (pipe, end) = nix::unistd::pipe().unwrap();
        let (say, heard) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            say.send(nix::unistd::gettid().as_raw().cast_unsigned()).unwrap();
            black_box(keeps_its_frame_in_rbp(pipe.as_fd())) + 1
        });
        let tid = heard.recv().unwrap();
        // Of the process that the tests run in: nothing is stopped for a walk.
        let pid = std::process::id();
        let left = loop {
            let seen = threads::look(pid, tid);
            if let Some(left) = seen.left.filter(|_| seen.text.contains("system call read of pipe")) {
                break left;
            }
            std::thread::yield_now();
        };
        let walk = Walker::of(pid).walk(left);
        let mut threads = [ThreadStack { addresses: walk.addresses, ..ThreadStack::default() }];
        symbols::name(pid, &mut threads);
        let frames = &threads[0].frames;
        drop(end);
        assert_eq!(waiting.join().unwrap(), 1, "it reads on as if nobody had looked");
        // Its caller may be hidden behind the left-overs of earlier calls; the walk goes on to the thread's beginning all the same.
        assert!(frames.iter().any(|frame| frame.contains("start_thread") || frame.contains("clone")), "{frames:#?}");
    }

    #[test]
    fn a_process_that_is_killed_while_it_is_looked_at_gives_an_answer_and_its_exit_status() {
        use std::os::unix::process::ExitStatusExt;

        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        let left = loop {
            if let Some(left) = threads::look(pid, pid).left {
                break left;
            }
            std::thread::yield_now();
        };
        let mut early = Walker::of(pid);
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
        while !threads::look(pid, pid).text.starts_with("state Z") {
            std::thread::yield_now();
        }
        assert_eq!(early.walk(left).addresses[0], left.pc);
        assert_eq!(Walker::of(pid).walk(left).addresses, [left.pc]);
        assert_eq!(threads::look(pid, pid).left, None);
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    }
}
