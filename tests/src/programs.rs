//! The programs under test, and what a machine may lack.

use std::path::{Path, PathBuf};

/// Names the folder of the programs; otherwise it is the one that cargo built this test into.
pub const VARIABLE: &str = "TRAINCTL_BIN_DIR";

/// Needs that a machine may not meet. A suite that lacks one skips with a message, unless `TRAINCTL_REQUIRE` names it.
///
/// # Panics
/// If it does.
pub fn lacks(need: &str, why: &str) {
    let required = std::env::var("TRAINCTL_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name.trim() == need), "TRAINCTL_REQUIRE={required}, but {why}");
    eprintln!("skipped: {why}");
}

/// The folder of the programs.
pub fn dir() -> PathBuf {
    if let Some(dir) = std::env::var_os(VARIABLE) {
        return PathBuf::from(dir);
    }
    // target/<profile>/deps/<test>
    let own = std::env::current_exe().unwrap();
    own.parent().and_then(Path::parent).unwrap().to_owned()
}

/// Path of a program.
pub fn path(name: &str) -> PathBuf {
    dir().join(name)
}

/// Whether the command line and the daemons are built.
pub fn have_cli() -> bool {
    have(&["trainctl", "trainctl-coordinator", "trainctl-worker"], "cli")
}

/// Whether everything is built that trains, the trainer on libtorch included.
pub fn have_trainer() -> bool {
    have(&["trainctl", "trainctl-coordinator", "trainctl-worker", "trainctl-trainer"], "torch")
}

fn have(names: &[&str], need: &str) -> bool {
    let missing = names.iter().map(|name| path(name)).find(|path| !path.is_file());
    if let Some(missing) = &missing {
        lacks(need, &format!("{} is not built; `make test` builds all and runs this", missing.display()));
    }
    missing.is_none()
}

/// A Python with the modules of tests/requirements.txt (`TRAINCTL_PYTHON`, else python3).
pub fn python() -> Option<String> {
    let python = std::env::var("TRAINCTL_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = std::process::Command::new(&python).args(["-c", "import blake3, tokenizers"]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    lacks(
        "python",
        &format!(
            "{python} lacks a module of tests/requirements.txt; `make test` installs it and names it in TRAINCTL_PYTHON"
        ),
    );
    None
}

/// Root of the project's sources.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Where tests put their folders: `target/tmp/e2e`.
pub fn scratch_root() -> PathBuf {
    let target = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
    target.join("tmp/e2e")
}
