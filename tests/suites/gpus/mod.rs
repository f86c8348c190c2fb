//! What NVML says of a worker's GPUs decides whether the worker takes a rank. There is no GPU here, so the library that the
//! worker opens is one of the suite's own (`nvml.c`); what a driver answers was not seen.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use trainctl_tests::daemons::Coordinator;
use trainctl_tests::process::Process;
use trainctl_tests::scratch::Scratch;
use trainctl_tests::wait;

/// Builds the library into a folder of its own.
fn library(scratch: &Scratch) -> PathBuf {
    let (folder, source) = (scratch.join("nvml"), scratch.join("nvml.c"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(&source, include_str!("nvml.c")).unwrap();
    let mut built = Command::new("cc");
    built.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]);
    let built = built.arg(folder.join("libnvidia-ml.so.1")).arg(&source).status().unwrap();
    assert!(built.success());
    folder
}

fn worker(scratch: &Scratch, state: &Path, name: &str, environment: &[(&str, &str)]) -> Process {
    let mut command = scratch.command("trainctl-worker");
    command.arg("--state-dir").arg(scratch.join(name)).arg("--coordinator").arg(state);
    command.args(["--name", name, "--device", "cuda", "--no-standby"]);
    command.env_remove("CUDA_VISIBLE_DEVICES").envs(environment.iter().copied());
    scratch.start(command, name)
}

#[test]
fn a_worker_whose_gpu_is_broken_is_quarantined_with_its_figures() {
    let scratch = Scratch::new("gpus");
    let state = scratch.join("state");
    let library = library(&scratch).display().to_string();
    let path = ("LD_LIBRARY_PATH", library.as_str());
    let _coordinator = Coordinator::start(&scratch, &state);
    let _workers = [
        worker(&scratch, &state, "broken", &[path, ("CUDA_VISIBLE_DEVICES", "GPU-bbbb")]),
        worker(&scratch, &state, "both", &[path]),
        worker(&scratch, &state, "unknown", &[path, ("CUDA_VISIBLE_DEVICES", "7")]),
        worker(&scratch, &state, "well", &[path, ("CUDA_VISIBLE_DEVICES", "0")]),
        worker(&scratch, &state, "without", &[]),
    ];
    let list = wait::until("five measured workers", || {
        let state = state.to_str().unwrap();
        let ended = scratch.trainctl(["workers", "list", "--output", "json", "--coordinator", state]).wait();
        let list: Vec<Value> = serde_json::from_str(&ended.expect_code(0).stdout).unwrap();
        let are_measured = list.iter().all(|worker| worker["health"]["memory_available"].as_u64() > Some(0));
        Some(list).filter(|list| list.len() == 5 && are_measured)
    });
    let of = |name: &str| list.iter().find(|worker| worker["id"] == name).unwrap();
    let warnings = |name: &str| of(name)["warnings"].to_string();

    assert_eq!((&of("well")["state"], warnings("well").as_str()), (&"idle".into(), "[]"));
    let broken = of("broken");
    assert_eq!(broken["state"], "quarantined");
    let reason = broken["quarantine"]["reason"].as_str().unwrap();
    let figures = broken["quarantine"]["figures"].as_str().unwrap();
    for words in ["GPU GPU-bbbb: 3 memory errors that ECC could not correct", "waits to be remapped"] {
        assert!(reason.contains(words), "{words}: {reason}");
    }
    for words in ["Test GPU", "80896 MiB of 81920 MiB free", "ECC uncorrected 3", "link 8/16"] {
        assert!(figures.contains(words), "{words}: {figures}");
    }
    for words in ["throttled (HW_THERMAL_SLOWDOWN)", "8 of 16 lanes", "processes 4242 compute on it"] {
        assert!(warnings("broken").contains(words), "{words}: {}", warnings("broken"));
    }
    assert_eq!(of("both")["state"], "quarantined", "it sees all of them");
    for (name, words) in [("unknown", "NVML, GPU 7"), ("without", "is the NVIDIA driver installed on this machine?")] {
        assert_eq!(of(name)["state"], "idle", "{name}");
        assert!(warnings(name).contains(words), "{name}: {}", warnings(name));
    }
}
