//! `trainctl checkpoints`: what people read about checkpoints and do to them without a coordinator.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use trainctl_s3::{Program, Server};
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Ended};
use trainctl_tests::programs;
use trainctl_tests::scratch::Scratch;
use trainctl_tests::synthetic::Synthetic;
use trainctl_tests::wait;

fn checkpoints(scratch: &Scratch, arguments: &[&str]) -> Ended {
    scratch.trainctl([&["checkpoints"], arguments].concat()).wait()
}

fn json(scratch: &Scratch, arguments: &[&str], code: i32) -> Value {
    let ended = checkpoints(scratch, &[arguments, &["--output", "json"]].concat()).expect_code(code);
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {}", ended.stdout))
}

/// Checkpoints in a listing, by name.
fn listed(scratch: &Scratch) -> Vec<String> {
    let lines = json(scratch, &["list", "run"], 0);
    lines.as_array().unwrap().iter().map(|line| line["name"].as_str().unwrap().to_owned()).collect()
}

fn flip_last_byte(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn c9_a_pinned_checkpoint_stays_until_it_is_unpinned() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("checkpoints-pins");
    let run = Synthetic::tiny(scratch.join("run"));
    for step in [9, 19, 29, 39] {
        run.commit(step, step, Some(step as f64));
    }
    checkpoints(&scratch, &["pin", "run", "epoch_0_step_19", "--why", "in the paper", "--who", "anna"]).expect_code(0);
    checkpoints(&scratch, &["pin", "run", "epoch_0_step_8"]).expect_code(64).expect_said("epoch_0_step_8");
    checkpoints(&scratch, &["pin", "run", "LATEST", "--who", "generation-3"]).expect_code(64);
    let lines = json(&scratch, &["list", "run"], 0);
    let pin = &lines[1]["pins"][0];
    assert_eq!((&pin["who"], &pin["why"], &pin["for_good"]), (&"anna".into(), &"in the paper".into(), &true.into()));
    checkpoints(&scratch, &["list", "run"]).expect_code(0).expect_said("pinned by anna");

    // LOWEST_VAL is step 9, LATEST 39; --keep 1 would drop 19 and 29.
    let plan = json(&scratch, &["prune", "run", "--keep", "1", "--dry-run"], 0);
    let actions: Vec<_> = plan["checkpoints"].as_array().unwrap().iter().map(|line| &line["action"]).collect();
    assert_eq!(actions, ["keep", "keep", "remove", "keep"]);
    assert_eq!(listed(&scratch).len(), 4, "--dry-run changes nothing");
    checkpoints(&scratch, &["prune", "run", "--keep", "1"]).expect_code(0).expect_said("pinned by anna");
    assert_eq!(listed(&scratch), ["epoch_0_step_9", "epoch_0_step_19", "epoch_0_step_39"]);

    checkpoints(&scratch, &["unpin", "run", "epoch_0_step_19", "--who", "berta"]).expect_code(64).expect_said("anna");
    checkpoints(&scratch, &["unpin", "run", "epoch_0_step_19", "--who", "anna"]).expect_code(0);
    // job.yaml says max_recent_checkpoints: 2.
    checkpoints(&scratch, &["prune", "run"]).expect_code(0);
    assert_eq!(listed(&scratch), ["epoch_0_step_9", "epoch_0_step_19", "epoch_0_step_39"], "two newest and LOWEST_VAL");
    checkpoints(&scratch, &["prune", "run", "--keep", "1"]).expect_code(0);
    assert_eq!(listed(&scratch), ["epoch_0_step_9", "epoch_0_step_39"]);
    checkpoints(&scratch, &["verify", "run"]).expect_code(0);
}

#[test]
fn j2_prune_refuses_while_a_coordinator_holds_the_run() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("checkpoints-held");
    let job = Job::new(scratch.join("run"));
    let spec = job.write(scratch.join("job.yaml"));
    let state = scratch.join("state");
    let mut coordinator = Coordinator::start(&scratch, &state);
    // No worker comes: it waits in the queue, and the coordinator holds its directory.
    daemons::submit(&scratch, &state, &spec);
    let run = Synthetic::tiny(scratch.join("run"));
    for step in [9, 19, 29] {
        run.commit(step, step, None);
    }
    checkpoints(&scratch, &["prune", "run", "--keep", "1"]).expect_code(69).expect_said("held by a coordinator");
    assert_eq!(listed(&scratch).len(), 3);
    json(&scratch, &["prune", "run", "--keep", "1", "--dry-run"], 0);
    coordinator.process.kill9();
    checkpoints(&scratch, &["prune", "run", "--keep", "1"]).expect_code(0);
    assert_eq!(listed(&scratch), ["epoch_0_step_29"]);
    let numbers = fs::read_dir(scratch.join("run/control/numbers")).unwrap().count();
    assert_eq!(numbers, 2, "the coordinator's term and the pruner's");
    let _successor = Coordinator::start(&scratch, &state);
    checkpoints(&scratch, &["prune", "run", "--keep", "1"]).expect_code(0).expect_said("freed 0 B");
}

#[test]
fn diff_says_which_tensors_differ_and_by_how_much() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("checkpoints-diff");
    let run = Synthetic { bf16: true, ..Synthetic::tiny(scratch.join("run")) };
    run.commit(9, 1, None);
    run.commit(19, 2, None);
    run.commit_weights(19, 2);
    let other = Synthetic { bf16: true, ..Synthetic::tiny(scratch.join("other")) };
    other.commit(29, 1, None);

    checkpoints(&scratch, &["diff", "run/epoch_0_step_9", "other"]).expect_code(0).expect_said("equal in every value");
    let diff = json(&scratch, &["diff", "run/epoch_0_step_9", "LATEST"], 1);
    assert_eq!((&diff["within"], &diff["second"]["name"]), (&false.into(), &"epoch_0_step_19".into()), "{diff}");
    let tensors = diff["diff"]["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 2 * run.model().parameters().len());
    for tensor in tensors {
        let (max, rms) = (tensor["max"].as_f64().unwrap(), tensor["rms"].as_f64().unwrap());
        assert!(0.0 < rms && rms < max && max < 0.5, "{tensor}");
    }
    checkpoints(&scratch, &["diff", "run/epoch_0_step_9", "LATEST", "--tolerance", "0.5"])
        .expect_code(0)
        .expect_said("within 5e-1");
    checkpoints(&scratch, &["diff", "run", "run/weights"]).expect_code(1).expect_said("optim/master");
    checkpoints(&scratch, &["diff", "run", "run/weights", "--weights-only"]).expect_code(0);
    checkpoints(&scratch, &["diff", "run", "nowhere"]).expect_code(64).expect_said("nowhere");

    let larger = Synthetic { width: 64, ..Synthetic::tiny(scratch.join("larger")) };
    larger.commit(9, 1, None);
    checkpoints(&scratch, &["diff", "run", "larger", "--weights-only"]).expect_code(1).expect_said("[300, 64]");
}

#[test]
fn show_and_list_tell_what_a_checkpoint_is() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("checkpoints-show");
    let run = Synthetic { bf16: true, ..Synthetic::tiny(scratch.join("run")) };
    run.commit(9, 1, Some(2.5));
    run.commit_weights(4, 1);
    let shown = checkpoints(&scratch, &["show", "run"]).expect_code(0).stdout;
    for said in
        ["steps done    10 of 1,000", "val loss      default 2.5", "LATEST, LOWEST_VAL", "80 samples of text", "full"]
    {
        assert!(shown.contains(said), "{said}\n{shown}");
    }
    let shown = json(&scratch, &["show", "run/weights/epoch_0_step_4"], 0);
    assert_eq!((&shown["manifest"]["kind"], &shown["manifest"]["step"]), (&"weights".into(), &4.into()));
    assert_eq!(listed(&scratch), ["epoch_0_step_9", "weights/epoch_0_step_4"]);
    checkpoints(&scratch, &["show", "run/epoch_0_step_8"]).expect_code(64).expect_said("epoch_0_step_9");
}

#[test]
fn verify_names_the_file_that_is_damaged() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("checkpoints-verify");
    let run = Synthetic { bf16: true, ..Synthetic::tiny(scratch.join("run")) };
    run.commit(9, 1, None);
    run.commit(19, 2, None);
    run.commit_weights(9, 1);
    checkpoints(&scratch, &["verify", "run"]).expect_code(0).expect_said("weights/epoch_0_step_9  ok");
    let shard = "model/shard-00001-of-00002.g1.safetensors";
    flip_last_byte(&scratch.join("run/weights/epoch_0_step_9").join(shard));
    let found = json(&scratch, &["verify", "run"], 1);
    let broken: Vec<_> =
        found.as_array().unwrap().iter().filter(|line| !line["faults"].as_array().unwrap().is_empty()).collect();
    assert_eq!(broken.len(), 1, "{found:#}");
    assert_eq!(broken[0]["name"], "weights/epoch_0_step_9");
    checkpoints(&scratch, &["verify", "run", "LATEST"]).expect_code(0);
    flip_last_byte(&scratch.join("run/epoch_0_step_19").join(shard));
    checkpoints(&scratch, &["verify", "run", "LATEST"]).expect_code(1).expect_said(shard);
    checkpoints(&scratch, &["verify", "run/LATEST"]).expect_code(1).expect_said("DAMAGED");
    // A damaged manifest is what LATEST meant, not the older checkpoint.
    let manifest = scratch.join("run/epoch_0_step_19/manifest.json");
    let mut bytes = fs::read(&manifest).unwrap();
    bytes[20] ^= 1;
    fs::write(&manifest, bytes).unwrap();
    checkpoints(&scratch, &["verify", "run", "LATEST"]).expect_code(1).expect_said("the manifest is damaged");
}

#[test]
fn checkpoints_that_lie_elsewhere_are_found_from_the_run_directory() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("checkpoints-elsewhere");
    let elsewhere = scratch.join("elsewhere");
    let run = Synthetic { bf16: true, checkpoint_dir: Some(elsewhere.clone()), ..Synthetic::tiny(scratch.join("run")) };
    for step in [9, 19, 29] {
        run.commit(step, step, None);
    }
    run.commit_weights(9, 9);
    assert!(elsewhere.join("LATEST").exists() && !scratch.join("run/LATEST").exists());
    assert_eq!(listed(&scratch).len(), 4);
    checkpoints(&scratch, &["verify", "run/LATEST"]).expect_code(0);
    checkpoints(&scratch, &["diff", "run", "elsewhere/epoch_0_step_29"]).expect_code(0);
    scratch.trainctl(["export", "--from", "run/weights", "--to", "out"]).wait().expect_code(0);
    checkpoints(&scratch, &["pin", "run", "epoch_0_step_9"]).expect_code(0);
    assert!(scratch.join("run/control/pins").is_dir());
    // Pins and holder are the run directory's: without it nothing is removed.
    checkpoints(&scratch, &["prune", "elsewhere", "--keep", "1"]).expect_code(64).expect_said("no run directory");
    checkpoints(&scratch, &["pin", "elsewhere", "LATEST"]).expect_code(64);
    checkpoints(&scratch, &["prune", "run", "--keep", "1"]).expect_code(0);
    assert_eq!(listed(&scratch), ["epoch_0_step_9", "epoch_0_step_29", "weights/epoch_0_step_9"]);
    checkpoints(&scratch, &["list", "ftp://host/x"]).expect_code(64).expect_said("s3://");
}

#[test]
fn a_bucket_is_read_by_the_same_verbs() {
    if !programs::have_cli() {
        return;
    }
    let mut scratch = Scratch::new("checkpoints-bucket");
    let server = Server::start(Program::Test("object_store::s3_server"), &scratch.join("s3"), "checkpoints");
    scratch.set_environment(server.environment());
    let run = Synthetic { bf16: true, ..Synthetic::tiny(scratch.join("run")) };
    run.commit(9, 1, Some(2.0));
    run.commit_weights(4, 1);
    // The server keeps objects as files: what a job would have uploaded. A pointer there is a small object.
    copy(&scratch.join("run/epoch_0_step_9"), &server.object("run/epoch_0_step_9"));
    copy(&scratch.join("run/weights"), &server.object("run/weights"));
    fs::write(server.object("run/LATEST"), "epoch_0_step_9\n").unwrap();
    let url = server.url("run");

    let lines = json(&scratch, &["list", &url], 0);
    assert_eq!((&lines[0]["pointers"][0], &lines[1]["name"]), (&"LATEST".into(), &"weights/epoch_0_step_4".into()));
    checkpoints(&scratch, &["show", &format!("{url}/LATEST")]).expect_code(0).expect_said(&url);
    checkpoints(&scratch, &["verify", &url]).expect_code(0);
    checkpoints(&scratch, &["diff", &url, "run"]).expect_code(0);
    scratch.trainctl(["export", "--from", &format!("{url}/weights"), "--to", "out"]).wait().expect_code(0);
    assert!(scratch.join("out/model.safetensors").is_file());
    checkpoints(&scratch, &["pin", &url, "LATEST"]).expect_code(64).expect_said("name the run directory");
    checkpoints(&scratch, &["prune", &url, "--keep", "1"]).expect_code(64);

    flip_last_byte(&server.object("run/epoch_0_step_9/model/shard-00000-of-00002.g1.safetensors"));
    checkpoints(&scratch, &["verify", &url, "LATEST"]).expect_code(1).expect_said("model/shard-00000");
    scratch.trainctl(["export", "--from", &url, "--to", "broken"]).wait().expect_code(1);
    assert!(!scratch.join("broken").exists());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (from, to) = {
            let entry = entry.unwrap();
            (entry.path(), to.join(entry.file_name()))
        };
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).unwrap();
        }
    }
}

#[test]
fn prune_tells_what_it_did() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("checkpoints-told");
    let run = Synthetic::tiny(scratch.join("run"));
    for step in [9, 19, 29] {
        run.commit(step, step, None);
    }
    fs::create_dir_all(scratch.join("run/control")).unwrap();
    // It has made its plan and is about to take its term when somebody pins a checkpoint.
    let mut command = scratch.command("trainctl");
    command.args(["checkpoints", "prune", "run", "--keep", "1", "--output", "json"]);
    command.env("TRAINCTL_FAULT", "numbers.take:1:stop");
    let mut pruning = scratch.start(command, "prune");
    wait::until_true("a prune that is about to take its term", || process::is_stopped(pruning.pid()));
    checkpoints(&scratch, &["pin", "run", "epoch_0_step_9", "--who", "anna"]).expect_code(0);
    pruning.signal(Signal::SIGCONT);
    let told: Value = serde_json::from_str(&pruning.wait().expect_code(0).stdout).unwrap();
    let actions: Vec<_> = told["checkpoints"].as_array().unwrap().iter().map(|line| &line["action"]).collect();
    assert_eq!(actions, ["keep", "remove", "keep"], "{told}");
    assert_eq!(listed(&scratch), ["epoch_0_step_9", "epoch_0_step_29"]);
}
