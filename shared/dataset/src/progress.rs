//! How long operations say how far they are.

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Bytes of input read.
    pub bytes: u64,
    /// Bytes of input in all; 0 while unknown.
    pub total_bytes: u64,
    /// Documents done.
    pub documents: u64,
    /// Tokens made; 0 where there are none.
    pub tokens: u64,
}

/// Receives the counts of a long operation a few times a second at most.
pub trait Progress {
    /// Called with the totals so far, and once at the end.
    fn update(&mut self, counts: &Counts);
}

/// Shows nothing.
impl Progress for () {
    fn update(&mut self, _counts: &Counts) {}
}
