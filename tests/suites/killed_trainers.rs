//! `kill -9` of any trainer at any time changes nothing (P4): the proof 1.

use std::path::Path;

use rand::Rng;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, Trainer, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, seed, wait};

#[test]
fn p4_three_killed_trainers_leave_no_trace() {
    if !programs::have_trainer() {
        return;
    }
    let mut random = seed::seeded();
    let scratch = Scratch::new("killed-trainers");
    let job = Job::new(scratch.join("killed")).slow();
    let want = unbroken(&job);

    let spec = job.write(scratch.join("job.yaml"));
    let run = Run::new(&job.run_dir);
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    let (mut generation, mut killed) = (0, Vec::new());
    for steps in [2..12, 13..24, 25..36] {
        let (step, rank) = (random.random_range(steps), random.random_range(0..2));
        run.wait_for_step(step);
        let trainers = run.wait_for_trainers(2, generation);
        generation = trainers[0].generation;
        trainers[rank].kill9();
        killed.push(rank as u64);
        let exited = wait::until("the exit in events.jsonl", || {
            let mut exits = run.events_of("trainer_exited").into_iter();
            exits.find(|exit| exit["generation"] == generation && exit["rank"] == rank)
        });
        assert!(exited.to_string().contains('9'), "{exited}");
    }
    trainctl.wait().expect_code(0);

    assert_same_rows(&run, &want, 40);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    assert_eq!(run.generations().len(), 4, "one generation for each kill: {:?}", run.generations());
    let explained =
        scratch.trainctl(["explain", job.run_dir.to_str().unwrap(), "--output", "json"]).wait().expect_code(0);
    let explained: serde_json::Value = serde_json::from_str(&explained.stdout).unwrap();
    let blamed: Vec<Option<u64>> =
        explained["lost"].as_array().unwrap().iter().map(|lost| lost["rank"].as_u64()).collect();
    assert_eq!(blamed, killed.iter().map(|rank| Some(*rank)).collect::<Vec<_>>(), "{explained}");
    for commit in want.commits() {
        let same = run.manifest(&commit.name.to_string()).unwrap();
        assert_eq!(same.state_hash, commit.state_hash, "{}", commit.name);
    }
}

/// Waits for the start of every trainer of the next generation, formed or not.
fn started_after(run: &Run, generation: u64) -> Vec<Trainer> {
    run.wait_for_trainers(2, generation)
}

#[test]
fn p4_kills_while_forming_before_the_first_commit_and_of_all_ranks_at_once() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("killed-early");
    let job = Job::new(scratch.join("run")).slow();
    let want = unbroken(&job);
    let spec = job.write(scratch.join("job.yaml"));
    let run = Run::new(&job.run_dir);
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);

    let forming = started_after(&run, 0);
    forming[1].kill9();
    let young = started_after(&run, forming[0].generation);
    run.wait_for_step(3);
    young[0].kill9();
    let both = started_after(&run, young[0].generation);
    run.wait_for_step(15);
    both.iter().for_each(Trainer::kill9);
    trainctl.wait().expect_code(0);

    assert_same_rows(&run, &want, 40);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    let formed = run.generations();
    assert_eq!(formed.len(), 4, "{:?}", run.events_of("generation_lost"));
    // What had no commit to go back to began at step 0, in a generation of its own (P6: and the record says so).
    let starts: Vec<_> = run.events_of("generation_formed").iter().map(|event| event["step"].clone()).collect();
    assert_eq!(starts.last().unwrap(), 10, "{starts:?}");
    assert!(starts[..starts.len() - 1].iter().all(|step| *step == 0), "{starts:?}");
}

/// Rows and commits after two faults at once.
fn finish_by_hand(scratch: &Scratch, state: &Path, id: &str, run: &Run, want: &Run) {
    daemons::wait_for_success(scratch, state, id);
    assert_same_rows(run, want, 40);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
}

#[test]
fn p4_a_trainer_killed_while_the_coordinator_is_away_costs_steps_and_nothing_else() {
    if !programs::have_trainer() {
        return;
    }
    let mut random = seed::seeded();
    let scratch = Scratch::new("killed-both");
    let job = Job::new(scratch.join("run")).slow();
    let want = unbroken(&job);
    let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
    let mut coordinator = Coordinator::start(&scratch, &state);
    let _workers: Vec<Process> = (0..2).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
    let id = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));

    run.wait_for_step(random.random_range(12..25));
    coordinator.process.kill9();
    let trainers = run.trainers();
    let victim = trainers[random.random_range(0..2)];
    victim.kill9();
    wait::until_true("the trainer's end", || !trainctl_tests::process::exists(victim.pid));
    let _second = Coordinator::start(&scratch, &state);
    finish_by_hand(&scratch, &state, &id, &run, &want);
    assert_eq!(run.generations().len(), 2);
}
