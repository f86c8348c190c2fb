//! `trainctl export`: the weights arrive bit for bit (P7), memory does not grow with the model, and a killed export leaves
//! nothing that looks like a whole one. That `transformers` loads it is `make oracle`.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use trainctl_store::fault::FailPoint;
use trainctl_store::shard::ShardReader;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Ended};
use trainctl_tests::programs;
use trainctl_tests::run::Run;
use trainctl_tests::scratch::Scratch;
use trainctl_tests::synthetic::Synthetic;
use trainctl_tests::wait;

fn export(scratch: &Scratch, from: &str, to: &str, options: &[&str], fault: Option<&str>) -> Ended {
    let mut command = scratch.command("trainctl");
    command.args(["export", "--from", from, "--to", to]).args(options);
    if let Some(fault) = fault {
        command.env("TRAINCTL_FAULT", fault);
    }
    scratch.start(command, "export").wait()
}

/// Every tensor of an export's safetensors files: name, type, bytes.
fn tensors(dir: &Path) -> Vec<(String, String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
        for (name, info) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
            let at = |index: usize| 8 + size + info["data_offsets"][index].as_u64().unwrap() as usize;
            all.push((name.clone(), info["dtype"].as_str().unwrap().to_owned(), bytes[at(0)..at(1)].to_vec()));
        }
    }
    all.sort();
    all
}

/// Names in a folder, hidden ones too.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_trained_run_is_exported_bit_for_bit_with_its_tokenizer() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("export-trained");
    let job = Job { steps: 10, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("run")) };
    let spec = job.write(scratch.join("job.yaml"));
    scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(0);
    let ended = export(&scratch, "run", "out", &["--output", "json", "--max-shard-size", "100KB"], None).expect_code(0);
    let summary: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&summary["checkpoint"], &summary["dtype"]), (&"epoch_0_step_9".into(), &"float32".into()), "{summary}");
    let out = scratch.join("out");
    for file in ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"] {
        assert!(out.join(file).is_file(), "{file}: {:?}", names(&out));
    }
    let latest = Run::new(&job.run_dir).latest();
    let reader = ShardReader::open(&job.run_dir, latest.name, None).unwrap();
    let exported = tensors(&out);
    let wanted: Vec<String> =
        reader.tensors().filter_map(|(name, _)| name.strip_prefix("model/").map(str::to_owned)).collect();
    assert_eq!(exported.iter().map(|(name, ..)| name.clone()).collect::<Vec<_>>(), wanted);
    for (name, dtype, bytes) in exported {
        let mut stored = vec![0; bytes.len()];
        reader.read_tensor(&format!("model/{name}"), &mut stored).unwrap();
        assert!(dtype == "F32" && stored == bytes, "{name}");
    }
    let tokenizer = |dir: &Path| fs::read(dir.join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer(&out), tokenizer(&job.corpus.tokenizer));
    // Again to the same place: nothing is overwritten.
    export(&scratch, "run/epoch_0_step_4", "out", &[], None).expect_code(64).expect_said("not empty");
}

#[test]
fn full_and_weights_only_checkpoints_give_the_same_bf16_weights() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("export-weights");
    let run = Synthetic { bf16: true, ..Synthetic::tiny(scratch.join("run")) };
    run.commit(9, 1, None);
    run.commit_weights(9, 1);
    let read = |from: &str, to: &str, options: &[&str]| {
        export(&scratch, from, to, options, None).expect_code(0);
        tensors(&scratch.join(to))
    };
    let full = read("run", "full", &[]);
    assert!(full.iter().all(|(_, dtype, _)| dtype == "BF16"));
    assert_eq!(full, read("run/weights/epoch_0_step_9", "weights", &[]));
    let wide = read("run/LATEST", "wide", &["--dtype", "fp32"]);
    assert_eq!(wide, read("run/weights", "wide-weights", &["--dtype", "fp32"]), "masters and bf16 hold the same here");
    assert_eq!(full, read("run", "again", &["--dtype", "bf16"]));
    let half = read("run", "half", &["--dtype", "fp16"]);
    assert!(half.iter().all(|(_, dtype, _)| dtype == "F16"));
    let config: Value = serde_json::from_slice(&fs::read(scratch.join("half/config.json")).unwrap()).unwrap();
    assert_eq!((&config["dtype"], &config["torch_dtype"]), (&"float16".into(), &"float16".into()));
}

/// Runs an export to its end and gives the most memory that it ever had, bytes.
fn peak_of(scratch: &Scratch, from: &str, to: &str) -> u64 {
    let mut process = scratch.trainctl(["export", "--from", from, "--to", to]);
    let status = format!("/proc/{}/status", process.pid());
    let mut peak = 0;
    wait::until_true("the export's end", || {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        peak = kib.map_or(peak, |kib| kib << 10);
        !process.is_running()
    });
    process.wait().expect_code(0);
    peak
}

#[test]
fn peak_memory_is_the_same_for_every_size() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("export-memory");
    let mut peaks = Vec::new();
    for units in [5, 6, 8] {
        let run = Synthetic::large(scratch.join(&format!("run-{units}")), units);
        let name = run.commit(9, 1, None);
        let [from, to] = ["run", "out"].map(|name| format!("{name}-{units}"));
        let peak = peak_of(&scratch, &from, &to);
        let size = run.model().parameter_count() * 4;
        if peaks.is_empty() {
            // The largest tensor is larger than the buffers.
            let reader = ShardReader::open(scratch.join(&from), name, None).unwrap();
            for (name, _, bytes) in tensors(&scratch.join(&to)) {
                let mut stored = vec![0; bytes.len()];
                reader.read_tensor(&format!("model/{name}"), &mut stored).unwrap();
                assert!(stored == bytes, "{name}");
            }
        }
        eprintln!("export of {} MB: peak memory {} MiB", size / 1_000_000, peak >> 20);
        peaks.push(peak);
        fs::remove_dir_all(scratch.join(&from)).unwrap();
        fs::remove_dir_all(scratch.join(&to)).unwrap();
    }
    let (least, most) = (peaks.iter().min().unwrap(), peaks.iter().max().unwrap());
    assert!(*most <= 1 << 30, "{peaks:?}");
    assert!(*most as f64 <= 1.1 * *least as f64, "{peaks:?}");
}

#[test]
fn a_killed_export_is_never_found_as_a_whole_one() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("export-killed");
    let run = Synthetic::tiny(scratch.join("run"));
    run.commit(9, 1, None);
    let place = scratch.join("place");
    let points = FailPoint::ALL.iter().map(|point| point.0).filter(|point| point.starts_with("export."));
    let mut cases = 0;
    for point in points {
        for stage in ["", ".temp", ".done"] {
            for nth in [1, 3] {
                fs::remove_dir_all(&place).unwrap_or_default();
                let fault = format!("{point}{stage}:{nth}:exit");
                // Something to sweep.
                fs::create_dir_all(place.join(".export-out.1.2")).unwrap();
                let first = export(&scratch, "run", "place/out", &["--max-shard-size", "20KB"], Some(&fault));
                if first.signal.is_none() {
                    // This point is not passed so often.
                    assert_eq!(first.code, Some(0), "{fault}: {}", first.stderr);
                    continue;
                }
                cases += 1;
                let is_whole = (point, stage) == ("export.publish", ".done");
                assert_eq!(place.join("out").exists(), is_whole, "{fault}");
                if !is_whole {
                    export(&scratch, "run", "place/out", &["--max-shard-size", "20KB"], None).expect_code(0);
                }
                assert_eq!(names(&place), ["out"], "{fault}: nothing else is left");
                assert_eq!(tensors(&place.join("out")).len(), run.model().parameters().len(), "{fault}");
            }
        }
    }
    eprintln!("{cases} cases");
    assert!(cases >= 8, "{cases}");
    let eio = export(&scratch, "run", "place/other", &[], Some("export.file:2:eio")).expect_code(2);
    assert!(eio.stderr.contains("place/.export-other") || eio.stderr.contains("cannot write"), "{}", eio.stderr);
    assert_eq!(names(&place), ["out"], "a failed export removes what it wrote");
}

/// `trainctl run` is killed with all that it started while the coordinator is frozen in an export.
#[test]
fn a_run_that_is_killed_in_its_last_export_writes_it_when_it_is_run_again() {
    if !programs::have_trainer() {
        return;
    }
    let mut scratch = Scratch::new("export-last");
    scratch.inject("trainctl-coordinator", &["export.file:1:stop"]);
    let job = Job { steps: 10, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("run")) };
    let (spec, run) = (job.write(scratch.join("job.yaml")), Run::new(&job.run_dir));
    let mut trainctl = scratch.trainctl(["run", spec.to_str().unwrap()]);
    wait::until_true("a coordinator that freezes in the export", || {
        scratch.processes().into_iter().any(process::is_stopped)
    });
    trainctl.kill9();
    wait::until_true("the end of all that it started", || scratch.processes().is_empty());
    let consolidated = job.run_dir.join("epoch_0_step_9/model/consolidated");
    assert!(run.latest().step == 9 && !consolidated.exists());

    let again = scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(0);
    assert!(again.stderr.contains("which an earlier run left when it was killed"), "{}", again.stderr);
    assert!(consolidated.join("config.json").is_file());
    assert_eq!((run.events_of("job_finished").len(), run.generations().len()), (1, 1), "nothing is trained again");
    scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(0).expect_said("has done 10 steps already");
}

#[test]
fn a_coordinator_ends_although_an_export_hangs() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("export-hangs");
    let job = Job { steps: 100_000, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("run")).slow() };
    let state = scratch.join("state");
    // This thread hangs, as in a file system that is away.
    let mut coordinator = Coordinator::launch(&scratch, &state, Some("export.file:1:hang")).ready();
    let _workers = [0, 1].map(|index| daemons::start_worker(&scratch, &state, index, None));
    let spec = scratch.join("job.yaml");
    fs::write(&spec, format!("{}checkpoint:\n  save_consolidated: every\n", job.yaml())).unwrap();
    daemons::submit(&scratch, &state, &spec);
    let run = Run::new(&job.run_dir);
    run.wait_for_commit(9);
    coordinator.process.signal(Signal::SIGTERM);
    coordinator.process.wait().expect_code(0);
}
