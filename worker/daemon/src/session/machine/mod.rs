//! The session's decisions as a pure state machine. No I/O, no clock: `now` is an argument, effects are the answer.

mod commands;
mod event;

use std::time::Duration;

use trainctl_proto::v1::{
    Assignment, Fence, Health, Heartbeat, Phase, Place, RankReport, RunningTrainer, StartTrainer,
    coordinator_message::Body as Command, rank_report::Report,
};

pub use event::{Effect, Event, Outgoing};

use self::commands::over;
use super::results::Results;
use crate::state::Fences;

/// Time between heartbeats.
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long a new stream may take to its Welcome; also the lease until a Welcome has named one.
pub const FIRST_LEASE: Duration = Duration::from_secs(10);
/// A tick later than this after the one before means that we, not the coordinator, were held up (J6).
const LATE_TICK: Duration = Duration::from_millis(500);
/// Time between ticks while a stream is up; well below [`LATE_TICK`].
const UP_TICK: Duration = Duration::from_millis(250);
/// Time between ticks while there is none.
const DIAL_TICK: Duration = Duration::from_millis(50);

/// State of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Down { dial_at: Duration },
    Dialling,
    Up { heard_at: Duration, lease: Duration, beat_at: Duration },
}

/// State of the trainer.
#[derive(Clone, Debug, PartialEq)]
enum Trainer {
    Idle,
    Starting {
        run: String,
        fence: Fence,
        rank: u32,
        command: String,
        stop: Vec<String>,
    },
    Running {
        run: String,
        running: RunningTrainer,
        stop: Vec<String>,
        ended: bool,
        /// Its report that every process group is made. It is not spooled and must not get lost with a stream, or the
        /// generation would never be formed; so it is said again on every new one.
        formed: Option<Box<RankReport>>,
        /// Where it is, and when its own thread last wrote that.
        place: Option<(Place, Duration)>,
        /// Steps whose times the coordinator was told.
        told: u64,
    },
    /// Its end is known or wished for; it is not gone yet.
    Stuck {
        run: String,
        fence: Fence,
        reason: String,
    },
}

impl Trainer {
    fn current(&self) -> Option<(&str, &Fence)> {
        match self {
            Self::Idle => None,
            Self::Starting { run, fence, .. } | Self::Stuck { run, fence, .. } => Some((run, fence)),
            Self::Running { run, running, .. } => running.fence.as_ref().map(|fence| (run.as_str(), fence)),
        }
    }

    /// Whether it is sure that it will be gone soon.
    fn is_ending(&self) -> bool {
        match self {
            Self::Starting { stop, .. } => !stop.is_empty(),
            Self::Running { stop, ended, .. } => *ended || !stop.is_empty(),
            Self::Idle | Self::Stuck { .. } => false,
        }
    }
}

/// The machine.
#[derive(Debug)]
pub struct Machine {
    stream: Stream,
    trainer: Trainer,
    fences: Fences,
    results: Results,
    /// A start that waits for the end of the trainer before it.
    next: Option<StartTrainer>,
    /// The last beat of this stream, in the coordinator's time and in ours.
    beat: Option<(u64, Duration)>,
    health: Option<Health>,
    ticked_at: Duration,
    run_of: fn(&Assignment) -> Result<String, String>,
}

impl Machine {
    /// A machine without stream or trainer. `run_of` names the run directory of an assignment.
    pub fn new(fences: Fences, run_of: fn(&Assignment) -> Result<String, String>) -> Self {
        Self {
            stream: Stream::Down { dial_at: Duration::ZERO },
            trainer: Trainer::Idle,
            fences,
            results: Results::default(),
            next: None,
            beat: None,
            health: None,
            ticked_at: Duration::ZERO,
            run_of,
        }
    }

    /// The fences to store on [`Effect::Remember`].
    pub fn fences(&self) -> &Fences {
        &self.fences
    }

    /// The trainer as Hello describes it.
    pub fn running(&self) -> Option<RunningTrainer> {
        match &self.trainer {
            Trainer::Running { running, .. } => Some(running.clone()),
            Trainer::Starting { fence, rank, .. } => Some(RunningTrainer {
                fence: Some(fence.clone()),
                rank: *rank,
                phase: Phase::Starting.into(),
                ..RunningTrainer::default()
            }),
            Trainer::Idle | Trainer::Stuck { .. } => None,
        }
    }

    /// Whether a trainer, or something of one, may be there.
    pub fn has_trainer(&self) -> bool {
        self.trainer != Trainer::Idle
    }

    /// How soon it wants to be told that time has passed: often while it dials, rarely while a stream is up, since each tick
    /// wakes a processor that a trainer computes on.
    pub fn next_tick(&self) -> Duration {
        match self.stream {
            Stream::Up { .. } => UP_TICK,
            Stream::Down { .. } | Stream::Dialling => DIAL_TICK,
        }
    }

    /// Takes an event and says what to do, in order.
    pub fn on(&mut self, now: Duration, event: Event) -> Vec<Effect> {
        match event {
            Event::Connected => {
                self.stream = Stream::Up { heard_at: now, lease: FIRST_LEASE, beat_at: now + HEARTBEAT };
                self.beat = None;
                Vec::new()
            }
            Event::Disconnected { reason, retry_in } => {
                tracing::debug!(%reason, ?retry_in, "no session");
                self.stream = Stream::Down { dial_at: now + retry_in };
                Vec::new()
            }
            Event::Heard(command) => {
                if let Stream::Up { heard_at, .. } = &mut self.stream {
                    *heard_at = now;
                }
                self.heard(now, command)
            }
            Event::Said(report) => self.said(report),
            Event::Place(place) => self.seen(now, place),
            Event::Started { pid, start_time } => self.started(pid, start_time),
            Event::StartFailed { reason } => self.start_failed(&reason),
            Event::Ended => {
                if let Trainer::Running { ended, .. } = &mut self.trainer {
                    *ended = true;
                }
                Vec::new()
            }
            Event::Stuck { reason } => self.stuck(reason),
            Event::Gone => self.gone(),
            Event::Measured(health) => {
                let health = Health { busy: self.has_trainer(), ..health };
                self.health = Some(health.clone());
                vec![Effect::Send(Outgoing::Health(health))]
            }
            Event::Probed(result) => vec![Effect::Send(Outgoing::Probed(result))],
            Event::Tick => self.tick(now),
        }
    }

    fn tick(&mut self, now: Duration) -> Vec<Effect> {
        let since = now.saturating_sub(self.ticked_at);
        self.ticked_at = now;
        if let Stream::Up { heard_at, .. } = &mut self.stream
            && since > LATE_TICK
        {
            // J6: what the coordinator said meanwhile may still wait in our queue.
            *heard_at = (*heard_at + since).min(now);
        }
        match self.stream {
            Stream::Down { dial_at } if now >= dial_at => {
                self.stream = Stream::Dialling;
                vec![Effect::Dial]
            }
            Stream::Up { heard_at, lease, .. } if now > heard_at + lease => {
                let silent = now.saturating_sub(heard_at);
                vec![Effect::HangUp { reason: format!("the coordinator was silent for {:.1} s", silent.as_secs_f64()) }]
            }
            Stream::Up { heard_at, lease, beat_at } if now >= beat_at => {
                self.stream = Stream::Up { heard_at, lease, beat_at: now + HEARTBEAT };
                vec![Effect::Send(Outgoing::Heartbeat(self.heartbeat(now)))]
            }
            _ => Vec::new(),
        }
    }

    /// Without the wall clock, which is not the machine's to read.
    fn heartbeat(&mut self, now: Duration) -> Heartbeat {
        let (beat_us, heard_at) = self.beat.unwrap_or((0, now));
        let held_us = u64::try_from(now.saturating_sub(heard_at).as_micros()).unwrap_or(u64::MAX);
        let beat = Heartbeat { beat_us, held_us, ..Heartbeat::default() };
        let Some(running) = self.running() else { return beat };
        let beat = Heartbeat { phase: running.phase, step: running.step, ..beat };
        let Trainer::Running { place: Some((place, moved_at)), told, .. } = &mut self.trainer else { return beat };
        let untold = usize::try_from(place.steps.saturating_sub(*told)).unwrap_or(usize::MAX);
        *told = place.steps;
        Heartbeat {
            progress: place.progress.clone(),
            silent_ms: u64::try_from(now.saturating_sub(*moved_at).as_millis()).unwrap_or(u64::MAX),
            compute_seconds: place.compute_seconds[place.compute_seconds.len().saturating_sub(untold)..].to_vec(),
            ..beat
        }
    }

    /// Takes in where the trainer is. Its first step is told at once, later ones with the heartbeats.
    fn seen(&mut self, now: Duration, newest: Place) -> Vec<Effect> {
        let Trainer::Running { running, place, .. } = &mut self.trainer else { return Vec::new() };
        if newest.steps > 0 {
            let is_first = running.step.replace(newest.step).is_none();
            if let (true, Stream::Up { beat_at, .. }) = (is_first, &mut self.stream) {
                *beat_at = now;
            }
        }
        let moved_at =
            place.take().filter(|(last, _)| last.beats == newest.beats).map_or(now, |(_, moved_at)| moved_at);
        *place = Some((newest, moved_at));
        Vec::new()
    }

    fn heard(&mut self, now: Duration, command: Command) -> Vec<Effect> {
        match command {
            Command::Welcome(welcome) => {
                if let Stream::Up { lease, .. } = &mut self.stream {
                    *lease = Duration::from_millis(welcome.lease_ms.max(1_000));
                }
                let formed = match &self.trainer {
                    Trainer::Running { formed, .. } => formed.clone(),
                    _ => None,
                };
                let formed = formed.map(|report| Effect::Send(Outgoing::Report(report)));
                let health = self.health.clone().map(|health| Effect::Send(Outgoing::Health(health)));
                formed.into_iter().chain(health).chain([Effect::Pump]).collect()
            }
            Command::Beat(beat) => {
                self.beat = Some((beat.sent_us, now));
                Vec::new()
            }
            Command::Probe(probe) => vec![Effect::Probe(probe)],
            Command::Ack(ack) => vec![Effect::Acked(ack)],
            Command::StartTrainer(start) => self.start(start),
            Command::StopTrainer(stop) => self.stop(stop),
            Command::Control(control) => self.control(control),
            Command::DumpStacks(dump) => self.dump_stacks(dump.fence.unwrap_or_default()),
        }
    }

    fn said(&mut self, report: RankReport) -> Vec<Effect> {
        if let Trainer::Running { running, formed, .. } = &mut self.trainer {
            match &report.report {
                Some(Report::Formed(_)) => *formed = Some(Box::new(report.clone())),
                Some(Report::Phase(changed)) => running.phase = changed.phase,
                _ => {}
            }
        }
        vec![Effect::Send(Outgoing::Report(Box::new(report)))]
    }

    fn started(&mut self, pid: u32, start_time: u64) -> Vec<Effect> {
        let Trainer::Starting { run, fence, rank, command, stop } = std::mem::replace(&mut self.trainer, Trainer::Idle)
        else {
            return Vec::new();
        };
        let mut effects = Vec::new();
        if !stop.is_empty() {
            effects.push(Effect::Kill { reason: over(&fence) });
        }
        let phase = Phase::Starting.into();
        let running = RunningTrainer { fence: Some(fence), rank, pid, start_time, phase, step: None };
        self.trainer = Trainer::Running { run, running, stop, ended: false, formed: None, place: None, told: 0 };
        effects.push(self.done(&command));
        effects
    }

    fn start_failed(&mut self, reason: &str) -> Vec<Effect> {
        let Trainer::Starting { fence, command, stop, .. } = std::mem::replace(&mut self.trainer, Trainer::Idle) else {
            return Vec::new();
        };
        let mut effects = vec![self.answer_not_started(&command, reason.to_owned(), fence)];
        effects.extend(stop.iter().map(|id| self.done(id)));
        effects.extend(self.admit_next());
        effects
    }

    fn stuck(&mut self, reason: String) -> Vec<Effect> {
        let Some((run, fence)) = self.trainer.current().map(|(run, fence)| (run.to_owned(), fence.clone())) else {
            return Vec::new();
        };
        let stopping = match std::mem::replace(&mut self.trainer, Trainer::Idle) {
            Trainer::Running { stop, .. } | Trainer::Starting { stop, .. } => stop,
            Trainer::Idle | Trainer::Stuck { .. } => Vec::new(),
        };
        let waiting = self.next.take().map(|next| next.command_id);
        let ids = stopping.into_iter().chain(waiting);
        let effects = ids.map(|id| self.answer(&id, reason.clone(), false, Some(fence.clone()))).collect();
        self.trainer = Trainer::Stuck { run, fence, reason };
        effects
    }

    fn gone(&mut self) -> Vec<Effect> {
        let stopping = match std::mem::replace(&mut self.trainer, Trainer::Idle) {
            Trainer::Running { stop, .. } => stop,
            _ => Vec::new(),
        };
        let mut effects: Vec<Effect> = stopping.iter().map(|id| self.done(id)).collect();
        effects.extend(self.admit_next());
        effects
    }
}
