//! The serving process: FUSE on one side, commands from the test on the other (its standard input, a socket).
//!
//! It is another process than the test, so that a killed test leaves no mount behind: the socket then ends, and everything
//! is unmounted. Nothing is cached in the kernel (all times to live are zero), so that a power cut is seen at once.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyStatfs, ReplyWrite, Request, WriteFlags,
};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use crate::image::{Body, Image, Ino, Node};
use crate::script::{Call, Script};

/// The kernel keeps nothing.
const TTL: Duration = Duration::ZERO;
const BLOCK: u64 = 4096;
/// Where there is no limit.
const PLENTY: u64 = 1 << 40;

/// What all mounts share.
#[derive(Default)]
struct State {
    image: Image,
    script: Script,
    /// Bytes that fit.
    capacity: Option<u64>,
    /// Part of the paths whose syncs are not answered.
    hold: Option<String>,
    /// The answers that wait, with what they will say.
    held: Vec<(ReplyEmpty, Result<()>)>,
    /// Part of the paths whose reads are not answered.
    hold_reads: Option<String>,
    held_reads: Vec<HeldRead>,
}

/// A read that waits for its answer.
struct HeldRead {
    ino: INodeNo,
    offset: u64,
    size: u32,
    reply: ReplyData,
}

type Shared = Arc<Mutex<State>>;
type Result<T> = std::result::Result<T, Errno>;

/// One mount.
struct View {
    state: Shared,
    number: usize,
    /// How much later than the others it hears of new names.
    late: Duration,
}

impl View {
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.image.actor = self.number;
        state
    }

    fn entry(&self, reply: ReplyEntry, work: impl FnOnce(&mut State) -> Result<Ino>) {
        let mut state = self.state();
        match work(&mut state).and_then(|ino| attributes(&state.image, ino)) {
            Ok(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            Err(errno) => reply.error(refusal(errno)),
        }
    }

    fn empty(&self, reply: ReplyEmpty, work: impl FnOnce(&mut State) -> Result<()>) {
        answer(reply, work(&mut self.state()));
    }
}

impl State {
    /// A call on an inode.
    fn pass(&mut self, call: Call, ino: INodeNo) -> Result<()> {
        let path = self.image.path(ino.0);
        self.script.pass(call, &path)
    }

    fn read(&mut self, HeldRead { ino, offset, size, reply }: HeldRead) {
        let passed = self.pass(Call::Read, ino);
        match passed.and_then(|()| self.image.bytes(ino.0)) {
            Ok(bytes) => {
                let start = (offset as usize).min(bytes.len());
                let end = (start + size as usize).min(bytes.len());
                reply.data(&bytes[start..end]);
            }
            Err(errno) => reply.error(refusal(errno)),
        }
    }

    /// A call on a name.
    fn pass_name<'a>(&mut self, call: Call, dir: INodeNo, name: &'a OsStr) -> Result<&'a str> {
        let name = name.to_str().ok_or(Errno::EILSEQ)?;
        let path = self.image.path_in(dir.0, name);
        self.script.pass(call, &path)?;
        Ok(name)
    }

    fn must_fit(&self, ino: Ino, end: u64) -> Result<()> {
        let Some(capacity) = self.capacity else { return Ok(()) };
        let more = end.saturating_sub(self.image.bytes(ino)?.len() as u64);
        if more > 0 && self.image.used() + more > capacity { Err(Errno::ENOSPC) } else { Ok(()) }
    }
}

fn answer(reply: ReplyEmpty, result: Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(refusal(errno)),
    }
}

fn refusal(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno as i32)
}

fn kind(node: &Node) -> FileType {
    match node.body {
        Body::File(_) => FileType::RegularFile,
        Body::Directory(_) => FileType::Directory,
        Body::Symlink(_) => FileType::Symlink,
    }
}

fn attributes(image: &Image, ino: Ino) -> Result<FileAttr> {
    let node = image.node(ino)?;
    let size = match &node.body {
        Body::File(bytes) => bytes.len() as u64,
        Body::Directory(_) => BLOCK,
        Body::Symlink(target) => target.len() as u64,
    };
    let changed = UNIX_EPOCH + Duration::from_secs(node.changed);
    Ok(FileAttr {
        ino: INodeNo(ino),
        size,
        blocks: size.div_ceil(512),
        atime: changed,
        mtime: changed,
        ctime: changed,
        crtime: changed,
        kind: kind(node),
        perm: node.mode as u16,
        nlink: node.links,
        uid: nix::unistd::getuid().as_raw(),
        gid: nix::unistd::getgid().as_raw(),
        rdev: 0,
        blksize: BLOCK as u32,
        flags: 0,
    })
}

impl Filesystem for View {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.entry(reply, |state| {
            let name = name.to_str().ok_or(Errno::ENOENT)?;
            state.image.lookup(parent.0, name, self.late)
        });
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match attributes(&self.state().image, ino.0) {
            Ok(attributes) => reply.attr(&TTL, &attributes),
            Err(errno) => reply.error(refusal(errno)),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<fuser::TimeOrNow>,
        _: Option<fuser::TimeOrNow>,
        _: Option<std::time::SystemTime>,
        _: Option<FileHandle>,
        _: Option<std::time::SystemTime>,
        _: Option<std::time::SystemTime>,
        _: Option<std::time::SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut state = self.state();
        let mut set = || {
            if let Some(size) = size {
                state.pass(Call::Truncate, ino)?;
                state.must_fit(ino.0, size)?;
                state.image.truncate(ino.0, size as usize)?;
            }
            if let Some(mode) = mode {
                state.image.set_mode(ino.0, mode)?;
            }
            attributes(&state.image, ino.0)
        };
        match set() {
            Ok(attributes) => reply.attr(&TTL, &attributes),
            Err(errno) => reply.error(refusal(errno)),
        }
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.state().image.node(ino.0).map(|node| &node.body) {
            Ok(Body::Symlink(target)) => reply.data(target.as_bytes()),
            Ok(_) => reply.error(refusal(Errno::EINVAL)),
            Err(errno) => reply.error(refusal(errno)),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        self.entry(reply, |state| {
            let name = state.pass_name(Call::Mkdir, parent, name)?;
            state.image.create(parent.0, name, Body::directory(), mode & !umask)
        });
    }

    fn symlink(&self, _: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        self.entry(reply, |state| {
            let name = state.pass_name(Call::Symlink, parent, name)?;
            let target = target.to_str().ok_or(Errno::EILSEQ)?.to_owned();
            state.image.create(parent.0, name, Body::Symlink(target), 0o777)
        });
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.entry(reply, |state| {
            let name = state.pass_name(Call::Link, parent, name)?;
            state.image.link(ino.0, parent.0, name)?;
            Ok(ino.0)
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.empty(reply, |state| {
            let name = state.pass_name(Call::Unlink, parent, name)?;
            state.image.unlink(parent.0, name)
        });
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.empty(reply, |state| {
            let name = state.pass_name(Call::Rmdir, parent, name)?;
            state.image.rmdir(parent.0, name)
        });
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.empty(reply, |state| {
            let name = name.to_str().ok_or(Errno::ENOENT)?;
            let new_name = state.pass_name(Call::Rename, new_parent, new_name)?;
            match flags {
                flags if flags.is_empty() => state.image.rename((parent.0, name), (new_parent.0, new_name)),
                flags if flags == RenameFlags::RENAME_NOREPLACE => {
                    match state.image.lookup(new_parent.0, new_name, Duration::ZERO) {
                        Ok(_) => Err(Errno::EEXIST),
                        Err(_) => state.image.rename((parent.0, name), (new_parent.0, new_name)),
                    }
                }
                _ => Err(Errno::EINVAL),
            }
        });
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn create(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, _: i32, reply: ReplyCreate) {
        let mut state = self.state();
        let mut make = || {
            let name = state.pass_name(Call::Create, parent, name)?;
            let ino = state.image.create(parent.0, name, Body::file(), mode & !umask)?;
            attributes(&state.image, ino)
        };
        match make() {
            Ok(made) => reply.created(&TTL, &made, Generation(0), FileHandle(0), FopenFlags::empty()),
            Err(errno) => reply.error(refusal(errno)),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = self.state();
        let path = state.image.path(ino.0);
        let read = HeldRead { ino, offset, size, reply };
        match &state.hold_reads {
            Some(part) if path.contains(part) => state.held_reads.push(read),
            _ => state.read(read),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.state();
        let mut write = || {
            state.pass(Call::Write, ino)?;
            state.must_fit(ino.0, offset + data.len() as u64)?;
            state.image.write(ino.0, offset as usize, data)
        };
        match write() {
            Ok(()) => reply.written(data.len() as u32),
            Err(errno) => reply.error(refusal(errno)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = self.state();
        let result = state.pass(Call::Fsync, ino).and_then(|()| state.image.sync(ino.0));
        let path = state.image.path(ino.0);
        match &state.hold {
            Some(part) if path.contains(part) => state.held.push((reply, result)),
            _ => answer(reply, result),
        }
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.empty(reply, |state| {
            state.pass(Call::Fsyncdir, ino)?;
            state.image.sync(ino.0)
        });
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let state = self.state();
        let names = match state.image.list(ino.0, self.late) {
            Ok(names) => names,
            Err(errno) => return reply.error(refusal(errno)),
        };
        let dots = [(".".to_owned(), ino.0), ("..".to_owned(), state.image.parent(ino.0))];
        for (index, (name, behind)) in dots.into_iter().chain(names).enumerate().skip(offset as usize) {
            let Ok(node) = state.image.node(behind) else { continue };
            if reply.add(INodeNo(behind), index as u64 + 1, kind(node), name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let state = self.state();
        let blocks = state.capacity.unwrap_or(PLENTY) / BLOCK;
        let free = blocks.saturating_sub(state.image.used().div_ceil(BLOCK));
        reply.statfs(blocks, free, free, 1 << 30, 1 << 30, BLOCK as u32, 255, BLOCK as u32);
    }
}

fn mount(state: &Shared, number: usize, dir: &Path, late: Duration) -> io::Result<BackgroundSession> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("faultfs".to_owned()), MountOption::NoAtime];
    fuser::spawn_mount(View { state: Arc::clone(state), number, late }, dir, &config)
}

/// Serves until the test's end of the socket is closed.
///
/// # Errors
/// If the socket breaks, or something cannot be unmounted.
pub(crate) fn serve() -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut answers = socket.try_clone()?;
    let state = Shared::default();
    let mut mounts = Vec::new();
    for line in BufReader::new(socket).lines() {
        let answer = obey(&line?, &state, &mut mounts).unwrap_or_else(|reason| format!("error {reason}"));
        writeln!(answers, "{answer}")?;
    }
    for (dir, _) in &mounts {
        match umount2(dir.as_path(), MntFlags::MNT_DETACH) {
            // The test has unmounted it itself, or removed the folder.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Carries out one command; the answer is a line.
fn obey(
    line: &str,
    state: &Shared,
    mounts: &mut Vec<(PathBuf, BackgroundSession)>,
) -> std::result::Result<String, String> {
    let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("`{text}` is no number"));
    let mut state_now = state.lock().unwrap_or_else(PoisonError::into_inner);
    match verb {
        "mount" => {
            let (late, dir) = rest.split_once(' ').ok_or("mount <milliseconds> <directory>")?;
            let late = Duration::from_millis(number(late)?);
            drop(state_now);
            let dir = PathBuf::from(dir);
            let session =
                mount(state, mounts.len(), &dir, late).map_err(|e| format!("mount {}: {e}", dir.display()))?;
            mounts.push((dir, session));
        }
        "fail" => state_now.script.add(rest.parse()?),
        "clear" => state_now.script.clear(),
        "hold" => state_now.hold = Some(rest.to_owned()),
        "hold-reads" => state_now.hold_reads = Some(rest.to_owned()),
        "held" => return Ok(format!("ok {}", state_now.held.len() + state_now.held_reads.len())),
        "release" => {
            state_now.hold = None;
            state_now.hold_reads = None;
            state_now.held.drain(..).for_each(|(reply, result)| answer(reply, result));
            for read in std::mem::take(&mut state_now.held_reads) {
                state_now.read(read);
            }
        }
        "capacity" => state_now.capacity = Some(number(rest)?).filter(|bytes| *bytes > 0),
        "sync" => state_now.image.sync_all(),
        "write-back" => state_now.image.write_back(number(rest)?),
        "cut" => state_now.image.cut(),
        "used" => return Ok(format!("ok {}", state_now.image.used())),
        "changes" => return Ok(format!("ok {}", state_now.script.changes())),
        _ => return Err(format!("`{line}` is no command")),
    }
    Ok("ok".to_owned())
}
