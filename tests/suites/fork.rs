//! Runs that begin with a checkpoint of another run: `trainctl fork` and `checkpoint.restore_from`.

use std::fs;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trainctl_dataset::indexed::{Dtype, IndexedWriter};
use trainctl_dataset::{CorpusCounts, Split, corpus_key, open_split_after};
use trainctl_spec::JobSpec;
use trainctl_spec::start::{DataPhase, Keep};
use trainctl_store::Manifest;
use trainctl_tests::corpus::VOCABULARY;
use trainctl_tests::job::Job;
use trainctl_tests::process::Ended;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Row, Run};
use trainctl_tests::scratch::Scratch;

/// `trainctl <words>` to its end.
fn trainctl(scratch: &Scratch, words: &[&str]) -> Ended {
    scratch.trainctl(words).wait()
}

/// A run of `job` that was stopped after `steps`, and its spec.
fn stopped(scratch: &Scratch, job: &Job, steps: u64) -> (Run, PathBuf) {
    let spec = job.write(scratch.join("parent.yaml"));
    trainctl(scratch, &["run", text(&spec), "--until-step", &steps.to_string()]).expect_code(0);
    let parent = Run::new(&job.run_dir);
    assert_eq!(parent.latest().step, steps - 1);
    (parent, spec)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Files in a run's `control/pins/`.
fn pins(run: &Run) -> Vec<String> {
    let entries = fs::read_dir(run.dir().join("control/pins")).into_iter().flatten();
    entries.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).filter(|pin| pin.contains("fork")).collect()
}

/// Asserts that `fork` made the steps from `first` on that `want` made, bit for bit (P4).
#[track_caller]
fn assert_goes_on_as(fork: &Run, want: &Run, first: u64) {
    let (got, want_rows) = (fork.rows(), want.rows());
    let steps: Vec<u64> = got.iter().map(|row| row.step).collect();
    assert_eq!(steps, (first..want_rows.len() as u64).collect::<Vec<_>>());
    for (got, want) in got.iter().zip(&want_rows[first as usize..]) {
        assert_eq!(got.bits(), want.bits(), "{got:?}\n{want:?}");
    }
    assert_eq!(fork.latest().state_hash, want.latest().state_hash);
}

/// The parent that every manifest of a run names.
#[track_caller]
fn assert_parent(fork: &Run, parent: &Run, name: &str, keep: Keep) {
    let commits = fork.commits();
    assert!(!commits.is_empty());
    for commit in commits {
        let named = commit.parent.unwrap_or_else(|| panic!("{} names no parent", commit.name));
        assert_eq!((named.run.as_str(), named.name.to_string().as_str()), (text(parent.dir()), name));
        assert_eq!(named.keep, keep, "{}", commit.name);
    }
}

/// Another corpus with the same vocabulary.
fn corpus(scratch: &Scratch, name: &str) -> PathBuf {
    let prefix = scratch.join(name);
    let mut random = StdRng::seed_from_u64(name.len() as u64);
    let mut writer = IndexedWriter::create(&prefix, Dtype::for_vocabulary(VOCABULARY as usize)).unwrap();
    for _ in 0..200 {
        let length = random.random_range(50..400);
        let tokens: Vec<u32> = (0..length).map(|_| random.random_range(0..VOCABULARY)).collect();
        writer.push_document(&tokens).unwrap();
    }
    writer.finish().unwrap();
    prefix
}

#[test]
fn p4_a_fork_that_keeps_everything_goes_on_as_its_parent_even_when_killed_before_its_first_commit() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("fork-all");
    let job = Job::new(scratch.join("parent")).slow();
    let want = unbroken(&job);
    let (parent, spec) = stopped(&scratch, &job, 20);
    let fork = Run::new(scratch.join("fork"));
    let keep = "weights,optimizer,data,schedule";
    let words = ["fork", text(parent.dir()), text(&spec), "--run-dir", text(fork.dir()), "--keep", keep];
    let told = trainctl(&scratch, &words).expect_code(0).expect_said("trainctl run");
    for part in ["epoch_0_step_19 (20 steps done)", "weights, optimizer, data, schedule", "from 20 to 40", "sample 160"]
    {
        assert!(told.stdout.contains(part), "{part} in {}", told.stdout);
    }
    assert_eq!(pins(&parent).len(), 1, "{:?}", pins(&parent));

    let resolved = fork.dir().join("job.yaml");
    let mut running = scratch.trainctl(["run", text(&resolved)]);
    fork.wait_for_step(23);
    fork.wait_for_trainers(2, 0)[1].kill9();
    let second = fork.wait_for_trainers(2, fork.generations()[0]);
    assert!(fork.commits().is_empty(), "the kill must come before the first commit");
    assert_eq!(pins(&parent).len(), 1, "pinned until the first commit");
    running.wait().expect_code(0);

    assert_goes_on_as(&fork, &want, 20);
    assert_parent(&fork, &parent, "epoch_0_step_19", Keep::ALL);
    assert_eq!(pins(&parent), Vec::<String>::new(), "released after the first commit");
    let last = fork.latest();
    assert_eq!((last.generation, last.consumed_samples), (second[0].generation, 320));
    assert_eq!(last.phase, DataPhase { first_step: 20, first_sample: 160, ..DataPhase::default() });
    assert_eq!(last.corpora, CorpusCounts::from([(corpus_key(&job.corpus.prefix), 320)]));
    assert_eq!(parent.latest().corpora, CorpusCounts::from([(corpus_key(&job.corpus.prefix), 160)]));

    // From here on it is a run like any other.
    let commits = fork.commits().len();
    trainctl(&scratch, &["run", text(&resolved)]).expect_code(0).expect_said("has done 40 steps already");
    trainctl(&scratch, &["resume", text(fork.dir()), "--from", "epoch_0_step_29"]).expect_code(0);
    assert_goes_on_as(&fork, &want, 20);
    assert_eq!(fork.commits().len(), commits);
    assert_parent(&fork, &parent, "epoch_0_step_19", Keep::ALL);
}

#[test]
fn a_shared_corpus_goes_on_where_it_was_and_another_blend_begins_at_its_sample_0() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("fork-blend");
    let job = Job { steps: 20, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("parent")) };
    let want = unbroken(&job);
    let (parent, spec) = stopped(&scratch, &job, 10);
    let shared = text(&job.corpus.prefix);
    let fork = |name: &str, keep: &str, paths: &str| {
        let run = Run::new(scratch.join(name));
        let paths = format!("dataset.paths={paths}");
        let words = ["fork", text(parent.dir()), text(&spec), "--run-dir", text(run.dir()), "--keep", keep, "--run"];
        let ended = trainctl(&scratch, &[&words[..], &["--set", &paths]].concat());
        (run, ended.expect_code(0))
    };

    // The same corpus as another blend: it starts at its sample 0, which is where the corpus goes on. Every bit shows that
    // the samples are those that the parent would have read.
    let (again, told) =
        fork("again", "weights,optimizer,data,schedule", &format!("[{{prefix: {shared}, weight: 1.0}}]"));
    assert!(told.stdout.contains(&format!("{shared} goes on behind 80 samples")), "{}", told.stdout);
    assert_goes_on_as(&again, &want, 10);
    let key = corpus_key(&job.corpus.prefix);
    let used = CorpusCounts::from([(key.clone(), 80)]);
    assert_eq!(again.latest().phase, DataPhase { first_step: 10, first_sample: 0, corpora: used.clone() });
    assert_eq!((again.latest().consumed_samples, again.latest().corpora[&key]), (80, 160));

    // A blend with a new corpus.
    let new = corpus(&scratch, "new");
    let blend = format!("[{{prefix: {shared}, weight: 0.25}}, {{prefix: {}, weight: 0.75}}]", text(&new));
    let (mixed, told) = fork("mixed", "weights,optimizer,data", &blend);
    assert!(told.stdout.contains(&format!("{} is new", text(&new))), "{}", told.stdout);
    let spec_of = |run: &Run| JobSpec::from_yaml(&fs::read_to_string(run.dir().join("job.yaml")).unwrap()).unwrap();
    let dataset = spec_of(&mixed).dataset;
    let blend_of = |used: &CorpusCounts| open_split_after(&dataset, Split::Train, Some(160), used).unwrap();
    let (goes_on, fresh) = (blend_of(&used), blend_of(&CorpusCounts::new()));
    for commit in mixed.commits() {
        assert_eq!(commit.phase, DataPhase { corpora: used.clone(), ..DataPhase::default() });
        assert_eq!(commit.consumed_samples, (commit.step + 1) * 8);
        assert_eq!(commit.corpora, goes_on.used(commit.consumed_samples), "{}", commit.name);
        assert_eq!(commit.corpora.values().sum::<u64>(), 80 + commit.consumed_samples);
    }
    assert_parent(&mixed, &parent, "epoch_0_step_9", Keep { schedule: false, ..Keep::ALL });

    // A fork of the fork: counts add up over all phases.
    let words = ["fork", text(mixed.dir()), text(&spec), "--keep", "data", "--run"];
    let third = Run::new(scratch.join("third"));
    let only_new = format!("dataset.paths={}", text(&new));
    let more = ["--run-dir", text(third.dir()), "--set", &only_new];
    trainctl(&scratch, &[&words[..], &more].concat()).expect_code(0);
    let (before, after) = (mixed.latest().corpora, third.latest().corpora);
    assert_eq!(after[&key], before[&key], "it is not read any more, and not forgotten");
    assert_eq!(after[&corpus_key(&new)], before[&corpus_key(&new)] + 160);

    // Without data: from the start.
    let (anew, _) = fork("anew", "weights", &blend);
    assert_eq!(anew.latest().phase, DataPhase::default());
    assert_eq!(anew.latest().corpora, fresh.used(160));
    let losses = |run: &Run| run.rows().iter().map(|row| row.loss.to_bits()).collect::<Vec<_>>();
    assert_ne!(losses(&anew), losses(&mixed));
}

#[test]
fn restore_from_begins_with_all_of_a_checkpoint_or_its_weights() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("restore-from");
    let job = Job { steps: 20, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("parent")) };
    let want = unbroken(&job);
    let (parent, spec) = stopped(&scratch, &job, 10);
    let restore = |name: &str, from: &str, more: &[&str]| {
        let run = Run::new(scratch.join(name));
        let from = format!("checkpoint.restore_from={from}");
        let words = ["run", text(&spec), "--run-dir", text(run.dir()), "--set", &from];
        (trainctl(&scratch, &[&words[..], more].concat()), run)
    };
    let (ended, all) = restore("all", text(parent.dir()), &[]);
    ended.expect_code(0).expect_said("begins with");
    assert_goes_on_as(&all, &want, 10);
    assert_parent(&all, &parent, "epoch_0_step_9", Keep::ALL);
    assert_eq!(pins(&parent), Vec::<String>::new());

    let named = format!("{}/epoch_0_step_4", text(parent.dir()));
    let (ended, weights) = restore("weights", &named, &["--weights-only"]);
    ended.expect_code(0);
    assert_parent(&weights, &parent, "epoch_0_step_4", Keep::WEIGHTS);
    let rows = weights.rows();
    assert_eq!(rows.iter().map(|row| row.step).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
    let scratch_rows: Vec<Row> = want.rows();
    assert!(rows[0].loss < scratch_rows[0].loss, "trained weights: {:?} against {:?}", rows[0], scratch_rows[0]);
    assert_eq!(rows[0].lr.to_bits(), scratch_rows[0].lr.to_bits(), "the schedule begins anew");

    // It is a run of its own now: what it began with counts no more.
    let (ended, _) = restore("weights", "/nowhere", &[]);
    ended.expect_code(0).expect_said("has done 20 steps already");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("fork-refused");
    let job = Job { steps: 10, ckpt_every: 5, val_every: 5, ..Job::new(scratch.join("parent")) };
    let (parent, spec) = stopped(&scratch, &job, 5);
    let before = parent.latest();
    let child = scratch.join("child");
    let fork = |from: &str, more: &[&str]| {
        let words = ["fork", from, text(&spec), "--run-dir", text(&child)];
        trainctl(&scratch, &[&words[..], more].concat()).expect_code(64)
    };
    let says = |ended: Ended, parts: &[&str]| {
        for part in parts {
            assert!(ended.stderr.contains(part), "{part:?} in {}", ended.stderr);
        }
        assert!(!child.exists(), "a refusal writes nothing");
        assert_eq!(pins(&parent), Vec::<String>::new(), "and pins nothing");
    };
    let here = text(parent.dir());
    says(fork("/nowhere/run", &[]), &["/nowhere/run does not exist"]);
    says(fork(&format!("{here}/epoch_0_step_7"), &[]), &["no committed checkpoint epoch_0_step_7", "epoch_0_step_4"]);
    says(
        fork(here, &["--set", "model.config.n_layer=3", "--set", "model.config.vocab_size=640"]),
        &[
            "model/transformer.wte.weight: [512, 64] in the checkpoint, [640, 64] in the model",
            "model/transformer.h.2.ln_1.weight: missing in the checkpoint, [64] in the model",
        ],
    );
    says(fork(here, &["--set", "precision=bf16"]), &["optimizer", "precision: \"fp32\" → \"bf16\""]);
    let keep_data = ["--keep", "data", "--set", "dataset.seed=7"];
    says(fork(here, &keep_data), &["dataset.seed: 1234 → 7", "leave data out"]);
    let keep_all = ["--keep", "optimizer,data,schedule", "--set", "step_scheduler.max_steps=5"];
    says(fork(here, &keep_all), &["5 steps are done and the run ends at 5"]);
    says(fork(here, &["--keep", "momentum"]), &["momentum", "weights, optimizer, data, schedule"]);
    says(fork(here, &["--set", &format!("checkpoint.restore_from={here}")]), &["restore_from", "leave one"]);
    let itself = ["fork", here, text(&spec), "--run-dir", here];
    says(trainctl(&scratch, &itself).expect_code(64), &["holds checkpoints already: epoch_0_step_4", "--run-dir"]);

    let run = ["run", text(&spec), "--run-dir", text(&child)];
    says(trainctl(&scratch, &[&run[..], &["--weights-only"]].concat()).expect_code(64), &["restore_from"]);
    let from = format!("checkpoint.restore_from={here}");
    let misfit = [&run[..], &["--set", &from, "--set", "model.config.n_layer=1"]].concat();
    says(
        trainctl(&scratch, &misfit).expect_code(64),
        &["cannot begin with", "h.1.ln_1.weight: [64] in the checkpoint"],
    );
    let resume = trainctl(&scratch, &["resume", here, "--weights-only"]).expect_code(64);
    says(resume, &["trainctl fork", "--keep weights"]);
    assert_eq!(parent.latest(), before, "the parent is as it was");

    // A bit of a damaged parent is noticed where it is cheap to notice: a file that is not whole.
    let Manifest { files, .. } = before;
    let shard = parent.dir().join("epoch_0_step_4").join(&files.iter().find(|file| file.size > 1000).unwrap().path);
    fs::OpenOptions::new().write(true).open(shard).unwrap().set_len(1000).unwrap();
    says(fork(here, &[]), &["epoch_0_step_4 is damaged"]);
}
