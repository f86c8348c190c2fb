//! Checkpoints from a rank's point of view: what it saves, when that is durable, and how it loads.
//!
//! Every rank saves an even share of all parameters and of their optimizer state ([`deal()`]), so that all write at once
//! and every element is written once. The ranks write and report; only the coordinator commits (C2). Names carry the
//! generation, so a fenced writer can overwrite nothing.

mod deal;
mod decide;
mod digest;
mod earlier;
mod load;
mod pretrained;
mod retry;
mod save;
mod snapshot;
mod write;

pub use deal::{Piece, deal};
pub use load::{Together, VERIFY_ENV, load};
pub use pretrained::load_pretrained;
pub use save::Saver;
pub use snapshot::{Buffer, Plan, State};
pub use write::{Meta, TrainerState};

use tch::Kind;

/// Name prefix of first moments.
pub(crate) const EXP_AVG: &str = "exp_avg.";
/// Name prefix of second moments.
pub(crate) const EXP_AVG_SQ: &str = "exp_avg_sq.";
/// Name prefix of fp32 weights under `precision: bf16`.
pub(crate) const MASTER: &str = "master.";

/// safetensors' spelling of the kinds that a training state has.
pub(crate) fn dtype(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Float => Some("F32"),
        Kind::BFloat16 => Some("BF16"),
        _ => None,
    }
}
