//! What goes wrong while it storms.

use rand::Rng;
use rand::seq::{IndexedRandom, IteratorRandom};

use crate::training::End;
use crate::world::{What, World};

const KINDS: [&str; 22] = [
    "trainer killed",
    "trainer killed",
    "worker killed",
    "worker gone for good",
    "worker's host frozen",
    "trainer killed",
    "worker killed",
    "worker killed",
    "worker's host frozen",
    "stream broken",
    "stream broken",
    "stream broken",
    "stream broken",
    "worker cut off",
    "worker not heard",
    "worker hears nothing",
    "coordinator killed",
    "coordinator frozen",
    "coordinator cut off",
    "coordinator leaves",
    "second coordinator started",
    "wall clock jumps",
];

impl World {
    /// Something goes wrong, and something else later. After the last storm nothing does.
    pub(crate) fn fault(&mut self) {
        if self.now >= self.scenario.weather.ends_at() {
            return;
        }
        if !self.storms() {
            return self.after(500, What::Fault);
        }
        self.soon(self.scenario.weather.every.clone(), What::Fault);
        let Some(kind) = KINDS.choose(&mut self.random).copied() else { return };
        self.note(kind.to_owned());
        let number = self.random.random_range(0..self.workers.len());
        let lasts = self.random.random_range(100..12_000);
        let until = self.now + lasts;
        match kind {
            "trainer killed" => {
                let running = self.workers.iter().filter(|worker| worker.trainer.is_some() && worker.is_up);
                let victim = running.map(|worker| worker.id.clone()).choose(&mut self.random);
                let victim = self.workers.iter().position(|worker| Some(&worker.id) == victim.as_ref());
                let Some(number) = victim else { return };
                let Some(tag) = self.workers[number].trainer.as_ref().map(|trainer| trainer.tag) else { return };
                let life = self.workers[number].incarnation;
                self.after(0, What::TrainerEnds(number, life, tag, End::Killed));
                self.disturbed(kind, 0);
            }
            "worker killed" if self.workers[number].is_up => {
                self.kill_worker(number, false);
                self.disturbed(kind, self.now + 4_000);
            }
            "worker gone for good" if self.workers[number].is_up && self.num_gone < self.scenario.num_spare => {
                self.num_gone += 1;
                self.kill_worker(number, true);
                self.disturbed(kind, 0);
            }
            "worker's host frozen" => {
                self.workers[number].frozen_until = until;
                self.disturbed(kind, until);
            }
            "stream broken" => {
                self.hang_up(number);
                self.disturbed(kind, 0);
            }
            "worker cut off" => {
                (self.workers[number].cut_to_until, self.workers[number].cut_from_until) = (until, until);
                self.disturbed(kind, until);
            }
            "worker not heard" => {
                self.workers[number].cut_from_until = until;
                self.disturbed(kind, until);
            }
            "worker hears nothing" => {
                self.workers[number].cut_to_until = until;
                self.disturbed(kind, until);
            }
            "wall clock jumps" => {
                let day = 86_400_000;
                let Some(life) = self.some_coordinator() else { return };
                if let Some(coordinator) = self.coordinators.get_mut(&life) {
                    coordinator.wall_ms = 1_000_000_000_000 + self.random.random_range(0..2 * day);
                }
                self.disturbed(kind, 0);
            }
            "second coordinator started" => {
                let host = self.random.random_range(0..2);
                self.after(0, What::Launch(host));
                self.disturbed(kind, 0);
            }
            _ => self.fault_of_coordinator(kind, until),
        }
    }

    fn fault_of_coordinator(&mut self, kind: &'static str, until: u64) {
        let Some(life) = self.some_coordinator() else { return };
        match kind {
            "coordinator killed" => {
                self.end_coordinator(life);
                self.disturbed(kind, 0);
            }
            "coordinator frozen" => self.freeze(life, kind),
            "coordinator cut off" => {
                if let Some(coordinator) = self.coordinators.get_mut(&life) {
                    coordinator.cut_until = until;
                }
                self.disturbed(kind, until);
            }
            "coordinator leaves" => {
                self.release(life);
                self.disturbed(kind, 0);
            }
            _ => {}
        }
    }
}
