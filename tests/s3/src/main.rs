//! The server as a program. `TRAINCTL_S3_SERVE` says what to serve; it prints its port and serves until it is killed.

fn main() {
    trainctl_s3::serve_if_asked();
}
