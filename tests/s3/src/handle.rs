//! A test's handle of the server's process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::Deserialize;

use crate::switches::Switches;
use crate::{ACCESS_KEY, PORT, SECRET_KEY, SERVE, serve};

const LOG: &str = "requests.jsonl";

/// What serves.
#[derive(Clone, Debug)]
pub enum Program {
    /// The program `trainctl-s3`.
    Path(PathBuf),
    /// The test of that name in the running test program; it calls [`crate::serve_if_asked`].
    Test(&'static str),
}

/// A running server; killed when this is dropped. Its data outlives it.
#[derive(Debug)]
pub struct Server {
    program: Program,
    folder: PathBuf,
    bucket: String,
    port: u16,
    child: Child,
}

/// One line of the server's log.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// `GET`, `PUT`, …
    pub method: String,
    /// `/bucket/key`.
    pub path: String,
    /// Without the question mark.
    pub query: String,
    /// `bytes=0-99`.
    pub range: Option<String>,
    /// The condition of a put that must not overwrite.
    pub if_none_match: Option<String>,
    /// The condition of a put that must overwrite exactly this.
    pub if_match: Option<String>,
    /// Length of the request's body.
    pub bytes: Option<u64>,
    /// Status of the answer.
    pub status: u16,
    /// What a switch did: `refused`, `lost`, `truncated` or `skewed`.
    pub fault: Option<String>,
}

impl Request {
    /// First and last byte of its range.
    pub fn bounds(&self) -> Option<(u64, u64)> {
        let (first, last) = self.range.as_deref()?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

impl Server {
    /// Starts a server with its data and log in `folder`, and one bucket.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(program: Program, folder: &Path, bucket: &str) -> Self {
        let (child, port) = launch(&program, folder, bucket, 0);
        Self { program, folder: folder.to_owned(), bucket: bucket.to_owned(), port, child }
    }

    /// Kills it, or waits for its end if it is dying, and starts it again on the same port with the same data.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        self.kill();
        (self.child, self.port) = launch(&self.program, &self.folder, &self.bucket, self.port);
    }

    /// Kills it.
    ///
    /// # Panics
    /// If it cannot be waited for.
    pub fn kill(&mut self) {
        if self.child.kill().is_ok() {
            self.child.wait().unwrap();
        }
    }

    /// Whether it has ended.
    ///
    /// # Panics
    /// If it cannot be asked.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Sets all switches.
    ///
    /// # Panics
    /// If the server refuses them.
    pub fn set(&self, switches: &Switches) {
        let body = serde_json::to_string(switches).unwrap();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let length = body.len();
        let path = serve::SWITCHES;
        write!(
            stream,
            "PUT {path} HTTP/1.1\r\nhost: s3\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    /// What a client needs in its environment.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{}", self.port)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY.to_owned()),
        ]
    }

    /// `s3://<bucket>/<prefix>`.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{}/{prefix}", self.bucket)
    }

    /// Every request so far whose answer began.
    ///
    /// # Panics
    /// If the log cannot be read.
    pub fn requests(&self) -> Vec<Request> {
        let text = std::fs::read_to_string(self.folder.join(LOG)).unwrap();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Every key of the bucket, sorted.
    ///
    /// # Panics
    /// If the data cannot be read.
    pub fn keys(&self) -> Vec<String> {
        let root = self.folder.join("data").join(&self.bucket);
        let mut keys = Vec::new();
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    keys.push(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        keys.sort();
        keys
    }

    /// Path of an object's bytes.
    pub fn object(&self, key: &str) -> PathBuf {
        self.folder.join("data").join(&self.bucket).join(key)
    }

    /// Files of uploads that are neither completed nor aborted.
    ///
    /// # Panics
    /// If the data cannot be read.
    pub fn open_uploads(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.folder.join("data")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut found: Vec<_> = names.filter(|name| name.starts_with(".upload")).collect();
        found.sort();
        found
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn launch(program: &Program, folder: &Path, bucket: &str, port: u16) -> (Child, u16) {
    std::fs::create_dir_all(folder).unwrap();
    let mut command = match program {
        Program::Path(path) => Command::new(path),
        Program::Test(name) => {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", name, "--nocapture", "--test-threads", "1"]);
            command
        }
    };
    let asked = format!("{}\n{bucket}\n{}\n{port}", folder.join("data").display(), folder.join(LOG).display());
    command.env(SERVE, asked).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("start {command:?}: {error}"));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let port = lines.find_map(|line| line.split_once(PORT).map(|(_, port)| port.trim().to_owned()));
    let port = port.unwrap_or_else(|| panic!("the S3 server did not start: {command:?}"));
    (child, port.parse().unwrap())
}
