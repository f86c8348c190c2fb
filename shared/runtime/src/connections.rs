//! Connections of a listener: how many there may be, and how long a stranger may stay.
//!
//! A connection is a stranger's until a call on it was let in. Strangers have [`Limits::proof`] for that; where there is no
//! room for a newcomer, the one that has been a stranger for longest makes room, then the oldest observer's. Workers and the
//! owner never do, so neither ten thousand silent connections nor a colleague's loop shuts them out. Peers that are gone
//! without a word are found by HTTP/2 keep-alives ([`crate::rpc`]).

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::codegen::http::Extensions;
use tonic::transport::server::{Connected, TlsConnectInfo};

use crate::auth::Role;
use crate::certificates;
use crate::clock::{Clock, SystemClock};

/// Pause after an accept that failed: mostly the process has no file descriptor left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// A listener that is full says so at most so often.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// At most so many connections, however many files the process may have.
const MOST: usize = 8192;

/// Whose a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// No call on it was let in yet.
    Stranger = 0,
    /// Somebody's who may look.
    Observer = 1,
    /// A worker's or the owner's.
    Member = 2,
}

impl From<Role> for Standing {
    fn from(role: Role) -> Self {
        match role {
            Role::Observer => Self::Observer,
            Role::Worker | Role::Owner => Self::Member,
        }
    }
}

/// How much a listener takes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open connections.
    pub connections: usize,
    /// How long a stranger may stay.
    pub proof: Duration,
}

impl Limits {
    /// Half of the files that the process may open, at most 8,192; a stranger has ten seconds, TLS handshake included.
    #[must_use]
    pub fn of(open_files: u64) -> Self {
        let half = usize::try_from(open_files / 2).unwrap_or(MOST);
        Self { connections: half.clamp(16, MOST), proof: Duration::from_secs(10) }
    }
}

/// What becomes of a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// There is room.
    Admit,
    /// There is room once this one is closed.
    Replace(u64),
    /// All are workers' and the owner's.
    Refuse,
}

/// Decides on a newcomer, given the open connections in the order of their arrival.
#[must_use]
pub fn decide_admission(open: impl Iterator<Item = (u64, Standing)>, limit: usize) -> Admission {
    let mut count = 0;
    let mut least: Option<(u64, Standing)> = None;
    for (id, standing) in open {
        count += 1;
        if least.is_none_or(|(_, lowest)| standing < lowest) {
            least = Some((id, standing));
        }
    }
    match least {
        _ if count < limit => Admission::Admit,
        Some((id, Standing::Stranger | Standing::Observer)) => Admission::Replace(id),
        _ => Admission::Refuse,
    }
}

#[derive(Debug)]
struct State {
    standing: AtomicU8,
    close: CancellationToken,
    /// The worker of the peer's certificate, once it was looked at.
    worker: OnceLock<Option<String>>,
}

impl State {
    fn standing(&self) -> Standing {
        match self.standing.load(Ordering::Relaxed) {
            0 => Standing::Stranger,
            1 => Standing::Observer,
            _ => Standing::Member,
        }
    }
}

#[derive(Debug, Default)]
struct Register {
    next: u64,
    open: BTreeMap<u64, Arc<State>>,
}

type Shared = Arc<Mutex<Register>>;

fn lock(register: &Shared) -> std::sync::MutexGuard<'_, Register> {
    register.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The other side of a connection: in the extensions of each of its requests.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address.
    pub address: Option<SocketAddr>,
    state: Arc<State>,
}

impl Peer {
    /// The peer of a request that came through [`Incoming`].
    #[must_use]
    pub fn of(extensions: &Extensions) -> Option<Self> {
        extensions.get::<Self>().cloned()
    }

    /// A call of this peer was let in.
    pub(crate) fn prove(&self, standing: Standing) {
        self.state.standing.fetch_max(standing as u8, Ordering::Relaxed);
    }

    /// The worker that the peer's TLS certificate names.
    pub(crate) fn certified_worker(&self, extensions: &Extensions) -> Option<String> {
        let look = || {
            let certificates = extensions.get::<TlsConnectInfo<Self>>()?.peer_certs()?;
            let first = certificates.first()?;
            match certificates::worker_of(first, SystemClock::new().wall_ms()) {
                Ok(worker) => Some(worker),
                Err(error) => {
                    tracing::warn!(address = ?self.address, %error, "a certificate of our CA proves nothing");
                    None
                }
            }
        };
        self.state.worker.get_or_init(look).clone()
    }
}

/// A listener's connections, within [`Limits`].
pub struct Incoming {
    listener: TcpListener,
    limits: Limits,
    register: Shared,
    pause: Option<Pin<Box<Sleep>>>,
    warned: Option<Instant>,
}

impl Incoming {
    /// Accepts what comes to `listener`.
    #[must_use]
    pub fn new(listener: TcpListener, limits: Limits) -> Self {
        Self { listener, limits, register: Shared::default(), pause: None, warned: None }
    }

    /// Makes a connection of a stream, if it is let in.
    fn admit(&mut self, stream: TcpStream, address: SocketAddr) -> Option<Connection> {
        let mut register = lock(&self.register);
        let open = register.open.iter().map(|(id, state)| (*id, state.standing()));
        let admission = decide_admission(open, self.limits.connections);
        if admission != Admission::Admit && self.warned.is_none_or(|at| at.elapsed() > WARN_EVERY) {
            self.warned = Some(Instant::now());
            let limit = self.limits.connections;
            tracing::warn!(limit, ?admission, "too many connections: the oldest strangers' are closed first");
        }
        match admission {
            Admission::Admit => {}
            Admission::Replace(id) => {
                // Out of the register at once: its file is closed when its task runs next.
                if let Some(state) = register.open.remove(&id) {
                    state.close.cancel();
                }
            }
            Admission::Refuse => return None,
        }
        let id = register.next;
        register.next += 1;
        let close = CancellationToken::new();
        let closed = Some(Box::pin(close.clone().cancelled_owned()));
        let state =
            Arc::new(State { standing: AtomicU8::new(Standing::Stranger as u8), close, worker: OnceLock::new() });
        register.open.insert(id, state.clone());
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%address, %error, "no TCP_NODELAY");
        }
        let peer = Peer { address: Some(address), state };
        let deadline = Some(Box::pin(tokio::time::sleep(self.limits.proof)));
        Some(Connection { stream, peer, deadline, closed, id, register: self.register.clone() })
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(context)) {
                Ok((stream, address)) => {
                    if let Some(connection) = self.admit(stream, address) {
                        return Poll::Ready(Some(Ok(connection)));
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    self.pause = Some(Box::pin(tokio::time::sleep(ACCEPT_RETRY)));
                }
            }
        }
    }
}

/// One connection. It fails with `TimedOut` when a stranger stays too long and with `ConnectionAborted` when it makes room.
pub struct Connection {
    stream: TcpStream,
    peer: Peer,
    /// Absent once it is no stranger's any more.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Absent once it is a member's.
    closed: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    id: u64,
    register: Shared,
}

impl Connection {
    /// Whether it may go on. Looked at before each read and write, since a peer that reads nothing holds up the reading too.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Some(closed) = &mut self.closed else { return Ok(()) };
        let standing = self.peer.state.standing();
        if closed.as_mut().poll(context).is_ready() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "closed to make room for another connection"));
        }
        if standing == Standing::Member {
            (self.closed, self.deadline) = (None, None);
            return Ok(());
        }
        if standing != Standing::Stranger {
            self.deadline = None;
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no call that was let in, in the time for it"));
        }
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.register).open.remove(&self.id);
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_stream::StreamExt;

    use super::Standing::{Member, Observer, Stranger};
    use super::*;

    #[test]
    fn the_oldest_of_the_lowest_makes_room() {
        let decide = |open: &[Standing], limit| decide_admission((0..).zip(open.iter().copied()), limit);
        assert_eq!(decide(&[], 2), Admission::Admit);
        assert_eq!(decide(&[Stranger, Stranger], 3), Admission::Admit);
        assert_eq!(decide(&[Member, Stranger, Stranger], 3), Admission::Replace(1));
        assert_eq!(decide(&[Observer, Member, Stranger], 3), Admission::Replace(2));
        assert_eq!(decide(&[Member, Observer, Observer], 3), Admission::Replace(1));
        assert_eq!(decide(&[Member, Member], 2), Admission::Refuse);
        assert_eq!(Limits::of(20_000).connections, 8192);
        assert_eq!(Limits::of(1024).connections, 512);
        assert_eq!(Limits::of(u64::MAX).connections, 8192);
    }

    struct Place {
        incoming: Incoming,
        address: SocketAddr,
    }

    impl Place {
        async fn new(connections: usize, proof: Duration) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
            let address = listener.local_addr().expect("address");
            Self { incoming: Incoming::new(listener, Limits { connections, proof }), address }
        }

        async fn pair(&mut self) -> (TcpStream, Connection) {
            let client = TcpStream::connect(self.address).await.expect("connect");
            (client, self.incoming.next().await.expect("a connection").expect("accepted"))
        }
    }

    async fn read(connection: &mut Connection) -> io::Result<usize> {
        connection.read(&mut [0; 8]).await
    }

    #[tokio::test]
    async fn a_stranger_has_so_long_and_a_member_for_ever() {
        let mut place = Place::new(8, Duration::from_millis(50)).await;
        let (_stranger, mut strange) = place.pair().await;
        let (mut member, mut known) = place.pair().await;
        let (_watcher, observer) = place.pair().await;
        known.connect_info().prove(Member);
        observer.connect_info().prove(Observer);
        assert_eq!(read(&mut strange).await.expect_err("too long").kind(), io::ErrorKind::TimedOut);
        member.write_all(b"x").await.expect("write");
        assert_eq!(read(&mut known).await.expect("a member stays"), 1);
        let mut observer = observer;
        observer.write_all(b"x").await.expect("an observer stays");
    }

    #[tokio::test]
    async fn a_newcomer_replaces_a_stranger_and_never_a_member() {
        let mut place = Place::new(2, Duration::from_secs(600)).await;
        let (_a, first) = place.pair().await;
        first.connect_info().prove(Member);
        let (_b, mut second) = place.pair().await;
        let (_c, third) = place.pair().await;
        assert_eq!(read(&mut second).await.expect_err("replaced").kind(), io::ErrorKind::ConnectionAborted);
        third.connect_info().prove(Observer);
        drop(second);
        let (_d, fourth) = place.pair().await;
        fourth.connect_info().prove(Member);
        let mut third = third;
        assert_eq!(read(&mut third).await.expect_err("replaced").kind(), io::ErrorKind::ConnectionAborted);
        // Full of members: refused, and let in again when one has gone.
        let mut refused = TcpStream::connect(place.address).await.expect("connect");
        let waiting = tokio::time::timeout(Duration::from_millis(50), place.incoming.next()).await;
        assert!(waiting.is_err(), "refused");
        assert_eq!(refused.read(&mut [0; 1]).await.unwrap_or_default(), 0, "closed");
        drop(first);
        place.pair().await;
    }
}
