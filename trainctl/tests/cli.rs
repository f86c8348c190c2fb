//! The contract of the command line, on the real program: exit codes, what goes to which stream, and that a refusal
//! leaves no trace. What needs daemons is in the end-to-end suites.

#![allow(clippy::expect_used, reason = "tests")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use trainctl_dataset::indexed::{Dtype, IndexedWriter};

/// A folder with a corpus and a spec that passes.
struct Place {
    dir: tempfile::TempDir,
}

const CONFIG: &str = "{model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 32, n_positions: 64, vocab_size: 256}";

fn spec() -> String {
    format!(
        "name: tiny\nrun_dir: run\nresources: {{workers: 2}}\nmodel: {{config: {CONFIG}}}\n\
         dataset: {{paths: text, seq_length: 16, split: \"90,10,0\"}}\nvalidation_dataset: {{num_val_samples: 4}}\n\
         step_scheduler: {{global_batch_size: 4, local_batch_size: 2, max_steps: 20, ckpt_every_steps: 10}}\n"
    )
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut writer = IndexedWriter::create(&dir.path().join("text"), Dtype::for_vocabulary(256)).expect("create");
        for document in 0..50_u32 {
            let tokens: Vec<u32> = (0..40).map(|n| (n * 7 + document) % 256).collect();
            writer.push_document(&tokens).expect("push");
        }
        writer.finish().expect("finish");
        std::fs::write(dir.path().join("job.yaml"), spec()).expect("write");
        Self { dir }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn trainctl(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_trainctl"))
            .args(arguments)
            .current_dir(self.path())
            .env("HOME", self.path())
            .env_remove("XDG_STATE_HOME")
            .env_remove("TRAINCTL_COORDINATOR")
            .env_remove("TRAINCTL_LOG")
            .output()
            .expect("run trainctl")
    }

    fn names(&self) -> Vec<PathBuf> {
        let mut names: Vec<_> =
            std::fs::read_dir(self.path()).expect("list").map(|entry| entry.expect("entry").path()).collect();
        names.sort();
        names
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("not killed by a signal")
}

#[test]
fn help_and_version_are_data_and_usage_errors_are_not() {
    let place = Place::new();
    for arguments in [&["--help"][..], &["run", "--help"], &["--version"], &["data", "tokenizer", "train", "--help"]] {
        let output = place.trainctl(arguments);
        assert_eq!((code(&output), output.stderr.len()), (0, 0), "{arguments:?}");
        assert!(!output.stdout.is_empty(), "{arguments:?}");
    }
    for arguments in
        [&[][..], &["run"], &["frobnicate"], &["run", "job.yaml", "--workers", "0"], &["list", "--output", "xml"]]
    {
        let output = place.trainctl(arguments);
        assert_eq!((code(&output), output.stdout.len()), (64, 0), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_good_spec_validates_and_writes_nothing() {
    let place = Place::new();
    let before = place.names();
    let output = place.trainctl(&["validate", "job.yaml"]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("job.yaml: ok\n"), "{}", text(&output.stdout));
    let output = place.trainctl(&["validate", "job.yaml", "--output", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json["valid"], true);
    assert_eq!(place.names(), before);
}

#[test]
fn a_bad_spec_is_refused_before_anything_is_written() {
    let place = Place::new();
    let before = place.names();
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--set", "step_scheduler.max_steps=-3"], &["--set step_scheduler.max_steps=-3", "max_steps"]),
        (&["--step_scheduler.max_steps=abc"], &["--step_scheduler.max_steps=abc"]),
        (&["optimizer.lrr=1"], &["optimizer.lrr=1", "lrr"]),
        (&["--set", "model.config.n_head=3"], &["n_head", "3"]),
        (&["--set", "dataset.paths=nowhere"], &["dataset.paths", "nowhere"]),
        (&["--set", "dataset.seq_length=100"], &["seq_length", "100", "64"]),
        (&["--workers", "9"], &["global_batch_size", "resources.workers = 9"]),
        (&["--set", "nonsense"], &["--set nonsense", "key=value"]),
    ];
    for (overrides, said) in cases {
        for verb in ["validate", "run"] {
            if verb == "validate" && overrides[0] == "--workers" {
                continue;
            }
            let output = place.trainctl(&[&[verb, "job.yaml"], overrides].concat());
            let stderr = text(&output.stderr);
            assert_eq!((code(&output), text(&output.stdout).as_str()), (64, ""), "{verb} {overrides:?}: {stderr}");
            for word in said {
                assert!(stderr.contains(word), "{verb} {overrides:?} does not say {word:?}: {stderr}");
            }
        }
    }
    assert_eq!(place.names(), before);
}

#[test]
fn a_spec_that_is_no_file_is_named() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("folder.yaml")).expect("create");
    std::fs::write(place.path().join("torn.yaml"), "name: [tiny\n").expect("write");
    std::fs::write(place.path().join("binary.yaml"), [0xff, 0xfe, 0]).expect("write");
    for (file, said) in [
        ("missing.yaml", "does not exist"),
        ("folder.yaml", "is a directory"),
        ("torn.yaml", "torn.yaml:"),
        ("binary.yaml", "UTF-8"),
    ] {
        let output = place.trainctl(&["run", file]);
        let stderr = text(&output.stderr);
        assert_eq!(code(&output), 64, "{file}: {stderr}");
        assert!(stderr.starts_with(file) && stderr.contains(said), "{file}: {stderr}");
    }
}

#[test]
fn faults_are_data_when_json_is_asked_for() {
    let place = Place::new();
    let output = place.trainctl(&["validate", "job.yaml", "--output", "json", "--set", "seed=minus"]);
    assert_eq!((code(&output), output.stderr.len()), (64, 0));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((json["valid"].as_bool(), json["faults"][0]["key"].as_str()), (Some(false), Some("seed")));
}

#[test]
fn without_a_coordinator_every_asker_says_where_it_looked() {
    let place = Place::new();
    let askers = [
        &["list"][..],
        &["status"],
        &["cancel", "x"],
        &["logs", "x"],
        &["submit", "job.yaml"],
        &["auth", "grant", "ann"],
        &["auth", "list"],
        &["auth", "revoke", "ann"],
    ];
    for arguments in askers {
        let output = place.trainctl(arguments);
        let stderr = text(&output.stderr);
        assert_eq!((code(&output), output.stdout.len()), (69, 0), "{arguments:?}: {stderr}");
        for word in ["control/endpoint.json", ".local/state/trainctl/endpoint.json", "--coordinator"] {
            assert!(stderr.contains(word), "{arguments:?} does not say {word:?}: {stderr}");
        }
    }
    let output = place.trainctl(&["list", "--coordinator", "/nonexistent"]);
    assert_eq!(code(&output), 69);
    assert!(text(&output.stderr).contains("/nonexistent/endpoint.json"));
}

#[test]
fn a_life_that_is_none_is_named_before_anybody_is_asked() {
    let place = Place::new();
    let output = place.trainctl(&["auth", "grant", "ann", "--expires", "soon"]);
    assert_eq!((code(&output), output.stdout.len()), (64, 0));
    assert!(text(&output.stderr).contains("write a number and s, m, h or d, as in 30d"), "{}", text(&output.stderr));
}

#[test]
fn resume_without_a_run_says_what_is_missing() {
    let place = Place::new();
    let output = place.trainctl(&["resume", "--from", "LATEST"]);
    assert_eq!(code(&output), 69);
    assert!(text(&output.stderr).contains("the current folder holds no run"), "{}", text(&output.stderr));
    let output = place.trainctl(&["resume", "."]);
    assert_eq!(code(&output), 64);
    assert!(
        text(&output.stderr).contains("job.yaml") || text(&output.stderr).contains("holds no"),
        "{}",
        text(&output.stderr)
    );
    let output = place.trainctl(&["resume", "no/such/dir"]);
    assert_eq!(code(&output), 64);
}

#[test]
fn what_a_run_cannot_begin_with_is_named_and_nothing_is_written() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("empty")).expect("make");
    let before = place.names();
    let cases: [(&[&str], &[&str]); 7] = [
        (&["fork", "nowhere", "job.yaml"], &["nowhere does not exist", "<run directory>/<name>"]),
        (&["fork", "empty", "job.yaml"], &["empty holds no checkpoint"]),
        (&["fork", "empty/epoch_0_step_9", "job.yaml"], &["empty holds no checkpoint"]),
        (&["fork", "empty", "job.yaml", "--keep", "weights,momentum"], &["`momentum` cannot be kept", "schedule"]),
        (&["run", "job.yaml", "--weights-only"], &["checkpoint.weights_only", "checkpoint.restore_from"]),
        (
            &["run", "job.yaml", "checkpoint.restore_from=nowhere"],
            &["checkpoint.restore_from", "nowhere does not exist"],
        ),
        (&["resume", "empty", "--weights-only"], &["trainctl fork empty/LATEST job.yaml --keep weights"]),
    ];
    for (arguments, said) in cases {
        let output = place.trainctl(arguments);
        let message = text(&output.stderr);
        assert_eq!((code(&output), output.stdout.len()), (64, 0), "{arguments:?}: {message}");
        said.iter().for_each(|part| assert!(message.contains(part), "{arguments:?}: {part:?} is not in:\n{message}"));
        assert_eq!(place.names(), before, "{arguments:?}");
    }
}

#[test]
fn fresh_takes_an_empty_directory_only() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("run")).expect("create");
    std::fs::write(place.path().join("run/notes.txt"), "mine").expect("write");
    let output = place.trainctl(&["run", "job.yaml", "--fresh"]);
    assert_eq!(code(&output), 64);
    assert!(text(&output.stderr).contains("--fresh"), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_dir(place.path().join("run")).expect("list").count(), 1, "something was written");
}

#[test]
fn checkpoint_directories_without_a_manifest_are_listed_and_never_started_over() {
    let place = Place::new();
    std::fs::create_dir_all(place.path().join("run/epoch_0_step_9/model")).expect("create");
    let output = place.trainctl(&["run", "job.yaml"]);
    assert_eq!(code(&output), 64);
    assert!(text(&output.stderr).contains("epoch_0_step_9"), "{}", text(&output.stderr));
    let output = place.trainctl(&["checkpoints", "list", "run", "--output", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((json[0]["name"].as_str(), json[0]["state"].as_str()), (Some("epoch_0_step_9"), Some("uncommitted")));
    assert_eq!(code(&place.trainctl(&["checkpoints", "verify", "run"])), 64);
}

#[test]
fn data_verbs_make_what_a_spec_reads() {
    let place = Place::new();
    let lines: Vec<String> = (0..200)
        .map(|n| serde_json::json!({ "text": format!("line {n} says hello to line {}", n * 3) }).to_string())
        .collect();
    std::fs::write(place.path().join("text.jsonl"), lines.join("\n")).expect("write");
    let steps: [&[&str]; 3] = [
        &["data", "tokenizer", "train", "text.jsonl", "--output-path", "tokenizer", "--vocab-size", "300"],
        &["data", "preprocess", "text.jsonl", "--tokenizer", "tokenizer", "--output-prefix", "new", "--append-eod"],
        &["data", "inspect", "new_text_document", "--tokenizer", "tokenizer", "--output", "json"],
    ];
    for arguments in steps {
        let output = place.trainctl(arguments);
        assert_eq!(code(&output), 0, "{arguments:?}: {}", text(&output.stderr));
    }
    let set = ["--set", "dataset.paths=new_text_document", "--set", "dataset.tokenizer=tokenizer"];
    let output = place.trainctl(&[&["validate", "job.yaml"][..], &set].concat());
    assert_eq!(code(&output), 64, "300 ids do not fit 256");
    assert!(text(&output.stderr).contains("vocab_size"), "{}", text(&output.stderr));
    let output =
        place.trainctl(&[&["validate", "job.yaml", "--set", "model.config.vocab_size=300"][..], &set].concat());
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
}

/// A daemon of `trainctl run` ends with its supervisor, also when that is killed with SIGKILL.
#[test]
fn a_tied_daemon_does_not_outlive_its_supervisor() {
    let script = r#"TRAINCTL_PARENT_PID=$$ "$0" tied-daemon sleep 600 & echo $!; wait"#;
    let mut supervisor = Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_trainctl")])
        .stdout(Stdio::piped())
        .spawn()
        .expect("bash");
    let mut line = String::new();
    BufReader::new(supervisor.stdout.take().expect("stdout")).read_line(&mut line).expect("pid");
    let daemon: u32 = line.trim().parse().expect("pid");
    let is_daemon = || std::fs::read(format!("/proc/{daemon}/cmdline")).is_ok_and(|line| line.starts_with(b"sleep\0"));
    wait_until("the daemon runs", is_daemon);
    supervisor.kill().expect("kill");
    supervisor.wait().expect("wait");
    wait_until("the daemon is gone", || !is_daemon());
    // Started by nobody who lives: it never becomes the daemon.
    let orphan = Command::new(env!("CARGO_BIN_EXE_trainctl"))
        .args(["tied-daemon", "touch", "never"])
        .env("TRAINCTL_PARENT_PID", "4194305")
        .output()
        .expect("run trainctl");
    assert_eq!(code(&orphan), 2);
    assert!(!Path::new("never").exists());
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let place = Place::new();
    let command = format!("'{}' data inspect text | true", env!("CARGO_BIN_EXE_trainctl"));
    let output =
        Command::new("bash").args(["-o", "pipefail", "-c", &command]).current_dir(place.path()).output().expect("bash");
    assert!(output.status.success(), "{}", text(&output.stderr));
}
