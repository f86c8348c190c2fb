//! Is a row still of use?
//!
//! A worker that was cut off sends its rows late: they may reach the run directory's task behind the work before the next
//! formation, which has cut the file back to the new start. Written then, they would stand where the new generation's rows
//! belong (J3).

use trainctl_spec::Generation;

/// The decision on one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowUse {
    /// It belongs into its file, unless its step is there.
    Write,
    /// A later generation has begun: its steps are run again, or were before its start and are in the file.
    Drop {
        /// That generation.
        begun: Generation,
    },
}

/// Decides on a row of `generation` when `begun` is the newest one that was prepared.
pub fn decide_row(generation: u64, begun: Option<Generation>) -> RowUse {
    match begun {
        Some(begun) if generation < begun.0 => RowUse::Drop { begun },
        _ => RowUse::Write,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn j3_a_row_of_an_earlier_generation_is_dropped_once_the_next_has_begun() {
        assert_eq!(decide_row(2, None), RowUse::Write);
        assert_eq!(decide_row(2, Some(Generation(2))), RowUse::Write);
        assert_eq!(decide_row(2, Some(Generation(3))), RowUse::Drop { begun: Generation(3) });
    }
}
