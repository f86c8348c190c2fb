//! A job whose checkpoints lie in a bucket of a real S3 server (P2, P4, P8): it trains, loses a trainer and a coordinator,
//! goes on, and ends with the same bits as the same job on a directory.

use std::path::Path;

use nix::sys::signal::Signal;
use trainctl_runtime::endpoint;
use trainctl_s3::{Program, SECRET_KEY, Server, Switches};
use trainctl_tests::job::Job;
use trainctl_tests::process;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, wait};

const BUCKET: &str = "checkpoints";

/// The S3 server's process.
#[test]
fn s3_server() {
    trainctl_s3::serve_if_asked();
}

/// A server, and the variables of its clients in the test's environment.
fn serve(scratch: &mut Scratch) -> Server {
    let server = Server::start(Program::Test("object_store::s3_server"), &scratch.join("s3"), BUCKET);
    scratch.set_environment(server.environment());
    server
}

/// The job with its checkpoints below `s3://checkpoints/run`, and that prefix as the server's directory shows it.
fn job_on(server: &Server, scratch: &Scratch) -> (Job, Run) {
    let job = Job { checkpoint_dir: Some(server.url("run")), ..Job::new(scratch.join("run")).slow() };
    (job, Run::new(server.object("run")))
}

/// Every file below a folder in which a text is found.
fn files_with(dir: &Path, text: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            files_with(&path, text, found);
        } else if String::from_utf8_lossy(&std::fs::read(&path).unwrap()).contains(text) {
            found.push(path.display().to_string());
        }
    }
}

#[test]
fn p4_a_job_on_a_bucket_survives_kills_and_a_bad_network_and_equals_the_job_on_a_directory() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("object-store");
    let server = serve(&mut scratch);
    server.set(&Switches { seed: 5, refuse: 0.05, lose: 0.05, truncate: 0.05, ..Switches::default() });
    let (job, bucket) = job_on(&server, &scratch);
    let want = unbroken(&Job { checkpoint_dir: None, ..job.clone() });
    let (spec, run) = (job.write(scratch.join("job.yaml")), Run::new(&job.run_dir));

    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap(), "--until-step", "25"]);
    run.wait_for_step(13);
    run.wait_for_trainers(2, 0)[1].kill9();
    trainctl.wait().expect_code(0);
    let stopped = bucket.commits().pop().unwrap();
    assert_eq!(stopped.step, 24);
    assert_eq!(run.commits().len(), 0, "no checkpoint lies in the run directory");

    // Running again is resuming, from the bucket.
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    let pid = || endpoint::read(&job.run_dir.join("control")).map(|endpoint| endpoint.pid).ok();
    run.wait_for_step(27);
    let first = pid().unwrap();
    process::send(first, Signal::SIGKILL);
    wait::until_true("another coordinator", || pid().is_some_and(|pid| pid != first));
    trainctl.wait().expect_code(0).expect_said("continues from epoch_0_step_24");

    assert_same_rows(&run, &want, job.steps);
    let last = bucket.commits().pop().unwrap();
    assert_eq!((last.step, &last.state_hash), (39, &want.latest().state_hash));
    let pointer = std::fs::read_to_string(server.object("run/LATEST")).unwrap();
    assert_eq!(pointer, format!("{}\n", last.name), "a pointer is a small text object");
    assert!(server.keys().iter().all(|key| !key.contains(".trainctl-probe") && !key.ends_with(".upload")));
    assert_eq!(server.open_uploads(), Vec::<String>::new());

    server.set(&Switches::default());
    let run_dir = job.run_dir.to_str().unwrap();
    scratch.trainctl(["checkpoints", "verify", run_dir, "LATEST"]).wait().expect_code(0);
    let listed = scratch.trainctl(["checkpoints", "list", run_dir]).wait().expect_code(0);
    assert!(listed.stdout.contains(&last.name.to_string()), "{}", listed.stdout);
    // Events, journals, logs, specs: credentials come from the environment and stay there.
    let mut leaks = Vec::new();
    for folder in ["run", "logs", "home"] {
        files_with(&scratch.join(folder), SECRET_KEY, &mut leaks);
    }
    assert!(leaks.is_empty(), "the secret is in {leaks:?}");
}

#[test]
fn p8_a_server_that_ignores_conditions_is_refused_before_a_worker_is_taken() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("object-store-refused");
    let server = serve(&mut scratch);
    let (job, _) = job_on(&server, &scratch);
    let spec = job.write(scratch.join("job.yaml"));
    server.set(&Switches { ignore_conditions: true, ..Switches::default() });
    let ended = scratch.trainctl(["run", spec.to_str().unwrap()]).wait();
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains("ignores the condition of a put"), "{}", ended.stderr);
    assert!(Run::new(&job.run_dir).events_of("generation_forming").is_empty());
    assert_eq!(server.keys(), Vec::<String>::new(), "nothing was written, and the question is removed");
}

#[test]
fn p8_a_bucket_that_is_not_there_is_named() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("object-store-nowhere");
    let server = serve(&mut scratch);
    let job = Job { checkpoint_dir: Some("s3://nowhere/run".into()), ..Job::new(scratch.join("run")) };
    let ended = scratch.trainctl(["run", job.write(scratch.join("job.yaml")).to_str().unwrap()]).wait();
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains("NoSuchBucket"), "{}", ended.stderr);
    drop(server);
}
