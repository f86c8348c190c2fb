//! Hosts for tests: each is a network namespace with an address of its own, and what goes between them passes a relay whose rules
//! a test changes while it runs: delay, loss, reordering, one way or both, and cuts.
//!
//! - [`Net`]: the hosts and the rules between them.
//! - [`Host`]: starts processes in it and freezes them. A host also has a name and a boot id of its own, since programs ask these
//!   whether two processes share a machine.
//! - `relay`: one thread that reads all TUN devices and writes each packet to its receiver's when it is due.
//! - `tun`: opening such a device, the only `unsafe` here.
//!
//! Namespaces have no names: they and their devices are gone with their last process, so a test that is killed leaves nothing
//! behind. Files are those of the machine, which are the shared file system of these hosts.

mod host;
mod relay;
mod tun;

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use host::Host;

use crate::relay::{Relay, Rules};

/// The largest packet, bytes: that of an interface for clusters.
pub const MTU: u16 = 9000;

/// Whether this machine can make such hosts; if not, says so, and fails if `TRAINCTL_REQUIRE` names `netns`.
///
/// # Panics
/// If it is required and missing.
#[expect(clippy::print_stderr, clippy::panic, reason = "what a test says goes to its output")]
pub fn have_netns() -> bool {
    let has_ip = || Command::new("ip").arg("-Version").output().is_ok_and(|output| output.status.success());
    let why = match std::fs::File::options().read(true).write(true).open(tun::DEVICE) {
        Err(error) => format!("{} cannot be opened ({error})", tun::DEVICE),
        Ok(_) if !nix::unistd::geteuid().is_root() => "only root can make network namespaces".to_owned(),
        Ok(_) if !has_ip() => "there is no `ip`; install iproute2".to_owned(),
        Ok(_) => return true,
    };
    let required = std::env::var("TRAINCTL_REQUIRE").unwrap_or_default();
    if required.split(',').any(|name| name.trim() == "netns") {
        panic!("TRAINCTL_REQUIRE={required}, but {why}");
    }
    eprintln!("skipped: {why}");
    false
}

/// What could not be made.
#[derive(Debug, thiserror::Error)]
#[error("host {host}: {what}: {source}")]
pub struct Error {
    /// The host's name.
    pub host: String,
    /// What was tried.
    pub what: &'static str,
    /// The system's answer.
    pub source: std::io::Error,
}

/// What happens to packets on their way from one host to another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// How long each is under way.
    pub delay: Duration,
    /// Share of packets that never arrive, 0 to 1.
    pub loss: f64,
    /// Share of packets that others overtake, 0 to 1.
    pub reorder: f64,
    /// Nothing passes.
    pub is_cut: bool,
}

impl Link {
    /// Nothing passes.
    pub const CUT: Self = Self { delay: Duration::ZERO, loss: 0.0, reorder: 0.0, is_cut: true };
}

/// What has happened on one link so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Packets that were delivered.
    pub passed: u64,
    /// Packets that a rule dropped.
    pub dropped: u64,
}

/// Hosts that reach each other through the relay. Dropped, all their namespaces end with their processes.
#[derive(Debug)]
pub struct Net {
    hosts: Vec<Host>,
    rules: Arc<Mutex<Rules>>,
    _relay: Relay,
}

impl Net {
    /// So many hosts (at most 250), with perfect links between them. Host n has the address `10.77.0.<n + 1>`.
    ///
    /// # Errors
    /// [`Error`].
    pub fn new(num_hosts: u8, seed: u64) -> Result<Self, Error> {
        let (mut hosts, mut devices) = (Vec::new(), Vec::new());
        for number in 0..num_hosts {
            let (host, device) = Host::start(number, Ipv4Addr::new(10, 77, 0, number + 1))?;
            hosts.push(host);
            devices.push(device);
        }
        let rules = Arc::new(Mutex::new(Rules::new(hosts.len(), seed)));
        let relay = Relay::start(devices, rules.clone()).map_err(|source| Error {
            host: "all".to_owned(),
            what: "start the relay",
            source,
        })?;
        Ok(Self { hosts, rules, _relay: relay })
    }

    /// The host with this number.
    pub fn host(&self, number: usize) -> &Host {
        &self.hosts[number]
    }

    /// From now on this holds on the way from one host to another.
    pub fn set_one_way(&self, from: usize, to: usize, link: Link) {
        self.rules().set(from, to, link);
    }

    /// From now on this holds between two hosts.
    pub fn set(&self, one: usize, other: usize, link: Link) {
        let mut rules = self.rules();
        rules.set(one, other, link);
        rules.set(other, one, link);
    }

    /// From now on this holds between one host and all others.
    pub fn set_all_of(&self, host: usize, link: Link) {
        (0..self.hosts.len()).filter(|other| *other != host).for_each(|other| self.set(host, other, link));
    }

    /// From now on this holds between all hosts.
    pub fn set_all(&self, link: Link) {
        (0..self.hosts.len()).for_each(|host| self.set_all_of(host, link));
    }

    /// What has happened on the way from one host to another.
    pub fn count(&self, from: usize, to: usize) -> Count {
        self.rules().count(from, to)
    }

    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
