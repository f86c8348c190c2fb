//! Forks of checkpoints that do not lie in a run directory's own folder: in a bucket, and weights that were saved apart
//! (P4; `docs/forks.md`).

use std::path::Path;

use trainctl_s3::{Program, Server};
use trainctl_spec::start::Keep;
use trainctl_tests::job::Job;
use trainctl_tests::process::Ended;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::Run;
use trainctl_tests::scratch::Scratch;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn fork(scratch: &Scratch, parent: &str, spec: &Path, name: &str, more: &[&str]) -> (Ended, Run) {
    let run = Run::new(scratch.join(name));
    let words = ["fork", parent, text(spec), "--run-dir", text(run.dir())];
    (scratch.trainctl([&words, more].concat()).wait(), run)
}

fn job(scratch: &Scratch) -> Job {
    Job { steps: 20, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("parent")) }
}

/// The first `steps` steps of a run with weights saved apart, every 5.
fn run_parent(scratch: &Scratch, spec: &Path, steps: u64) {
    let steps = steps.to_string();
    let words = ["run", text(spec), "--until-step", &steps, "--set", "checkpoint.weights_every_steps=5"];
    scratch.trainctl(words).wait().expect_code(0);
}

fn assert_goes_on_as(fork: &Run, want: &Run, first: u64) {
    let bits = |run: &Run| run.rows().iter().map(trainctl_tests::run::Row::bits).collect::<Vec<_>>();
    assert_eq!(bits(fork), bits(want)[first as usize..]);
    assert_eq!(fork.latest().state_hash, want.latest().state_hash);
}

#[test]
fn p4_a_fork_of_a_checkpoint_in_a_bucket_goes_on_as_its_parent() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("fork-bucket");
    let server = Server::start(Program::Test("object_store::s3_server"), &scratch.join("s3"), "checkpoints");
    scratch.set_environment(server.environment());
    let local = job(&scratch);
    let want = unbroken(&local);
    let spec = local.write(scratch.join("fork.yaml"));
    let parent = Job { checkpoint_dir: Some(server.url("run")), ..local };
    run_parent(&scratch, &parent.write(scratch.join("parent.yaml")), 10);

    // By its URL: into a directory, and into the bucket.
    let keep = ["--keep", "weights,optimizer,data,schedule", "--run"];
    let (ended, forked) = fork(&scratch, &server.url("run/epoch_0_step_9"), &spec, "fork", &keep);
    ended.expect_code(0).expect_said("is not pinned");
    assert_goes_on_as(&forked, &want, 10);
    let place = format!("checkpoint.checkpoint_dir={}", server.url("fork"));
    let (ended, forked) =
        fork(&scratch, &server.url("run"), &spec, "fork-in-bucket", &[&keep[..], &["--set", &place]].concat());
    ended.expect_code(0);
    let commits = Run::new(server.object("fork")).commits();
    let last = commits.last().unwrap();
    assert_eq!((last.step, &last.state_hash), (19, &want.latest().state_hash));
    assert_eq!(forked.rows().len(), 10);
    let named = last.parent.clone().unwrap();
    assert_eq!((named.name.to_string().as_str(), named.keep), ("epoch_0_step_9", Keep::ALL));
    assert!(named.run.contains(&server.url("run")), "{named:?}");

    // By its run directory, whose checkpoints are in the bucket; `restore_from` does the same.
    let (ended, forked) = fork(&scratch, text(&parent.run_dir), &spec, "fork-of-run", &keep);
    ended.expect_code(0);
    assert_goes_on_as(&forked, &want, 10);
    let restored = Run::new(scratch.join("restored"));
    let from = format!("checkpoint.restore_from={}", server.url("run/epoch_0_step_9"));
    let words = ["run", text(&spec), "--run-dir", text(restored.dir()), "--set", &from];
    scratch.trainctl(words).wait().expect_code(0);
    assert_goes_on_as(&restored, &want, 10);

    // What is not there is one error, and nothing is written.
    let (ended, none) = fork(&scratch, &server.url("run/epoch_0_step_7"), &spec, "none", &[]);
    ended.expect_code(64).expect_said("no committed checkpoint epoch_0_step_7");
    assert!(!none.dir().exists());
    let (ended, none) = fork(&scratch, "s3://nowhere/run", &spec, "none", &[]);
    assert_ne!(ended.code, Some(0));
    ended.expect_said("NoSuchBucket");
    assert!(!none.dir().exists());
}

#[test]
fn a_fork_of_weights_saved_apart_begins_with_them_and_keeps_nothing_else() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("fork-weights");
    let server = Server::start(Program::Test("object_store::s3_server"), &scratch.join("s3"), "checkpoints");
    scratch.set_environment(server.environment());
    let parent = job(&scratch);
    let spec = parent.write(scratch.join("job.yaml"));
    run_parent(&scratch, &spec, 10);
    let weights = parent.run_dir.join("weights/epoch_0_step_9");

    // The default is to keep the moments, which are not there.
    let (ended, none) = fork(&scratch, text(&weights), &spec, "none", &["--run"]);
    ended.expect_code(64).expect_said("so optimizer cannot be kept: keep weights alone (--keep weights,");
    assert!(!none.dir().exists(), "a refusal writes nothing");

    let (ended, forked) = fork(&scratch, text(&weights), &spec, "fork", &["--keep", "weights", "--run"]);
    ended.expect_code(0);
    let (ended, whole) = fork(&scratch, text(&parent.run_dir), &spec, "whole", &["--keep", "weights", "--run"]);
    ended.expect_code(0);
    let (rows, same) = (forked.rows(), whole.rows());
    assert_eq!(rows.iter().map(|row| row.step).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
    // The same weights but for their rounding to bf16; those that a run begins with from scratch are far off.
    let (rounded, exact, fresh) = (rows[0].loss, same[0].loss, Run::new(&parent.run_dir).rows()[0].loss);
    assert!((rounded - exact).abs() < 1e-2 && rounded.to_bits() != exact.to_bits(), "{rounded} and {exact}");
    assert!(fresh - exact > 0.1, "{fresh} and {exact}");
    let named = forked.latest().parent.unwrap();
    assert_eq!((named.name.to_string().as_str(), named.keep), ("epoch_0_step_9", Keep::WEIGHTS));

    // From a bucket they are the same bits.
    let uploaded = Job { run_dir: scratch.join("uploaded"), checkpoint_dir: Some(server.url("run")), ..parent };
    run_parent(&scratch, &uploaded.write(scratch.join("uploaded.yaml")), 10);
    let url = server.url("run/weights/epoch_0_step_9");
    let (ended, from_bucket) = fork(&scratch, &url, &spec, "from-bucket", &["--keep", "weights", "--run"]);
    ended.expect_code(0);
    assert_goes_on_as(&from_bucket, &forked, 0);
}
