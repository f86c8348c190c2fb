//! One host: a thread with namespaces of its own, in which it starts processes.
//!
//! A thread and not a process, since children of tests die with the thread that started them (`PR_SET_PDEATHSIG`), and it can
//! hand over the file of the device.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, sethostname};

use crate::{Error, MTU, tun};

/// Where the kernel shows which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The device's name in each host.
const INTERFACE: &str = "tun0";

/// What the thread shall do.
type Order = Box<dyn FnOnce() + Send>;

/// A host. Clones are the same one; its processes are killed when the last of them is dropped.
#[derive(Clone, Debug)]
pub struct Host {
    name: String,
    address: Ipv4Addr,
    /// What `/proc/<pid>/ns/net` of its processes says.
    namespace: PathBuf,
    orders: mpsc::Sender<Order>,
}

impl Host {
    pub(crate) fn start(number: u8, address: Ipv4Addr) -> Result<(Self, OwnedFd), Error> {
        let name = format!("host{number}");
        let boot_id = format!("00000000-0000-4000-8000-{:08x}{number:04x}", std::process::id());
        let (orders, to_do) = mpsc::channel::<Order>();
        let (made, answer) = mpsc::sync_channel(1);
        let own = name.clone();
        let thread = std::thread::Builder::new().name(name.clone());
        let started = thread.spawn(move || {
            let host = make(&own, address, &boot_id);
            let is_made = host.is_ok();
            // Who asked waits for this.
            drop(made.send(host));
            while let (true, Ok(order)) = (is_made, to_do.recv()) {
                order();
            }
        });
        let error = |what, source| Error { host: name.clone(), what, source };
        started.map_err(|source| error("start its thread", source))?;
        let made = answer.recv().map_err(|gone| error("start its thread", io::Error::other(gone)))?;
        let (namespace, device) = made.map_err(|(what, source)| error(what, source))?;
        Ok((Self { name, address, namespace, orders }, device))
    }

    /// What its processes see as the host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address, by which the other hosts reach it.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Does something in it: a socket that is made there stays there, whoever uses it.
    ///
    /// # Errors
    /// When its thread has ended.
    pub fn run<T: Send + 'static>(&self, what: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let (reply, answer) = mpsc::sync_channel(1);
        let gone = |_| io::Error::other(format!("the thread of {} has ended", self.name));
        // Who asked waits for the answer.
        let order = move || drop(reply.send(what()));
        self.orders.send(Box::new(order)).map_err(|error| gone(error.to_string()))?;
        answer.recv().map_err(|error| gone(error.to_string()))
    }

    /// Starts a process in it.
    ///
    /// # Errors
    /// That of the start.
    pub fn spawn(&self, mut command: Command) -> io::Result<Child> {
        self.run(move || command.spawn())?
    }

    /// Pids of its processes.
    pub fn processes(&self) -> Vec<u32> {
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_own = |pid: &u32| fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|link| link == self.namespace);
        pids.filter(is_own).collect()
    }

    /// Stops all its processes with SIGSTOP, until a look finds none that runs.
    pub fn freeze(&self) {
        let runs = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // The state stands behind the name, which ends with the last parenthesis.
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            state.is_some_and(|state| !matches!(state, 'T' | 'Z' | 'X'))
        };
        loop {
            let running: Vec<u32> = self.processes().into_iter().filter(runs).collect();
            if running.is_empty() {
                return;
            }
            signal(&running, Signal::SIGSTOP);
            std::thread::yield_now();
        }
    }

    /// Lets all its processes go on.
    pub fn thaw(&self) {
        signal(&self.processes(), Signal::SIGCONT);
    }
}

/// Sends a signal to processes that may be gone.
fn signal(pids: &[u32], signal: Signal) {
    for pid in pids.iter().filter_map(|pid| i32::try_from(*pid).ok()) {
        // ESRCH: it ended before.
        kill(Pid::from_raw(pid), signal).unwrap_or_default();
    }
}

/// Makes the calling thread a host of its own; gives its network namespace and device.
fn make(name: &str, address: Ipv4Addr, boot_id: &str) -> Result<(PathBuf, OwnedFd), (&'static str, io::Error)> {
    let namespaces = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS;
    unshare(namespaces).map_err(|error| ("leave the machine's namespaces", error.into()))?;
    sethostname(name).map_err(|error| ("set its name", error.into()))?;
    set_boot_id(name, boot_id).map_err(|error| ("set its boot id", error))?;
    let device = tun::open(INTERFACE).map_err(|error| ("open its TUN device", error))?;
    let (network, mtu) = (format!("{address}/24"), MTU.to_string());
    ip(&["link", "set", "lo", "up"])?;
    ip(&["address", "add", &network, "dev", INTERFACE])?;
    ip(&["link", "set", INTERFACE, "mtu", &mtu, "up"])?;
    let namespace = fs::read_link("/proc/thread-self/ns/net").map_err(|error| ("read its namespace", error))?;
    Ok((namespace, device))
}

/// Shows another boot id to this thread and its children.
fn set_boot_id(name: &str, boot_id: &str) -> io::Result<()> {
    let none = None::<&Path>;
    // What is mounted from here on is seen by nobody else.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let file = std::env::temp_dir().join(format!("trainctl-boot-id-{}-{name}", std::process::id()));
    fs::write(&file, format!("{boot_id}\n"))?;
    let mounted = mount(Some(&file), BOOT_ID, none, MsFlags::MS_BIND, none);
    // A mount needs no name for what it shows.
    fs::remove_file(&file)?;
    Ok(mounted?)
}

fn ip(arguments: &[&str]) -> Result<(), (&'static str, io::Error)> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| ("run `ip`", error))?;
    if output.status.success() {
        return Ok(());
    }
    let said = format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    Err(("set up its network", io::Error::other(said)))
}
