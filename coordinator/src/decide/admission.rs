//! May a worker take a rank now, and if not, why not?

/// What is known of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its stream is up.
    pub is_connected: bool,
    /// Everything that it had spooled when it dialled has arrived: what it says it runs is what it runs.
    pub is_drained: bool,
    /// It refused a start a moment ago.
    pub is_avoided: bool,
    /// It carries a rank, or the trainer of one that is over.
    pub is_busy: bool,
    /// It is quarantined.
    pub is_quarantined: bool,
}

/// Why it takes none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It cannot be reached.
    Away,
    /// It still delivers what it had spooled.
    Settling,
    /// It carries something.
    Busy,
    /// It refused a start.
    Avoided,
    /// Only its quarantine stands in the way.
    Quarantined,
}

/// A quarantine is named last: where it is the answer, nothing but it keeps the worker from a rank.
///
/// # Errors
/// The first reason that stands against it.
pub fn decide_admission(standing: &Standing) -> Result<(), Refusal> {
    match standing {
        Standing { is_connected: false, .. } => Err(Refusal::Away),
        Standing { is_drained: false, .. } => Err(Refusal::Settling),
        Standing { is_busy: true, .. } => Err(Refusal::Busy),
        Standing { is_avoided: true, .. } => Err(Refusal::Avoided),
        Standing { is_quarantined: true, .. } => Err(Refusal::Quarantined),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: Standing =
        Standing { is_connected: true, is_drained: true, is_avoided: false, is_busy: false, is_quarantined: false };

    #[test]
    fn a_free_worker_is_admitted_and_each_hindrance_is_named() {
        assert_eq!(decide_admission(&FREE), Ok(()));
        let cases = [
            (Standing { is_connected: false, ..FREE }, Refusal::Away),
            (Standing { is_drained: false, ..FREE }, Refusal::Settling),
            (Standing { is_busy: true, ..FREE }, Refusal::Busy),
            (Standing { is_avoided: true, ..FREE }, Refusal::Avoided),
            (Standing { is_quarantined: true, ..FREE }, Refusal::Quarantined),
        ];
        for (standing, refusal) in cases {
            assert_eq!(decide_admission(&standing), Err(refusal));
        }
    }

    #[test]
    fn a_quarantine_is_the_reason_only_where_nothing_else_is() {
        let busy = Standing { is_busy: true, is_quarantined: true, ..FREE };
        assert_eq!(decide_admission(&busy), Err(Refusal::Busy));
    }
}
