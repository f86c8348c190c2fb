//! `~/.aws/credentials` and `~/.aws/config`, which the client library does not read: static keys, region and endpoint of
//! one profile. Rotated keys are picked up while a job runs.
//!
//! Neither keys nor lines of these files are ever part of a message.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

/// How long keys are used before the files are read again.
const FRESH: Duration = Duration::from_secs(60);

/// Ways to get keys that need another program or service than a file.
const OTHER_WAYS: [&str; 5] = ["role_arn", "sso_session", "sso_start_url", "credential_process", "source_profile"];

/// Where the files are and which profile counts.
#[derive(Clone, Debug)]
pub(super) struct Files {
    profile: String,
    chosen: bool,
    credentials: PathBuf,
    config: PathBuf,
}

/// What a profile says.
#[derive(Default)]
pub(super) struct Profile {
    pub(super) keys: Option<Arc<AwsCredential>>,
    pub(super) region: Option<String>,
    pub(super) endpoint: Option<String>,
    /// It has no keys but names one of [`OTHER_WAYS`].
    pub(super) other: Option<String>,
}

impl Files {
    /// As the variables of the AWS tools say.
    pub(super) fn from_env() -> Self {
        let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        let file = |variable: &str, name: &str| {
            std::env::var_os(variable).map_or_else(|| home.join(".aws").join(name), PathBuf::from)
        };
        let profile = std::env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
        Self {
            chosen: profile.is_some(),
            profile: profile.unwrap_or_else(|| "default".to_owned()),
            credentials: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config: file("AWS_CONFIG_FILE", "config"),
        }
    }

    /// Reads the profile. Missing files are empty ones, unless `AWS_PROFILE` names a profile that is in neither.
    pub(super) fn read(&self) -> Result<Profile, String> {
        let credentials = read(&self.credentials)?;
        let config = read(&self.config)?;
        let in_config = match self.profile.as_str() {
            "default" => config.get("default"),
            name => config.get(&format!("profile {name}")),
        };
        let in_credentials = credentials.get(&self.profile);
        if self.chosen && in_config.is_none() && in_credentials.is_none() {
            return Err(format!(
                "AWS_PROFILE names the profile {}, which is neither in {} nor in {}",
                self.profile,
                self.credentials.display(),
                self.config.display()
            ));
        }
        let get = |key: &str| [in_credentials, in_config].into_iter().flatten().find_map(|section| section.get(key));
        let keys = match (get("aws_access_key_id"), get("aws_secret_access_key")) {
            (Some(id), Some(secret)) => Some(Arc::new(AwsCredential {
                key_id: id.clone(),
                secret_key: secret.clone(),
                token: get("aws_session_token").cloned(),
            })),
            (None, None) => None,
            _ => {
                let reason = "has only one of aws_access_key_id and aws_secret_access_key";
                return Err(format!("the profile {} of {} {reason}", self.profile, self.credentials.display()));
            }
        };
        let other = OTHER_WAYS.into_iter().find(|way| get(way).is_some()).filter(|_| keys.is_none());
        Ok(Profile {
            keys,
            region: get("region").cloned(),
            endpoint: get("endpoint_url").cloned(),
            other: other.map(str::to_owned),
        })
    }

    /// Why a profile with keys from elsewhere cannot be used, and what to do.
    pub(super) fn unsupported(&self, how: &str) -> String {
        let name = &self.profile;
        format!(
            "the profile {name} gets its keys by {how}, which is not supported here: export them with \
             `eval $(aws configure export-credentials --profile {name} --format env)`"
        )
    }

    /// Where keys were looked for.
    pub(super) fn nothing_found(&self) -> String {
        format!(
            "there are no credentials: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set, nor has the profile \
             {} any in {}, nor is there a web identity or a container's, and AWS_EC2_METADATA_DISABLED is true",
            self.profile,
            self.credentials.display()
        )
    }
}

/// Sections with their keys. What is not understood is left out: these files belong to other tools.
fn read(path: &Path) -> Result<BTreeMap<String, BTreeMap<String, String>>, String> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            return Ok(BTreeMap::new());
        }
        Err(e) => return Err(format!("{} cannot be read: {e}", path.display())),
    };
    let mut sections: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    let mut section = None;
    for line in text.lines() {
        let nested = line.starts_with([' ', '\t']);
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
            section = Some(sections.entry(name).or_default());
        } else if let (Some(section), Some((key, value)), false) = (&mut section, line.split_once('='), nested) {
            section.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    Ok(sections)
}

/// Keys of a profile, read again every minute.
pub(super) struct Provider {
    files: Files,
    known: Mutex<Option<(Instant, Arc<AwsCredential>)>>,
}

impl Provider {
    pub(super) fn new(files: Files) -> Self {
        Self { files, known: Mutex::new(None) }
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").field("files", &self.files).finish_non_exhaustive()
    }
}

#[async_trait]
impl CredentialProvider for Provider {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, keys)) = &*known
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(keys));
        }
        let read = self.files.read().and_then(|profile| profile.keys.ok_or_else(|| self.files.nothing_found()));
        match (read, &*known) {
            (Ok(keys), _) => {
                *known = Some((Instant::now(), Arc::clone(&keys)));
                Ok(keys)
            }
            // A file that is being rewritten: the old keys may still be good, and the server is the judge of that.
            (Err(reason), Some((_, keys))) => {
                tracing::warn!(%reason, "the AWS files cannot be read again; the keys that are known are used");
                Ok(Arc::clone(keys))
            }
            (Err(reason), None) => Err(object_store::Error::Generic { store: "S3", source: reason.into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(folder: &Path, profile: &str, credentials: &str, config: &str) -> Files {
        let files = Files {
            profile: profile.to_owned(),
            chosen: profile != "default",
            credentials: folder.join("credentials"),
            config: folder.join("config"),
        };
        std::fs::write(&files.credentials, credentials).unwrap();
        std::fs::write(&files.config, config).unwrap();
        files
    }

    const CREDENTIALS: &str = "\
# a comment
[default]
aws_access_key_id = AKIADEFAULT
aws_secret_access_key=default/secret+==

[lab]
aws_access_key_id = AKIALAB
aws_secret_access_key = lab-secret
aws_session_token = lab-token
";

    const CONFIG: &str = "\
[default]
region = eu-north-1
[profile  lab]
region = us-west-2
s3 =
  endpoint_url = http://nested.example
endpoint_url = https://s3.lab.example
[profile sso]
sso_session = corp
";

    #[test]
    fn keys_region_and_endpoint_of_a_profile_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let profile = files(folder.path(), "default", CREDENTIALS, CONFIG).read().unwrap();
        let keys = profile.keys.unwrap();
        assert_eq!((keys.key_id.as_str(), keys.secret_key.as_str()), ("AKIADEFAULT", "default/secret+=="));
        assert_eq!((profile.region.as_deref(), profile.endpoint), (Some("eu-north-1"), None));
        let profile = files(folder.path(), "lab", CREDENTIALS, CONFIG).read().unwrap();
        assert_eq!(profile.keys.unwrap().token.as_deref(), Some("lab-token"));
        assert_eq!(profile.endpoint.as_deref(), Some("https://s3.lab.example"));
    }

    #[test]
    fn what_cannot_be_used_is_said_without_any_key() {
        let folder = tempfile::tempdir().unwrap();
        let sso = files(folder.path(), "sso", CREDENTIALS, CONFIG);
        let how = sso.read().unwrap().other.unwrap();
        assert!(sso.unsupported(&how).contains("--profile sso"), "{}", sso.unsupported(&how));
        let unknown = files(folder.path(), "nobody", CREDENTIALS, CONFIG).read().err().unwrap();
        assert!(unknown.contains("nobody") && !unknown.contains("AKIA"), "{unknown}");
        let half =
            files(folder.path(), "default", "[default]\naws_access_key_id = AKIAHALF\n", "").read().err().unwrap();
        assert!(half.contains("only one of") && !half.contains("AKIAHALF"), "{half}");
        std::fs::remove_file(folder.path().join("credentials")).unwrap();
        let absent = Files { credentials: folder.path().join("credentials"), ..sso };
        assert!(Files { profile: "default".into(), chosen: false, ..absent }.read().unwrap().keys.is_none());
    }

    #[tokio::test]
    async fn a_file_that_is_being_rewritten_does_not_lose_the_keys() {
        let folder = tempfile::tempdir().unwrap();
        let provider = Provider::new(files(folder.path(), "default", CREDENTIALS, CONFIG));
        assert_eq!(provider.get_credential().await.unwrap().key_id, "AKIADEFAULT");
        std::fs::write(folder.path().join("credentials"), "").unwrap();
        if let Some((at, _)) = &mut *provider.known.lock().unwrap() {
            *at = at.checked_sub(FRESH).unwrap();
        }
        assert_eq!(provider.get_credential().await.unwrap().key_id, "AKIADEFAULT");
        assert!(!format!("{provider:?}").contains("AKIA"));
    }
}
