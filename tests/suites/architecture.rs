//! Who may depend on whom (ARCHITECTURE.md), held against `cargo metadata` and the sources.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};
use trainctl_tests::programs;

/// Each package of ours and those of ours that it may use. What is missing here may use nothing.
const EDGES: [(&str, &[&str]); 17] = [
    ("trainctl-spec", &[]),
    ("trainctl-fault", &[]),
    ("trainctl-proto", &["trainctl-spec"]),
    ("trainctl-runtime", &["trainctl-spec"]),
    ("trainctl-store", &["trainctl-spec", "trainctl-fault"]),
    ("trainctl-dataset", &["trainctl-spec"]),
    ("trainctl-collective", &["trainctl-spec"]),
    ("trainctl-engine", &["trainctl-spec", "trainctl-dataset", "trainctl-store", "trainctl-collective"]),
    // `collective` for the key-value trait that the trainer's link implements.
    (
        "trainctl-trainer",
        &["trainctl-spec", "trainctl-engine", "trainctl-proto", "trainctl-runtime", "trainctl-collective"],
    ),
    (
        "trainctl-coordinator",
        &["trainctl-spec", "trainctl-fault", "trainctl-proto", "trainctl-runtime", "trainctl-store"],
    ),
    ("trainctl-worker", &["trainctl-spec", "trainctl-fault", "trainctl-proto", "trainctl-runtime", "trainctl-store"]),
    ("trainctl", &["trainctl-spec", "trainctl-proto", "trainctl-runtime", "trainctl-store", "trainctl-dataset"]),
    // A file system for tests knows nothing of ours.
    ("trainctl-faultfs", &[]),
    // Nor do hosts for tests.
    ("trainctl-netns", &[]),
    // Nor does an S3 server; its tests are those of the store on it.
    ("trainctl-s3", &[]),
    // The simulation is made of the coordinator's, the worker's and the store's own decisions.
    ("trainctl-sim", &["trainctl-spec", "trainctl-proto", "trainctl-store", "trainctl-coordinator", "trainctl-worker"]),
    // The end-to-end suites run the programs and never link them.
    (
        "trainctl-tests",
        &[
            "trainctl-spec",
            "trainctl-proto",
            "trainctl-runtime",
            "trainctl-store",
            "trainctl-dataset",
            "trainctl-faultfs",
            "trainctl-netns",
        ],
    ),
];

/// Libraries that only some of our packages may use.
const CONFINED: [(&str, &[&str]); 8] = [
    ("tch", &["trainctl-collective", "trainctl-engine", "trainctl-trainer"]),
    ("torch-sys", &["trainctl-collective", "trainctl-engine", "trainctl-trainer"]),
    ("object_store", &["trainctl-store"]),
    ("rusqlite", &["trainctl-coordinator"]),
    ("cc", &["trainctl-collective"]),
    ("fuser", &["trainctl-faultfs"]),
    ("s3s", &["trainctl-s3"]),
    ("s3s-fs", &["trainctl-s3"]),
];

/// `spec` is pure: no runtime, no I/O.
const NOT_IN_SPEC: [&str; 6] = ["tokio", "tonic", "nix", "libc", "memmap2", "safetensors"];

/// The packages that need libtorch. All others are the default members.
const NEEDS_TORCH: [&str; 3] = ["trainctl-collective", "trainctl-engine", "trainctl-trainer"];

/// Where `unsafe` may be written.
const UNSAFE: [&str; 4] = [
    "worker/collective/src/ffi/",
    "shared/dataset/src/map.rs",
    "shared/store/src/io/view.rs",
    // The ioctl of a TUN device.
    "tests/netns/src/tun.rs",
];

/// Where files may be changed without `trainctl_store::io`: nothing of this is a checkpoint, a pointer or a row.
const CHANGES_FILES: [(&str, &str); 16] = [
    ("shared/store/src/io/", "the one module"),
    ("shared/fault/src/", "traces of tests"),
    ("shared/dataset/src/", "corpora, tokenizers and index caches"),
    ("shared/runtime/src/", "endpoints, tokens and keys"),
    ("coordinator/src/journal.rs", "the journal, which only its term names"),
    ("coordinator/src/hooks/", "logs of hooks"),
    ("coordinator/src/server.rs", "the state directory itself"),
    ("coordinator/src/runs.rs", "a control directory itself"),
    ("trainctl/src/attached.rs", "the run directory itself"),
    ("trainctl/src/supervise/mod.rs", "logs of daemons"),
    ("worker/daemon/src/health/probe.rs", "probes, which mean nothing after their round"),
    ("worker/daemon/src/state.rs", "a worker's own state"),
    ("worker/daemon/src/spool/file.rs", "a worker's own spool"),
    ("worker/daemon/src/trainer/", "logs of trainers"),
    ("worker/trainer/src/log.rs", "its own log"),
    ("worker/engine/src/memory.rs", "/proc"),
];

/// Calls that change files.
const CHANGING_CALLS: [&str; 17] = [
    "fs::write(",
    "fs::copy(",
    "fs::rename(",
    "fs::hard_link(",
    "fs::create_dir(",
    "fs::create_dir_all(",
    "fs::remove_file(",
    "fs::remove_dir(",
    "fs::remove_dir_all(",
    "fs::set_permissions(",
    "DirBuilder::",
    "File::create(",
    "File::create_new(",
    "File::options(",
    "OpenOptions::new(",
    ".set_len(",
    "fs::symlink(",
];

fn metadata() -> Metadata {
    let manifest = programs::workspace().join("Cargo.toml");
    MetadataCommand::new().manifest_path(manifest).no_deps().other_options(["--offline".to_owned()]).exec().unwrap()
}

#[test]
fn edges_go_one_way() {
    let metadata = metadata();
    let edges: BTreeMap<_, _> = EDGES.into();
    let mut wrong = Vec::new();
    for package in &metadata.packages {
        let name = package.name.to_string();
        let allowed = edges.get(name.as_str()).copied().unwrap_or_default();
        for dependency in &package.dependencies {
            let to = dependency.name.as_str();
            // A test may use more of ours, but a package of the default members never what needs libtorch.
            let is_test = dependency.kind == DependencyKind::Development;
            let needs_torch = NEEDS_TORCH.contains(&to) && !NEEDS_TORCH.contains(&name.as_str());
            if edges.contains_key(to) && !allowed.contains(&to) && (!is_test || needs_torch) {
                wrong.push(format!("{name} → {to}"));
            }
            for (library, users) in CONFINED {
                if to == library && !users.contains(&name.as_str()) {
                    wrong.push(format!("{name} → {library}, which is for {users:?}"));
                }
            }
            if name == "trainctl-spec" && NOT_IN_SPEC.contains(&to) && !is_test {
                wrong.push(format!("{name} → {to}: spec is pure"));
            }
        }
    }
    assert!(wrong.is_empty(), "not allowed: {wrong:#?}");
    let names: Vec<String> = metadata.packages.iter().map(|package| package.name.to_string()).collect();
    assert!(names.iter().all(|name| edges.contains_key(name.as_str())), "add the new package to the table: {names:?}");
}

#[test]
fn default_members_build_without_libtorch() {
    let metadata = metadata();
    let mut default: Vec<String> =
        metadata.workspace_default_packages().iter().map(|package| package.name.to_string()).collect();
    let mut wanted: Vec<String> =
        metadata.packages.iter().map(|p| p.name.to_string()).filter(|n| !NEEDS_TORCH.contains(&n.as_str())).collect();
    default.sort();
    wanted.sort();
    assert_eq!(default, wanted);
}

/// All Rust sources of our packages, with their paths in the project.
fn sources() -> Vec<(String, String)> {
    let root = programs::workspace();
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> =
        metadata().packages.iter().map(|p| p.manifest_path.parent().unwrap().as_std_path().to_owned()).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                found.push((relative(&path, &root), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

fn relative(path: &Path, root: &Path) -> String {
    path.strip_prefix(root).unwrap().display().to_string()
}

#[test]
fn unsafe_stays_where_it_may_be() {
    // Put together here, so that this file does not find itself.
    let word = ["un", "safe"].concat();
    let is_use = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        ["{", "fn", "impl", "extern", "trait"].iter().any(|what| code.contains(&format!("{word} {what}")))
            || code.contains(&format!("allow({word}_code"))
            || code.contains(&format!("expect({word}_code"))
            || code.contains(&format!("({word}("))
    };
    let sources = sources();
    assert!(sources.len() > 100, "the sources were not found: {}", sources.len());
    let outside = sources.iter().filter(|(path, _)| !UNSAFE.iter().any(|allowed| path.starts_with(allowed)));
    let wrong: Vec<&String> = outside.filter(|(_, text)| text.lines().any(is_use)).map(|(path, _)| path).collect();
    assert!(wrong.is_empty(), "{word} in {wrong:?}");
    for package in metadata().packages {
        let manifest = fs::read_to_string(&package.manifest_path).unwrap();
        assert!(manifest.contains("[lints]\nworkspace = true"), "{}: take the workspace's lints", package.name);
    }
}

#[test]
fn the_decisions_of_the_coordinator_are_pure() {
    // Clock and chance are arguments (ARCHITECTURE.md): a decision that reads them cannot be tested.
    let forbidden = ["Instant::now", "SystemTime", "tokio::", "std::fs", "std::env", "rand::", "async fn"];
    let mut seen = 0;
    for (path, text) in sources().iter().filter(|(path, _)| path.starts_with("coordinator/src/decide/")) {
        seen += 1;
        for word in forbidden {
            assert!(!text.contains(word), "{path}: {word}");
        }
    }
    assert!(seen > 3, "coordinator/src/decide/ was not found");
}

/// The part of a source file that goes into a program.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or_default()
}

#[test]
fn files_are_changed_and_buckets_are_reached_only_through_the_stores_io() {
    let is_program = |path: &str| {
        let in_sources = path.contains("/src/") && !path.starts_with("tests/");
        in_sources && !path.contains("tests") && !path.contains("/examples/")
    };
    let mut used = Vec::new();
    for (path, text) in sources().iter().filter(|(path, _)| is_program(path)) {
        let code = || without_tests(text).lines().filter(|line| !line.trim_start().starts_with("//"));
        let changes = code().any(|line| CHANGING_CALLS.iter().any(|call| line.contains(call)));
        let place = CHANGES_FILES.iter().position(|(place, _)| path.starts_with(place));
        assert!(!changes || place.is_some(), "{path} changes files; use trainctl_store::io, or add it with the reason");
        used.extend(place.filter(|_| changes));
        let reaches = code().any(|line| line.contains("object_store::"));
        assert!(
            !reaches || path.starts_with("shared/store/src/io/"),
            "{path} reaches a bucket; use trainctl_store::io"
        );
    }
    let unused = (0..CHANGES_FILES.len()).filter(|index| !used.contains(index)).map(|index| CHANGES_FILES[index].0);
    assert_eq!(unused.collect::<Vec<_>>(), Vec::<&str>::new(), "these need no exception any more");
}
