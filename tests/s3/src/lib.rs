//! A real S3 server for tests: `s3s-fs` behind HTTP, in a process of its own, with signatures checked.
//!
//! What a plain `s3s-fs` lacks is added in [`serve`]: conditional puts that are atomic, a log of every request, and
//! [`Switches`] by which the server refuses, loses answers, is slow, cuts bodies off, has another time, ignores conditions or
//! dies. [`Server`] is a test's handle of it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test kit: what does not go as expected fails the test")]

pub mod handle;
pub mod serve;
pub mod switches;

pub use handle::{Program, Request, Server};
pub use switches::Switches;

/// What a server's process is told: data, bucket, log and port, one a line.
pub const SERVE: &str = "TRAINCTL_S3_SERVE";

/// What a server's process says before its port.
pub(crate) const PORT: &str = "trainctl-s3 listens on port ";

/// Serves in a process that was started for it, until it is killed; returns at once in any other. A test that has no program
/// of the server at hand makes one of itself: `#[test] fn s3_server() { trainctl_s3::serve_if_asked() }`.
///
/// # Panics
/// If it cannot serve.
#[expect(clippy::print_stdout, reason = "the port is what its parent reads")]
pub fn serve_if_asked() {
    use std::io::Write;
    let Ok(asked) = std::env::var(SERVE) else { return };
    // With its parent, so that a test that was killed leaves nothing.
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).unwrap();
    let asked: Vec<&str> = asked.lines().collect();
    let [data, bucket, log, port] = asked[..] else { panic!("{SERVE} is `{asked:?}`") };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let served = runtime.block_on(async {
        let server = serve::Bound::bind(data.as_ref(), bucket, log.as_ref(), port.parse()?).await?;
        println!("{PORT}{}", server.port()?);
        std::io::stdout().flush()?;
        server.run().await
    });
    panic!("the S3 server ended: {served:?}");
}

/// The access key that the server knows.
pub const ACCESS_KEY: &str = "AKIATRAINCTLTESTS000";

/// Its secret. Tests look for it where it must not be.
pub const SECRET_KEY: &str = "tests-secret-key-that-must-not-be-logged";
