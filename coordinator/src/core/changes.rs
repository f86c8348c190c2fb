//! What the run directory's task changed of the checkpoints, told as events of the run.

use trainctl_spec::JobId;
use trainctl_spec::report::SaveKind;
use trainctl_store::layout::CheckpointName;

use super::saves::name_of;
use super::{Core, Effect, Moment};
use crate::events::Entry;
use crate::run_io::{Changes, Mended};

impl Core {
    /// A takeover mended what an earlier holder left, or retention ran apart from a commit.
    pub(super) fn mended(&mut self, id: &JobId, mended: Mended, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.pointers = mended.pointers;
        for (kind, changes) in mended.changes {
            self.changed(id, kind, changes, None, at, out);
        }
        self.publish(id, out);
    }

    /// `step`: that of the commit with which it was changed.
    pub(super) fn changed(
        &mut self,
        id: &JobId,
        kind: SaveKind,
        changes: Changes,
        step: Option<u64>,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let save = name_of(kind);
        let of = |what: &'static str, name: CheckpointName| {
            let entry = Entry::new(what).step(name.step).with("save", save.into());
            entry.with("checkpoint", name.to_string().into())
        };
        for name in changes.retired {
            let entry = of("checkpoint_retired", name).with("reason", "a dead generation committed it late".into());
            self.event_row(id, entry, at, out);
        }
        for name in changes.restored {
            let entry = of("checkpoint_restored", name).with("reason", "an earlier holder took it away late".into());
            self.event_row(id, entry, at, out);
        }
        for (pointer, from, to) in changes.moves {
            let entry = Entry::new("pointer_moved");
            let entry = step.map_or(entry.clone(), |step| entry.step(step)).with("pointer", pointer.into());
            self.event_row(id, entry.with("from", from.into()).with("to", to.into()), at, out);
        }
        for name in changes.pruned {
            let entry = Entry::new("checkpoint_pruned").with("save", save.into());
            self.event_row(id, entry.with("checkpoint", name.into()), at, out);
        }
        for key in changes.swept {
            self.event_row(id, Entry::new("orphan_removed").with("path", key.into()), at, out);
        }
    }
}
