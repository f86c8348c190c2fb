//! Whole runs over real processes: rows, validation, stops, resumes, world sizes.
//!
//! Coverage: D2, D3 `world_sizes_agree_on_losses_and_gradients`; P4 `a_resumed_run_equals_the_unbroken_one_bit_for_bit` and
//! `p4_replicas_are_equal_bit_for_bit_at_every_save_and_a_flipped_bit_is_told`; C2
//! (shard names) and C8 `a_checkpoint_loads_at_another_world_size`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use support::runs::{assert_relative, commit, losses, reports, spec, state_hash, tensors};
use support::world::{Case, Told};
use support::{assert_close, config};
use trainctl_spec::job::Precision;
use trainctl_spec::report::{FinishCause, Phase, SaveKind};
use trainctl_spec::start::{DataPhase, Keep};
use trainctl_spec::{JobSpec, lr};

/// A rank's process; see `support::world`.
#[test]
fn rank_process() {
    support::world::rank_process();
}

#[test]
fn one_rank_learns_reports_validates_and_saves() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 30);
    let told = Case::new(spec.clone(), 1).run();
    let rank = &told[0];
    assert_eq!(rank.ended, Some(Ok((FinishCause::Complete, 30, rank.rows.last().map(|row| row.loss)))));
    assert_eq!(rank.formed, 1);
    assert_eq!(rank.steps, (0..30).collect::<Vec<_>>());
    let steps: Vec<u64> = rank.rows.iter().map(|row| row.step).collect();
    assert_eq!(steps, rank.steps);
    let schedule = lr::Schedule::of(&spec);
    for row in &rank.rows {
        assert_eq!(row.lr, schedule.logged(trainctl_spec::Step(row.step)));
        assert_eq!((row.num_tokens_per_step, row.num_label_tokens), (7 * 16, 7 * 16));
        assert!(row.mem > 0.0 && row.tps > 0.0 && row.grad_norm > 0.0 && row.mfu.is_none());
        assert!(row.timestamp.ends_with('Z') && row.timestamp.len() == 24, "{}", row.timestamp);
    }
    let losses = losses(&told);
    assert!((losses[0] - 67f64.ln()).abs() < 0.3, "a fresh model guesses: {}", losses[0]);
    assert!(losses[29] < losses[0] - 0.5, "{losses:?}");
    // N = 3, K = 4, last = 29.
    let validated: Vec<u64> = rank.validation.iter().map(|(_, row)| row.step).collect();
    assert_eq!(validated, [2, 3, 5, 7, 8, 11, 14, 15, 17, 19, 20, 23, 26, 27, 29]);
    assert!(rank.validation.iter().all(|(name, row)| name == "default" && row.num_label_tokens == 9 * 16));
    let saved: Vec<u64> = rank.reports.iter().map(|report| report.step).collect();
    assert_eq!(saved, [3, 7, 11, 15, 19, 23, 27, 29]);
    let last = rank.reports.last().unwrap();
    assert_eq!((last.checkpoint.as_str(), last.consumed_samples), ("epoch_0_step_29", 210));
    assert_eq!(last.val_losses, BTreeMap::from([("default".to_owned(), rank.validation.last().unwrap().1.val_loss)]));
    let paths: Vec<&str> = last.files.iter().map(|file| file.path.as_str()).collect();
    let shard = "shard-00000-of-00001.g1.safetensors";
    assert_eq!(paths, [format!("model/{shard}"), format!("optim/{shard}"), "optim/trainer.g1.json".into()]);
    assert_eq!(rank.phases.first(), Some(&(Phase::Rendezvous, 0)));
    assert_eq!(rank.phases[1..3], [(Phase::Loading, 0), (Phase::Stepping, 0)]);
    assert_eq!(rank.phases.last(), Some(&(Phase::Finished, 30)));
    commit(&spec, &told, 29);
}

#[test]
fn world_sizes_agree_on_losses_and_gradients() {
    let runs: Vec<_> = (1..=3)
        .map(|world_size| {
            let dir = tempfile::tempdir().unwrap();
            let mut spec = spec(dir.path(), 0.1, 6);
            // The first moments after one step are 0.1 × the gradients, as long as nothing is clipped.
            spec.step_scheduler.ckpt_every_steps = 1;
            spec.clip_grad_norm.max_norm = 1e6;
            let told = Case::new(spec.clone(), world_size).run();
            let (name, _) = commit(&spec, &told, 0);
            let gradients = tensors(&spec.run_dir, &name, "optim/exp_avg.");
            (told, gradients)
        })
        .collect();
    let (one, (names, gradients)) = &runs[0];
    assert_eq!(names.len(), 28);
    for (told, (_, other)) in &runs[1..] {
        assert_relative(&losses(told), &losses(one), 1e-5);
        let norms = |told: &[Told]| told[0].rows.iter().map(|row| row.grad_norm).collect::<Vec<_>>();
        assert_relative(&norms(told), &norms(one), 1e-4);
        let val = |told: &[Told]| told[0].validation.iter().map(|(_, row)| row.val_loss).collect::<Vec<_>>();
        assert_relative(&val(told), &val(one), 1e-5);
        assert_close(names, other, gradients, 1e-5);
        for rank in told {
            assert_eq!(rank.ended.as_ref().unwrap().as_ref().unwrap().2, Some(*losses(told).last().unwrap()));
        }
        assert!(told[1..].iter().all(|rank| rank.rows.is_empty() && rank.validation.is_empty()));
    }
}

#[test]
fn a_resumed_run_equals_the_unbroken_one_bit_for_bit() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let (whole_dir, broken_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let spec = |dir: &Path| JobSpec { precision, ..spec(dir, 0.1, 8) };
        let whole = Case::new(spec(whole_dir.path()), 2).run();
        let spec = spec(broken_dir.path());
        let first = Case { stop_at: 4, ..Case::new(spec.clone(), 2) }.run();
        assert!(matches!(first[0].ended, Some(Ok((FinishCause::UntilStep, 4, _)))));
        assert_eq!(state_hash(&first, 3), state_hash(&whole, 3));
        let checkpoint = commit(&spec, &first, 3);
        let second =
            Case { start_from: Some(checkpoint), start_step: 4, generation: 2, ..Case::new(spec.clone(), 2) }.run();
        assert_eq!([losses(&first), losses(&second)].concat(), losses(&whole));
        assert_eq!(state_hash(&second, 7), state_hash(&whole, 7));
        assert!(second[1].reports[0].files[0].path.ends_with("shard-00001-of-00002.g2.safetensors"));
        let masters = second[0].reports[0].tensors.iter().filter(|t| t.0.starts_with("optim/master.")).count();
        assert_eq!(masters > 0, precision == Precision::Bf16);
    }
}

#[test]
fn a_checkpoint_loads_at_another_world_size() {
    let (whole_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = Case::new(spec(whole_dir.path(), 0.1, 8), 2).run();
    let spec = spec(dir.path(), 0.1, 8);
    let checkpoint = commit(&spec, &Case { stop_at: 4, ..Case::new(spec.clone(), 2) }.run(), 3);
    for world_size in [1, 3] {
        let case = Case::new(spec.clone(), world_size);
        let rest = Case { start_from: Some(checkpoint.clone()), start_step: 4, generation: 2, ..case }.run();
        assert_relative(&losses(&rest), &losses(&whole)[4..], 1e-5);
    }
}

#[test]
fn ranks_of_one_host_share_the_proof_and_none_goes_on_where_one_finds_damage() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.1, 8);
    let checkpoint = commit(&spec, &Case { stop_at: 4, ..Case::new(spec.clone(), 2) }.run(), 3);
    let folder = spec.run_dir.join(&checkpoint.0).join("model");
    // Each shard is one block here, so each rank proves one of the two.
    let shards = ["shard-00000-of-00002.g1.safetensors", "shard-00001-of-00002.g1.safetensors"];
    for (shard, optimizer) in shards.into_iter().flat_map(|shard| [(shard, true), (shard, false)]) {
        let flip = || {
            let mut bytes = std::fs::read(folder.join(shard)).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(folder.join(shard), bytes).unwrap();
        };
        flip();
        let start_from = Some(checkpoint.clone());
        let keep = Keep { optimizer, ..Keep::ALL };
        let told = Case { start_from, start_step: 4, keep, ..Case::new(spec.clone(), 2) }.run();
        flip();
        assert!(told.iter().all(|rank| rank.steps.is_empty()), "a rank took a step");
        let ends = told.iter().map(|rank| rank.ended.clone().unwrap().expect_err("a rank went on"));
        let (finds, waits): (Vec<String>, Vec<String>) = ends.partition(|end| end.contains(shard));
        assert!(matches!(&finds[..], [end] if end.contains("tensors model/")), "{finds:?}");
        assert!(matches!(&waits[..], [end] if end.contains("wait until all ranks have loaded")), "{waits:?}");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_with_every_difference() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), 0.0, 4);
    let checkpoint = commit(&spec, &Case::new(spec.clone(), 1).run(), 3);
    let mut other = config(0.0);
    other.insert("vocab_size".into(), 99.into());
    other.insert("n_layer".into(), 1.into());
    spec.model.config = serde_json::from_value(other.into()).unwrap();
    let case = |from| Case { start_from: Some(from), start_step: 4, ..Case::new(spec.clone(), 1) };
    let told = case(checkpoint.clone()).run();
    let Some(Err(text)) = &told[0].ended else { panic!("{:?}", told[0].ended) };
    for part in [
        "checkpoint epoch_0_step_3 does not fit the model; nothing was loaded",
        "model/transformer.wte.weight: saved as F32 [67, 24], the model has F32 [99, 24]",
        "optim/exp_avg.transformer.h.1.ln_1.weight: saved as F32 [24], unknown to the model",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let told = case((checkpoint.0, "0".repeat(64))).run();
    let Some(Err(text)) = &told[0].ended else { panic!("{:?}", told[0].ended) };
    assert!(text.contains("load checkpoint epoch_0_step_3"), "{text}");
}

#[test]
fn d2_a_phase_reads_where_it_says_and_counts_each_corpus() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 4);
    let key = dir.path().join("text").display().to_string();
    let whole = Case::new(spec.clone(), 1).run();
    assert_eq!(whole[0].reports[0].corpora, BTreeMap::from([(key.clone(), 28)]));
    // The first loss of a fresh model is a function of its samples alone: a phase whose first sample is that of step 2 …
    let at = |phase, generation| losses(&Case { phase, stop_at: 1, generation, ..Case::new(spec.clone(), 1) }.run())[0];
    let (two, other) = (DataPhase { first_sample: 14, ..DataPhase::default() }, "elsewhere".to_owned());
    // … or whose corpus goes on there reads the same.
    let corpora = BTreeMap::from([(key.clone(), 14), (other.clone(), 5)]);
    let goes_on = DataPhase { corpora, ..DataPhase::default() };
    let first = at(two.clone(), 2);
    assert_eq!(first, at(goes_on.clone(), 3));
    assert_ne!(first, at(DataPhase::default(), 4));
    let told = Case { phase: goes_on, generation: 5, ..Case::new(spec.clone(), 2) }.run();
    let report = &told[0].reports[0];
    assert_eq!(report.consumed_samples, 28);
    assert_eq!(report.corpora, BTreeMap::from([(key, 14 + 28), (other, 5)]));
    assert!(told[1].reports[0].corpora.is_empty(), "rank 0 reports them");
    // A phase may begin at a later step: positions count from there.
    let later = DataPhase { first_step: 2, ..two };
    let case = Case { phase: later, start_step: 2, generation: 6, ..Case::new(spec, 1) };
    assert_eq!(case.run()[0].reports[0].consumed_samples, 14 + 2 * 7);
}

#[test]
fn requests_heard_by_one_rank_act_on_all_at_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 100);
    let told = Case { save_heard: Some((0, 1)), stop_heard: Some((vec![1], 5)), ..Case::new(spec.clone(), 2) }.run();
    for rank in &told {
        assert!(matches!(rank.ended, Some(Ok((FinishCause::Stopped, 6, _)))), "{:?}", rank.ended);
        let saved: Vec<u64> = rank.reports.iter().map(|report| report.step).collect();
        assert_eq!(saved, [1, 3, 5]);
    }
    commit(&spec, &told, 5);
}

#[test]
fn p4_replicas_are_equal_bit_for_bit_at_every_save_and_a_flipped_bit_is_told() {
    for (world_size, precision) in
        [(2, Precision::Fp32), (3, Precision::Fp32), (3, Precision::Bf16), (4, Precision::Fp32)]
    {
        let dir = tempfile::tempdir().unwrap();
        // Four micro-batches: of three ranks one has two, of four each has one. Saves after each step, and of weights alone.
        let mut spec = JobSpec { precision, ..spec(dir.path(), 0.1, 5) };
        spec.step_scheduler.ckpt_every_steps = 1;
        spec.checkpoint.weights_every_steps = Some(2);
        let replicas = |told: &[Told], kind, step| -> Vec<(u128, Option<u128>)> {
            reports(told, kind, step).iter().map(|report| report.replica.unwrap()).collect()
        };
        let told = Case::new(spec.clone(), world_size).run();
        let mut seen = std::collections::BTreeSet::new();
        for step in 0..5 {
            let replicas = replicas(&told, SaveKind::Full, step);
            assert_eq!(replicas.len(), world_size as usize, "step {step}");
            assert!(replicas.iter().all(|(held, _)| *held == replicas[0].0), "step {step}: {replicas:?}");
            let written = replicas.iter().fold(0, |sum: u128, (_, written)| sum.wrapping_add(written.unwrap()));
            assert_eq!(written, replicas[0].0, "step {step}: what was written is what they hold");
            assert!(seen.insert(written), "step {step}: the state has changed");
        }
        let of_weights = replicas(&told, SaveKind::Weights, 3);
        assert_eq!(of_weights, vec![(replicas(&told, SaveKind::Full, 3)[0].0, None); world_size as usize]);

        let fault = "step.begin:3:flip".to_owned();
        let told = Case { fault, faulty: Some(1), generation: 2, ..Case::new(spec, world_size) }.run();
        for step in 0..5 {
            let held: Vec<u128> = replicas(&told, SaveKind::Full, step).into_iter().map(|(held, _)| held).collect();
            let others = (0..held.len()).filter(|rank| *rank != 1).all(|rank| held[rank] == held[0]);
            assert!(others && (held[1] != held[0]) == (step >= 2), "step {step}: {held:x?}");
        }
    }
}

#[test]
fn where_replicas_are_not_compared_no_rank_says_what_it_holds() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), 0.0, 4);
    spec.fault_tolerance.compare_replicas = false;
    let told = Case::new(spec, 1).run();
    assert_eq!(told[0].reports[0].replica, None);
}

#[test]
fn a_loss_that_is_not_finite_stops_or_skips_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), 0.0, 5);
    spec.optimizer.lr = 1e30;
    let told = Case::new(spec.clone(), 2).run();
    let stopped: Vec<_> = told.iter().map(|rank| rank.ended.clone().unwrap().unwrap_err()).collect();
    assert!(stopped[0].starts_with("step 1: loss ") && stopped[0].contains("skip_step"), "{}", stopped[0]);
    assert_eq!(stopped[0], stopped[1]);
    spec.fault_tolerance.on_nonfinite = serde_json::from_value("skip_step".into()).unwrap();
    let told = Case { generation: 2, ..Case::new(spec, 2) }.run();
    assert!(matches!(told[0].ended, Some(Ok((FinishCause::Complete, 5, _)))), "{:?}", told[0].ended);
    assert_eq!((losses(&told).len(), told[0].not_finite.clone()), (1, vec![1, 2, 3, 4]));
}

#[test]
fn a_failed_last_save_fails_the_run_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let spec = spec(dir.path(), 0.0, 6);
    // A file where the checkpoint's directory belongs.
    std::fs::write(dir.path().join("epoch_0_step_3"), "").unwrap();
    let told = Case::new(spec.clone(), 1).run();
    assert!(matches!(told[0].ended, Some(Ok(_))), "the run goes on after a failed save: {:?}", told[0].ended);
    assert_eq!(told[0].failed_saves.len(), 1);
    std::fs::write(dir.path().join("epoch_0_step_4"), "").unwrap();
    let stop_heard = Some((vec![0], 4));
    let told = Case { stop_at: 5, generation: 2, stop_heard, ..Case::new(spec, 1) }.run();
    let Some(Err(text)) = &told[0].ended else { panic!("{:?}", told[0].ended) };
    assert!(text.contains("save checkpoint epoch_0_step_4"), "{text}");
    let attempts = told[0].failed_saves.iter().filter(|why| why.starts_with('4'));
    assert_eq!(attempts.count(), 3, "as often as a stop allows: {:?}", told[0].failed_saves);
}
