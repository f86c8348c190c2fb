//! A rendezvous store over TCP for ranks that are processes of their own: the parent serves it from a port of the
//! kernel's choice, each call of a rank is one connection with one JSON line each way.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trainctl_collective::{KeyValue, KvError};

#[derive(Serialize, Deserialize)]
enum Call {
    Set(String, Vec<u8>),
    Wait(Vec<String>, Duration),
    Get(String, Duration),
    Add(String, i64),
    Check(Vec<String>),
    Delete(String),
    CompareSet(String, Vec<u8>, Vec<u8>),
    NumKeys,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Done,
    Bytes(Vec<u8>),
    Number(i64),
    Flag(bool),
    TimedOut,
}

#[derive(Default)]
struct Shared {
    keys: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Shared {
    fn answer(&self, call: Call) -> Answer {
        let mut keys = self.keys.lock().unwrap();
        let answer = match call {
            Call::Set(key, value) => {
                keys.insert(key, value);
                Answer::Done
            }
            Call::Wait(wanted, timeout) => {
                let missing = |keys: &mut HashMap<String, Vec<u8>>| wanted.iter().any(|key| !keys.contains_key(key));
                let (_keys, result) = self.changed.wait_timeout_while(keys, timeout, missing).unwrap();
                return if result.timed_out() { Answer::TimedOut } else { Answer::Done };
            }
            Call::Get(key, timeout) => {
                let missing = |keys: &mut HashMap<String, Vec<u8>>| !keys.contains_key(&key);
                let (keys, _) = self.changed.wait_timeout_while(keys, timeout, missing).unwrap();
                return keys.get(&key).map_or(Answer::TimedOut, |value| Answer::Bytes(value.clone()));
            }
            Call::Add(key, amount) => {
                let old = keys.get(&key).map_or(0, |value| String::from_utf8_lossy(value).parse().unwrap());
                keys.insert(key, (old + amount).to_string().into_bytes());
                Answer::Number(old + amount)
            }
            Call::Check(wanted) => Answer::Flag(wanted.iter().all(|key| keys.contains_key(key))),
            Call::Delete(key) => Answer::Flag(keys.remove(&key).is_some()),
            Call::CompareSet(key, expected, desired) => match keys.get(&key) {
                Some(now) if *now != expected => Answer::Bytes(now.clone()),
                None if !expected.is_empty() => Answer::Bytes(expected),
                _ => {
                    keys.insert(key, desired.clone());
                    Answer::Bytes(desired)
                }
            },
            Call::NumKeys => Answer::Number(keys.len() as i64),
        };
        self.changed.notify_all();
        answer
    }
}

/// Serves a store until the process ends.
pub fn serve() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let shared = Arc::new(Shared::default());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, shared) = (stream.unwrap(), Arc::clone(&shared));
            thread::spawn(move || {
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line).unwrap();
                let Ok(call) = serde_json::from_str(&line) else { return };
                let mut answer = serde_json::to_string(&shared.answer(call)).unwrap();
                answer.push('\n');
                // A rank that died meanwhile does not read its answer.
                drop((&stream).write_all(answer.as_bytes()));
            });
        }
    });
    address
}

/// The client.
pub struct Remote(pub SocketAddr);

impl Remote {
    fn call(&self, call: &Call) -> Result<Answer, KvError> {
        let ask = || -> std::io::Result<Answer> {
            let stream = TcpStream::connect(self.0)?;
            let mut line = serde_json::to_string(call)?;
            line.push('\n');
            (&stream).write_all(line.as_bytes())?;
            let mut answer = String::new();
            BufReader::new(&stream).read_line(&mut answer)?;
            Ok(serde_json::from_str(&answer)?)
        };
        match ask() {
            Ok(Answer::TimedOut) => Err(KvError::timeout("the key did not appear")),
            Ok(answer) => Ok(answer),
            Err(error) => Err(KvError::closed(error.to_string())),
        }
    }

    fn bytes(&self, call: &Call) -> Result<Vec<u8>, KvError> {
        match self.call(call)? {
            Answer::Bytes(bytes) => Ok(bytes),
            _ => Err(KvError::other("unexpected answer")),
        }
    }

    fn number(&self, call: &Call) -> Result<i64, KvError> {
        match self.call(call)? {
            Answer::Number(number) => Ok(number),
            _ => Err(KvError::other("unexpected answer")),
        }
    }

    fn flag(&self, call: &Call) -> Result<bool, KvError> {
        match self.call(call)? {
            Answer::Flag(flag) => Ok(flag),
            _ => Err(KvError::other("unexpected answer")),
        }
    }
}

fn owned(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|&key| key.to_owned()).collect()
}

impl KeyValue for Remote {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.call(&Call::Set(key.to_owned(), value.to_vec())).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        self.bytes(&Call::Get(key.to_owned(), timeout))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, KvError> {
        self.number(&Call::Add(key.to_owned(), amount))
    }

    fn check(&self, keys: &[&str]) -> Result<bool, KvError> {
        self.flag(&Call::Check(owned(keys)))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), KvError> {
        self.call(&Call::Wait(owned(keys), timeout)).map(drop)
    }

    fn delete(&self, key: &str) -> Result<bool, KvError> {
        self.flag(&Call::Delete(key.to_owned()))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, KvError> {
        self.bytes(&Call::CompareSet(key.to_owned(), expected.to_vec(), desired.to_vec()))
    }

    fn num_keys(&self) -> Result<i64, KvError> {
        self.number(&Call::NumKeys)
    }
}
