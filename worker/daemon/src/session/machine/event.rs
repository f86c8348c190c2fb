//! The words of the session machine: what it is told, and what it wants done.

use std::time::Duration;

use trainctl_proto::v1::{
    Ack, Assignment, CommandResult, Health, Heartbeat, Place, Probe, ProbeResult, RankReport, TrainerControl,
    coordinator_message::Body as Command,
};

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A stream is open and the Hello is on its way.
    Connected,
    /// There is no stream any more, or a dial failed. `retry_in` is the back-off's next delay.
    Disconnected {
        /// Why, for the log.
        reason: String,
        /// When to dial again.
        retry_in: Duration,
    },
    /// The coordinator said something.
    Heard(Command),
    /// The trainer said something that is not spooled.
    Said(RankReport),
    /// Where the trainer is, by its page: before each tick.
    Place(Place),
    /// The trainer that [`Effect::Start`] asked for exists.
    Started {
        /// Its process id.
        pid: u32,
        /// Clock ticks since boot.
        start_time: u64,
    },
    /// It could not be started; nothing of it is left.
    StartFailed {
        /// Why.
        reason: String,
    },
    /// The trainer has ended; it is being cleaned up after.
    Ended,
    /// The trainer has ended, but something of it cannot be killed.
    Stuck {
        /// What.
        reason: String,
    },
    /// The trainer and everything of it is gone and its exit is spooled.
    Gone,
    /// The worker measured itself.
    Measured(Health),
    /// What [`Effect::Probe`] asked for was looked at.
    Probed(ProbeResult),
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Open a stream.
    Dial,
    /// Drop the stream.
    HangUp {
        /// Why, for the log.
        reason: String,
    },
    /// Send a message that is not spooled; lost when there is no stream.
    Send(Outgoing),
    /// The stream is welcome: send what the spool holds.
    Pump,
    /// Store the fences durably, before the effects that follow (W3).
    Remember,
    /// Start a trainer.
    Start(Box<Assignment>),
    /// Kill the trainer and everything of it.
    Kill {
        /// What its waiting calls are told.
        reason: String,
    },
    /// Hand a request to the trainer.
    Control(TrainerControl),
    /// Find out what the trainer's threads are doing.
    DumpStacks,
    /// Look at a run directory, at peers.
    Probe(Probe),
    /// The coordinator has the spool up to here.
    Acked(Ack),
}

/// A message that is not spooled.
#[derive(Clone, Debug, PartialEq)]
pub enum Outgoing {
    /// Once a second.
    Heartbeat(Heartbeat),
    /// Answer to a command.
    Result(CommandResult),
    /// From the trainer.
    Report(Box<RankReport>),
    /// The newest measurement.
    Health(Health),
    /// Answer to a probe.
    Probed(ProbeResult),
}
