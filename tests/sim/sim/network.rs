//! Streams between workers and coordinators: in order within one, in any order between two. What cannot pass waits, as TCP does;
//! what a side that hangs up had not sent yet may be lost.

use std::collections::VecDeque;

use rand::Rng;
use rand::seq::IteratorRandom;
use trainctl_coordinator::core;
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_worker::session::machine::Event;

use crate::world::{What, World};

/// How long a coordinator may take to open a stream.
const OPEN_TIMEOUT: u64 = 5_000;

#[derive(Debug)]
pub(crate) enum Message {
    Hello(Box<v1::Hello>),
    /// The coordinator has read the Hello.
    Opened,
    ToWorker(Body),
    ToCoordinator(v1::WorkerMessage),
    /// The other side has hung up.
    End,
}

/// The worker's side of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Dialling,
    Open,
    Closed,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    worker: usize,
    life: u64,
    /// Life of the coordinator at the other end.
    coordinator: u64,
    side: Side,
    to_worker: VecDeque<Message>,
    to_coordinator: VecDeque<Message>,
}

impl World {
    pub(crate) fn send(&mut self, stream: u64, to_worker: bool, message: Message) {
        let Some(line) = self.streams.get_mut(&stream) else { return };
        let line = if to_worker { &mut line.to_worker } else { &mut line.to_coordinator };
        line.push_back(message);
        self.soon(self.scenario.weather.delay.clone(), What::Delivery { stream, to_worker });
    }

    /// A worker dials whom `endpoint.json` names; it may read an old one.
    pub(crate) fn dial(&mut self, worker: usize) {
        let is_stale = self.mishap(self.scenario.weather.stale_in);
        let serving = self.coordinators.values().filter(|coordinator| coordinator.is_serving).map(|c| c.life);
        let other = serving.choose(&mut self.random).filter(|_| is_stale);
        let coordinator = other.or(self.disk.endpoint).unwrap_or_default();
        self.num_streams += 1;
        let stream = self.num_streams;
        let (to_worker, to_coordinator) = (VecDeque::new(), VecDeque::new());
        let (life, side) = (self.workers[worker].incarnation, Side::Dialling);
        self.streams.insert(stream, Stream { worker, life, coordinator, side, to_worker, to_coordinator });
        self.workers[worker].stream = Some(stream);
        if self.coordinators.get(&coordinator).is_some_and(|coordinator| coordinator.is_serving) {
            let hello = Box::new(self.workers[worker].hello(self.now));
            self.send(stream, false, Message::Hello(hello));
            self.after(OPEN_TIMEOUT, What::DialTimeout(stream));
        } else {
            self.soon(1..60, What::DialTimeout(stream));
        }
    }

    pub(crate) fn dial_timeout(&mut self, stream: u64) {
        let Some(open) = self.streams.get(&stream).filter(|stream| stream.side == Side::Dialling) else { return };
        let (worker, life) = (open.worker, open.life);
        let thaw = self.workers[worker].frozen_until;
        if thaw > self.now {
            return self.after(thaw - self.now, What::DialTimeout(stream));
        }
        if self.is_up(worker, life) {
            self.hang_up(worker);
        }
    }

    /// A worker's stream ends at its side.
    pub(crate) fn hang_up(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        let Some(stream) = worker.stream.take() else { return };
        (worker.is_connected, worker.sent) = (false, None);
        let retry_in = worker.next_retry();
        self.close(stream);
        if self.workers[number].is_up {
            self.work(number, Event::Disconnected { reason: "the stream ended".to_owned(), retry_in });
        }
    }

    /// The worker's side of a stream is gone.
    pub(crate) fn close(&mut self, stream: u64) {
        let is_lost = self.random.random_bool(0.5);
        let Some(open) = self.streams.get_mut(&stream) else { return };
        open.side = Side::Closed;
        if is_lost {
            open.to_coordinator.clear();
        }
        self.send(stream, false, Message::End);
    }

    pub(crate) fn deliver(&mut self, stream: u64, to_worker: bool) {
        let Some(open) = self.streams.get_mut(&stream) else { return };
        let (number, worker) = (open.worker, &self.workers[open.worker]);
        let coordinator = self.coordinators.get(&open.coordinator);
        let cut = coordinator.map_or(0, |coordinator| coordinator.cut_until);
        let until = match (to_worker, coordinator) {
            (true, _) => worker.cut_to_until.max(worker.frozen_until),
            (false, Some(coordinator)) => worker.cut_from_until.max(coordinator.frozen_until),
            (false, None) => return open.to_coordinator.clear(),
        };
        let until = until.max(cut);
        if until > self.now {
            // Whoever waited longest is heard last: TCP tries again ever more rarely.
            let wait = until - self.now;
            let late = self.random.random_range(0..=(wait / 4).min(3_000));
            return self.after(wait + late, What::Delivery { stream, to_worker });
        }
        let (life, coordinator) = (open.life, open.coordinator);
        let line = if to_worker { &mut open.to_worker } else { &mut open.to_coordinator };
        let Some(message) = line.pop_front() else { return };
        if !to_worker {
            return self.arrives_at_coordinator(coordinator, number, stream, message);
        }
        let is_open = open.side;
        if self.is_up(number, life) && is_open != Side::Closed {
            self.arrives_at_worker(number, stream, message);
        }
    }

    fn arrives_at_worker(&mut self, number: usize, stream: u64, message: Message) {
        match message {
            Message::Opened => {
                if let Some(open) = self.streams.get_mut(&stream) {
                    open.side = Side::Open;
                }
                let worker = &mut self.workers[number];
                (worker.is_connected, worker.heard_at, worker.retry_ms) = (true, self.now, 100);
                self.work(number, Event::Connected);
            }
            Message::ToWorker(body) => {
                let is_command = matches!(body, Body::StartTrainer(_) | Body::StopTrainer(_) | Body::Control(_));
                if is_command && self.mishap(self.scenario.weather.repeat_in) {
                    let longest = [100, 3_000, 20_000][self.random.random_range(0..3)];
                    self.soon(1..longest, What::Repeated(number, Box::new(body.clone())));
                }
                self.workers[number].heard_at = self.now;
                self.work(number, Event::Heard(body));
            }
            Message::End => self.hang_up(number),
            Message::Hello(_) | Message::ToCoordinator(_) => {}
        }
    }

    fn arrives_at_coordinator(&mut self, life: u64, worker: usize, session: u64, message: Message) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        match message {
            Message::Hello(hello) => {
                coordinator.sessions.insert(session, worker);
                self.note(format!("{} says Hello to coordinator {life}, running {:?}", hello.worker_id, hello.running));
                self.owner(life, core::Event::Hello { session, hello });
                // The answer goes first, whatever the owner has sent.
                if let Some(open) = self.streams.get_mut(&session) {
                    open.to_worker.push_front(Message::Opened);
                    self.soon(self.scenario.weather.delay.clone(), What::Delivery { stream: session, to_worker: true });
                }
            }
            Message::ToCoordinator(message) => {
                self.owner(life, core::Event::Message { session, message: Box::new(message) });
            }
            Message::End => {
                coordinator.sessions.remove(&session);
                self.streams.remove(&session);
                self.owner(life, core::Event::Gone { session });
            }
            Message::Opened | Message::ToWorker(_) => {}
        }
    }
}
