//! From a URL and the environment to a client. One client for each bucket of a process, so that connections are shared.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::MultipartStore;
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};

use super::profile::{self, Profile};
use crate::error::{Error, Result};
use crate::location::{BucketUrl, Service};

/// What this module needs of a client.
pub(super) trait Backend: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Backend for T {}

/// A bucket's client, and what is known of the server.
pub(super) struct Client {
    pub(super) store: Arc<dyn Backend>,
    /// The server was seen to refuse a second conditional put of one key.
    pub(super) conditional: tokio::sync::OnceCell<()>,
}

/// A whole request, with its body: 16 MiB at 0.3 MB/s.
const REQUEST_TIMEOUT: &str = "60s";
const CONNECT_TIMEOUT: &str = "5s";

/// 10 tries in about a minute: a store that fails over is ridden out, one that is away is an error before the next save.
fn retries() -> RetryConfig {
    RetryConfig {
        // The client draws each pause at random between the first one and three times the last: jitter is built in.
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(10),
            base: 2.0,
        },
        max_retries: 10,
        retry_timeout: Duration::from_secs(120),
    }
}

/// The client of a bucket: made once in the life of a process.
pub(super) fn client(url: &BucketUrl) -> Result<Arc<Client>> {
    /// By service and bucket.
    type Clients = HashMap<(Service, String), Arc<Client>>;
    static CLIENTS: Mutex<Option<Clients>> = Mutex::new(None);
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    let clients = clients.get_or_insert_default();
    let key = (url.service(), url.bucket().to_owned());
    if let Some(client) = clients.get(&key) {
        return Ok(Arc::clone(client));
    }
    let client = Arc::new(Client { store: connect(url)?, conditional: tokio::sync::OnceCell::new() });
    clients.insert(key, Arc::clone(&client));
    Ok(client)
}

fn connect(url: &BucketUrl) -> Result<Arc<dyn Backend>> {
    install_tls();
    let wrong = |error: object_store::Error| Error::object("use", url, super::fault::explain(&error));
    Ok(match url.service() {
        Service::S3 => Arc::new(s3(url)?.build().map_err(wrong)?),
        Service::Gcs => {
            let key = GoogleConfigKey::Client;
            let builder = GoogleCloudStorageBuilder::from_env()
                .with_config(key(ClientConfigKey::Timeout), REQUEST_TIMEOUT)
                .with_config(key(ClientConfigKey::ConnectTimeout), CONNECT_TIMEOUT);
            Arc::new(builder.with_bucket_name(url.bucket()).with_retry(retries()).build().map_err(wrong)?)
        }
        Service::Azure => {
            let key = AzureConfigKey::Client;
            let builder = MicrosoftAzureBuilder::from_env()
                .with_config(key(ClientConfigKey::Timeout), REQUEST_TIMEOUT)
                .with_config(key(ClientConfigKey::ConnectTimeout), CONNECT_TIMEOUT);
            Arc::new(builder.with_container_name(url.bucket()).with_retry(retries()).build().map_err(wrong)?)
        }
    })
}

/// The environment first, then the profile of the AWS files, then what the machine itself offers (web identity, container,
/// instance), which the client tries by itself.
fn s3(url: &BucketUrl) -> Result<AmazonS3Builder> {
    let key = AmazonS3ConfigKey::Client;
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(url.bucket())
        .with_retry(retries())
        .with_config(key(ClientConfigKey::Timeout), REQUEST_TIMEOUT)
        .with_config(key(ClientConfigKey::ConnectTimeout), CONNECT_TIMEOUT);
    let is_set = |builder: &AmazonS3Builder, key: AmazonS3ConfigKey| builder.get_config_value(&key).is_some();
    let in_environment = is_set(&builder, AmazonS3ConfigKey::AccessKeyId);
    let by_machine = is_set(&builder, AmazonS3ConfigKey::WebIdentityTokenFile)
        || is_set(&builder, AmazonS3ConfigKey::ContainerCredentialsRelativeUri)
        || is_set(&builder, AmazonS3ConfigKey::ContainerCredentialsFullUri)
        || builder.get_config_value(&AmazonS3ConfigKey::SkipSignature).is_some_and(|value| value == "true");
    let files = profile::Files::from_env();
    let profile = files.read().map_err(|reason| Error::object("use", url, reason))?;
    for (key, value) in [(AmazonS3ConfigKey::Region, &profile.region), (AmazonS3ConfigKey::Endpoint, &profile.endpoint)]
    {
        let given = is_set(&builder, key)
            || (key == AmazonS3ConfigKey::Region && is_set(&builder, AmazonS3ConfigKey::DefaultRegion));
        if let Some(value) = value.as_ref().filter(|_| !given) {
            builder = builder.with_config(key, value);
        }
    }
    if in_environment {
        return Ok(builder);
    }
    match profile {
        Profile { keys: Some(_), .. } => Ok(builder.with_credentials(Arc::new(profile::Provider::new(files)))),
        Profile { other: Some(how), .. } if !by_machine => Err(Error::object("use", url, files.unsupported(&how))),
        _ if by_machine || !metadata_disabled() => Ok(builder),
        _ => Err(Error::object("use", url, files.nothing_found())),
    }
}

fn metadata_disabled() -> bool {
    std::env::var("AWS_EC2_METADATA_DISABLED").is_ok_and(|value| value.eq_ignore_ascii_case("true"))
}

/// rustls with ring, once: the HTTP client is built without a provider of its own.
fn install_tls() {
    if rustls::crypto::CryptoProvider::get_default().is_none()
        && rustls::crypto::ring::default_provider().install_default().is_err()
    {
        tracing::debug!("another thread was first to install the TLS provider");
    }
}
