//! Malformed specs through the real command: one clear message each, exit 64, nothing started, nothing written (P8): the
//! proof 6. The rules themselves are tested in `spec`.

use std::fs;
use std::path::Path;

use trainctl_tests::corpus::corpus;
use trainctl_tests::job::Job;
use trainctl_tests::programs;
use trainctl_tests::scratch::Scratch;

/// Title, and what of the sound spec is replaced by what.
const CASES: [(&str, &str, &str); 22] = [
    ("unknown key", "  workers: 2", "  workerz: 2"),
    ("unknown section", "optimizer:", "wandb:\n  project: x\noptimizer:"),
    ("wrong type", "max_steps: 40", "max_steps: [40]"),
    ("number in quotes", "max_steps: 40", "max_steps: \"40\""),
    ("negative", "global_batch_size: 8", "global_batch_size: -8"),
    ("zero", "workers: 2", "workers: 0"),
    ("missing key", "  seq_length: 64\n", ""),
    ("missing file", "tokenizer: [CORPUS]/tokenizer", "tokenizer: [DIR]/nowhere"),
    ("tokenizer larger than the model's vocabulary", "vocab_size: 512", "vocab_size: 300"),
    ("heads that do not divide", "n_head: 4", "n_head: 5"),
    ("sequence longer than the model's", "n_positions: 64", "n_positions: 32"),
    ("data that is not there", "paths: [CORPUS]/data_text_document", "paths: [DIR]/data"),
    ("glob without a match", "paths: [CORPUS]/data_text_document", "paths: [DIR]/data*"),
    ("a directory as file", "  config:\n", "  config: [DIR]\n  was:\n"),
    ("a file as directory", "run_dir: [DIR]/run", "run_dir: [DIR]/a-file"),
    ("batch too small for the world", "global_batch_size: 8", "global_batch_size: 2"),
    ("unknown word", "optimizer:", "precision: fp8\noptimizer:"),
    ("variable that is not set", "run_dir: [DIR]/run", "run_dir: ${NOT_SET_ANYWHERE}/run"),
    ("duplicate key", "max_steps: 40", "max_steps: 40\n  max_steps: 41"),
    ("YAML: bracket not closed", "split: \"90,10,0\"", "split: [90, 10"),
    ("YAML: tab", "  lr: 0.003", "\tlr: 0.003"),
    ("name with a slash", "name: tiny", "name: ../tiny"),
];

/// Names of everything below a folder.
fn names(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path.clone());
            }
            found.push(path.display().to_string());
        }
    }
    found.sort();
    found
}

/// Runs a verb on a spec that it must refuse, and gives what it said, with this machine's paths taken out.
fn refused(scratch: &Scratch, work: &Path, verb: &str) -> String {
    let mut command = scratch.command("trainctl");
    command.current_dir(work).args([verb, "job.yaml"]);
    let before = names(work);
    let ended = scratch.start(command, verb).wait().expect_code(64);
    assert_eq!(names(work), before, "{verb} wrote something");
    assert!(scratch.processes().is_empty(), "{verb} left processes");
    assert_eq!(ended.stdout, "", "{verb}: a refusal is no data");
    let corpus = corpus().prefix.parent().unwrap().display().to_string();
    ended.stderr.replace(&work.display().to_string(), "[DIR]").replace(&corpus, "[CORPUS]")
}

#[test]
fn p8_each_malformed_spec_gives_one_clear_error_and_starts_nothing() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("malformed-specs");
    let work = scratch.join("work");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("a-file"), "x").unwrap();
    let corpus = corpus().prefix.parent().unwrap().display().to_string();
    let real = |text: &str| text.replace("[DIR]", work.to_str().unwrap()).replace("[CORPUS]", &corpus);
    let sound = Job::new(work.join("run")).yaml();
    let mut report = String::new();
    for (title, from, to) in CASES {
        let (from, to) = (real(from), real(to));
        assert!(sound.contains(&from), "{title}: {from}");
        let mut spec = sound.replacen(&from, &to, 1);
        if title == "a directory as file" {
            // What was inline goes.
            let (start, end) = (spec.find("  was:").unwrap(), spec.find("dataset:").unwrap());
            spec.replace_range(start..end, "");
        }
        fs::write(work.join("job.yaml"), spec).unwrap();
        let said = refused(&scratch, &work, "validate");
        assert_eq!(said.lines().count(), 1, "{title}: {said}");
        assert!(said.starts_with("job.yaml:"), "{title}: {said}");
        assert_eq!(refused(&scratch, &work, "run"), said, "{title}: run and validate say the same");
        report += &format!("{title}\n    {said}");
    }
    fs::remove_file(work.join("job.yaml")).unwrap();
    for (title, make) in [("no file", None), ("a directory", Some("job.yaml"))] {
        make.into_iter().for_each(|name| fs::create_dir(work.join(name)).unwrap());
        let said = refused(&scratch, &work, "validate");
        assert_eq!(refused(&scratch, &work, "run"), said, "{title}");
        report += &format!("{title}\n    {said}");
    }
    insta::assert_snapshot!(report);
}

#[test]
fn a_sound_spec_is_accepted_and_nothing_is_written() {
    if !programs::have_cli() {
        return;
    }
    let scratch = Scratch::new("sound-spec");
    let work = scratch.join("work");
    fs::create_dir(&work).unwrap();
    Job::new(work.join("run")).write(work.join("job.yaml"));
    let before = names(&work);
    let path = work.join("job.yaml");
    scratch.trainctl(["validate", path.to_str().unwrap()]).wait().expect_code(0).expect_said("ok");
    assert_eq!(names(&work), before);
    scratch.trainctl(["validate", path.to_str().unwrap(), "--set", "optimizer.lr=fast"]).wait().expect_code(64);
    scratch.trainctl(["validate", path.to_str().unwrap(), "optimizer.lr=1e-4"]).wait().expect_code(0);
}
