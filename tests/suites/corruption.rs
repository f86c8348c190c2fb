//! Silent corruption: a bit of one rank's weights flips in its memory. No checkpoint ever holds it, the rank is named where a
//! majority can, and the run ends bit for bit like one that was never touched (C2, P4, P6).

use serde_json::Value;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;

/// Runs `job` with one worker per rank, of which one has a trainer with a fault: at its first start, or at each. The job's
/// status in the end, and the rank that had the fault first.
fn run_with_fault(scratch: &Scratch, job: &Job, fault: &str, at_each_start: bool) -> (Value, u64) {
    let state = scratch.join("state");
    let coordinator = Coordinator::start(scratch, &state);
    let (trainer, pid) = (scratch.join("faulty-trainer"), scratch.join("faulty-pid"));
    let condition = if at_each_start { "true" } else { "[ ! -e \"$PID\" ]" };
    let script = format!("PID='{}'\nif {condition}; then", pid.display());
    let script = format!(
        "{script} export TRAINCTL_FAULT={fault}; [ -e \"$PID\" ] || echo $$ >\"$PID\"; fi\nexec \"$TRAINER\" \"$@\""
    );
    scratch.write_trainer(&trainer, &script);
    let worker = |index| daemons::start_worker(scratch, &state, index, (index == 1).then_some(trainer.as_path()));
    let workers: Vec<_> = (0..job.workers).map(worker).collect();
    let id = daemons::submit(scratch, &state, &job.write(scratch.join("job.yaml")));
    let status = daemons::wait_for_end(scratch, &state, &id);
    drop((workers, coordinator));
    let pid: u64 = std::fs::read_to_string(pid).unwrap().trim().parse().unwrap();
    let started = Run::new(&job.run_dir).events_of("trainer_started");
    let faulty = started.iter().find(|event| event["pid"] == pid).unwrap_or_else(|| panic!("{pid} in {started:?}"));
    (status, faulty["rank"].as_u64().unwrap())
}

/// What `trainctl explain` says of the last loss.
fn explained(scratch: &Scratch, job: &Job) -> Value {
    let said = scratch.trainctl(["explain", job.run_dir.to_str().unwrap(), "--output", "json"]).wait().expect_code(0);
    let said: Value = serde_json::from_str(&said.stdout).unwrap();
    said["lost"].as_array().unwrap().last().unwrap().clone()
}

#[test]
fn p4_a_flipped_bit_is_in_no_checkpoint_and_the_run_ends_as_if_it_had_never_been() {
    if !programs::have_trainer() {
        return;
    }
    for workers in [2, 3] {
        let scratch = Scratch::new(&format!("flipped-bit-{workers}"));
        let job = Job { workers, burn_in: Some(0.2), ..Job::new(scratch.join("run")) };
        let want = unbroken(&job);
        // In step 12, between the commits of steps 9 and 19.
        let (status, faulty) = run_with_fault(&scratch, &job, "step.begin:13:flip", false);
        assert_eq!(status["phase"], "succeeded", "{status:#}");

        let run = Run::new(&job.run_dir);
        let generations = run.generations();
        assert_eq!(generations.len(), 2, "{generations:?}");
        let burned_in = run.events_of("burned_in").into_iter().map(|event| event["generation"].clone());
        assert_eq!(burned_in.collect::<Vec<_>>(), generations, "once all are new, and once the suspects are checked");
        let found = run.events_of("replicas_differ");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((&found[0]["step"], &found[0]["generation"]), (&19.into(), &generations[0].into()), "{}", found[0]);
        let explained = explained(&scratch, &job);
        let (cause, action) = (explained["cause"].as_str().unwrap(), explained["action"].as_str().unwrap());
        assert!(cause.contains("silent corruption") && action.contains("memtester"), "{explained:#}");
        if workers == 3 {
            assert_eq!(found[0]["ranks"], serde_json::json!([faulty]), "{}", found[0]);
            assert_eq!(explained["rank"], faulty, "{explained:#}");
            assert!(cause.starts_with(&format!("rank {faulty} (worker ")), "{cause}");
        } else {
            assert_eq!((&found[0]["ranks"], &explained["rank"]), (&serde_json::json!([0, 1]), &Value::Null));
            assert!(cause.contains("no majority says which is right"), "{cause}");
        }
        let then = explained["then"].as_str().unwrap();
        let wanted = format!("generation {} went on from epoch_0_step_9", generations[1]);
        assert!(then.starts_with(&wanted), "the newest commit: {then}");

        assert_same_rows(&run, &want, 40);
        let committed = run.events_of("checkpoint_committed");
        let hashes =
            |run: &Run| run.commits().into_iter().map(|commit| (commit.step, commit.state_hash)).collect::<Vec<_>>();
        assert_eq!(hashes(&run), hashes(&want));
        let of_first =
            committed.iter().filter(|event| event["generation"] == generations[0]).map(|event| event["step"].clone());
        assert_eq!(of_first.collect::<Vec<_>>(), [9], "nothing that the generation did after the flip: {committed:?}");
    }
}

#[test]
fn j5_a_bit_that_flips_at_each_try_stops_the_job_with_that_explanation() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("flipped-again");
    let job = Job { burn_in: Some(0.0), ..Job::new(scratch.join("run")) };
    let (status, _) = run_with_fault(&scratch, &job, "step.begin:2:flip", true);
    assert_eq!(status["phase"], "failed", "{status:#}");
    let reason = status["reason"].as_str().unwrap();
    assert!(reason.starts_with("failed twice in the same way at step 9: the 2 replicas differ"), "{reason}");
    let run = Run::new(&job.run_dir);
    assert_eq!((run.events_of("replicas_differ").len(), run.commits().len()), (2, 0));
    assert!(run.events_of("burned_in").is_empty(), "never, says the spec");
    assert!(explained(&scratch, &job)["action"].as_str().unwrap().contains("compare the hosts' processors"));
}
