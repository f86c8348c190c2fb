//! Certificates of workers, for listeners that speak TLS.
//!
//! A worker makes its key in memory, asks for a certificate with the join token (`Workers.Enroll`), and from then on proves
//! itself by it. The certificate says `trainctl://role/worker/<id>`; the coordinator takes nothing else from the request than
//! its public key. The CA stays over restarts, so certificates do too. Their times are judged by wall clocks of necessity;
//! [`SKEW`] is allowed for.

use std::time::Duration;

use rcgen::{CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};
use tonic::transport::Identity;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// How long a worker's certificate is valid.
pub const LIFE: Duration = Duration::from_secs(90 * 24 * 3600);
/// How far the clock of whoever checks a certificate may be behind its issuer's.
pub const SKEW: Duration = Duration::from_secs(600);

const PREFIX: &str = "trainctl://role/worker/";
/// Bytes of a worker id.
const MAX_ID: usize = 256;

/// Why a certificate cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No id for a worker.
    #[error("{0:?} is no worker id: it must have 1 to {MAX_ID} bytes")]
    WorkerId(String),
    /// The request is not one.
    #[error("the certificate request cannot be used: {0}")]
    Request(String),
    /// The certificate is not one of ours.
    #[error("the certificate names no worker: {0}")]
    NotAWorkers(String),
    /// The certificate has ended.
    #[error("the certificate has expired")]
    Over,
    /// A key or certificate cannot be made.
    #[error("make a key or certificate: {0}")]
    Make(String),
}

/// A worker's key and the certificate for it. Its `Debug` shows nothing; it is never written anywhere.
#[derive(Clone)]
pub struct Certified {
    certificate_pem: String,
    key_pem: String,
}

impl std::fmt::Debug for Certified {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Certified(…)")
    }
}

impl Certified {
    pub(crate) fn identity(&self) -> Identity {
        Identity::from_pem(&self.certificate_pem, &self.key_pem)
    }
}

/// A key that has no certificate yet. Its `Debug` shows nothing.
pub struct Key(KeyPair);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Key {
    /// A new one.
    ///
    /// # Errors
    /// [`Error::Make`].
    pub fn generate() -> Result<Self, Error> {
        KeyPair::generate().map(Self).map_err(|error| Error::Make(error.to_string()))
    }

    /// The request for a certificate, DER.
    ///
    /// # Errors
    /// [`Error::Make`].
    pub fn request(&self) -> Result<Vec<u8>, Error> {
        let request = CertificateParams::new(Vec::<String>::new()).and_then(|params| params.serialize_request(&self.0));
        request.map(|request| request.der().to_vec()).map_err(|error| Error::Make(error.to_string()))
    }

    /// With the certificate that was given for it.
    #[must_use]
    pub fn certified(self, certificate_pem: String) -> Certified {
        Certified { certificate_pem, key_pem: self.0.serialize_pem() }
    }
}

/// Signs a worker's request: for this id, from [`SKEW`] before `now_ms` to `life` after it.
pub(crate) fn sign(
    issuer: &rcgen::Issuer<'_, KeyPair>,
    worker_id: &str,
    request: &[u8],
    now_ms: u64,
    life: Duration,
) -> Result<String, Error> {
    if worker_id.is_empty() || worker_id.len() > MAX_ID {
        return Err(Error::WorkerId(worker_id.chars().take(MAX_ID).collect()));
    }
    let request = CertificateSigningRequestParams::from_der(&request.into())
        .map_err(|error| Error::Request(error.to_string()))?;
    let make = |error: rcgen::Error| Error::Make(error.to_string());
    let mut params = CertificateParams::new(Vec::<String>::new()).map_err(make)?;
    params.distinguished_name.push(DnType::OrganizationalUnitName, "worker");
    let uri = format!("{PREFIX}{}", encode(worker_id)).try_into().map_err(make)?;
    params.subject_alt_names = vec![SanType::URI(uri)];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let now = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_millis(now_ms);
    (params.not_before, params.not_after) = (now - SKEW, now + life);
    Ok(params.signed_by(&request.public_key, issuer).map_err(make)?.pem())
}

/// The worker that a certificate (DER) names. Signature and times were TLS's to check when the certificate was shown; that
/// it has ended is looked at again, since a session of TLS may be resumed for a day without showing it.
///
/// # Errors
/// [`Error::NotAWorkers`], [`Error::Over`].
pub fn worker_of(certificate: &[u8], now_ms: u64) -> Result<String, Error> {
    let not_ours = |why: &dyn std::fmt::Display| Error::NotAWorkers(why.to_string());
    let (_, certificate) = X509Certificate::from_der(certificate).map_err(|error| not_ours(&error))?;
    let ends = certificate.validity().not_after.timestamp();
    if i64::try_from(now_ms / 1000).is_ok_and(|now| now > ends) {
        return Err(Error::Over);
    }
    let names = certificate.subject_alternative_name().map_err(|error| not_ours(&error))?;
    let names = names.ok_or_else(|| not_ours(&"it has no alternative name"))?;
    let [GeneralName::URI(uri)] = names.value.general_names.as_slice() else {
        return Err(not_ours(&"it must have one alternative name, a URI"));
    };
    let id = uri.strip_prefix(PREFIX).and_then(decode);
    id.ok_or_else(|| not_ours(&format_args!("{uri:?} does not begin with {PREFIX} and go on with an id")))
}

/// RFC 3986: all but unreserved characters as `%XX`.
fn encode(id: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    id.bytes().map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut id = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let pair = [bytes.next()?, bytes.next()?];
            id.push(u8::from_str_radix(std::str::from_utf8(&pair).ok()?, 16).ok()?);
        } else {
            id.push(byte);
        }
    }
    String::from_utf8(id).ok().filter(|id| !id.is_empty())
}

#[cfg(test)]
mod tests {
    use rcgen::Issuer;

    use super::*;

    fn issuer() -> Issuer<'static, KeyPair> {
        let params = CertificateParams::new(Vec::<String>::new()).expect("parameters");
        Issuer::new(params, KeyPair::generate().expect("key"))
    }

    fn der(pem: &str) -> Vec<u8> {
        x509_parser::pem::parse_x509_pem(pem.as_bytes()).expect("PEM").1.contents
    }

    #[test]
    fn a_certificate_names_its_worker_and_its_times() {
        let now_ms = 1_800_000_000_123;
        for id in ["w0", "node 7/β%", &"x".repeat(MAX_ID)] {
            let key = Key::generate().expect("key");
            let pem = sign(&issuer(), id, &key.request().expect("request"), now_ms, LIFE).expect("sign");
            let der = der(&pem);
            assert_eq!(worker_of(&der, now_ms).expect("worker"), id);
            let end_ms = now_ms + 90 * 24 * 3_600_000;
            assert!(matches!(worker_of(&der, end_ms + 1000), Err(Error::Over)));
            let (_, certificate) = X509Certificate::from_der(&der).expect("certificate");
            let validity = certificate.validity();
            assert_eq!(validity.not_before.timestamp(), 1_800_000_000 - 600);
            assert_eq!(validity.not_after.timestamp(), 1_800_000_000 + 90 * 24 * 3600);
            assert!(!certificate.is_ca());
        }
    }

    #[test]
    fn what_is_no_request_or_no_workers_certificate_is_refused() {
        let key = Key::generate().expect("key");
        let request = key.request().expect("request");
        for id in ["", &"x".repeat(MAX_ID + 1)] {
            assert!(matches!(sign(&issuer(), id, &request, 0, LIFE), Err(Error::WorkerId(_))));
        }
        let mut forged = request.clone();
        let last = forged.len() - 1;
        forged[last] ^= 1;
        for bytes in [&b"noise"[..], &[], &forged] {
            assert!(matches!(sign(&issuer(), "w0", bytes, 0, LIFE), Err(Error::Request(_))));
        }
        let params = CertificateParams::new(vec!["coordinator".to_owned()]).expect("parameters");
        let own = params.self_signed(&KeyPair::generate().expect("key")).expect("sign");
        assert!(matches!(worker_of(own.der(), 0), Err(Error::NotAWorkers(_))));
        assert!(matches!(worker_of(b"noise", 0), Err(Error::NotAWorkers(_))));
        for text in ["%", "%4", "%zz", "%ff", ""] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
