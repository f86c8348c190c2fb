//! Workers that come and go: no join closes or fails a generation, and the job comes to its end (J4). That a generation is never
//! ended by a join is checked at each Hello (`checks.rs`); here is how many there were.

use rand::Rng;

use crate::scenario::{Job, Scenario, Weather};
use crate::world::{What, World};

/// Rounds of five workers for four slots.
const ROUNDS: u64 = 1_000;

impl World {
    /// The worker leaves, in good order or without a word, or it comes back.
    pub(crate) fn flap(&mut self, number: usize) {
        if self.workers[number].is_up {
            let stream = self.workers[number].stream;
            self.kill_worker(number, true);
            if let Some(stream) = stream
                && self.random.random_bool(0.5)
            {
                self.close(stream);
            }
        } else {
            self.workers[number].is_gone = false;
            self.start_worker(number);
        }
    }
}

fn five_for_four(seed: u64, max_steps: u64) -> World {
    let jobs = vec![Job::new(0, 4, max_steps, 5, None)];
    World::new(Scenario { seed, jobs, num_workers: 5, num_spare: 1, weather: Weather::calm() }, false)
}

#[test]
fn j4_five_workers_join_and_leave_in_any_order_and_each_loss_costs_one_generation_at_most() {
    for seed in 0..ROUNDS {
        let mut world = five_for_four(seed, 60);
        let mut leaves = 0;
        for worker in 0..5 {
            let num_leaves = world.random.random_range(0..3);
            leaves += num_leaves;
            let mut times: Vec<u64> = (0..2 * num_leaves).map(|_| world.random.random_range(0..30_000)).collect();
            times.sort_unstable();
            times.into_iter().for_each(|at| world.after(at, What::Flap(worker)));
        }
        world.run();
        let generations = world.disk.runs[0].generations.len();
        assert!((1..=1 + leaves).contains(&generations), "seed {seed}: {generations} generations, {leaves} leaves");
    }
}

#[test]
fn j4_a_worker_that_joins_and_leaves_every_second_disturbs_nobody() {
    for seed in 0..20 {
        let mut world = five_for_four(seed, 2_000);
        // The job has its four by then.
        (20..320).for_each(|second| world.after(1_000 * second, What::Flap(5)));
        world.workers.push(crate::worker::Worker::new(5));
        world.run();
        assert_eq!(world.disk.runs[0].generations.len(), 1, "seed {seed}");
        assert!(world.now > 300_000, "the job was there all the time: {} ms", world.now);
    }
}
