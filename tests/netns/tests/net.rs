//! The hosts and the relay, with sockets and processes in them.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use trainctl_netns::{Host, Link, Net, have_netns};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a packet that is not held up may take on a busy machine.
const PROMPT: Duration = Duration::from_millis(150);

fn net(hosts: u8) -> Option<Net> {
    have_netns().then(|| Net::new(hosts, 1).unwrap())
}

fn listen(host: &Host) -> TcpListener {
    let address = SocketAddr::from((host.address(), 0));
    host.run(move || TcpListener::bind(address)).unwrap().unwrap()
}

fn socket(host: &Host) -> UdpSocket {
    let address = SocketAddr::from((host.address(), 0));
    let socket = host.run(move || UdpSocket::bind(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn connect(host: &Host, to: &TcpListener) -> (TcpStream, TcpStream) {
    let address = to.local_addr().unwrap();
    let near = host.run(move || TcpStream::connect_timeout(&address, PATIENCE)).unwrap().unwrap();
    (near, to.accept().unwrap().0)
}

/// How long one datagram takes.
fn transit(from: &UdpSocket, to: &UdpSocket) -> Duration {
    let began = Instant::now();
    from.send_to(b"x", to.local_addr().unwrap()).unwrap();
    to.recv(&mut [0; 8]).unwrap();
    began.elapsed()
}

/// So many datagrams with their numbers go; those that come.
fn numbers(from: &UdpSocket, to: &UdpSocket, count: u16) -> Vec<u16> {
    let (receiver, address) = (to.try_clone().unwrap(), to.local_addr().unwrap());
    receiver.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    // Beside the sender: the queue of a socket is short.
    let received = std::thread::spawn(move || {
        let (mut came, mut buffer) = (Vec::new(), [0; 2]);
        while let Ok(2) = receiver.recv(&mut buffer) {
            came.push(u16::from_be_bytes(buffer));
        }
        came
    });
    for number in 0..count {
        from.send_to(&number.to_be_bytes(), address).unwrap();
        std::thread::sleep(Duration::from_micros(100));
    }
    received.join().unwrap()
}

#[test]
fn hosts_reach_each_other_at_their_addresses_and_nothing_else_is_there() {
    let Some(net) = net(3) else { return };
    let listener = listen(net.host(2));
    for from in [0, 1] {
        let (mut near, mut far) = connect(net.host(from), &listener);
        assert_eq!(far.peer_addr().unwrap().ip(), net.host(from).address());
        let bytes: Vec<u8> = (0..1_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
        let sent = bytes.clone();
        let sender = std::thread::spawn(move || near.write_all(&sent).unwrap());
        let mut came = Vec::new();
        far.read_to_end(&mut came).unwrap();
        sender.join().unwrap();
        assert!(came == bytes, "{} bytes came", came.len());
    }
    // The machine's own network is another one: the same address leads nowhere there, and the machine's not here.
    let outside = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = net.host(0).run(move || TcpStream::connect(outside)).unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn a_rule_holds_one_way_or_both_and_only_as_long_as_it_is_set() {
    let Some(net) = net(3) else { return };
    let [a, b, c] = [0, 1, 2].map(|number| socket(net.host(number)));
    assert!(transit(&a, &b) < PROMPT);
    let slow = Link { delay: Duration::from_millis(300), ..Link::default() };
    net.set_one_way(0, 1, slow);
    assert!(transit(&a, &b) >= slow.delay);
    assert!(transit(&b, &a) < PROMPT && transit(&a, &c) < PROMPT, "the other links are as they were");
    net.set_one_way(0, 1, Link::CUT);
    a.send_to(b"lost", b.local_addr().unwrap()).unwrap();
    assert!(transit(&b, &a) < PROMPT);
    assert_eq!(net.count(0, 1).dropped, 1);
    net.set(0, 1, Link::default());
    assert!(transit(&a, &b) < PROMPT, "what was lost does not come later");
}

#[test]
fn losses_are_as_many_as_the_rule_says_and_the_same_for_a_seed() {
    if !have_netns() {
        return;
    }
    let lossy = |seed| {
        let net = Net::new(2, seed).unwrap();
        let [a, b] = [0, 1].map(|number| socket(net.host(number)));
        net.set(0, 1, Link { loss: 0.2, ..Link::default() });
        let came = numbers(&a, &b, 500);
        (came, net.count(0, 1))
    };
    let (first, count) = lossy(7);
    assert_eq!((first.len() as u64, count.passed + count.dropped), (count.passed, 500));
    assert!((60..140).contains(&count.dropped), "{count:?}");
    assert!(first.is_sorted(), "nothing is overtaken without a rule");
    assert_eq!(lossy(7).0, first);
    assert_ne!(lossy(8).0, first);
}

#[test]
fn some_packets_are_overtaken_and_none_is_lost() {
    let Some(net) = net(2) else { return };
    let [a, b] = [0, 1].map(|number| socket(net.host(number)));
    net.set(0, 1, Link { reorder: 0.1, ..Link::default() });
    let mut came = numbers(&a, &b, 200);
    assert!(!came.is_sorted());
    came.sort_unstable();
    assert_eq!(came, (0..200).collect::<Vec<_>>());
}

#[test]
fn a_stream_stands_still_while_its_link_is_cut_and_goes_on_afterwards() {
    let Some(net) = net(2) else { return };
    let listener = listen(net.host(1));
    let (mut near, mut far) = connect(net.host(0), &listener);
    net.set(0, 1, Link::CUT);
    near.write_all(b"late").unwrap();
    far.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let silent = far.read(&mut [0; 8]).unwrap_err();
    assert!(matches!(silent.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{silent}");
    net.set(0, 1, Link::default());
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut came = [0; 4];
    far.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"late");
}

#[test]
fn a_process_sees_a_host_of_its_own_and_freezes_with_it() {
    let Some(net) = net(2) else { return };
    let said = |host: &Host| {
        let mut command = Command::new("sh");
        command.args(["-c", "hostname; cat /proc/sys/kernel/random/boot_id"]).stdout(Stdio::piped());
        let output = host.spawn(command).unwrap().wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let (first, second) = (said(net.host(0)), said(net.host(1)));
    assert!(first.starts_with("host0\n") && second.starts_with("host1\n"), "{first}{second}");
    let boot = |said: &str| said.lines().nth(1).unwrap().to_owned();
    assert_ne!(boot(&first), boot(&second));
    assert_ne!(boot(&first), machine.trim());

    let mut command = Command::new("sh");
    command.args(["-c", "sleep 1000 & wait"]);
    let mut shell = net.host(0).spawn(command).unwrap();
    let began = Instant::now();
    while net.host(0).processes().len() < 2 {
        assert!(began.elapsed() < PATIENCE, "the shell's child");
        std::thread::yield_now();
    }
    let state = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let pids = net.host(0).processes();
    assert!(pids.contains(&shell.id()) && net.host(1).processes().is_empty());
    net.host(0).freeze();
    assert!(pids.iter().all(|pid| state(pid).contains(") T ")));
    net.host(0).thaw();
    assert!(pids.iter().all(|pid| !state(pid).contains(") T ")));
    for pid in pids {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGKILL)
            .unwrap();
    }
    shell.wait().unwrap();
}
