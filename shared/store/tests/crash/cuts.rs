//! The same on a file system that forgets at a power cut what was not synced; and that each of our syncs is needed there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use trainctl_faultfs::FaultFs;

use crate::cases::{self, Case, all_wanted, carry_out, sample};
use crate::check;
use crate::cycle::{Plan, STEPS, coordinate};
use crate::scene::{Scene, Start, block_on, scratch};

/// Leaves this sync out in every case, in order to see that a test fails: `scripts/without-fsync.sh`.
const WITHOUT: &str = "TRAINCTL_WITHOUT_FSYNC";

/// A mounted file system, used case by case.
pub(crate) struct Mounted {
    pub(crate) fs: FaultFs,
    dir: tempfile::TempDir,
}

impl Mounted {
    pub(crate) fn new() -> Self {
        let dir = scratch();
        Self { fs: FaultFs::mount(dir.path(), "faultfs_server").unwrap(), dir }
    }

    /// A run directory in the state of a scene, durably; nothing else is there.
    pub(crate) fn run(&mut self, scene: Scene) -> PathBuf {
        let run = self.dir.path().join("run");
        if run.exists() {
            std::fs::remove_dir_all(&run).unwrap();
        }
        scene.prepare(&run);
        self.fs.sync().unwrap();
        run
    }
}

/// The child works with `fault`; when it has ended the power fails. By `write_back` the kernel has made some of the rest
/// durable before.
pub(crate) fn cut(mounted: &mut Mounted, scene: Scene, fault: &str, write_back: Option<u64>) -> Result<(), String> {
    let outside = scratch();
    let promises = outside.path().join("promises");
    let run = mounted.run(scene);
    let status = Start { scene, dir: &run, promises: &promises, fault, trace: None }.spawn().wait().unwrap();
    if !status.success() && std::os::unix::process::ExitStatusExt::signal(&status).is_none_or(|signal| signal != 9) {
        return Err(format!(
            "the child ended in disorder: {}",
            std::fs::read_to_string(crate::scene::said(&promises)).unwrap()
        ));
    }
    if let Some(seed) = write_back {
        mounted.fs.write_back(seed).unwrap();
    }
    mounted.fs.cut().unwrap();
    block_on(after_cut(&run, scene, &promises))
}

async fn after_cut(run: &Path, scene: Scene, promises: &Path) -> Result<(), String> {
    check::loads(run, scene, promises).await.map_err(|e| format!("after the cut: {e}"))?;
    coordinate(run, &Arc::default(), &Plan::default()).await.map_err(|e| format!("the next holder: {e}"))?;
    check::complete(run, scene, STEPS).await?;
    check::clean(run).await
}

fn fault_of(case: &Case) -> String {
    match std::env::var(WITHOUT) {
        Ok(sync) => format!("{},{sync}:*:skip", case.fault()),
        Err(_) => case.fault(),
    }
}

#[test]
fn a_power_cut_anywhere_leaves_a_run_that_loads_and_goes_on() {
    if !trainctl_faultfs::have_fuse() {
        return;
    }
    let (all, seed) = (cases::cases(&["exit"], |_| true), cases::seed());
    let chosen = sample(all.clone(), 40, seed);
    carry_out("power cuts", all.len(), &chosen, seed, Mounted::new, |mounted, case| {
        // Of a sample each case has one of the two.
        let write_back = seed.wrapping_add(case.nth);
        if all_wanted() || write_back % 2 == 0 {
            cut(mounted, case.scene, &fault_of(case), None).map_err(|e| format!("nothing written back: {e}"))?;
        }
        if all_wanted() || write_back % 2 == 1 {
            let written = cut(mounted, case.scene, &fault_of(case), Some(write_back));
            written.map_err(|e| format!("write-back {write_back}: {e}"))?;
        }
        Ok(())
    });
}

/// Every sync that a child makes: `commit.manifest.fsync` and so on.
fn syncs() -> Vec<String> {
    let places = Scene::ALL.into_iter().flat_map(cases::places).map(|(place, _)| place);
    let mut syncs: Vec<_> = places.filter(|place| place.contains(".fsync")).collect();
    syncs.sort();
    syncs.dedup();
    syncs
}

/// How many calls after a sync a power cut is tried.
const NEAR: usize = 12;
/// How many of these moments at most.
const MOMENTS: usize = 60;

/// The calls within a few of the place of a sync.
fn moments(sync: &str, random: &mut StdRng) -> Vec<(Scene, String)> {
    let mut found = Vec::new();
    for scene in Scene::ALL {
        let mut calls = 0;
        for place in cases::trace(scene) {
            calls += usize::from(place == cases::ANY_CALL);
            if sync.split('+').any(|sync| sync == place) {
                found.extend((calls..calls + NEAR).map(|nth| (scene, format!(",*:{}:exit", nth + 1))));
            }
        }
    }
    found.sort();
    found.dedup();
    found.shuffle(random);
    found.truncate(MOMENTS);
    found.extend(Scene::ALL.map(|scene| (scene, String::new())));
    found
}

/// The first loss that is found when a sync is left out.
fn loss_without(mounted: &mut Mounted, sync: &str, random: &mut StdRng) -> Option<String> {
    moments(sync, random).into_iter().find_map(|(scene, moment)| {
        let left_out: Vec<_> = sync.split('+').map(|sync| format!("{sync}:*:skip")).collect();
        let fault = format!("{}{moment}", left_out.join(","));
        let write_back = random.random_bool(0.5).then(|| random.random());
        let loss = cut(mounted, scene, &fault, write_back).err()?;
        Some(format!("{scene:?}, {fault}, write-back {write_back:?}: {loss}"))
    })
}

/// Syncs without which no power cut loses anything that was promised, by why.
const EXPENDABLE: [(&str, &[&str]); 5] = [
    (
        "what comes back is removed or moved again by the next holder",
        &[
            "commit.sweep.fsync_dir",
            "export.sweep.fsync_dir",
            "holder.sweep.fsync_dir",
            "numbers.sweep.fsync_dir",
            "pin.remove.fsync_dir",
            "pin.sweep.fsync_dir",
            "pointer.sweep.fsync_dir",
            "prune.directory.fsync_dir",
            "prune.manifest.fsync_dir",
            "prune.rename.fsync_dir",
            "prune.stray.fsync_dir",
            "retire.remove.fsync_dir",
            "retire.rename.fsync_dir",
            "retire.restore.fsync_dir",
            "rows.cut.fsync",
            "rows.repair.fsync",
        ],
    ),
    (
        "an old or torn holder.json costs the successor a lease",
        &["holder.beat.fsync", "holder.beat.fsync_dir", "holder.release.fsync", "holder.release.fsync_dir"],
    ),
    ("the cycle promises nothing about it", &["origin.write.fsync", "origin.write.fsync_dir"]),
    ("C6: the next holder computes it again", &["pointer.lowest_val.fsync_dir"]),
    (
        "a later sync of the same directory comes before the promise",
        &["commit.config.fsync_dir", "commit.losses.fsync_dir", "commit.sync.fsync_dir", "shard.write.fsync_dir"],
    ),
];
/// Each of these covers the other.
const TOGETHER: [&str; 1] = ["commit.sync.fsync_dir+shard.write.fsync_dir"];
/// How many of the needed ones a sample tries.
const SAMPLE: usize = 6;

#[test]
fn without_any_one_of_our_syncs_a_power_cut_loses_something() {
    if !trainctl_faultfs::have_fuse() {
        return;
    }
    let seed = cases::seed();
    let mut random = StdRng::seed_from_u64(seed);
    let all = syncs();
    let expendable: Vec<_> = EXPENDABLE.iter().flat_map(|(_, syncs)| *syncs).collect();
    let unknown: Vec<_> = expendable.iter().filter(|sync| !all.iter().any(|found| found == **sync)).collect();
    assert!(unknown.is_empty(), "there is no such sync: {unknown:?}");
    let mut needed: Vec<String> = all.iter().filter(|sync| !expendable.iter().any(|e| e == sync)).cloned().collect();
    needed.extend(TOGETHER.map(str::to_owned));
    needed.shuffle(&mut random);
    let count = if all_wanted() { needed.len() } else { SAMPLE };
    eprintln!("syncs: {count} of {} that are needed, seed: TRAINCTL_SEED={seed}", needed.len());
    let mut mounted = Mounted::new();
    let mut needless = Vec::new();
    for sync in needed.into_iter().take(count) {
        match loss_without(&mut mounted, &sync, &mut random) {
            Some(loss) => eprintln!("without {sync}: {loss}"),
            None => needless.push(sync),
        }
    }
    assert!(needless.is_empty(), "nothing was lost without {needless:?}");
}
