//! The crash matrix of whole runs (P2, P4): one process of a real run is killed, frozen or fails at a fail point; trainctl brings
//! it back by itself, and the run ends as if nothing had happened. The store's own matrix (`store/tests/crash/`) has every
//! place in the store many times; here each process passes its places as part of a run.
//!
//! Without `TRAINCTL_MATRIX=all` each test carries out a sample (`make matrix` runs all).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use trainctl_store::CheckpointName;
use trainctl_store::fault::{ENV_TRACE, FailPoint};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Process};
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, seed, wait};

/// How long a frozen process stays so: more than twice the lease.
const FREEZE: Duration = Duration::from_millis(2500);
/// The shortest lease of a worker.
const LEASE_MS: &str = "1000";
/// What a case may take: the longest back-off after a fault is a few seconds.
const LIMIT: Duration = Duration::from_secs(120);
const ACTIONS: [&str; 3] = ["exit", "eio", "stop"];

/// One fault in one process.
#[derive(Clone, Debug)]
struct Case {
    program: &'static str,
    /// For each start of the program.
    faults: Vec<String>,
}

/// A short run with every kind of commit, pruning included.
fn job(run_dir: std::path::PathBuf) -> Job {
    Job { steps: 12, ckpt_every: 3, val_every: 3, warmup: 2, ..Job::new(run_dir) }
}

fn start(scratch: &Scratch, job: &Job, trace: Option<&Path>) -> Process {
    let spec = scratch.join("job.yaml");
    std::fs::write(&spec, format!("{}checkpoint:\n  max_recent_checkpoints: 1\n", job.yaml())).unwrap();
    let mut command = scratch.command("trainctl");
    command.arg("run").arg(spec).env("TRAINCTL_LEASE_MS", LEASE_MS);
    if let Some(trace) = trace {
        command.env(ENV_TRACE, trace);
    }
    scratch.start(command, "run")
}

/// What each program passes in an unbroken run, with how often one process does.
fn places() -> &'static BTreeMap<&'static str, BTreeMap<String, u64>> {
    static PLACES: OnceLock<BTreeMap<&'static str, BTreeMap<String, u64>>> = OnceLock::new();
    PLACES.get_or_init(|| {
        let scratch = Scratch::new("matrix-places");
        let trace = scratch.join("trace");
        std::fs::create_dir(&trace).unwrap();
        start(&scratch, &job(scratch.join("run")), Some(&trace)).wait().expect_code(0);
        let mut places: BTreeMap<&str, BTreeMap<String, u64>> = BTreeMap::new();
        for file in std::fs::read_dir(&trace).unwrap().map(|entry| entry.unwrap()) {
            let name = file.file_name().into_string().unwrap();
            let programs = ["trainctl-coordinator", "trainctl-worker", "trainctl-trainer"];
            let Some(program) = programs.into_iter().find(|program| name.starts_with(program)) else { continue };
            let mut counts: BTreeMap<String, u64> = BTreeMap::new();
            for place in std::fs::read_to_string(file.path()).unwrap().lines() {
                *counts.entry(place.to_owned()).or_default() += 1;
            }
            // Of two equal processes the one that passes a place less often: the fault must be reached in either.
            for (place, count) in counts {
                let known = places.entry(program).or_default().entry(place).or_insert(count);
                *known = count.min(*known);
            }
        }
        places
    })
}

/// Every place with every action; `nth` by chance, or each.
fn cases(program: &'static str, random: &mut StdRng, each: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (place, count) in &places()[program] {
        let nths: Vec<u64> = (1..=*count).collect();
        let nths = if each { nths } else { nths.choose(random).copied().into_iter().collect() };
        for (nth, action) in nths.into_iter().flat_map(|nth| ACTIONS.map(|action| (nth, action))) {
            cases.push(Case { program, faults: vec![format!("{place}:{nth}:{action}")] });
        }
    }
    cases
}

/// What only a coordinator passes that takes over.
fn takeovers() -> Vec<Case> {
    let places =
        ["journal.copy", "journal.copy.temp"].into_iter().flat_map(|place| ACTIONS.map(|action| (place, action)));
    let fault = |(place, action)| vec!["rows.append:5:exit".to_owned(), format!("{place}:1:{action}")];
    places.map(|case| Case { program: "trainctl-coordinator", faults: fault(case) }).collect()
}

/// What only a trainer passes that starts from a checkpoint.
fn reloads() -> Vec<Case> {
    let places = ["load.manifest", "load.block", "load.state"];
    let places = places.into_iter().flat_map(|place| ACTIONS.map(|action| (place, action)));
    // Two trainers start, one of them ends after the first commit, and two start again.
    let faults = |(place, action)| vec!["shard.write:8:exit".to_owned(), String::new(), format!("{place}:1:{action}")];
    places.map(|case| Case { program: "trainctl-trainer", faults: faults(case) }).collect()
}

/// What is left in a run directory that no run has a use for.
fn left_behind(run: &Run) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![run.dir().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()) {
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with(".tmp-") {
                found.push(entry.path().display().to_string());
            }
            if entry.file_type().unwrap().is_dir() {
                if folder == run.dir() && name.parse::<CheckpointName>().is_ok() && run.manifest(&name).is_none() {
                    found.push(entry.path().display().to_string());
                }
                folders.push(entry.path());
            }
        }
    }
    found
}

fn wait_for_freeze(scratch: &Scratch, trainctl: &mut Process) -> u32 {
    wait::within(LIMIT, "a frozen process", || {
        assert!(trainctl.is_running(), "the run ended before the fault: {}", trainctl.stderr());
        scratch.processes().into_iter().find(|pid| process::is_stopped(*pid))
    })
}

fn carry_out(case: &Case, number: usize) {
    let Case { program, faults } = case;
    let started = Instant::now();
    let mut scratch = Scratch::new(&format!("matrix-{program}-{number}"));
    let job = job(scratch.join("run"));
    let (run, want) = (Run::new(&job.run_dir), unbroken(&job));
    scratch.inject(program, &faults.iter().map(String::as_str).collect::<Vec<_>>());
    let mut trainctl = start(&scratch, &job, None);
    if faults.iter().any(|fault| fault.ends_with(":stop")) {
        let frozen = wait_for_freeze(&scratch, &mut trainctl);
        let thaw_at = Instant::now() + FREEZE;
        wait::until_true("the end of the freeze", || Instant::now() >= thaw_at);
        process::send(frozen, Signal::SIGCONT);
    }
    trainctl.wait_within(LIMIT).expect_code(0);

    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    scratch.trainctl(["checkpoints", "verify", job.run_dir.to_str().unwrap()]).wait().expect_code(0);
    let left = left_behind(&run);
    assert!(left.is_empty(), "left behind: {left:?}");
    let processes = scratch.processes();
    assert!(processes.is_empty(), "processes are left: {processes:?}");
    eprintln!("{:5.1} s  {program} {faults:?}", started.elapsed().as_secs_f64());
}

/// All cases of a program, or a sample of this size that has each of the points.
fn matrix(program: &'static str, sample: usize, points: &[FailPoint], more: Vec<Case>) {
    if !programs::have_trainer() {
        return;
    }
    let mut random = seed::seeded();
    let all = std::env::var("TRAINCTL_MATRIX").is_ok_and(|text| text == "all");
    let mut cases = cases(program, &mut random, all);
    cases.extend(more);
    let number = cases.len();
    let has = |case: &Case, point: &FailPoint| {
        case.faults.last().is_some_and(|fault| fault.split([':', '.']).take(2).eq(point.0.split('.')))
    };
    for point in points {
        assert!(cases.iter().any(|case| has(case, point)), "no {program} passes {}", point.0);
    }
    if !all {
        cases.shuffle(&mut random);
        let needed: BTreeSet<usize> =
            points.iter().filter_map(|point| cases.iter().position(|case| has(case, point))).collect();
        let rest = (0..cases.len()).filter(|index| !needed.contains(index));
        let chosen: Vec<usize> = needed.iter().copied().chain(rest).take(sample.max(needed.len())).collect();
        cases = chosen.into_iter().map(|index| cases[index].clone()).collect();
    }
    eprintln!("{program}: {} cases, of a place's hits {} (of {number})", cases.len(), if all { "all" } else { "one" });
    for (number, case) in cases.iter().enumerate() {
        eprintln!("case {number}: {case:?}");
        carry_out(case, number);
    }
}

#[test]
#[ignore = "takes minutes, and is not known to pass yet (docs/plan.md): `make matrix` runs it"]
fn p4_a_trainer_that_ends_fails_or_freezes_at_a_fail_point_changes_nothing() {
    matrix("trainctl-trainer", 4, &[FailPoint::SAVE_SNAPSHOT, FailPoint::SAVE_REPORT], reloads());
}

#[test]
#[ignore = "takes minutes, and is not known to pass yet (docs/plan.md): `make matrix` runs it"]
fn p4_a_worker_that_ends_fails_or_freezes_at_a_fail_point_changes_nothing() {
    matrix("trainctl-worker", 4, FailPoint::SPOOL, vec![]);
}

#[test]
#[ignore = "takes minutes, and is not known to pass yet (docs/plan.md): `make matrix` runs it"]
fn p2_a_coordinator_that_ends_fails_or_freezes_at_a_fail_point_changes_nothing() {
    matrix("trainctl-coordinator", 6, FailPoint::JOURNAL, takeovers());
}
