//! The wire contract of trainctl.
//!
//! [`v1`] is generated from `trainctl/v1/*.proto`, where every field is described. Wire types stop at the door: daemons
//! convert them with the `TryFrom` implementations of [`convert`] and work with the types of `trainctl-spec`.

pub mod convert;

/// Generated messages, clients and servers of package `trainctl.v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("trainctl.v1");
}

/// The encoded `FileDescriptorSet`, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The path of every method of every service, as a request has it: `/trainctl.v1.Jobs/List`.
pub const METHODS: &[&str] = include!(concat!(env!("OUT_DIR"), "/methods.rs"));
