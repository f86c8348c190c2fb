//! What must hold of a run directory. Each check says what does not, so that a test can also ask for a loss.

use std::collections::BTreeMap;
use std::path::Path;

use trainctl_store::CheckpointStore;
use trainctl_store::checkpoints::{Depth, ResolveError, ResolveOptions, Selector};
use trainctl_store::io::Io;
use trainctl_store::layout::{CheckpointName, LATEST, LOWEST_VAL};
use trainctl_store::numbers::Numbers;
use trainctl_store::rows::parse_rows;

use crate::cycle::EXPORT;
use crate::scene::Scene;

pub(crate) type Checked = Result<(), String>;

fn ensure(condition: bool, what: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(what()) }
}

/// The highest number of each promise.
fn promised(promises: &Path) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(promises).unwrap_or_default();
    let line = |line: &str| line.split_once(' ').map(|(what, step)| (what.to_owned(), step.parse().unwrap()));
    text.lines().filter_map(line).collect()
}

/// Directly after the fault. P2, read-only: what LATEST names loads, every committed checkpoint is whole, and no promise is broken.
pub(crate) async fn loads(dir: &Path, scene: Scene, promises: &Path) -> Checked {
    let promised = promised(promises);
    let store = CheckpointStore::open(dir);
    if let Ok(target) = std::fs::read_link(dir.join(LATEST)) {
        let name: CheckpointName = target.to_str().unwrap_or_default().parse().map_err(|e| format!("LATEST: {e}"))?;
        // The scene's late rename takes LATEST's target away; whoever takes over brings it back.
        if scene == Scene::Fresh || dir.join(&target).exists() {
            whole(&store, name).await.map_err(|e| format!("LATEST: {e}"))?;
        }
    }
    let listing = store.list().await.map_err(|e| e.to_string())?;
    ensure(listing.damaged.is_empty(), || format!("damaged: {:?}", listing.damaged))?;
    for committed in &listing.committed {
        whole(&store, committed.name()).await.map_err(|e| format!("half there (C3, C4): {e}"))?;
    }
    let options = ResolveOptions { depth: Depth::Hashes, ..ResolveOptions::default() };
    match store.resolve(Selector::Latest, &options).await {
        Ok(_) => {}
        Err(ResolveError::Empty { .. } | ResolveError::NoneCommitted { .. }) => {
            ensure(!dir.join(LATEST).is_symlink(), || "LATEST before the first commit".to_owned())?;
        }
        Err(e) => return Err(e.to_string()),
    }
    let newest = listing.committed.last().map(|newest| newest.name().step);
    let committed = promised.get("commit").copied().max(scene.committed());
    ensure(newest >= committed, || format!("step {committed:?} was committed, the newest is {newest:?}"))?;
    let rows = steps_of_rows(dir)?;
    let row = promised.get("row").copied();
    ensure(rows.last().copied() >= row, || format!("row {row:?} was synced, there are {rows:?}"))?;
    let pin = promised.get("pin").map(|step| CheckpointName { epoch: 0, step: *step });
    let pinned = store.pinned().await.map_err(|e| e.to_string())?;
    ensure(pin.is_none_or(|pin| pinned.contains(&pin)), || format!("{pin:?} was pinned, there are {pinned:?}"))?;
    let numbers = Numbers::new(Io::new(dir.join("control"))).all().await.map_err(|e| e.to_string())?;
    let number = numbers.iter().filter(|entry| entry.record.is_some()).map(|entry| entry.number).max();
    let taken = promised.get("number").copied();
    ensure(number >= taken, || format!("number {taken:?} was taken, there are {numbers:?}"))?;
    let latest = std::fs::read_link(dir.join(LATEST)).ok();
    let latest = latest.and_then(|name| Some(name.to_str()?.parse::<CheckpointName>().ok()?.step));
    let swapped = promised.get("latest").copied();
    ensure(latest >= swapped, || format!("LATEST named step {swapped:?}, and now {latest:?}"))?;
    if promised.contains_key("export") {
        ensure(dir.join(EXPORT).exists(), || "the export is gone".to_owned())?;
    }
    exported(dir)
}

/// The run is over, and nothing is left of whatever happened on the way.
pub(crate) async fn complete(dir: &Path, scene: Scene, steps: u64) -> Checked {
    // What was promised before is not: the next holder has pins and numbers of its own.
    loads(dir, scene, Path::new("")).await?;
    let store = CheckpointStore::open(dir);
    let listing = store.list().await.map_err(|e| e.to_string())?;
    // The last generation's start stays pinned until the next one has a start of its own.
    let pinned = store.pinned().await.map_err(|e| e.to_string())?;
    let unpinned = |name: &CheckpointName| ![1, steps - 1].contains(&name.step) && !pinned.contains(name);
    let names: Vec<_> = listing.committed.iter().map(|c| c.name()).collect();
    let surplus: Vec<_> = names.iter().filter(|name| unpinned(name)).collect();
    ensure(surplus.is_empty() && pinned.len() <= 1, || format!("committed are {names:?}, pinned {pinned:?}"))?;
    let has = |step| names.iter().any(|name| name.step == step);
    ensure(has(1) && has(steps - 1), || format!("committed are only {names:?}"))?;
    ensure(listing.uncommitted.is_empty(), || format!("left behind: {:?}", listing.uncommitted))?;
    for (pointer, step) in [(LATEST, steps - 1), (LOWEST_VAL, 1)] {
        let target = std::fs::read_link(dir.join(pointer)).map_err(|e| format!("{pointer}: {e}"))?;
        ensure(target.to_str() == Some(&format!("epoch_0_step_{step}")), || format!("{pointer} names {target:?}"))?;
    }
    let rows = steps_of_rows(dir)?;
    ensure(rows == (0..steps).collect::<Vec<_>>(), || format!("rows of steps {rows:?}"))?;
    ensure(dir.join(EXPORT).exists(), || "there is no export".to_owned())
}

/// No temporary file anywhere, and in a committed checkpoint nothing that its manifest does not list.
pub(crate) async fn clean(dir: &Path) -> Checked {
    let store = CheckpointStore::open(dir);
    let mut found = Vec::new();
    walk(dir, dir, &mut found);
    let hidden: Vec<_> = found.iter().filter(|path| path.split('/').any(|part| part.starts_with('.'))).collect();
    ensure(hidden.is_empty(), || format!("left behind: {hidden:?}"))?;
    for committed in store.list().await.map_err(|e| e.to_string())?.committed {
        let prefix = format!("{}/", committed.name());
        let listed: Vec<_> = committed.manifest.files.iter().map(|file| file.path.as_str()).collect();
        let inside = found.iter().filter_map(|path| path.strip_prefix(&prefix));
        let foreign: Vec<_> = inside.filter(|path| *path != "manifest.json" && !listed.contains(path)).collect();
        ensure(foreign.is_empty(), || format!("{}: not in the manifest: {foreign:?}", committed.name()))?;
    }
    Ok(())
}

async fn whole(store: &CheckpointStore, name: CheckpointName) -> Checked {
    let verified = store.verify(name, &|_, _| {}).await.map_err(|e| e.to_string())?;
    ensure(verified.faults.is_empty(), || format!("{name}: {:?}", verified.faults))
}

fn steps_of_rows(dir: &Path) -> Result<Vec<u64>, String> {
    let path = dir.join("training.jsonl");
    let whole = std::fs::read_to_string(&path).unwrap_or_default();
    // The last one may be torn: whoever opens the file next removes it.
    let lines = whole.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let step = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64();
    let steps: Option<Vec<u64>> = lines.map(step).collect();
    match steps {
        Some(steps) => Ok(steps),
        None => Err(format!("{}: {:?}", path.display(), parse_rows::<serde_json::Value>(&path))),
    }
}

/// Whole or not at all.
fn exported(dir: &Path) -> Checked {
    let export = dir.join(EXPORT);
    if !export.exists() {
        return Ok(());
    }
    let bytes = std::fs::read(export.join("model.safetensors")).map_err(|e| format!("export: {e}"))?;
    let tensors = safetensors::SafeTensors::deserialize(&bytes).map_err(|e| format!("export: {e}"))?;
    ensure(tensors.len() > 10 && export.join("config.json").exists(), || format!("export: {:?}", tensors.names()))
}

fn walk(root: &Path, dir: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            walk(root, &path, found);
        } else {
            found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        }
    }
}
