//! All cases, the ones of this run, and carrying them out side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};

use crate::scene::{Scene, Start, scratch};

/// `all` carries out every case (`make matrix`); otherwise a sample.
const ALL: &str = "TRAINCTL_MATRIX";
const SEED: &str = "TRAINCTL_SEED";
/// Any system call that changes a file system.
pub(crate) const ANY_CALL: &str = "*";

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) scene: Scene,
    /// As `TRAINCTL_FAULT` has it.
    pub(crate) place: String,
    pub(crate) nth: u64,
    pub(crate) action: &'static str,
}

impl Case {
    pub(crate) fn fault(&self) -> String {
        format!("{}:{}:{}", self.place, self.nth, self.action)
    }
}

/// Whether all cases are wanted.
pub(crate) fn all_wanted() -> bool {
    std::env::var(ALL).is_ok_and(|text| text == "all")
}

/// `TRAINCTL_SEED`, else a new one.
pub(crate) fn seed() -> u64 {
    match std::env::var(SEED) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED}={text}: must be a number")),
        Err(_) => rand::rng().random_range(0..1_000_000),
    }
}

/// What an unbroken child passes in a scene, in order.
pub(crate) fn trace(scene: Scene) -> Vec<String> {
    let (dir, trace) = (scratch(), scratch());
    let run = dir.path().join("run");
    scene.prepare(&run);
    let promises = dir.path().join("promises");
    let start = Start { scene, dir: &run, promises: &promises, fault: "", trace: Some(trace.path()) };
    assert!(start.spawn().wait().unwrap().success());
    let file = std::fs::read_dir(trace.path()).unwrap().next().unwrap().unwrap().path();
    std::fs::read_to_string(file).unwrap().lines().map(str::to_owned).collect()
}

/// The same, with how often.
pub(crate) fn places(scene: Scene) -> BTreeMap<String, u64> {
    let mut places = BTreeMap::new();
    for place in trace(scene) {
        *places.entry(place).or_insert(0) += 1;
    }
    places
}

/// Every hit of every place with each of the actions.
pub(crate) fn cases(actions: &[&'static str], wanted: impl Fn(&str) -> bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for scene in Scene::ALL {
        for (place, count) in places(scene).into_iter().filter(|(place, _)| wanted(place)) {
            for nth in 1..=count {
                let case = |action: &&'static str| Case { scene, place: place.clone(), nth, action };
                cases.extend(actions.iter().map(case));
            }
        }
    }
    cases
}

/// All of them, or by chance one of each place and `calls` of those that count calls.
pub(crate) fn sample(cases: Vec<Case>, calls: usize, seed: u64) -> Vec<Case> {
    if all_wanted() {
        return cases;
    }
    let mut random = StdRng::seed_from_u64(seed);
    let (mut counted, named): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(|case| case.place == ANY_CALL);
    let mut by_place: BTreeMap<String, Vec<Case>> = BTreeMap::new();
    for case in named {
        by_place.entry(case.place.clone()).or_default().push(case);
    }
    let mut chosen: Vec<Case> = by_place.into_values().filter_map(|of| of.choose(&mut random).cloned()).collect();
    counted.shuffle(&mut random);
    chosen.extend(counted.into_iter().take(calls));
    chosen
}

/// Carries out the cases, some at a time, each thread with a state of its own.
///
/// # Panics
/// With every case that did not go as it must.
pub(crate) fn carry_out<S>(
    name: &str,
    of: usize,
    cases: &[Case],
    seed: u64,
    state: impl Fn() -> S + Sync,
    run: impl Fn(&mut S, &Case) -> Result<(), String> + Sync,
) {
    eprintln!("{name}: {} of {of} cases, seed: {SEED}={seed} ({ALL}=all carries out all)", cases.len());
    assert!(!cases.is_empty(), "{name}: no case");
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(cases.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut state = state();
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(reason) = run(&mut state, case) {
                        failures.lock().unwrap().push(format!("{:?}: {}: {reason}", case.scene, case.fault()));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

/// The points that a set of places belongs to, without their stages.
pub(crate) fn points<'a>(places: impl Iterator<Item = &'a String>) -> BTreeSet<String> {
    const STAGES: [&str; 4] = [".temp", ".done", ".fsync", ".fsync_dir"];
    let point = |place: &String| {
        let stage = STAGES.iter().find(|stage| place.ends_with(**stage));
        place.strip_suffix(stage.copied().unwrap_or_default()).unwrap_or(place).to_owned()
    };
    places.map(point).filter(|point| point != ANY_CALL).collect()
}
