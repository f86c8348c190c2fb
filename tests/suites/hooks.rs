//! `on_commit` and `on_end`: they run, in order and with what they need to know, and nothing of the run waits for them. And
//! what else follows a commit: the directory for `transformers`, and bf16 weights that are saved apart.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::Value;
use trainctl_tests::job::Job;
use trainctl_tests::run::Run;
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{process, programs, wait};

/// Writes a job's spec with further top-level keys.
fn write(scratch: &Scratch, job: &Job, keys: &str) -> PathBuf {
    let path = scratch.join("job.yaml");
    fs::write(&path, job.yaml() + keys).unwrap();
    path
}

fn lines(path: impl AsRef<Path>) -> Vec<String> {
    fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn steps_and_codes(events: &[Value]) -> Vec<(u64, i64)> {
    events.iter().map(|event| (event["step"].as_u64().unwrap(), event["code"].as_i64().unwrap())).collect()
}

#[test]
fn commands_run_in_order_and_the_run_ends_after_on_end() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("hooks");
    let job = Job::new(scratch.join("run"));
    let keys = "\
on_commit: 'test -f \"$TRAINCTL_CHECKPOINT/manifest.json\" && echo \"$TRAINCTL_STEP $TRAINCTL_CHECKPOINT_NAME $TRAINCTL_POINTERS\" >> commits; exit 3'
on_end: 'sleep 1; echo \"$TRAINCTL_STATE $TRAINCTL_CHECKPOINT_NAME $TRAINCTL_RUN_DIR\" > end; echo on stdout'
";
    let spec = write(&scratch, &job, keys);
    scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(0);

    let run = Run::new(&job.run_dir);
    let seen = lines(job.run_dir.join("commits"));
    let heads: Vec<_> = seen.iter().map(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(
        heads,
        [9, 19, 29, 39].map(|step| format!("{step} epoch_0_step_{step} LATEST")),
        "each commit, in order, and the pointers that moved"
    );
    let end = format!("succeeded epoch_0_step_39 {}", job.run_dir.display());
    assert_eq!(lines(job.run_dir.join("end")), [end], "trainctl run waits for on_end");
    assert_eq!(lines(job.run_dir.join("logs/hooks/on_end-39.log")), ["on stdout"]);
    let ended = run.events_of("hook_ended");
    assert_eq!(steps_and_codes(&ended), [(9, 3), (19, 3), (29, 3), (39, 3), (39, 0)], "a failure is an event");
    assert_eq!(ended[4]["hook"], "on_end");
    assert!(fs::read_dir(job.run_dir.join("control/pins")).unwrap().all(|pin| {
        let name = pin.unwrap().file_name().into_string().unwrap();
        !name.contains("on_commit")
    }));

    let commits = run.events_of("checkpoint_committed");
    assert!(commits.iter().all(|event| event["bytes"].as_u64().unwrap() > 100_000 && event["save"] == "full"));
    assert!(commits.iter().all(|event| event["commit_seconds"].as_f64().unwrap() > 0.0), "{commits:?}");
    // The last checkpoint has a directory for `transformers`, and verify does not miss it in the manifest.
    let consolidated = |step: u64| job.run_dir.join(format!("epoch_0_step_{step}/model/consolidated/config.json"));
    assert!(consolidated(39).is_file() && !consolidated(29).exists());
    assert_eq!(run.events_of("consolidated").len(), 1);
    scratch.trainctl(["checkpoints", "verify", job.run_dir.to_str().unwrap()]).wait().expect_code(0);
}

#[test]
fn a_command_that_hangs_delays_no_commit() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("hanging-hook");
    let job = Job::new(scratch.join("run"));
    let keys = "on_commit: 'until test -e go; do sleep 0.05; done; echo \"$TRAINCTL_STEP\" >> commits'\n";
    let spec = write(&scratch, &job, &format!("{keys}checkpoint: {{max_recent_checkpoints: 1}}\n"));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    let run = Run::new(&job.run_dir);
    run.wait_for_commit(39);
    wait::until_true("the job's end", || !run.events_of("job_finished").is_empty());
    assert_eq!(lines(job.run_dir.join("commits")), [""; 0]);
    let kept: Vec<u64> = run.commits().iter().map(|manifest| manifest.step).collect();
    assert_eq!(kept, [9, 19, 29, 39], "what waits for its command is pinned");
    fs::write(job.run_dir.join("go"), "").unwrap();
    trainctl.wait().expect_code(0);
    assert_eq!(lines(job.run_dir.join("commits")), ["9", "19", "29", "39"]);
    // LATEST, and LOWEST_VAL where it is another one.
    assert!(run.commits().len() <= 2, "and goes when its command is over");
}

#[test]
fn on_end_hears_of_a_failure() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("hook-of-a-failure");
    let job = Job { max_restarts: 0, steps: 10_000, ..Job::new(scratch.join("run")).slow() };
    let spec = write(&scratch, &job, "on_end: 'echo \"$TRAINCTL_STATE: $TRAINCTL_CAUSE\" > end'\n");
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    let run = Run::new(&job.run_dir);
    run.wait_for_step(12);
    process::send(run.trainers()[1].pid, Signal::SIGKILL);
    trainctl.wait().expect_code(1);
    let end = lines(job.run_dir.join("end"));
    assert!(end.len() == 1 && end[0].starts_with("failed: ") && end[0].contains("rank 1"), "{end:?}");
}

#[test]
fn weights_are_saved_apart_under_a_limit_of_their_own() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("weights");
    let job = Job::new(scratch.join("run"));
    let keys = "\
checkpoint: {max_recent_checkpoints: 1, keep_every_steps: 20, weights_every_steps: 5, max_recent_weights: 2, save_consolidated: false}
on_commit: 'echo \"$TRAINCTL_CHECKPOINT_KIND $TRAINCTL_STEP\" >> commits; test -f \"$TRAINCTL_CHECKPOINT/manifest.json\"'
";
    let spec = write(&scratch, &job, keys);
    scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(0);
    let run = Run::new(&job.run_dir);
    let steps = |run: &Run| run.commits().iter().map(|manifest| manifest.step).collect::<Vec<_>>();
    let lowest = run.pointer("LOWEST_VAL").unwrap();
    let kept: Vec<u64> = steps(&run).into_iter().filter(|step| lowest != format!("epoch_0_step_{step}")).collect();
    assert!(kept.iter().all(|step| [19, 39].contains(step)), "{kept:?}");
    assert!(steps(&run).contains(&19), "20 steps are a milestone");
    let weights = Run::new(job.run_dir.join("weights"));
    assert_eq!(steps(&weights), [34, 39]);
    assert_eq!(weights.pointer("LATEST"), None);
    let bytes = |run: &Run| run.commits().pop().unwrap().total_bytes();
    assert!(bytes(&weights) * 4 < bytes(&run), "bf16 weights against fp32 weights and two moments");
    assert!(run.events_of("hook_ended").iter().all(|event| event["code"] == 0));
    let told = lines(job.run_dir.join("commits"));
    let of = |kind: &str| told.iter().filter(|line| line.starts_with(kind)).count();
    assert_eq!((of("full"), of("weights")), (4, 8), "{told:?}");
}
