//! The wire between the hosts: one thread that reads each packet from its sender's device and writes it to its receiver's when
//! the rules say so.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{read, write};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{Count, Link};

/// So much later comes a packet that others overtake.
const HELD_BACK: Duration = Duration::from_millis(20);
/// A look at a device that has more is interrupted for what is due.
const READ_AT_ONCE: usize = 64;
/// Longer than any packet.
const BUFFER: usize = 1 << 16;

/// The rules of each link, and the chance that they need.
#[derive(Debug)]
pub(crate) struct Rules {
    num_hosts: usize,
    links: Vec<(Link, Count)>,
    random: StdRng,
}

impl Rules {
    pub(crate) fn new(num_hosts: usize, seed: u64) -> Self {
        let links = vec![Default::default(); num_hosts * num_hosts];
        Self { num_hosts, links, random: StdRng::seed_from_u64(seed) }
    }

    pub(crate) fn set(&mut self, from: usize, to: usize, link: Link) {
        self.links[from * self.num_hosts + to].0 = link;
    }

    pub(crate) fn count(&self, from: usize, to: usize) -> Count {
        self.links[from * self.num_hosts + to].1
    }

    /// After how long a packet arrives, if it does.
    fn decide(&mut self, from: usize, to: usize) -> Option<Duration> {
        let (link, count) = &mut self.links[from * self.num_hosts + to];
        if link.is_cut || (link.loss > 0.0 && self.random.random_bool(link.loss)) {
            count.dropped += 1;
            return None;
        }
        count.passed += 1;
        let is_held_back = link.reorder > 0.0 && self.random.random_bool(link.reorder);
        Some(if is_held_back { link.delay + HELD_BACK } else { link.delay })
    }
}

/// A packet under way. Ordered by when it is due, then by when it was sent.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    due: Instant,
    number: u64,
    to: usize,
    bytes: Vec<u8>,
}

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Of hosts whose addresses end in their number plus 1, in order.
    pub(crate) fn start(devices: Vec<OwnedFd>, rules: Arc<Mutex<Rules>>) -> io::Result<Self> {
        let (stop, stopped) = UnixStream::pair()?;
        let thread =
            std::thread::Builder::new().name("relay".to_owned()).spawn(move || carry(&devices, &rules, &stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A relay that panicked has told so by its own message.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

fn carry(devices: &[OwnedFd], rules: &Mutex<Rules>, stopped: &UnixStream) {
    let (mut under_way, mut number) = (BinaryHeap::new(), 0);
    let mut buffer = vec![0; BUFFER];
    loop {
        let now = Instant::now();
        while under_way.peek().is_some_and(|Reverse(Packet { due, .. })| *due <= now) {
            if let Some(Reverse(packet)) = under_way.pop() {
                deliver(&devices[packet.to], &packet.bytes);
            }
        }
        let pause = under_way.peek().map(|Reverse(packet)| packet.due.saturating_duration_since(now));
        // Rounded up: a poll that returns a moment too early would spin.
        let pause = pause.map(|pause| u16::try_from(pause.as_millis() + 1).unwrap_or(u16::MAX));
        let files = devices.iter().map(AsFd::as_fd).chain([stopped.as_fd()]);
        let mut polled: Vec<PollFd<'_>> = files.map(|file| PollFd::new(file, PollFlags::POLLIN)).collect();
        match poll(&mut polled, pause.map_or(PollTimeout::NONE, PollTimeout::from)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
        let ready: Vec<bool> = polled.iter().map(|file| file.any().unwrap_or(false)).collect();
        if ready[devices.len()] {
            return;
        }
        for from in (0..devices.len()).filter(|host| ready[*host]) {
            for _ in 0..READ_AT_ONCE {
                // EAGAIN: it has no more.
                let Ok(length) = read(&devices[from], &mut buffer) else { break };
                let packet = &buffer[..length];
                let Some(to) = receiver(packet, devices.len()) else { continue };
                let decided = rules.lock().unwrap_or_else(PoisonError::into_inner).decide(from, to);
                match decided {
                    Some(Duration::ZERO) => deliver(&devices[to], packet),
                    Some(delay) => {
                        number += 1;
                        let due = Instant::now() + delay;
                        under_way.push(Reverse(Packet { due, number, to, bytes: packet.to_vec() }));
                    }
                    None => {}
                }
            }
        }
    }
}

/// A full queue loses the packet, as on any network.
fn deliver(device: &OwnedFd, bytes: &[u8]) {
    write(device, bytes).unwrap_or_default();
}

/// Which host an IPv4 packet is for. What else a kernel sends by itself (IPv6's discovery) goes nowhere.
fn receiver(packet: &[u8], num_hosts: usize) -> Option<usize> {
    let is_v4 = packet.first().is_some_and(|first| first >> 4 == 4);
    let to: [u8; 4] = packet.get(16..20).filter(|_| is_v4)?.try_into().ok()?;
    let number = usize::from(Ipv4Addr::from(to).octets()[3]).checked_sub(1)?;
    (to[..3] == [10, 77, 0] && number < num_hosts).then_some(number)
}
