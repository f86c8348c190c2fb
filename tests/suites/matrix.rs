//! The crash matrix of whole runs (P2, P4): one process of a real run is killed, frozen or fails at a fail point; trainctl brings
//! it back by itself, and the run ends as if nothing had happened. The store's own matrix (`store/tests/crash/`) has every
//! place in the store many times; here each process passes its places as part of a run.
//!
//! Without `TRAINCTL_MATRIX=all` each test carries out a sample (`make matrix` runs all; `TRAINCTL_MATRIX=2/3` a third).

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use trainctl_store::fault::{ENV_TRACE, FailPoint};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Process};
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, seed, wait};

/// `trainctl`'s exit code for an error that is nobody's fault.
const INTERNAL: i32 = 2;
/// How long a frozen process stays so: more than twice the lease.
const FREEZE: Duration = Duration::from_millis(2500);
/// The shortest lease of a worker.
const LEASE_MS: &str = "1000";
/// What a case may take: the longest back-off after a fault is a few seconds.
const LIMIT: Duration = Duration::from_secs(120);
/// `all` carries out every case, `2/3` the second of three parts that together are all, a number a sample of that size, any
/// other text the cases whose faults contain it.
const CHOICE: &str = "TRAINCTL_MATRIX";
const PROGRAMS: [&str; 3] = ["trainctl-coordinator", "trainctl-worker", "trainctl-trainer"];
const ACTIONS: [&str; 3] = ["exit", "eio", "stop"];

/// One fault in one process.
#[derive(Clone, Debug)]
struct Case {
    program: &'static str,
    /// For each start of the program.
    faults: Vec<String>,
}

impl Case {
    /// The same in every process: it says in which part of all cases this one is, however many there are.
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.program, &self.faults).hash(&mut hasher);
        hasher.finish()
    }

    /// Whether its last fault, the one that it is about, is at this point.
    fn meets(&self, point: FailPoint) -> bool {
        self.faults.last().is_some_and(|fault| fault.split([':', '.']).take(2).eq(point.0.split('.')))
    }
}

/// A short run with every kind of commit, pruning included, and the shortest burn-in: two products.
fn job(run_dir: std::path::PathBuf) -> Job {
    Job { burn_in: Some(0.001), steps: 12, ckpt_every: 3, val_every: 3, warmup: 2, ..Job::new(run_dir) }
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
            let Some(program) = PROGRAMS.into_iter().find(|program| name.starts_with(program)) else { continue };
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

/// Every place with every action, at each hit or at one by chance.
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

/// The last fault with every action, after starts that meet the first ones.
fn after(program: &'static str, before: &[&str], places: &[&str]) -> Vec<Case> {
    let faults = |place: &str, action: &str| {
        let last = format!("{place}:1:{action}");
        before.iter().map(|fault| (*fault).to_owned()).chain([last]).collect()
    };
    let actions = |place| ACTIONS.map(|action| Case { program, faults: faults(place, action) });
    places.iter().flat_map(|place| actions(*place)).collect()
}

/// What only a coordinator passes that takes over from one that was killed.
fn takeovers() -> Vec<Case> {
    let program = "trainctl-coordinator";
    let journal = after(program, &["rows.append:5:exit"], &["journal.copy", "journal.copy.temp"]);
    let submission = after(program, &["job.spec.temp:1:exit"], &["job.sweep", "job.sweep.done"]);
    [journal, submission].concat()
}

/// What only a trainer passes that starts from a checkpoint: two start, one of them ends after the first commit, and two
/// start again.
fn reloads() -> Vec<Case> {
    after("trainctl-trainer", &["shard.write:8:exit", ""], &["load.manifest", "load.block", "load.state"])
}

/// A fault's place, and at which hit it acts.
fn place_of(fault: &str) -> (&str, usize) {
    let mut fields = fault.split(':');
    (fields.next().unwrap(), fields.next().unwrap().parse().unwrap())
}

/// Whether a job whose spec cannot be written is what comes of the fault.
fn may_be_refused(faults: &[String]) -> bool {
    let (place, _) = place_of(&faults[faults.len() - 1]);
    faults.iter().any(|fault| fault.ends_with(":eio")) && (place == "*" || place.starts_with("job."))
}

/// Waits until a fault has frozen a process, and lets it go on after [`FREEZE`]; or until the run ends without.
fn freeze_for_a_while(scratch: &Scratch, trainctl: &mut Process) {
    let frozen = wait::within(LIMIT, "a frozen process", || {
        let frozen = scratch.processes().into_iter().find(|pid| process::is_stopped(*pid));
        if frozen.is_none() && trainctl.is_running() { None } else { Some(frozen) }
    });
    if let Some(frozen) = frozen {
        let thaw_at = Instant::now() + FREEZE;
        wait::until_true("the end of the freeze", || Instant::now() >= thaw_at);
        process::send(frozen, Signal::SIGCONT);
    }
}

/// A coordinator that was killed while it said that it leaves, or could not remove a temporary file, has left one, which the
/// next one removes.
fn hold_once_more(scratch: &Scratch, run: &Run) {
    let mut command = scratch.command("trainctl-coordinator");
    command.arg("--state-dir").arg(run.dir().join("control"));
    let mut coordinator = scratch.start(command, "next-holder");
    wait::until_true("the next holder to remove what is left", || run.left_behind().is_empty());
    coordinator.signal(Signal::SIGTERM);
    coordinator.wait().expect_code(0);
}

/// Runs the job over the fault and checks what is there in the end. Whether the fault was reached.
fn carry_out(case: &Case, number: usize) -> bool {
    let Case { program, faults } = case;
    let mut scratch = Scratch::new(&format!("matrix-{program}-{number}"));
    let job = job(scratch.join("run"));
    let (run, want) = (Run::new(&job.run_dir), unbroken(&job));
    scratch.inject(program, &faults.iter().map(String::as_str).collect::<Vec<_>>());
    let mut trainctl = start(&scratch, &job, None);
    if faults.iter().any(|fault| fault.ends_with(":stop")) {
        freeze_for_a_while(&scratch, &mut trainctl);
    }
    let ended = trainctl.wait_within(LIMIT);
    if may_be_refused(faults) && ended.code != Some(0) {
        // Nothing was begun, so the same command can be given again.
        ended.expect_code(INTERNAL).expect_said("the job was not started").expect_said("Input/output error");
        assert!(run.events().is_empty(), "of a job that was refused: {:?}", run.events());
        start(&scratch, &job, None).wait_within(LIMIT).expect_code(0);
    } else {
        ended.expect_code(0);
    }

    assert_same_rows(&run, &want, job.steps);
    assert_eq!(run.latest().state_hash, want.latest().state_hash);
    scratch.trainctl(["checkpoints", "verify", job.run_dir.to_str().unwrap()]).wait().expect_code(0);
    let is_temporary = |path: &String| path.contains("/control/") && path.contains("/.tmp-");
    if run.left_behind().iter().any(is_temporary) {
        hold_once_more(&scratch, &run);
    }
    let left = run.left_behind();
    assert!(left.is_empty(), "left behind: {left:?}");
    let processes = scratch.processes();
    assert!(processes.is_empty(), "processes are left: {processes:?}");
    faults.iter().enumerate().filter(|(_, fault)| !fault.is_empty()).all(|(start, fault)| {
        let (place, nth) = place_of(fault);
        scratch.times_passed(start, place) >= nth
    })
}

/// How often a place is passed depends on the time too (beats, acknowledgements), so a hit that did not come is tried
/// earlier. The fault that was reached.
fn carry_out_reached(mut case: Case, number: usize) -> Case {
    while !carry_out(&case, number) {
        let fault = case.faults.last_mut().unwrap();
        let (place, nth) = place_of(fault);
        assert!(nth > 1, "no start came to {fault}");
        *fault = format!("{place}:{}:{}", nth / 2, fault.rsplit(':').next().unwrap());
    }
    case
}

/// A sample of this size, or as much larger as it must be to have each of the points.
fn sampled(mut cases: Vec<Case>, size: usize, points: &[FailPoint], random: &mut StdRng) -> Vec<Case> {
    cases.shuffle(random);
    let position = |point: &FailPoint| cases.iter().position(|case| case.meets(*point));
    let needed: BTreeSet<usize> = points.iter().filter_map(position).collect();
    let rest = (0..cases.len()).filter(|index| !needed.contains(index));
    let indices = needed.iter().copied().chain(rest).take(size.max(needed.len()));
    indices.map(|index| cases[index].clone()).collect()
}

/// Carries out what `TRAINCTL_MATRIX` chooses, else a sample.
fn matrix(program: &'static str, sample: usize, more: Vec<Case>) {
    if !programs::have_trainer() {
        return;
    }
    let mut random = seed::seeded();
    let wanted = std::env::var(CHOICE).unwrap_or_default();
    let size = wanted.parse().map_err(|_| ()).or(if wanted.is_empty() { Ok(sample) } else { Err(()) });
    let mut all = cases(program, &mut random, size.is_err());
    all.extend(more);
    let points = points(program);
    for point in &points {
        assert!(all.iter().any(|case| case.meets(*point)), "no {program} passes {}", point.0);
    }
    let number = all.len();
    let cases = match size {
        Ok(size) => sampled(all, size, &points, &mut random),
        Err(()) if wanted == "all" => all,
        Err(()) if let Some((part, parts)) = part_of(&wanted) => {
            all.into_iter().filter(|case| case.hash() % parts + 1 == part).collect()
        }
        Err(()) => all.into_iter().filter(|case| case.faults.iter().any(|fault| fault.contains(&wanted))).collect(),
    };
    assert!(!cases.is_empty(), "{CHOICE}={wanted} chooses no case of {program}");
    eprintln!("{program}: {} of {number} cases ({CHOICE}=all carries out all)", cases.len());
    let mut failed = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let started = Instant::now();
        let reached = std::panic::catch_unwind(|| carry_out_reached(case.clone(), number));
        let (verdict, faults) = match &reached {
            Ok(reached) => ("passed", &reached.faults),
            Err(_) => ("FAILED", &case.faults),
        };
        eprintln!("{:5.1} s  {verdict}  {program} {faults:?}", started.elapsed().as_secs_f64());
        failed.extend(reached.is_err().then_some(faults.clone()));
    }
    assert!(failed.is_empty(), "{} of {} cases failed: {failed:?}", failed.len(), cases.len());
}

/// Of `2/3` the 2 and the 3.
fn part_of(wanted: &str) -> Option<(u64, u64)> {
    let (part, parts) = wanted.split_once('/')?;
    let (part, parts) = (part.parse().ok()?, parts.parse().ok()?);
    assert!((1..=parts).contains(&part), "{CHOICE}={wanted}: there is no such part");
    Some((part, parts))
}

/// What a program's matrix must have: every point that only this program passes.
fn points(program: &str) -> Vec<FailPoint> {
    match program {
        "trainctl-trainer" => FailPoint::TRAINER.to_vec(),
        "trainctl-worker" => FailPoint::SPOOL.to_vec(),
        "trainctl-coordinator" => [FailPoint::SUBMISSION, FailPoint::JOURNAL].concat(),
        _ => panic!("{program} has no matrix"),
    }
}

#[test]
fn every_fail_point_is_in_a_matrix() {
    // The store's own matrix has those of the store; a test of the same name there sees to it.
    let ours: Vec<FailPoint> = PROGRAMS.into_iter().flat_map(points).collect();
    let has = |point: &&FailPoint| FailPoint::STORE.contains(point) || ours.contains(point);
    let missing: Vec<_> = FailPoint::ALL.iter().filter(|point| !has(point)).collect();
    assert!(missing.is_empty(), "give these to the program that passes them: {missing:?}");
}

#[test]
fn p4_a_trainer_that_ends_fails_or_freezes_at_a_fail_point_changes_nothing() {
    matrix("trainctl-trainer", 12, reloads());
}

#[test]
fn p4_a_worker_that_ends_fails_or_freezes_at_a_fail_point_changes_nothing() {
    matrix("trainctl-worker", 10, vec![]);
}

#[test]
fn p2_a_coordinator_that_ends_fails_or_freezes_at_a_fail_point_changes_nothing() {
    matrix("trainctl-coordinator", 24, takeovers());
}
