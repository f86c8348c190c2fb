//! Stopping and going on: the proof 4, and "running again is resuming".

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::sys::signal::Signal;
use trainctl_tests::job::Job;
use trainctl_tests::process::Ended;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, wait};

/// `trainctl run <spec> <more>` to its end.
fn run(scratch: &Scratch, spec: &Path, more: &[&str]) -> Ended {
    let mut arguments = vec!["run", spec.to_str().unwrap()];
    arguments.extend(more);
    scratch.trainctl(arguments).wait()
}

/// `trainctl resume <run> --from <from> <more>` to its end.
fn resume(scratch: &Scratch, run: &Run, from: &str, more: &[&str]) -> Ended {
    let mut arguments = vec!["resume", run.dir().to_str().unwrap(), "--from", from];
    arguments.extend(more);
    scratch.trainctl(arguments).wait()
}

/// Everything below a folder: paths and contents of files, targets of links. Logs and control files aside.
fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().display().to_string();
            if path.is_symlink() {
                found.push((name, fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()));
            } else if path.is_dir() {
                found.push((name, Vec::new()));
                folders.push(path);
            } else {
                found.push((name, fs::read(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

/// A run that was stopped after 20 of 40 steps.
fn stopped_at_20(scratch: &Scratch) -> (Job, Run, std::path::PathBuf) {
    let job = Job::new(scratch.join("run"));
    let spec = job.write(scratch.join("job.yaml"));
    run(scratch, &spec, &["--until-step", "20"]).expect_code(0).expect_said("after 20 steps of 40");
    let stopped = Run::new(&job.run_dir);
    assert_eq!(stopped.last_step(), Some(19));
    let latest = stopped.latest();
    assert_eq!((latest.step, latest.max_steps, latest.until_step), (19, 40, Some(20)));
    (job, stopped, spec)
}

#[test]
fn a_run_stopped_at_step_20_and_resumed_equals_the_unbroken_one() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("until-step");
    let (job, stopped, _) = stopped_at_20(&scratch);
    let want = unbroken(&job);
    resume(&scratch, &stopped, "LATEST", &[]).expect_code(0).expect_said("continues from epoch_0_step_19");
    assert_same_rows(&stopped, &want, 40);
    assert_eq!(stopped.latest().state_hash, want.latest().state_hash);
    let parent = stopped.manifest("epoch_0_step_29").unwrap().started_from.unwrap();
    assert_eq!(parent.name.to_string(), "epoch_0_step_19");
}

#[test]
fn damage_that_one_rank_finds_stops_the_job_and_names_file_and_tensor() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("damaged-shard");
    let (job, stopped, _) = stopped_at_20(&scratch);
    for rank in [0, 1] {
        let shards = fs::read_dir(stopped.dir().join("epoch_0_step_19/optim")).unwrap();
        let shard = shards.map(|entry| entry.unwrap().path()).find(|path| {
            path.file_name().unwrap().to_str().unwrap().starts_with(&format!("shard-0000{rank}-of-00002"))
        });
        let shard = shard.unwrap();
        let flip = || {
            let mut bytes = fs::read(&shard).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&shard, bytes).unwrap();
        };
        flip();
        let name = shard.file_name().unwrap().to_str().unwrap();
        let ended =
            resume(&scratch, &stopped, "LATEST", &[]).expect_code(1).expect_said("failed twice in the same way");
        ended.expect_said(name).expect_said("other bytes than were written").expect_said("optim/exp_avg");
        flip();
    }
    // Nothing was lost: with the byte put right it goes on.
    resume(&scratch, &stopped, "LATEST", &[]).expect_code(0);
    assert_same_rows(&stopped, &unbroken(&job), 40);
}

#[test]
fn ctrl_c_once_saves_and_stops_and_the_resumed_run_equals_the_unbroken_one() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("ctrl-c");
    let job = Job::new(scratch.join("run")).slow();
    let want = unbroken(&job);
    let (spec, interrupted) = (job.write(scratch.join("job.yaml")), Run::new(&job.run_dir));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    interrupted.wait_for_step(13);
    trainctl.signal(Signal::SIGINT);
    trainctl.wait().expect_code(1).expect_said("trainctl resume");
    let latest = interrupted.latest();
    assert!((14..39).contains(&latest.step) && (latest.step + 1) % 10 != 0, "no save of its own: {}", latest.name);
    assert_eq!(interrupted.last_step(), Some(latest.step), "it stops where it saved");
    assert!(scratch.processes().is_empty(), "processes are left");

    // Running again is resuming.
    let said = format!("continues from {}", latest.name);
    run(&scratch, &spec, &[]).expect_code(0).expect_said(&said);
    assert_same_rows(&interrupted, &want, 40);
    assert_eq!(interrupted.latest().state_hash, want.latest().state_hash);
}

#[test]
fn ctrl_c_twice_stops_now() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("ctrl-c-twice");
    let job = Job { steps: 2000, ..Job::new(scratch.join("run")).slow() };
    let (spec, interrupted) = (job.write(scratch.join("job.yaml")), Run::new(&job.run_dir));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    interrupted.wait_for_commit(9);
    trainctl.signal(Signal::SIGINT);
    // Two signals at once may arrive as one.
    wait::until_true("an answer to the first Ctrl-C", || trainctl.stderr().contains("again"));
    trainctl.signal(Signal::SIGINT);
    trainctl.wait().expect_code(1);
    assert!(scratch.processes().is_empty(), "processes are left");
    scratch.trainctl(["checkpoints", "verify", job.run_dir.to_str().unwrap(), "LATEST"]).wait().expect_code(0);
}

#[test]
fn c5_a_lost_latest_is_recomputed_and_no_manifest_is_no_fresh_start() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("lost-latest");
    let (_, stopped, spec) = stopped_at_20(&scratch);
    let latest = stopped.dir().join("LATEST");

    fs::remove_file(&latest).unwrap();
    resume(&scratch, &stopped, "LATEST", &["--until-step", "21"])
        .expect_code(0)
        .expect_said("LATEST is missing; recomputed from the committed manifests: epoch_0_step_19")
        .expect_said("continues from epoch_0_step_19");
    assert_eq!(stopped.latest().step, 20);

    fs::remove_file(&latest).unwrap();
    symlink("epoch_0_step_99", &latest).unwrap();
    resume(&scratch, &stopped, "LATEST", &["--until-step", "22"])
        .expect_code(0)
        .expect_said("LATEST names epoch_0_step_99, which is not a committed checkpoint")
        .expect_said("continues from epoch_0_step_20");
    assert_eq!(stopped.latest().step, 21);

    let names: Vec<String> = stopped.commits().iter().map(|commit| commit.name.to_string()).collect();
    for name in &names {
        fs::remove_file(stopped.dir().join(name).join("manifest.json")).unwrap();
    }
    let before = contents(stopped.dir());
    for ended in [resume(&scratch, &stopped, "LATEST", &[]), run(&scratch, &spec, &[])] {
        let ended = ended.expect_code(64);
        assert!(names.iter().all(|name| ended.stderr.contains(name)), "{names:?} in {}", ended.stderr);
    }
    assert!(contents(stopped.dir()) == before, "a refusal changes nothing");
}

#[test]
fn from_lowest_val_starts_where_it_says() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("lowest-val");
    // A learning rate that grows until it ruins the model, so that the best checkpoint is not the last.
    let job = Job { lr: 3.0, warmup: 18, ckpt_every: 5, val_every: 5, steps: 20, ..Job::new(scratch.join("run")) };
    let spec = job.write(scratch.join("job.yaml"));
    run(&scratch, &spec, &[]).expect_code(0);
    let resumed = Run::new(&job.run_dir);
    let lowest = resumed.pointer("LOWEST_VAL").unwrap();
    let best = resumed.manifest(&lowest).unwrap();
    let last = resumed.latest();
    let losses: Vec<_> = resumed.commits().iter().map(|commit| commit.metrics.val_loss("default")).collect();
    assert!(best.step < last.step, "the test needs a run that gets worse: {losses:?}");
    let before = resumed.rows();

    resume(&scratch, &resumed, "LOWEST_VAL", &[]).expect_code(0).expect_said("LOWEST_VAL").expect_said(&lowest);
    let (now, generation) = (resumed.latest(), *resumed.generations().last().unwrap());
    assert_eq!(now.started_from.as_ref().unwrap().name.to_string(), lowest);
    // What was later than the start is retired, not overwritten (C6), and the same steps give the same bits (P4).
    let set_aside = format!("abandoned/g{generation}/{}", last.name);
    assert!(resumed.dir().join(&set_aside).join("manifest.json").is_file());
    let listed = scratch.trainctl(["checkpoints", "list", resumed.dir().to_str().unwrap()]).wait();
    listed.expect_code(0).expect_said(&set_aside).expect_said("set aside: ");
    assert_eq!((now.step, &now.state_hash), (last.step, &last.state_hash));
    let rows = resumed.rows();
    assert!(rows.iter().map(trainctl_tests::run::Row::bits).eq(before.iter().map(trainctl_tests::run::Row::bits)));
    assert!(rows.iter().all(|row| (row.generation == generation) == (row.step > best.step)), "{rows:?}");
}

#[test]
fn running_again_is_resuming_and_overwrites_nothing() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("running-again");
    let job = Job { steps: 10, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("run")) };
    let spec = job.write(scratch.join("job.yaml"));
    run(&scratch, &spec, &[]).expect_code(0);
    let before = contents(&job.run_dir);

    run(&scratch, &spec, &[]).expect_code(0).expect_said("has done 10 steps already");
    let changed = run(&scratch, &spec, &["--set", "seed=5"]).expect_code(64);
    for part in ["seed", "1111", "5", "may not change"] {
        assert!(changed.stderr.contains(part), "{part} in {}", changed.stderr);
    }
    run(&scratch, &spec, &["--fresh"]).expect_code(64).expect_said("--fresh takes an empty directory only");
    assert!(contents(&job.run_dir) == before, "a refusal changes nothing");

    let other = scratch.join("other");
    run(&scratch, &spec, &["--fresh", "--run-dir", other.to_str().unwrap(), "--until-step", "5"]).expect_code(0);
    assert_eq!(Run::new(&other).latest().step, 4);
}

#[test]
fn a_live_run_directory_is_refused_with_its_holder() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("live-holder");
    let job = Job { steps: 60, ..Job::new(scratch.join("run")).slow() };
    let (spec, first) = (job.write(scratch.join("job.yaml")), Run::new(&job.run_dir));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    first.wait_for_step(2);
    let second = run(&scratch, &spec, &[]).expect_code(69);
    assert!(trainctl.is_running(), "the second must come while the first runs");
    let endpoint = trainctl_runtime::endpoint::read(&job.run_dir.join("control")).unwrap();
    for part in [format!("127.0.0.1:{}", endpoint.port), endpoint.host, endpoint.pid.to_string()] {
        assert!(second.stderr.contains(&part), "{part} in {}", second.stderr);
    }
    trainctl.wait().expect_code(0);
    assert_eq!(first.latest().step, 59);
    assert_eq!(first.generations().len(), 1);
}

#[test]
fn p8_a_start_beyond_the_end_is_refused_and_retires_nothing() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("nothing-to-do");
    let (_, stopped, _) = stopped_at_20(&scratch);
    let before = contents(stopped.dir());
    for (from, until) in [("epoch_0_step_9", "10"), ("epoch_0_step_19", "5")] {
        let refused = resume(&scratch, &stopped, from, &["--until-step", until]).expect_code(64);
        for part in [from, "there is nothing to do", "--until-step"] {
            assert!(refused.stderr.contains(part), "{part} in {}", refused.stderr);
        }
    }
    assert!(contents(stopped.dir()) == before, "a refusal changes nothing");
    resume(&scratch, &stopped, "epoch_0_step_9", &["--until-step", "11"]).expect_code(0);
    assert_eq!(stopped.latest().step, 10);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it does what a holder did before it was frozen")]
fn c2_what_a_takeover_puts_back_is_an_event_of_the_run() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("put-back");
    let (job, stopped, spec) = stopped_at_20(&scratch);
    let want = unbroken(&job);
    // As a holder leaves it that was frozen before it retired, and woke up after its successor had committed.
    let generation = stopped.latest().generation;
    let abandoned = stopped.dir().join(format!("abandoned/g{generation}"));
    fs::create_dir_all(&abandoned).unwrap();
    fs::rename(stopped.dir().join("epoch_0_step_19"), abandoned.join("epoch_0_step_19")).unwrap();

    run(&scratch, &spec, &[]).expect_code(0);
    let restored = stopped.events_of("checkpoint_restored");
    assert_eq!(restored.len(), 1, "{restored:?}");
    assert_eq!((&restored[0]["checkpoint"], &restored[0]["save"]), (&"epoch_0_step_19".into(), &"full".into()));
    let parent = stopped.manifest("epoch_0_step_29").unwrap().started_from.unwrap();
    assert_eq!(parent.name.to_string(), "epoch_0_step_19", "and the run goes on from it");
    assert_same_rows(&stopped, &want, job.steps);
}
