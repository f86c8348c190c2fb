//! The real program, started as it must not be.

use std::process::{Command, Stdio};

#[allow(clippy::unwrap_used)] // test code, though not marked as a test
fn run(environment: &[(&str, String)]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_trainctl-trainer"))
        .env_remove("TRAINCTL_PARENT_PID")
        .env_remove("TRAINCTL_LINK_FD")
        .envs(environment.iter().map(|(key, value)| (*key, value.as_str())))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), text.lines().last().unwrap_or_default().to_owned())
}

#[test]
fn without_a_worker_it_says_so_in_its_last_line() {
    let own = std::process::id().to_string();
    let cases = [
        (vec![], "not started by trainctl-worker"),
        (vec![("TRAINCTL_PARENT_PID", "1".to_owned())], "has ended already"),
        (vec![("TRAINCTL_PARENT_PID", own)], "TRAINCTL_LINK_FD is not 0"),
    ];
    for (environment, wanted) in cases {
        let (code, last_line) = run(&environment);
        assert_eq!(code, Some(64), "{environment:?}");
        assert!(last_line.starts_with("trainctl-trainer: error: ") && last_line.contains(wanted), "{last_line}");
    }
}

#[test]
fn standard_input_that_is_no_link_is_refused() {
    let environment = [("TRAINCTL_PARENT_PID", std::process::id().to_string()), ("TRAINCTL_LINK_FD", "0".to_owned())];
    let (code, last_line) = run(&environment);
    assert_eq!(code, Some(64), "{last_line}");
    assert!(last_line.starts_with("trainctl-trainer: error: standard input is no connected socket"), "{last_line}");
}
