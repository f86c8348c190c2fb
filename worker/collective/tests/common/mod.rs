//! Real ranks for the tests: the test binary starts itself once per rank, and the ranks meet in a store behind a TCP port.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use trainctl_collective::{GroupOptions, KeyValue, KvError, KvErrorKind, MemoryStore};

/// How long anything may take before a test gives up. Never waited for in a passing run.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const SCENARIO: &str = "TRAINCTL_TEST_SCENARIO";

/// What a rank process was started for; `None` in the test process itself.
pub(crate) fn scenario() -> Option<String> {
    std::env::var(SCENARIO).ok()
}

/// The options of this rank process, and the store that it shares with the others.
pub(crate) fn this_rank(timeout: Duration) -> (GroupOptions, Arc<dyn KeyValue>) {
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let address: SocketAddr = std::env::var("TRAINCTL_TEST_STORE").unwrap().parse().unwrap();
    let options = GroupOptions {
        rank: number("TRAINCTL_TEST_RANK"),
        world_size: number("TRAINCTL_TEST_WORLD"),
        address: "127.0.0.1".parse().unwrap(),
        timeout,
    };
    (options, Arc::new(Remote(address)))
}

/// The processes of one world and their store.
pub(crate) struct World {
    pub(crate) store: Arc<MemoryStore>,
    children: Vec<Child>,
}

impl World {
    /// Starts `ranks` of a world of `size` in `scenario`.
    pub(crate) fn start(scenario: &str, size: usize, ranks: std::ops::Range<usize>) -> Self {
        let store = Arc::new(MemoryStore::new());
        let address = serve(store.clone());
        let children = ranks.map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
                .env(SCENARIO, scenario)
                .env("TRAINCTL_TEST_STORE", address.to_string())
                .env("TRAINCTL_TEST_RANK", rank.to_string())
                .env("TRAINCTL_TEST_WORLD", size.to_string())
                .env("OMP_NUM_THREADS", "1")
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        });
        Self { children: children.collect(), store }
    }

    /// SIGKILL for one rank.
    pub(crate) fn kill(&mut self, rank: usize) {
        self.children[rank].kill().unwrap();
    }

    /// Waits until every rank but `killed` has ended well.
    pub(crate) fn finish(mut self, killed: Option<usize>) {
        let mut failures = String::new();
        for (rank, child) in std::mem::take(&mut self.children).into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            if Some(rank) == killed || output.status.success() {
                continue;
            }
            failures += &format!(
                "--- rank {rank}: {}\n{}\n{}\n",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        assert!(failures.is_empty(), "{failures}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for child in &mut self.children {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

// The protocol of the store: one call per connection, each field after its length.

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn take(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn take_number(stream: &mut impl Read) -> std::io::Result<i64> {
    Ok(i64::from_le_bytes(take(stream)?.try_into().unwrap()))
}

fn serve(store: Arc<MemoryStore>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let store = store.clone();
            thread::spawn(move || answer(stream, &*store));
        }
    });
    address
}

fn answer(mut stream: TcpStream, store: &dyn KeyValue) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut operation = String::new();
    reader.read_line(&mut operation)?;
    let count = take_number(&mut reader)?;
    let keys =
        (0..count).map(|_| Ok(String::from_utf8(take(&mut reader)?).unwrap())).collect::<std::io::Result<Vec<_>>>()?;
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    let (value, desired) = (take(&mut reader)?, take(&mut reader)?);
    let number = take_number(&mut reader)?;
    let timeout = Duration::from_millis(take_number(&mut reader)? as u64);
    let result = match operation.trim() {
        "set" => store.set(keys[0], &value).map(|()| (vec![], 0)),
        "get" => store.get(keys[0], timeout).map(|bytes| (bytes, 0)),
        "add" => store.add(keys[0], number).map(|sum| (vec![], sum)),
        "check" => store.check(&keys).map(|there| (vec![], there.into())),
        "wait" => store.wait(&keys, timeout).map(|()| (vec![], 0)),
        "delete" => store.delete(keys[0]).map(|there| (vec![], there.into())),
        "compare_set" => store.compare_set(keys[0], &value, &desired).map(|bytes| (bytes, 0)),
        "num_keys" => store.num_keys().map(|count| (vec![], count)),
        other => Err(KvError::other(format!("unknown operation {other}"))),
    };
    let (code, bytes, number) = match result {
        Ok((bytes, number)) => (0, bytes, number),
        Err(KvError { kind: KvErrorKind::Timeout, message }) => (1, message.into_bytes(), 0),
        Err(KvError { kind: KvErrorKind::Closed, message }) => (2, message.into_bytes(), 0),
        Err(error) => (3, error.message.into_bytes(), 0_i64),
    };
    let mut reply = Vec::new();
    put(&mut reply, &i64::to_le_bytes(code));
    put(&mut reply, &bytes);
    put(&mut reply, &number.to_le_bytes());
    stream.write_all(&reply)
}

struct Remote(SocketAddr);

#[derive(Default)]
struct Call<'a> {
    keys: &'a [&'a str],
    value: &'a [u8],
    desired: &'a [u8],
    number: i64,
    timeout: Duration,
}

impl Remote {
    fn call(&self, operation: &str, call: &Call<'_>) -> Result<(Vec<u8>, i64), KvError> {
        let mut request = format!("{operation}\n").into_bytes();
        put(&mut request, &(call.keys.len() as i64).to_le_bytes());
        for key in call.keys {
            put(&mut request, key.as_bytes());
        }
        put(&mut request, call.value);
        put(&mut request, call.desired);
        put(&mut request, &call.number.to_le_bytes());
        put(&mut request, &(call.timeout.as_millis() as i64).to_le_bytes());
        let exchange = || {
            let mut stream = TcpStream::connect(self.0)?;
            stream.write_all(&request)?;
            std::io::Result::Ok((take_number(&mut stream)?, take(&mut stream)?, take_number(&mut stream)?))
        };
        let (code, bytes, number) =
            exchange().map_err(|error| KvError::closed(format!("the store is gone: {error}")))?;
        let text = || String::from_utf8_lossy(&bytes).into_owned();
        match code {
            0 => Ok((bytes, number)),
            1 => Err(KvError::timeout(text())),
            2 => Err(KvError::closed(text())),
            _ => Err(KvError::other(text())),
        }
    }
}

impl KeyValue for Remote {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.call("set", &Call { keys: &[key], value, ..Call::default() }).map(drop)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        self.call("get", &Call { keys: &[key], timeout, ..Call::default() }).map(|reply| reply.0)
    }
    fn add(&self, key: &str, number: i64) -> Result<i64, KvError> {
        self.call("add", &Call { keys: &[key], number, ..Call::default() }).map(|reply| reply.1)
    }
    fn check(&self, keys: &[&str]) -> Result<bool, KvError> {
        self.call("check", &Call { keys, ..Call::default() }).map(|reply| reply.1 != 0)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), KvError> {
        self.call("wait", &Call { keys, timeout, ..Call::default() }).map(drop)
    }
    fn delete(&self, key: &str) -> Result<bool, KvError> {
        self.call("delete", &Call { keys: &[key], ..Call::default() }).map(|reply| reply.1 != 0)
    }
    fn compare_set(&self, key: &str, value: &[u8], desired: &[u8]) -> Result<Vec<u8>, KvError> {
        self.call("compare_set", &Call { keys: &[key], value, desired, ..Call::default() }).map(|reply| reply.0)
    }
    fn num_keys(&self) -> Result<i64, KvError> {
        self.call("num_keys", &Call::default()).map(|reply| reply.1)
    }
}
