//! `s3s-fs` with conditional puts that are atomic: it looks for the key and then writes, so both happen under the key's lock.
//! Without conditions (a switch) it overwrites, as old servers do.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use s3s::dto::*;
use s3s::{S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result};
use s3s_fs::FileSystem;

use super::Control;

pub(super) struct Store {
    files: FileSystem,
    control: Arc<Control>,
    locks: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

impl Store {
    pub(super) fn new(files: FileSystem, control: Arc<Control>) -> Self {
        Self { files, control, locks: Mutex::default() }
    }

    async fn lock(&self, bucket: &str, key: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(locks.entry(format!("{bucket}/{key}")).or_default())
        };
        lock.lock_owned().await
    }
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = S3Result<S3Response<T>>> + Send + 'a>>;

/// The calls that pass through unchanged. Written as `async_trait` would, which does not look into macros.
macro_rules! pass {
    ($($name:ident: $input:ident -> $output:ident;)*) => {
        $(fn $name<'a, 'b>(&'a self, request: S3Request<$input>) -> Answer<'b, $output>
        where
            'a: 'b,
            Self: 'b,
        {
            self.files.$name(request)
        })*
    };
}

/// S3's answer for an upload that was completed, aborted or never begun; `s3s-fs` says that access is denied.
fn no_such_upload(error: S3Error) -> S3Error {
    match error.code() {
        S3ErrorCode::AccessDenied => S3Error::new(S3ErrorCode::NoSuchUpload),
        _ => error,
    }
}

#[async_trait::async_trait]
impl S3 for Store {
    pass! {
        create_bucket: CreateBucketInput -> CreateBucketOutput;
        head_bucket: HeadBucketInput -> HeadBucketOutput;
        get_object: GetObjectInput -> GetObjectOutput;
        head_object: HeadObjectInput -> HeadObjectOutput;
        list_objects_v2: ListObjectsV2Input -> ListObjectsV2Output;
        delete_objects: DeleteObjectsInput -> DeleteObjectsOutput;
        create_multipart_upload: CreateMultipartUploadInput -> CreateMultipartUploadOutput;
        list_parts: ListPartsInput -> ListPartsOutput;
    }

    async fn put_object(&self, mut request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let _held = self.lock(&request.input.bucket, &request.input.key).await;
        if self.control.switches().ignore_conditions {
            request.input.if_none_match = None;
            request.input.if_match = None;
        }
        self.files.put_object(request).await
    }

    async fn delete_object(&self, request: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        let _held = self.lock(&request.input.bucket, &request.input.key).await;
        self.files.delete_object(request).await
    }

    async fn upload_part(&self, request: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        self.files.upload_part(request).await.map_err(no_such_upload)
    }

    async fn complete_multipart_upload(
        &self,
        mut request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let _held = self.lock(&request.input.bucket, &request.input.key).await;
        if self.control.switches().ignore_conditions {
            request.input.if_none_match = None;
            request.input.if_match = None;
        }
        self.files.complete_multipart_upload(request).await.map_err(no_such_upload)
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        self.files.abort_multipart_upload(request).await.map_err(no_such_upload)
    }
}
