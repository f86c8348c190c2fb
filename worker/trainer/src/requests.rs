//! What the worker has asked for and the engine reads once per step.

use std::sync::atomic::{AtomicBool, Ordering};

use trainctl_engine::Requests;
use trainctl_proto::v1::{TrainerControl, trainer_control::Request};

/// Requests that came in. A stop stays; a save is cleared when a save begins.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    stop: AtomicBool,
    save: AtomicBool,
    sealed: AtomicBool,
}

impl Pending {
    /// Notes a request. The worker has checked its fence.
    pub(crate) fn take(&self, control: &TrainerControl) {
        match &control.request {
            Some(Request::Stop(_)) => self.stop.store(true, Ordering::Release),
            Some(Request::Save(_)) => self.save.store(true, Ordering::Release),
            Some(Request::Sealed(_)) => self.sealed.store(true, Ordering::Release),
            Some(Request::DumpStacks(_)) | None => {
                tracing::warn!("a request of a kind that this trainer does not know: ignored")
            }
        }
    }

    /// What is asked now.
    pub(crate) fn now(&self) -> Requests {
        Requests { stop: self.stop.load(Ordering::Acquire), save: self.save.load(Ordering::Acquire) }
    }

    /// A save of the current step begins: it answers every save request so far.
    pub(crate) fn save_begins(&self) {
        self.save.store(false, Ordering::Release);
    }

    /// Whether the rendezvous store is sealed.
    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use trainctl_proto::v1::{SaveRequest, Sealed, StopRequest};

    use super::*;

    #[test]
    fn a_stop_stays_and_a_save_is_answered_by_a_save() {
        let pending = Pending::default();
        assert_eq!(pending.now(), Requests::default());
        let control = |request| TrainerControl { fence: None, request: Some(request) };
        pending.take(&control(Request::Save(SaveRequest {})));
        pending.take(&control(Request::Stop(StopRequest {})));
        assert_eq!(pending.now(), Requests { stop: true, save: true });
        pending.save_begins();
        assert_eq!(pending.now(), Requests { stop: true, save: false });
        assert!(!pending.is_sealed());
        pending.take(&control(Request::Sealed(Sealed {})));
        assert!(pending.is_sealed());
    }
}
