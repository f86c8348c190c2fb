//! How a worker proves who it is: on loopback by the join token, on a listener with TLS by a certificate.
//!
//! Key and certificate live in memory only, so a daemon that starts anew enrols anew. It also does when the run's CA is
//! another one, when a third of the certificate's life or less is left, and when the coordinator would not have it: then the
//! join token must do. A session that is open is not ended for it; its certificate was looked at when it was opened.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use trainctl_proto::v1::EnrollRequest;
use trainctl_proto::v1::workers_client::WorkersClient;
use trainctl_runtime::certificates::{Certified, Key};
use trainctl_runtime::endpoint::Endpoint;
use trainctl_runtime::rpc::{self, AuthedChannel, Credentials};

/// How long the coordinator may take to sign.
const ENROLL_TIMEOUT: Duration = Duration::from_secs(5);

/// A certificate, and how long it is good for.
#[derive(Debug)]
struct Held {
    certified: Certified,
    /// CA of the run that gave it.
    ca_pem: String,
    since: Instant,
    valid: Duration,
}

/// What to do about the certificate before a dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// It does.
    Keep,
    /// There is none yet, or the last one was refused.
    None,
    /// The run has another CA.
    OtherCa,
    /// A third of its life or less is left.
    Old,
}

/// Decides by the age of what is held: `(is of this run's CA, age, life)`.
fn decide(held: Option<(bool, Duration, Duration)>) -> Decision {
    match held {
        None => Decision::None,
        Some((false, _, _)) => Decision::OtherCa,
        Some((true, age, life)) if age.saturating_mul(3) >= life.saturating_mul(2) => Decision::Old,
        Some(_) => Decision::Keep,
    }
}

/// This worker's proof of who it is.
#[derive(Debug)]
pub(super) struct Identity {
    worker_id: String,
    held: Mutex<Option<Held>>,
}

impl Identity {
    pub(super) fn new(worker_id: String) -> Self {
        Self { worker_id, held: Mutex::default() }
    }

    /// Dials, after it has enrolled where that is needed.
    pub(super) async fn connect(&self, endpoint: &Endpoint, token: &str) -> Result<AuthedChannel, String> {
        let Some(ca_pem) = &endpoint.ca_pem else {
            return rpc::connect(endpoint, token).await.map_err(|error| error.to_string());
        };
        let mut held = self.held.lock().await;
        let look = held.as_ref().map(|held| (held.ca_pem == *ca_pem, held.since.elapsed(), held.valid));
        let decision = decide(look);
        if decision != Decision::Keep {
            let new = self.enroll(endpoint, ca_pem, token).await?;
            tracing::info!(worker = %self.worker_id, why = ?decision, valid = ?new.valid, "enrolled: a new certificate");
            *held = Some(new);
        }
        let Some(held) = &*held else { return Err("no certificate".to_owned()) };
        let channel = rpc::connect(endpoint, Credentials::Certificate(&held.certified)).await;
        channel.map_err(|error| error.to_string())
    }

    /// The coordinator would not open a session: not with this certificate, perhaps. True if there was one.
    pub(super) async fn forget(&self) -> bool {
        self.held.lock().await.take().is_some()
    }

    async fn enroll(&self, endpoint: &Endpoint, ca_pem: &str, token: &str) -> Result<Held, String> {
        let key = Key::generate().map_err(|error| error.to_string())?;
        let certificate_request = key.request().map_err(|error| error.to_string())?;
        let request = EnrollRequest { worker_id: self.worker_id.clone(), certificate_request };
        let channel = rpc::connect(endpoint, token).await.map_err(|error| error.to_string())?;
        let mut client = WorkersClient::new(channel);
        let since = Instant::now();
        let answer = match tokio::time::timeout(ENROLL_TIMEOUT, client.enroll(request)).await {
            Err(_) => return Err(format!("the coordinator did not sign a certificate within {ENROLL_TIMEOUT:?}")),
            Ok(Err(status)) => return Err(format!("enrol with the join token: {}", describe(&status))),
            Ok(Ok(answer)) => answer.into_inner(),
        };
        let valid = Duration::from_millis(answer.valid_ms);
        Ok(Held { certified: key.certified(answer.certificate_pem), ca_pem: ca_pem.to_owned(), since, valid })
    }
}

/// A refusal in one line. TLS refuses a certificate by an alert, which is the innermost cause of a transport error.
pub(super) fn describe(status: &tonic::Status) -> String {
    let message = status.message();
    match std::error::Error::source(status) {
        Some(source) => format!("{:?}: {message}: {}", status.code(), rpc::innermost(source)),
        None => format!("{:?}: {message}", status.code()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_renewed_when_a_third_of_its_life_is_left() {
        let day = Duration::from_secs(24 * 3600);
        let held = |days: u32| Some((true, days * day, 90 * day));
        assert_eq!(decide(None), Decision::None);
        assert_eq!(decide(held(0)), Decision::Keep);
        assert_eq!(decide(held(59)), Decision::Keep);
        assert_eq!(decide(held(60)), Decision::Old);
        assert_eq!(decide(held(400)), Decision::Old);
        assert_eq!(decide(Some((false, day, 90 * day))), Decision::OtherCa);
        assert_eq!(decide(Some((true, Duration::ZERO, Duration::ZERO))), Decision::Old, "one that is good for nothing");
    }
}
