//! TLS of a non-loopback listener: a CA of the run's own and a server certificate under the fixed name `coordinator`, so
//! that no host name and no address has to be right in it. The same CA signs the workers' certificates
//! ([`crate::certificates`]); a client may show one, and one that is not of this CA, or out of date, ends the handshake.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use crate::{certificates, files};

/// The name that clients expect in the server's certificate.
pub const SERVER_NAME: &str = "coordinator";

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the CA cannot be read or written.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A certificate or key is not one.
    #[error("certificate authority in {path}: {reason}; delete the folder and start the coordinator again")]
    Certificate {
        /// The CA's folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A listener that other machines reach would speak in the clear.
    #[error("{0} can be reached from other machines and has no TLS: refusing to listen there without it")]
    Clear(IpAddr),
}

/// What a TLS server needs, and what its clients need.
#[derive(Clone)]
pub struct ServerTls {
    /// For tonic's server.
    pub config: ServerTlsConfig,
    /// The CA's certificate, for `endpoint.json`.
    pub ca_pem: String,
    /// Signs workers' certificates.
    pub authority: Authority,
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerTls(…)")
    }
}

/// The run's CA. Clones are the same one; its `Debug` shows nothing.
#[derive(Clone)]
pub struct Authority(Arc<Issuer<'static, KeyPair>>);

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority(…)")
    }
}

impl Authority {
    /// Signs a worker's request ([`certificates::Key::request`]), for `life` from `now_ms`; the certificate as PEM.
    ///
    /// # Errors
    /// [`certificates::Error`].
    pub fn sign(
        &self,
        worker_id: &str,
        request: &[u8],
        now_ms: u64,
        life: Duration,
    ) -> Result<String, certificates::Error> {
        certificates::sign(&self.0, worker_id, request, now_ms, life)
    }
}

/// Whether a listener on `address` must speak TLS: everything but loopback.
#[must_use]
pub fn required(address: IpAddr) -> bool {
    !address.to_canonical().is_loopback()
}

/// Refuses a non-loopback listener without TLS. Every server calls it before it binds.
///
/// # Errors
/// [`Error::Clear`].
pub fn check_listener(address: IpAddr, tls: Option<&ServerTls>) -> Result<(), Error> {
    if required(address) && tls.is_none() { Err(Error::Clear(address)) } else { Ok(()) }
}

/// The TLS set-up for a listener on `address`: `None` on loopback, else [`load_or_create`].
///
/// # Errors
/// As [`load_or_create`].
pub fn for_listener(address: IpAddr, state_dir: &Path) -> Result<Option<ServerTls>, Error> {
    if required(address) { load_or_create(state_dir).map(Some) } else { Ok(None) }
}

/// The CA of `<state>/ca` (made at the first start: folder 0700, files 0600) and a fresh server certificate from it.
///
/// # Errors
/// [`Error::Io`], [`Error::Certificate`].
pub fn load_or_create(state_dir: &Path) -> Result<ServerTls, Error> {
    let dir = state_dir.join("ca");
    let broken = |error: rcgen::Error| Error::Certificate { path: dir.clone(), reason: error.to_string() };
    let (key_path, certificate_path) = (dir.join("ca.key"), dir.join("ca.pem"));
    if !certificate_path.exists() {
        create_private_dir(&dir)?;
        let key = KeyPair::generate().map_err(broken)?;
        let certificate = ca_params().and_then(|params| params.self_signed(&key)).map_err(broken)?;
        write(&key_path, &key.serialize_pem())?;
        // The certificate last: its presence says that the key is whole.
        write(&certificate_path, &certificate.pem())?;
    }
    let key = KeyPair::from_pem(&read(&key_path)?).map_err(broken)?;
    let ca_pem = read(&certificate_path)?;
    let issuer = Issuer::new(ca_params().map_err(broken)?, key);
    let server_key = KeyPair::generate().map_err(broken)?;
    let server = server_params().and_then(|params| params.signed_by(&server_key, &issuer)).map_err(broken)?;
    let identity = Identity::from_pem(server.pem(), server_key.serialize_pem());
    // Optional, since people and those who enrol have none.
    let config = ServerTlsConfig::new()
        .identity(identity)
        .client_ca_root(Certificate::from_pem(&ca_pem))
        .client_auth_optional(true);
    Ok(ServerTls { config, ca_pem, authority: Authority(Arc::new(issuer)) })
}

fn ca_params() -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.distinguished_name.push(DnType::CommonName, "trainctl run CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn server_params() -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, SERVER_NAME);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    Ok(params)
}

fn create_private_dir(dir: &Path) -> Result<(), Error> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|source| Error::Io {
        action: "create",
        path: dir.to_owned(),
        source,
    })
}

fn write(path: &Path, pem: &str) -> Result<(), Error> {
    files::write_atomically(path, pem.as_bytes(), 0o600).map_err(|source| Error::Io {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_may_speak_in_the_clear() {
        for (address, tls) in [("127.0.0.1", false), ("127.9.9.9", false), ("::1", false), ("::ffff:127.0.0.1", false)]
        {
            assert_eq!(required(address.parse().expect("address")), tls, "{address}");
        }
        for address in ["0.0.0.0", "::", "10.0.0.7", "fe80::1"] {
            let address = address.parse().expect("address");
            assert!(matches!(check_listener(address, None), Err(Error::Clear(_))), "{address}");
        }
    }

    #[test]
    fn the_ca_lives_as_long_as_the_run() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let first = load_or_create(dir.path()).expect("create").ca_pem;
        assert_eq!(load_or_create(dir.path()).expect("load").ca_pem, first);
    }
}
