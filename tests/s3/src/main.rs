//! `trainctl-s3 DATA BUCKET LOG [PORT]`: serves until it is killed. Prints its port.

#![expect(clippy::print_stdout, reason = "the port is what its parent reads")]

use std::io::Write;
use std::path::PathBuf;

use nix::sys::signal::Signal;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // With its parent, so that a test that was killed leaves nothing.
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    let mut arguments = std::env::args().skip(1);
    let (Some(data), Some(bucket), Some(log)) = (arguments.next(), arguments.next(), arguments.next()) else {
        return Err("usage: trainctl-s3 DATA BUCKET LOG [PORT]".into());
    };
    let port = arguments.next().map_or(Ok(0), |port| port.parse())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let server = trainctl_s3::serve::Bound::bind(&PathBuf::from(data), &bucket, &PathBuf::from(log), port).await?;
        println!("{}", server.port()?);
        std::io::stdout().flush()?;
        server.run().await
    })
}
