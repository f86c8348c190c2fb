//! A small file system for tests, mounted by FUSE, in memory: it fails calls by script, holds syncs up, refuses links, shows new names late on
//! a second mount, and at a power cut forgets all that was not synced. After a SIGKILL the page cache survives, so only a
//! power cut tests durability.
//!
//! - [`image`]: what is in it, as processes see it and as a cut would leave it.
//! - [`script`]: which calls fail.
//! - [`FaultFs`]: the test's end. The file system is served by another process, which is the test's own program: each test
//!   program that mounts one has a test of this form, whose path it names at [`FaultFs::mount`]:
//!
//! ```ignore
//! #[test]
//! fn faultfs_server() {
//!     trainctl_faultfs::serve_if_asked();
//! }
//! ```

pub mod image;
pub mod script;
mod serve;

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use crate::script::Rule;

/// Tells the program that it is the server.
const SERVE: &str = "TRAINCTL_FAULTFS_SERVE";

/// Whether this machine can mount; if not, says so, and fails if `TRAINCTL_REQUIRE` names `fuse`.
///
/// # Panics
/// If it is required and missing.
#[expect(clippy::print_stderr, clippy::panic, reason = "what a test says goes to its output")]
pub fn have_fuse() -> bool {
    let device = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    let why = match device {
        Err(error) => format!("/dev/fuse cannot be opened ({error})"),
        Ok(_) if !nix::unistd::geteuid().is_root() => "only root can mount".to_owned(),
        Ok(_) => return true,
    };
    let required = std::env::var("TRAINCTL_REQUIRE").unwrap_or_default();
    if required.split(',').any(|name| name.trim() == "fuse") {
        panic!("TRAINCTL_REQUIRE={required}, but {why}");
    }
    eprintln!("skipped: {why}");
    false
}

/// The server's side: returns at once in a process that is none, and otherwise when all is unmounted.
///
/// # Panics
/// If it cannot serve.
#[expect(clippy::panic, reason = "in the server's process there is nobody else to tell")]
pub fn serve_if_asked() {
    if std::env::var_os(SERVE).is_some()
        && let Err(error) = serve::serve()
    {
        panic!("faultfs: {error}");
    }
}

/// What went wrong between the test and its server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server refused a command.
    #[error("faultfs: {0}")]
    Refused(String),
    /// It cannot be started or reached.
    #[error("faultfs: {0}")]
    Io(#[from] io::Error),
}

/// A mounted file system. Dropped, it is unmounted.
#[derive(Debug)]
pub struct FaultFs {
    server: Child,
    commands: UnixStream,
    answers: BufReader<UnixStream>,
    mounted: Vec<PathBuf>,
}

impl FaultFs {
    /// Mounts an empty file system on an existing directory. `server_test` is the path of the test that calls
    /// [`serve_if_asked`].
    ///
    /// # Errors
    /// [`Error`].
    pub fn mount(dir: &Path, server_test: &str) -> Result<Self, Error> {
        let (ours, theirs) = UnixStream::pair()?;
        let server = Command::new(std::env::current_exe()?)
            .args(["--exact", server_test, "--nocapture", "--test-threads", "1"])
            .env(SERVE, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // A signal to the test's group must not end it before it has unmounted.
            .process_group(0)
            .spawn()?;
        let mut fs = Self { server, commands: ours.try_clone()?, answers: BufReader::new(ours), mounted: Vec::new() };
        fs.mount_again(dir, Duration::ZERO)?;
        Ok(fs)
    }

    /// Mounts the same file system once more, where new names are seen so much later.
    ///
    /// # Errors
    /// [`Error`].
    pub fn mount_again(&mut self, dir: &Path, late: Duration) -> Result<(), Error> {
        self.command(&format!("mount {} {}", late.as_millis(), dir.display()))?;
        self.mounted.push(dir.to_owned());
        Ok(())
    }

    /// From the n-th matching call on, all fail: see [`Rule`] for the text.
    ///
    /// # Errors
    /// [`Error`].
    pub fn fail(&mut self, rule: &str) -> Result<(), Error> {
        let rule: Rule = rule.parse().map_err(Error::Refused)?;
        self.command(&format!("fail {rule}")).map(|_| ())
    }

    /// Nothing fails any more.
    ///
    /// # Errors
    /// [`Error`].
    pub fn clear(&mut self) -> Result<(), Error> {
        self.command("clear").map(|_| ())
    }

    /// Syncs of files whose path contains `part` do not end until [`FaultFs::release`], as on a disk that hangs. Everything
    /// else goes on.
    ///
    /// # Errors
    /// [`Error`].
    pub fn hold(&mut self, part: &str) -> Result<(), Error> {
        self.command(&format!("hold {part}")).map(|_| ())
    }

    /// Reads of files whose path contains `part` do not end until [`FaultFs::release`], as on a file system that is dead.
    ///
    /// # Errors
    /// [`Error`].
    pub fn hold_reads(&mut self, part: &str) -> Result<(), Error> {
        self.command(&format!("hold-reads {part}")).map(|_| ())
    }

    /// How many syncs and reads are held up.
    ///
    /// # Errors
    /// [`Error`].
    pub fn held(&mut self) -> Result<u64, Error> {
        self.number("held")
    }

    /// Ends the syncs and reads that are held up, and holds none any more.
    ///
    /// # Errors
    /// [`Error`].
    pub fn release(&mut self) -> Result<(), Error> {
        self.command("release").map(|_| ())
    }

    /// So many bytes fit; 0 = no limit.
    ///
    /// # Errors
    /// [`Error`].
    pub fn set_capacity(&mut self, bytes: u64) -> Result<(), Error> {
        self.command(&format!("capacity {bytes}")).map(|_| ())
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// [`Error`].
    pub fn sync(&mut self) -> Result<(), Error> {
        self.command("sync").map(|_| ())
    }

    /// Makes some inodes durable, as the kernel may at any time: about every other one, by `seed`.
    ///
    /// # Errors
    /// [`Error`].
    pub fn write_back(&mut self, seed: u64) -> Result<(), Error> {
        self.command(&format!("write-back {seed}")).map(|_| ())
    }

    /// The power fails and comes back.
    ///
    /// # Errors
    /// [`Error`].
    pub fn cut(&mut self) -> Result<(), Error> {
        self.command("cut").map(|_| ())
    }

    /// Bytes of all files.
    ///
    /// # Errors
    /// [`Error`].
    pub fn used(&mut self) -> Result<u64, Error> {
        self.number("used")
    }

    /// How many calls changed something, or tried to.
    ///
    /// # Errors
    /// [`Error`].
    pub fn changes(&mut self) -> Result<u64, Error> {
        self.number("changes")
    }

    fn number(&mut self, command: &str) -> Result<u64, Error> {
        let answer = self.command(command)?;
        answer.parse().map_err(|_| Error::Refused(answer))
    }

    fn command(&mut self, command: &str) -> Result<String, Error> {
        writeln!(self.commands, "{command}")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        match answer.trim_end().split_once(' ').unwrap_or((answer.trim_end(), "")) {
            ("ok", value) => Ok(value.to_owned()),
            ("error", reason) => Err(Error::Refused(reason.to_owned())),
            _ => Err(Error::Refused(format!("the server ended at `{command}`"))),
        }
    }
}

impl Drop for FaultFs {
    fn drop(&mut self) {
        // Detached first, since a file may still be open; then the socket ends, and with it the server.
        for dir in &self.mounted {
            if let Err(errno) = umount2(dir, MntFlags::MNT_DETACH) {
                debug_assert!(matches!(errno, Errno::EINVAL | Errno::ENOENT), "unmount {}: {errno}", dir.display());
            }
        }
        let closed = self.commands.shutdown(std::net::Shutdown::Both).and_then(|()| self.server.wait());
        debug_assert!(closed.is_ok(), "the server of {:?}: {closed:?}", self.mounted);
    }
}
