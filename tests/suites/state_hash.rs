//! The second implementation of state_hash, in Python over the safetensors files, agrees on a real run (state_hash
//! depends on the tensors only).

use std::process::Command;

use trainctl_tests::job::Job;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;

#[test]
fn python_agrees_on_the_checkpoints_of_a_run() {
    if !programs::have_trainer() {
        return;
    }
    let Some(python) = programs::python() else { return };
    let run = unbroken(&Job::new("run"));
    let script = programs::workspace().join("tests/state_hash.py");
    let commits = run.commits();
    assert_eq!(commits.len(), 4);
    for commit in commits {
        let output = Command::new(&python).arg(&script).arg(run.dir().join(commit.name.to_string())).output().unwrap();
        let hash = String::from_utf8(output.stdout).unwrap();
        assert_eq!(hash.trim(), commit.state_hash, "{}: {}", commit.name, String::from_utf8_lossy(&output.stderr));
    }
}
