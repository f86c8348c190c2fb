//! Kills at every fail point and at requests that change the bucket, and holders that freeze there and wake up late.

use std::collections::BTreeMap;

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use trainctl_store::fault::{ENV, ENV_TRACE};

use crate::scene::{Scene, tail};

/// How many requests of one cycle are kill points in a sample.
const SAMPLE: usize = 12;

fn seed() -> u64 {
    let seed = std::env::var("TRAINCTL_SEED").map_or_else(|_| rand::rng().random(), |text| text.parse().unwrap());
    eprintln!("seed: TRAINCTL_SEED={seed}");
    seed
}

fn all() -> bool {
    std::env::var("TRAINCTL_MATRIX").is_ok_and(|value| value == "all")
}

/// Every place that a task passes, in order.
fn trace(scene: &Scene, task: &str) -> Vec<String> {
    let mut command = scene.command(task, "trace");
    let folder = scene.path("points");
    std::fs::create_dir(&folder).unwrap();
    command.env(ENV_TRACE, &folder);
    let ended = scene.spawn(command).wait();
    assert!(ended.success, "{}", tail(&ended.said));
    let file = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    std::fs::read_to_string(file).unwrap().lines().map(str::to_owned).collect()
}

/// Every place that one cycle passes, with how often. Places of the run directory alone are the POSIX matrix's.
fn places(scene: &Scene) -> BTreeMap<String, u64> {
    let mut places = BTreeMap::new();
    for place in trace(scene, "save") {
        *places.entry(place).or_insert(0) += 1;
    }
    let ours = ["*", "shard.", "commit.", "pointer.", "prune.", "retire."];
    places.retain(|place, _| ours.iter().any(|start| place.starts_with(start)) && !place.contains("fsync"));
    places
}

#[test]
fn a_kill_anywhere_leaves_a_bucket_that_loads_and_goes_on() {
    let scene = Scene::new();
    let places = places(&scene);
    for place in
        ["commit.manifest", "commit.manifest.done", "pointer.latest.temp", "prune.manifest", "shard.write.temp"]
    {
        assert!(places.contains_key(place), "{place} is not passed: {places:?}");
    }
    let mut random = StdRng::seed_from_u64(seed());
    let mut cases: Vec<(String, u64)> = Vec::new();
    for (place, count) in &places {
        let each: Vec<u64> = (1..=*count).collect();
        let some = if place == "*" { SAMPLE } else { 1 };
        let chosen = if all() { each } else { each.choose_multiple(&mut random, some).copied().collect() };
        cases.extend(chosen.into_iter().map(|nth| (place.clone(), nth)));
    }
    eprintln!("{} of {} cases", cases.len(), places.values().sum::<u64>());
    for (index, (place, nth)) in cases.into_iter().enumerate() {
        let (run, fault) = (format!("kill-{index}"), format!("{place}:{nth}:exit"));
        let ended = scene.run_with("save", &run, &fault);
        assert_eq!(ended.signal, Some(Signal::SIGKILL as i32), "{fault} was not reached:\n{}", tail(&ended.said));
        scene.must("recover", &run);
        assert_tidy(&scene, &run, &fault);
    }
}

/// Nothing is in the bucket but the pointers and what the two committed manifests name.
fn assert_tidy(scene: &Scene, run: &str, context: &str) {
    let keys = scene.server.keys();
    let inside = keys.iter().filter_map(|key| key.strip_prefix(&format!("{run}/")));
    let strange: Vec<_> = inside
        .filter(|key| !["LATEST", "LOWEST_VAL"].contains(key))
        .filter(|key| {
            let Some((folder, file)) = key.split_once('/') else { return true };
            let manifest = std::fs::read_to_string(scene.server.object(&format!("{run}/{folder}/manifest.json")));
            file != "manifest.json" && !manifest.is_ok_and(|text| text.contains(&format!("\"{file}\"")))
        })
        .collect();
    assert!(strange.is_empty(), "{context}: left behind: {strange:?}");
    assert_eq!(scene.server.open_uploads(), Vec::<String>::new(), "{context}");
}

#[test]
fn a_holder_that_freezes_and_wakes_up_after_a_takeover_does_no_harm() {
    let scene = Scene::new();
    for (index, point) in [
        "shard.write.temp:3",
        "commit.config:2",
        "commit.manifest:2",
        "commit.manifest.done:2",
        "pointer.latest:2",
        "pointer.latest:3",
        "pointer.lowest_val:2",
        "prune.manifest:1",
        "prune.directory:1",
    ]
    .into_iter()
    .enumerate()
    {
        let (run, fault) = (format!("frozen-{index}"), format!("{point}:stop"));
        let mut command = scene.command("save", &run);
        command.env(ENV, &fault);
        let frozen = scene.spawn(command);
        frozen.wait_until_stopped(&fault);
        scene.must("save-beside", &run);
        scene.must("complete", &run);
        frozen.signal(Signal::SIGCONT);
        let ended = frozen.wait();
        assert!(ended.said.contains("ended: "), "{fault}: it must notice:\n{}", tail(&ended.said));
        scene.must("check", &run);
        // C2: whoever holds the run looks again one lease after the takeover.
        scene.must("look-again", &run);
        scene.must("complete", &run);
    }
}

#[test]
fn c6_what_is_later_than_the_start_is_retired_in_its_place_and_a_late_retirement_does_no_harm() {
    let scene = Scene::new();
    for point in ["retire.rename", "retire.rename.temp"] {
        let run = format!("late-{point}");
        scene.must("save", &run);
        let mut command = scene.command("save epoch_0_step_1", &run);
        command.env(ENV, format!("{point}:1:stop"));
        let frozen = scene.spawn(command);
        frozen.wait_until_stopped(point);
        scene.must("save-beside epoch_0_step_1", &run);
        frozen.signal(Signal::SIGCONT);
        assert!(frozen.wait().said.contains("ended: "));
        scene.must("complete", &run);
        scene.must("look-again", &run);
        scene.must("complete", &run);
    }

    let run = "run";
    scene.must("save", run);
    for _ in 0..2 {
        scene.must("save epoch_0_step_1", run);
    }
    scene.must("complete", run);
    let keys = scene.server.keys();
    let retired = keys.iter().filter(|key| key.starts_with("run/epoch_0_step_3/manifest.abandoned.g")).count();
    assert_eq!(retired, 2, "what two generations retired is kept beside what came in its place: {keys:?}");
}

#[test]
fn an_upload_of_a_killed_writer_is_ended_by_the_next_holder() {
    let scene = Scene::new();
    let passed = trace(&scene, "save-large");
    scene.must("complete-large", "trace");
    let parts = scene.server.requests().iter().filter(|r| r.query.contains("partNumber=") && r.status == 200).count();
    assert_eq!(parts, 6, "two shards of 40 MiB in parts of 16 MiB");
    let before = |point: &str| passed.iter().take_while(|place| *place != point).filter(|place| *place == "*").count();
    let (begin, end) = (before("shard.write"), before("shard.write.temp"));
    assert!(end >= begin + 5, "an upload begins, is noted, and has three parts: {passed:?}");
    let mut left = 0;
    for nth in [begin + 3, (begin + end).div_ceil(2), end] {
        let (run, fault) = (format!("cut-{nth}"), format!("*:{nth}:exit"));
        let ended = scene.run_with("save-large", &run, &fault);
        assert_eq!(ended.signal, Some(Signal::SIGKILL as i32), "{fault}:\n{}", tail(&ended.said));
        left += usize::from(!scene.server.open_uploads().is_empty());
        scene.must("recover-large", &run);
        let unknown = scene.server.open_uploads();
        assert!(unknown.len() <= 2, "at most one of each rank, whose note was not written: {unknown:?}");
        unknown.iter().for_each(|file| std::fs::remove_file(scene.path("s3/data").join(file)).unwrap());
    }
    assert!(left > 0, "no kill fell into an upload");
}

#[test]
fn c6_a_late_removal_of_a_save_that_the_successor_has_committed_does_no_harm() {
    let scene = Scene::new();
    let ended = scene.run_with("save", "run", "commit.manifest:3:exit");
    assert_eq!(ended.signal, Some(Signal::SIGKILL as i32), "{}", tail(&ended.said));
    let mut command = scene.command("save", "run");
    command.env(ENV, "retire.remove:1:stop");
    let frozen = scene.spawn(command);
    frozen.wait_until_stopped("retire.remove");
    scene.must("save-beside", "run");
    frozen.signal(Signal::SIGCONT);
    assert!(frozen.wait().said.contains("ended: "));
    scene.must("complete", "run");
}
