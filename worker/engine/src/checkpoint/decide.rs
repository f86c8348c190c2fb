//! Whether a save that is due is made. Pure; the arguments are sums over ranks, so all ranks decide alike.

use trainctl_spec::job::WhenBusy;

use crate::schedule::SaveReason;

/// What stands in the way of a save, as counts of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Obstacles {
    /// Ranks that still write the save before.
    pub(super) busy: i64,
    /// Ranks that see too little room where checkpoints go.
    pub(super) full: i64,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Make it.
    Save,
    /// Leave it out: the run goes on on its last commit.
    Skip(String),
    /// It cannot be made: a failed save like any other.
    Fail(String),
}

/// Whether a save waits for the one before rather than giving way to it.
/// A run's last save always waits: without it steps would be lost on purpose.
pub(super) fn waits(reason: SaveReason, when_busy: WhenBusy) -> bool {
    is_last(reason) || when_busy == WhenBusy::Wait
}

/// Whether the run ends with this save.
pub(super) fn is_last(reason: SaveReason) -> bool {
    matches!(reason, SaveReason::Last | SaveReason::Stopping)
}

/// Decides on one save. `waits` is asked first, so `busy` ranks exist only where a save gives way; then nothing else is judged,
/// and a rank's saves of a kind end in the order of their steps.
pub(super) fn decide(obstacles: Obstacles, world_size: u32) -> Decision {
    match obstacles {
        Obstacles { busy: 0, full: 0 } => Decision::Save,
        Obstacles { busy: 0, full } => {
            Decision::Fail(format!("{full} of {world_size} ranks find too little free space"))
        }
        Obstacles { busy, .. } => Decision::Skip(format!(
            "{busy} of {world_size} ranks still write the save before, and checkpoint.when_busy is skip"
        )),
    }
}

/// How much room a save needs and finds; `None` if it is enough.
pub(super) fn shortage(needed: u64, free: u64, place: &str) -> Option<String> {
    // Headers, manifest, and what the file system keeps for itself.
    let needed = needed.saturating_add(needed / 100).saturating_add(1 << 20);
    (free < needed).then(|| {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        format!(
            "{place} has {} MiB free and the checkpoint needs {} MiB: free space there, or keep fewer checkpoints \
             (checkpoint.max_recent_checkpoints)",
            free >> 20,
            mib(needed)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_gives_way_only_where_the_spec_says_so_and_never_at_the_end() {
        assert!(waits(SaveReason::Every, WhenBusy::Wait));
        assert!(!waits(SaveReason::Every, WhenBusy::Skip) && !waits(SaveReason::Requested, WhenBusy::Skip));
        assert!(waits(SaveReason::Last, WhenBusy::Skip) && waits(SaveReason::Stopping, WhenBusy::Skip));
    }

    #[test]
    fn one_rank_in_the_way_is_enough_for_all() {
        let of = |busy, full| decide(Obstacles { busy, full }, 4);
        assert_eq!(of(0, 0), Decision::Save);
        let busy = "1 of 4 ranks still write the save before, and checkpoint.when_busy is skip".to_owned();
        assert_eq!(of(1, 0), Decision::Skip(busy.clone()));
        assert_eq!(of(0, 2), Decision::Fail("2 of 4 ranks find too little free space".to_owned()));
        assert_eq!(of(1, 2), Decision::Skip(busy), "the room is that of the save before");
    }

    #[test]
    fn a_shortage_says_what_is_needed_and_what_is_there() {
        assert_eq!(shortage(100 << 20, 102 << 20, "/runs"), None);
        let text = shortage(100 << 20, 101 << 20, "/runs").unwrap();
        assert!(text.starts_with("/runs has 101 MiB free and the checkpoint needs 102 MiB"), "{text}");
        assert!(shortage(u64::MAX, 0, "/runs").is_some());
    }
}
