//! Kills of trainers change nothing (P4, P6): the proof 1.

use rand::Rng;
use trainctl_tests::job::Job;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
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
    let mut generation = 0;
    for steps in [2..12, 13..24, 25..36] {
        let (step, rank) = (random.random_range(steps), random.random_range(0..2));
        run.wait_for_step(step);
        let trainers = run.wait_for_trainers(2, generation);
        generation = trainers[0].generation;
        trainers[rank].kill9();
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
    for commit in want.commits() {
        let same = run.manifest(&commit.name.to_string()).unwrap();
        assert_eq!(same.state_hash, commit.state_hash, "{}", commit.name);
    }
}
