//! The worker's life with its coordinator.
//!
//! [`Machine`](machine::Machine) decides: pure, events and the time in, effects out. [`Owner`](owner::Owner) is the one
//! task that owns it and carries the effects out. Transport, clock and processes are traits, so a simulator can run both.
//!
//! - **W1** A command is carried out once per command id; a repeat is answered with the stored result (J7).
//! - **W2** A command of a lower term, or of a generation that is over here, changes nothing and is answered with the
//!   current fence (J2, J3). Numbers are compared within one run directory only.
//! - **W3** The highest fence is on the disk before a command that raises it is carried out.
//! - **W4** A trainer starts only when its predecessor, with everything that descends from it, is gone and its exit is
//!   spooled. A start that comes between the predecessor's end and that moment waits for it.
//! - **W5** A coordinator that is silent for its lease is dialled again, for ever, at most a second apart (P5).

mod identity;
pub mod machine;
pub mod owner;
mod pump;
mod results;
pub mod transport;

#[cfg(test)]
mod machine_tests;
#[cfg(test)]
mod owner_tests;
#[cfg(test)]
mod transport_tests;
