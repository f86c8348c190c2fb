//! Secrets are in the files that are for them, 0600, and nowhere else: not in argv, environments, logs or the run's files.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use trainctl_tests::wait;

use super::{Place, TLS};

/// Everything that a process shows of itself to its user.
fn processes() -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let is_process = entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit());
        for name in ["cmdline", "environ"].iter().filter(|_| is_process) {
            let path = entry.path().join(name);
            // A process that has ended meanwhile.
            if let Ok(bytes) = fs::read(&path) {
                found.push((path.display().to_string(), bytes));
            }
        }
    }
    found
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found
}

fn holds(bytes: &[u8], secret: &str) -> bool {
    bytes.windows(secret.len()).any(|window| window == secret.as_bytes())
}

#[test]
fn secrets_are_in_their_own_files_and_nowhere_else() {
    // All that the programs can say of themselves.
    let Some(mut place) = Place::start("abuse-secrets", TLS, &[("TRAINCTL_LOG", "trace")]) else { return };
    let trainers = place.run.trainers();
    let ann = PathBuf::from(place.grant("ann"));
    let token = trainctl_runtime::auth::read_file(&ann).unwrap();
    let follow = ["logs", &place.job, "--follow", "--token-file", ann.to_str().unwrap()];
    let mut following = place.trainctl(&follow);
    let mut owner = place.trainctl(&["logs", &place.job, "--follow"]);
    wait::until_true("calls with both tokens", || {
        assert!(following.is_running() && owner.is_running());
        place.run.last_step() > Some(50)
    });

    let key = fs::read_to_string(place.state.join("ca/ca.key")).unwrap();
    let key = key.lines().nth(1).unwrap().to_owned();
    let secrets = [("owner", place.owner()), ("join", place.join()), ("grant", token), ("CA key", key)];
    let shown = processes();
    for program in ["trainctl-coordinator", "trainctl-worker", "trainctl-trainer", "--token-file"] {
        assert!(shown.iter().any(|(_, bytes)| holds(bytes, program)), "{program} was not looked at");
    }
    for (path, bytes) in &shown {
        let secret = secrets.iter().find(|(_, secret)| holds(bytes, secret));
        assert_eq!(secret.map(|(name, _)| name), None, "{path}");
    }

    drop((following, owner));
    let control = place.run.dir().join("control/join.json");
    let may_hold: BTreeSet<(&str, PathBuf)> = [
        ("owner", place.state.join("owner.json")),
        ("join", place.state.join("join.json")),
        ("join", control),
        ("grant", ann),
        ("CA key", place.state.join("ca/ca.key")),
    ]
    .into();
    let mut holding = BTreeSet::new();
    let mut logs = 0;
    for path in files(place.scratch.path()) {
        // A file that the run has pruned meanwhile.
        let Ok(bytes) = fs::read(&path) else { continue };
        logs += usize::from(path.extension().is_some_and(|end| end == "err" || end == "log"));
        for (name, secret) in &secrets {
            if holds(&bytes, secret) {
                assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
                holding.insert((*name, path.clone()));
            }
        }
        let is_key = path.ends_with("ca/ca.key");
        assert!(is_key || !holds(&bytes, "PRIVATE KEY"), "a key in {}", path.display());
    }
    assert_eq!(holding, may_hold);
    assert!(logs > 5, "the logs were not looked at");
    assert!(place.said("TRACE") > 0, "the coordinator said all that it can");
    place.assert_undisturbed(&trainers, "a look at everything");
    // Libraries call trouble at this level what is none; only the job's end is looked at.
    trainctl_tests::daemons::cancel(&place.scratch, &place.state, &place.job);
}
