//! Commands that were seen, with their answers (W1).

use std::collections::VecDeque;

use trainctl_proto::v1::CommandResult;

/// Command ids that are kept. A coordinator repeats only commands that it has no answer to.
const KEPT: usize = 1_024;

/// The last commands by id; an answer is absent while a command is being carried out.
#[derive(Debug, Default)]
pub(super) struct Results {
    known: VecDeque<(String, Option<CommandResult>)>,
}

impl Results {
    /// What is known of a command: nothing, that it is being carried out, or its answer.
    pub(super) fn of(&self, id: &str) -> Option<&Option<CommandResult>> {
        self.known.iter().find(|(known, _)| known == id).map(|(_, result)| result)
    }

    /// The command is being carried out.
    pub(super) fn pending(&mut self, id: &str) {
        if self.of(id).is_none() {
            self.known.push_back((id.to_owned(), None));
        }
        while self.known.len() > KEPT {
            self.known.pop_front();
        }
    }

    /// The command is answered.
    pub(super) fn answer(&mut self, result: CommandResult) {
        self.pending(&result.command_id);
        if let Some((_, slot)) = self.known.iter_mut().find(|(known, _)| *known == result.command_id) {
            *slot = Some(result);
        }
    }
}
