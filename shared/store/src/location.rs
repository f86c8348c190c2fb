//! Where checkpoints lie: a directory, or a prefix of a bucket.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use trainctl_spec::job::JobSpec;

use crate::error::{Error, Result};

/// A place for checkpoints: `runs/gpt2`, `file:///data/runs/gpt2`, `s3://bucket/prefix`, `gs://bucket/prefix` or
/// `az://container/prefix`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// A POSIX directory.
    Directory(PathBuf),
    /// A prefix of a bucket.
    Bucket(BucketUrl),
}

/// Who serves a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Amazon S3 and everything that speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage; the bucket is a container of the account that the environment names.
    Azure,
}

impl Service {
    /// The URL's scheme.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gcs => "gs",
            Self::Azure => "az",
        }
    }
}

/// A prefix of a bucket. The prefix has no slash at either end and may be empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BucketUrl {
    service: Service,
    bucket: String,
    prefix: String,
}

impl BucketUrl {
    /// Who serves it.
    pub fn service(&self) -> Service {
        self.service
    }

    /// The bucket or container.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The prefix of all keys.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The prefix below this one.
    #[must_use]
    pub fn join(&self, child: &str) -> Self {
        let prefix = if self.prefix.is_empty() { child.to_owned() } else { format!("{}/{child}", self.prefix) };
        Self { prefix, ..self.clone() }
    }
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.service.scheme(), self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

impl Location {
    /// Where a job's checkpoints lie: `checkpoint.checkpoint_dir`, or the run directory.
    ///
    /// # Errors
    /// [`Error::Location`].
    pub fn of_job(spec: &JobSpec) -> Result<Self> {
        match &spec.checkpoint.checkpoint_dir {
            Some(text) => text.parse(),
            None => Ok(Self::Directory(spec.run_dir.clone())),
        }
    }

    /// The directory, if it is one.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Directory(path) => Some(path),
            Self::Bucket(_) => None,
        }
    }

    /// The place below this one; `child` is a relative path without `.` or `..`.
    #[must_use]
    pub fn join(&self, child: &str) -> Self {
        match self {
            Self::Directory(path) => Self::Directory(path.join(child)),
            Self::Bucket(url) => Self::Bucket(url.join(child)),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Bucket(url) => url.fmt(f),
        }
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        Self::Directory(path)
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        Self::Directory(path.to_owned())
    }
}

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return match text {
                "" => Err(invalid(text, "it is empty")),
                path => Ok(Self::Directory(path.into())),
            };
        };
        let service = match scheme {
            "file" if rest.starts_with('/') => return Ok(Self::Directory(rest.into())),
            "file" => return Err(invalid(text, "a file:// URL names an absolute path: file:///data/runs")),
            "s3" => Service::S3,
            "gs" => Service::Gcs,
            "az" => Service::Azure,
            _ => {
                return Err(invalid(
                    text,
                    "use a directory, or a URL that begins with s3://, gs://, az:// or file:///",
                ));
            }
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.contains(['@', ':']) {
            // The text is not repeated: what stands there is probably a password.
            let reason =
                "leave user, password and port out of it: credentials and the endpoint come from the environment";
            return Err(invalid(&format!("{scheme}://…/{prefix}"), reason));
        }
        if bucket.is_empty() || !bucket.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
            return Err(invalid(text, "the bucket's name comes after the scheme: letters, digits, `-`, `.`, `_`"));
        }
        let prefix = prefix.trim_end_matches('/');
        let fine = |part: &str| !part.is_empty() && part != "." && part != "..";
        let odd = |c: char| c.is_control() || "?#%\\*".contains(c);
        if !prefix.is_empty() && (!prefix.split('/').all(fine) || prefix.contains(odd)) {
            return Err(invalid(text, "a prefix has no empty part, no `.` or `..`, and none of ? # % \\ *"));
        }
        Ok(Self::Bucket(BucketUrl { service, bucket: bucket.to_owned(), prefix: prefix.to_owned() }))
    }
}

fn invalid(text: &str, reason: &str) -> Error {
    Error::Location { text: text.to_owned(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Location> {
        text.parse()
    }

    #[test]
    fn directories_and_urls_are_told_apart_and_shown_as_they_were_written() {
        for text in ["runs/a", "/data/runs", "s3://bucket", "s3://my.bucket-1/a/b", "gs://b/x", "az://c/y"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("file:///data/x").unwrap(), Location::Directory("/data/x".into()));
        assert_eq!(parse("s3://bucket/a/").unwrap().to_string(), "s3://bucket/a");
        assert_eq!(parse("s3://bucket").unwrap().join("weights").to_string(), "s3://bucket/weights");
        assert_eq!(parse("s3://bucket/a").unwrap().join("weights").to_string(), "s3://bucket/a/weights");
        assert_eq!(parse("/data").unwrap().join("weights").directory(), Some(Path::new("/data/weights")));
    }

    #[test]
    fn what_is_no_place_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "empty"),
            ("http://host/x", "s3://"),
            ("file://data", "file:///"),
            ("s3:///a", "bucket's name"),
            ("s3://bu cket/a", "bucket's name"),
            ("s3://bucket/a//b", "empty part"),
            ("s3://bucket/../b", "`..`"),
            ("s3://bucket/a?versionId=1", "none of ?"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_password_in_a_url_is_refused_and_not_repeated() {
        let error = parse("s3://AKIAKEY:hunter2@bucket/a").unwrap_err().to_string();
        assert!(error.contains("environment") && !error.contains("hunter2") && !error.contains("AKIAKEY"), "{error}");
    }
}
