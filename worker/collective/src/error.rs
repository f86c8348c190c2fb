//! What can go wrong, sorted by what the caller does about it.

use crate::store::KvError;

/// An error of this crate. Lost peers, timeouts and aborted groups are consequences: the cause lies with another rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The rendezvous failed because the key-value store answered with an error.
    #[error("{operation}: the rendezvous store answered: {source}")]
    Store {
        /// The call that failed.
        operation: &'static str,
        /// The store's own error.
        source: KvError,
    },
    /// The connection to a peer is gone: it died, or it closed its group.
    #[error("{operation}: a peer was lost: {message}")]
    PeerLost {
        /// The call that failed.
        operation: &'static str,
        /// c10d's text.
        message: String,
    },
    /// The operation's own timeout passed.
    #[error("{operation}: timed out: {message}")]
    Timeout {
        /// The call that failed.
        operation: &'static str,
        /// c10d's text.
        message: String,
    },
    /// [`ProcessGroup::abort`](crate::ProcessGroup::abort) was called.
    #[error("{operation}: the process group was aborted: {reason}")]
    Aborted {
        /// The call that failed.
        operation: &'static str,
        /// The reason given to `abort`.
        reason: String,
    },
    /// An argument that could not be passed on.
    #[error("{operation}: {message}")]
    Argument {
        /// The call that failed.
        operation: &'static str,
        /// What is wrong and what is allowed.
        message: String,
    },
    /// CUDA or the NCCL plug-in could not be opened.
    #[error("{operation}: cannot open {library}: {message}")]
    Library {
        /// The call that failed.
        operation: &'static str,
        /// The shared object.
        library: String,
        /// The loader's text and the remedy.
        message: String,
    },
    /// Any other error of libtorch.
    #[error("{operation}: libtorch: {message}")]
    Torch {
        /// The call that failed.
        operation: &'static str,
        /// libtorch's text without its C++ backtrace.
        message: String,
    },
}

impl Error {
    /// Whether this failure only tells that another rank (or the caller of `abort`) ended first.
    pub fn is_consequence(&self) -> bool {
        matches!(self, Self::PeerLost { .. } | Self::Timeout { .. } | Self::Aborted { .. } | Self::Store { .. })
    }
}

/// Texts of Gloo (transport/tcp/pair.cc), of the kernel and of NCCL that mean "the other side is gone".
const PEER_LOST: [&str; 8] = [
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "connection refused",
    "software caused connection abort",
    "remote process exited",
    "connection was likely closed",
];

/// Texts of Gloo, c10d and NCCL's watchdog that mean "our own deadline passed".
const TIMEOUT: [&str; 4] = ["timed out", "timeout", "time out", "deadline exceeded"];

/// Sorts a text of c10d. A lost peer wins over a timeout, since Gloo names the time-out setting in some of its I/O errors.
pub(crate) fn classify(operation: &'static str, message: String) -> Error {
    let lower = message.to_lowercase();
    if PEER_LOST.iter().any(|text| lower.contains(text)) {
        Error::PeerLost { operation, message }
    } else if TIMEOUT.iter().any(|text| lower.contains(text)) {
        Error::Timeout { operation, message }
    } else {
        Error::Torch { operation, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_sorted_by_what_they_mean() {
        let kind = |text: &str| classify("test", text.to_owned());
        for text in [
            "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:39041",
            "[gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer",
            "writev [127.0.0.1]:1: Broken pipe",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exited prematurely.",
        ] {
            assert!(matches!(kind(text), Error::PeerLost { .. }), "{text}");
        }
        let text = "[gloo/transport/tcp/unbound_buffer.cc:82] Timed out waiting 5000ms for recv operation to complete";
        assert!(matches!(kind(text), Error::Timeout { .. }), "{text}");
        assert!(matches!(kind("Invalid scalar type"), Error::Torch { .. }));
    }
}
