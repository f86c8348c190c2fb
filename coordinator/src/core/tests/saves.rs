//! Saves, and what follows them.

use trainctl_spec::report::SaveKind;

use super::*;
use crate::exports::ExportResult;
use crate::hooks::{Hook, HookResult, Outcome, Which};

fn weights_of(world: &World) -> Vec<(SaveKind, u64)> {
    let commits = world.io.iter().filter_map(|request| match request {
        IoRequest::Commit(commit) => Some((commit.kind, commit.step)),
        _ => None,
    });
    commits.collect()
}

fn status(world: &World) -> v1::Job {
    world.core.status(&job()).unwrap()
}

fn fail_save(world: &mut World, rank: u32, step: u64) {
    fail_save_of(world, SaveKind::Full, rank, step);
}

fn fail_save_of(world: &mut World, kind: SaveKind, rank: u32, step: u64) {
    report_failed(world, kind, rank, step, 1, false);
}

fn report_failed(world: &mut World, kind: SaveKind, rank: u32, step: u64, attempt: u32, tried_again: bool) {
    let error = "write model/shard: No space left on device".to_owned();
    let failed = v1::SaveFailed { step, error, kind: v1::SaveKind::from(kind).into(), attempt, tried_again };
    world.report(SessionId::from(rank) + 1, rank, Report::SaveFailed(failed));
}

#[test]
fn weights_of_a_step_are_another_save_than_its_checkpoint() {
    let mut world = World::running();
    world.save(1, 0, 9, SaveKind::Full);
    world.save(2, 1, 9, SaveKind::Weights);
    assert_eq!(world.commits(), 0, "reports of two kinds never add up");
    world.save(1, 0, 9, SaveKind::Weights);
    assert_eq!(weights_of(&world), [(SaveKind::Weights, 9)]);
    world.committed_as(SaveKind::Weights, 9, Ok(()));
    assert_eq!(status(&world).latest, "", "weights move no pointer");
    world.save(2, 1, 9, SaveKind::Full);
    assert_eq!(weights_of(&world), [(SaveKind::Weights, 9), (SaveKind::Full, 9)]);
    world.committed(9, Ok(()));
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
}

#[test]
fn a_commit_says_what_the_save_cost() {
    let mut world = World::running();
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    world.committed(9, Ok(()));
    let save = status(&world).last_save.unwrap();
    assert_eq!((save.step, save.bytes), (9, 1000));
    assert_eq!((save.stall_seconds, save.write_seconds, save.commit_seconds), (1.25, 2.0, 0.5), "the slowest rank's");
    let event = &world.events("checkpoint_committed")[0];
    assert_eq!(
        (&event["bytes"], &event["stall_seconds"], &event["save"]),
        (&1000.into(), &1.25.into(), &"full".into())
    );
}

#[test]
fn a_failed_save_is_shown_until_the_next_commit() {
    let mut world = World::running();
    fail_save(&mut world, 0, 9);
    fail_save(&mut world, 1, 9);
    assert_eq!(world.events("save_failed").len(), 2);
    let reason = status(&world).reason;
    assert!(reason.contains("step 9 failed: rank 1: write model/shard: No space left"), "{reason}");
    fail_save(&mut world, 1, 19);
    assert!(status(&world).reason.starts_with("2 saves in a row failed, the last one of step 19"));
    world.later(Duration::from_secs(2));
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "the run goes on on its last commit");
    world.shards(1, 0, 29);
    world.shards(2, 1, 29);
    world.committed(29, Ok(()));
    assert_eq!(status(&world).reason, "");
}

#[test]
fn max_failures_stops_the_job_with_the_cause() {
    let mut world = World::running_with("checkpoint", "{save_consolidated: false, max_failures: 2}");
    fail_save(&mut world, 0, 9);
    fail_save(&mut world, 1, 9);
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "one save that failed on two ranks");
    let kept = world.journal.last().unwrap().failed_saves.clone();
    assert_ne!(kept, Default::default(), "a successor counts on");
    // A commit that cannot be made counts as well, and is given up with the job.
    world.shards(1, 0, 19);
    world.shards(2, 1, 19);
    world.committed(19, Err("create manifest.json: No space left on device"));
    assert!(matches!(world.phase(), JobPhase::Stopping { why: StopReason::Fail { .. }, .. }), "{:?}", world.phase());
    assert_eq!(world.stops(), [1, 2]);
    world.stopped(1, 0);
    world.stopped(2, 1);
    let JobPhase::Failed { cause } = world.phase() else { panic!("{:?}", world.phase()) };
    let cause = cause.to_string();
    assert!(cause.contains("2 saves in a row failed (checkpoint.max_failures = 2)"), "{cause}");
    assert!(cause.contains("No space left"), "{cause}");
}

#[test]
fn weights_that_cannot_be_saved_stop_no_job_and_forgive_nothing() {
    let mut world = World::running_with("checkpoint", "{save_consolidated: false, max_failures: 2}");
    for step in [9, 19, 29] {
        fail_save_of(&mut world, SaveKind::Weights, 0, step);
    }
    world.save(1, 0, 30, SaveKind::Weights);
    world.save(2, 1, 30, SaveKind::Weights);
    world.committed_as(SaveKind::Weights, 30, Err("No space left on device"));
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    assert_eq!(status(&world).reason, "the save of the weights of step 30 failed: commit: No space left on device");
    assert!(world.events("save_failed").iter().all(|event| event["save"] == "weights"));

    fail_save(&mut world, 0, 31);
    let reason = status(&world).reason;
    assert!(reason.starts_with("the save of step 31 failed: rank 0"), "{reason}");
    assert!(reason.contains("; the save of the weights of step 30 failed"), "both are still so: {reason}");
    world.committed_as(SaveKind::Weights, 30, Ok(()));
    assert!(!status(&world).reason.contains("weights"), "{}", status(&world).reason);
    fail_save(&mut world, 0, 32);
    assert!(matches!(world.phase(), JobPhase::Stopping { why: StopReason::Fail { .. }, .. }), "{:?}", world.phase());
}

#[test]
fn a_last_save_that_cannot_be_committed_ends_a_job_that_may_not_go_on() {
    let mut world = World::running_with("checkpoint", "{save_consolidated: false, max_failures: 1}");
    world.shards(1, 0, 39);
    world.shards(2, 1, 39);
    world.finish(v1::FinishCause::Complete, 40);
    world.committed(39, Err("No space left on device"));
    assert!(!matches!(world.phase(), JobPhase::Succeeded), "its last checkpoint does not exist");
    assert!(world.phase().is_terminal(), "{:?}", world.phase());
}

#[test]
fn a_cancel_now_does_not_wait_for_a_commit_that_fails() {
    let mut world = World::running();
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    world.committed(9, Err("No space left on device"));
    world.handle(Event::Cancel { job: job(), save: false });
    world.stopped(1, 0);
    world.stopped(2, 1);
    assert_eq!(world.phase(), JobPhase::Cancelled);
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
}

#[test]
fn p5_the_newest_save_of_an_outage_is_committed_and_what_lags_behind_it_is_superseded() {
    let mut world = World::running();
    // The coordinator was away for two saves: rank 0's spool comes first, whole.
    for step in [9, 19] {
        world.shards(1, 0, step);
    }
    world.shards(2, 1, 9);
    world.shards(2, 1, 19);
    assert_eq!(weights_of(&world), [(SaveKind::Full, 9), (SaveKind::Full, 19)], "in the order of their steps");
    world.committed(9, Err("late"));
    world.committed(19, Ok(()));
    // Sent twice, since an acknowledgement was lost: it must not wait for the other rank's report for ever.
    world.shards(1, 0, 9);
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
    let commits = world.commits();
    world.later(Duration::from_secs(5));
    assert_eq!(world.commits(), commits);
}

#[test]
fn a_job_succeeds_when_its_last_export_is_over_however_it_went() {
    for outcome in [Ok(512), Err("disk full".to_owned())] {
        let mut world = World::running_with("checkpoint", "{save_consolidated: final}");
        world.shards(1, 0, 39);
        world.shards(2, 1, 39);
        world.finish(v1::FinishCause::Complete, 40);
        world.committed(39, Ok(()));
        assert!(!world.phase().is_terminal(), "{:?}", world.phase());
        let checkpoint: CheckpointName = "epoch_0_step_39".parse().unwrap();
        assert_eq!(world.exports, [checkpoint], "asked for once");
        world.later(Duration::from_secs(1));
        assert_eq!(world.exports.len(), 1);
        let kind = if outcome.is_ok() { "consolidated" } else { "consolidate_failed" };
        let result = ExportResult { checkpoint, outcome, seconds: 1.0, warnings: Vec::new() };
        world.handle(Event::Exported { job: job(), result });
        assert_eq!(world.phase(), JobPhase::Succeeded);
        assert_eq!(world.events(kind).len(), 1);
    }
}

#[test]
fn a_job_that_stops_early_exports_nothing() {
    let mut world = World::running_with("checkpoint", "{save_consolidated: final}");
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    world.committed(9, Ok(()));
    world.finish(v1::FinishCause::UntilStep, 10);
    assert_eq!((world.phase(), world.exports.len()), (JobPhase::Succeeded, 0));
}

fn hooks(world: &World) -> Vec<&Hook> {
    let hooks = world.hooks.iter().filter_map(|request| match request {
        HookRequest::Run(hook) => Some(&**hook),
        HookRequest::End | HookRequest::Forget => None,
    });
    hooks.collect()
}

#[test]
fn on_commit_waits_for_the_export_of_its_checkpoint_where_every_one_is_exported() {
    let mut world = World::running_with("checkpoint", "{save_consolidated: every}\non_commit: 'true'");
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    world.committed(9, Ok(()));
    assert_eq!((world.exports.len(), hooks(&world).len()), (1, 0));
    let result = ExportResult { checkpoint: world.exports[0], outcome: Ok(1), seconds: 1.0, warnings: Vec::new() };
    world.handle(Event::Exported { job: job(), result });
    let hooks = hooks(&world);
    assert_eq!((hooks.len(), hooks[0].pointers.as_slice()), (1, ["LATEST".to_owned()].as_slice()));
}

#[test]
fn a_run_directory_is_kept_until_the_jobs_commands_are_over() {
    let mut world = World::running_with("on_end", "'true'\non_commit: 'true'");
    world.shards(1, 0, 39);
    world.shards(2, 1, 39);
    world.committed(39, Ok(()));
    world.finish(v1::FinishCause::Complete, 40);
    assert_eq!(world.phase(), JobPhase::Succeeded);
    assert_eq!(status(&world).commands, ["on_commit epoch_0_step_39", "on_end"]);
    assert!(!world.released && world.core.live_jobs().len() == 1, "a resume must not write beside it");
    let asked: Vec<Hook> = hooks(&world).into_iter().cloned().collect();
    assert_eq!((asked[1].which, asked[1].state, asked[1].cause.as_str()), (Which::OnEnd, "succeeded", ""));
    for (hook, code) in asked.into_iter().zip([0, 3]) {
        let log = "logs/hooks/x.log".to_owned();
        let result = HookResult::Ended { hook, outcome: Outcome::Code(code), seconds: 0.5, log };
        world.handle(Event::Hook { job: job(), result });
    }
    let codes: Vec<_> = world.events("hook_ended").iter().map(|event| event["code"].clone()).collect();
    assert_eq!(codes, [0, 3]);
    world.handle(Event::Hook { job: job(), result: HookResult::Over });
    assert!(world.released && status(&world).commands.is_empty() && world.core.live_jobs().is_empty());
    assert_eq!(world.phase(), JobPhase::Succeeded, "a command that fails fails no job");
}

fn refuse_commit(world: &mut World, step: u64) {
    for _ in 0..5 {
        let error = CommitError { reason: "model/shard-1 is missing".to_owned(), refused: true };
        let generation = Generation(world.generation);
        let committed = Committed { generation, kind: SaveKind::Full, step, outcome: Err(error) };
        world.handle(Event::Io { job: job(), result: Box::new(IoResult::Committed(Box::new(committed))) });
    }
}

#[test]
fn a_last_save_that_the_store_refuses_is_no_success() {
    let mut world = World::running();
    world.shards(1, 0, 39);
    world.shards(2, 1, 39);
    world.finish(v1::FinishCause::Complete, 40);
    refuse_commit(&mut world, 39);
    let JobPhase::Stopping { why: StopReason::Restart { cause }, .. } = world.phase() else {
        panic!("{:?}", world.phase())
    };
    let text = "the last save, of step 39, could not become a checkpoint: model/shard-1 is missing";
    assert!(cause.to_string().contains(text), "{cause}");
}

#[test]
fn j5_a_last_save_that_is_refused_in_each_generation_stops_the_job() {
    let mut world = World::running();
    for generation in [2, 3] {
        // What is committed before the end shows no progress: the run has been further.
        world.shards(1, 0, 29);
        world.shards(2, 1, 29);
        world.committed(29, Ok(()));
        world.shards(1, 0, 39);
        world.shards(2, 1, 39);
        world.finish(v1::FinishCause::Complete, 40);
        assert_eq!(world.generation, generation);
        refuse_commit(&mut world, 39);
        if generation == 2 {
            world.later(Duration::from_secs(1));
            world.prepare(StartPoint { step: 20, ..StartPoint::default() });
            world = world.run();
        }
    }
    let JobPhase::Failed { cause: Cause::Deterministic { step: 39, last, .. } } = world.phase() else {
        panic!("{:?}", world.phase())
    };
    assert!(matches!(*last, Cause::Storage { .. }), "{last}");
    assert_eq!(world.core.jobs[&job()].record.budget.used, 2);
}

#[test]
fn the_reports_of_a_save_that_a_rank_could_not_write_are_not_kept() {
    let mut world = World::running();
    world.shards(1, 0, 9);
    assert!(world.acked(1) < world.seq[&1], "it may still be complete");
    fail_save(&mut world, 1, 9);
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
    fail_save(&mut world, 1, 19);
    world.shards(1, 0, 19);
    assert_eq!(world.acked(1), world.seq[&1], "the failure may come first");
    // Rank 1 says nothing of step 29, but of a later one: it was left out there, or its report is lost.
    world.shards(1, 0, 29);
    world.shards(2, 1, 39);
    assert_eq!((world.acked(1), world.commits()), (world.seq[&1], 0));
    world.shards(1, 0, 39);
    assert_eq!(weights_of(&world), [(SaveKind::Full, 39)]);
}

#[test]
fn a_save_that_a_rank_tries_again_is_waited_for_and_each_attempt_counts() {
    let mut world = World::running_with("checkpoint", "{save_consolidated: false, max_failures: 3}");
    world.shards(1, 0, 39);
    for attempt in 1..=2 {
        report_failed(&mut world, SaveKind::Full, 1, 39, attempt, true);
        assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    }
    assert!(world.acked(1) < world.seq[&1], "its report is kept");
    assert_eq!(world.events("save_failed")[1]["attempt"], 2);
    let mut other = World::running_with("checkpoint", "{save_consolidated: false, max_failures: 3}");
    report_failed(&mut other, SaveKind::Full, 1, 39, 3, true);
    assert!(matches!(other.phase(), JobPhase::Stopping { why: StopReason::Fail { .. }, .. }), "{:?}", other.phase());
    world.shards(2, 1, 39);
    world.committed(39, Ok(()));
    world.finish(v1::FinishCause::Complete, 40);
    assert_eq!(world.phase(), JobPhase::Succeeded);
}

#[test]
fn failures_of_an_outage_that_a_commit_parts_are_not_in_a_row() {
    let mut world = World::running_with("checkpoint", "{save_consolidated: false, max_failures: 2}");
    // Rank 0's spool comes first, whole: nothing of it is committed before the last report is heard.
    fail_save(&mut world, 0, 9);
    world.shards(1, 0, 19);
    fail_save(&mut world, 0, 29);
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    world.shards(2, 1, 9);
    world.shards(2, 1, 19);
    world.shards(2, 1, 29);
    world.committed(19, Ok(()));
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
    fail_save(&mut world, 1, 39);
    assert!(matches!(world.phase(), JobPhase::Stopping { why: StopReason::Fail { .. }, .. }), "{:?}", world.phase());
}

#[test]
fn p5_of_saves_whose_commits_fail_the_newest_two_are_tried_again() {
    let mut world = World::running();
    for step in [9, 19, 29] {
        world.shards(1, 0, step);
        world.shards(2, 1, step);
        world.committed(step, Err("Permission denied"));
    }
    let refused = world.events("checkpoint_refused");
    assert_eq!((refused.len(), &refused[0]["step"]), (1, &9.into()));
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1] - 2, world.seq[&2] - 2));
    let before = world.commits();
    world.later(Duration::from_secs(3));
    assert_eq!(weights_of(&world)[before..], [(SaveKind::Full, 19), (SaveKind::Full, 29)]);
    world.committed(29, Ok(()));
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
}

#[test]
fn a_save_that_was_refused_before_a_later_commit_costs_no_success() {
    let mut world = World::running();
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    refuse_commit(&mut world, 9);
    world.shards(1, 0, 39);
    world.shards(2, 1, 39);
    world.committed(39, Ok(()));
    world.finish(v1::FinishCause::Complete, 40);
    assert_eq!(world.phase(), JobPhase::Succeeded);
}

#[test]
fn a_shard_report_that_is_not_understood_is_a_failed_save() {
    let mut world = World::running();
    world.shards(1, 0, 39);
    let file = v1::ShardFile { path: "model/shard-1".to_owned(), blake3: vec![0; 3], ..Default::default() };
    let shards = v1::ShardsDurable {
        step: 39,
        checkpoint: "epoch_0_step_39".to_owned(),
        files: vec![file],
        kind: v1::SaveKind::Full.into(),
        ..Default::default()
    };
    world.report(2, 1, Report::Shards(shards));
    assert!(status(&world).reason.contains("rank 1: its report is not understood"), "{}", status(&world).reason);
    world.finish(v1::FinishCause::Complete, 40);
    assert_ne!(world.phase(), JobPhase::Succeeded);
}

#[test]
fn a_cancel_now_drops_a_commit_under_way_that_fails() {
    let mut world = World::running();
    world.handle(Event::Cancel { job: job(), save: true });
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    world.handle(Event::Cancel { job: job(), save: false });
    world.stopped(1, 0);
    world.stopped(2, 1);
    assert!(!world.phase().is_terminal(), "the commit may still be made");
    world.committed(9, Err("No space left on device"));
    assert_eq!(world.phase(), JobPhase::Cancelled);
}

#[test]
fn an_adopted_job_ends_when_it_knows_its_newest_checkpoint_and_exports_it() {
    let spec = SPEC.replace("save_consolidated: false", "save_consolidated: final");
    let before = World::running();
    let mut world = World { generation: before.generation, ..World::new() };
    let at = Moment { now: world.now, wall_ms: 0 };
    let record = before.journal.last().cloned().unwrap();
    let effects = world.core.adopt(record, JobSpec::from_yaml(&spec).unwrap(), Term(3), at);
    world.take(effects);
    world.join(1, "w0", None);
    world.join(2, "w1", None);
    world.finish(v1::FinishCause::Complete, 40);
    assert!(!world.phase().is_terminal() && world.exports.is_empty(), "{:?}", world.phase());
    world.known("epoch_0_step_39");
    assert_eq!(world.exports, ["epoch_0_step_39".parse().unwrap()]);
}

#[test]
fn on_commit_is_told_the_pointers_that_name_its_checkpoint_and_no_others() {
    let mut world = World::running_with("on_commit", "'true'");
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    // Committed by a predecessor that moved LATEST; what moves now is a pointer that retention had to mend.
    let info = CommitInfo {
        checkpoint: "epoch_0_step_9".to_owned(),
        state_hash: "h".to_owned(),
        changes: Changes {
            moves: vec![("LOWEST_VAL".to_owned(), "epoch_0_step_5".to_owned(), "epoch_0_step_3".to_owned())],
            ..Changes::default()
        },
        pointers: ("epoch_0_step_9".to_owned(), "epoch_0_step_3".to_owned()),
        bytes: 1000,
        commit_seconds: 0.5,
    };
    let generation = Generation(world.generation);
    let committed = Committed { generation, kind: SaveKind::Full, step: 9, outcome: Ok(info) };
    world.handle(Event::Io { job: job(), result: Box::new(IoResult::Committed(Box::new(committed))) });
    assert_eq!(hooks(&world)[0].pointers, ["LATEST".to_owned()]);
}

#[test]
fn a_run_in_a_bucket_ends_without_an_export_by_default() {
    let mut world = World::running_with("checkpoint", "{checkpoint_dir: 's3://bucket/tiny'}");
    world.shards(1, 0, 39);
    world.shards(2, 1, 39);
    world.committed(39, Ok(()));
    world.finish(v1::FinishCause::Complete, 40);
    assert_eq!((world.phase(), world.exports.len()), (JobPhase::Succeeded, 0));
}

#[test]
fn what_a_formation_retires_is_in_the_events() {
    let mut world = World::new();
    world.submit();
    world.join(1, "w0", None);
    world.join(2, "w1", None);
    let prepared = Prepared {
        generation: Generation(2),
        start: StartPoint::default(),
        pointers: Default::default(),
        retired: vec![(SaveKind::Full, "epoch_0_step_19".parse().unwrap())],
        notes: Vec::new(),
    };
    world.handle(Event::Io { job: job(), result: Box::new(IoResult::Prepared(Box::new(Ok(prepared)))) });
    let events = world.events("checkpoint_retired");
    assert_eq!((events.len(), &events[0]["checkpoint"]), (1, &"epoch_0_step_19".into()));
}

#[test]
fn what_a_takeover_mended_is_told_and_moves_what_status_shows() {
    let mut world = World::running();
    let name = |step| CheckpointName { epoch: 0, step };
    let changes = Changes {
        retired: vec![name(29)],
        restored: vec![name(19)],
        moves: vec![("LATEST".to_owned(), "epoch_0_step_29".to_owned(), "epoch_0_step_19".to_owned())],
        pruned: vec!["epoch_0_step_4".to_owned()],
        swept: vec!["epoch_0_step_6".to_owned()],
    };
    let pointers = ("epoch_0_step_19".to_owned(), String::new());
    let mended = Mended { changes: vec![(SaveKind::Full, changes)], pointers };
    world.handle(Event::Io { job: job(), result: Box::new(IoResult::Mended(Box::new(mended))) });
    let told = [
        ("checkpoint_retired", "checkpoint", "epoch_0_step_29"),
        ("checkpoint_restored", "checkpoint", "epoch_0_step_19"),
        ("pointer_moved", "to", "epoch_0_step_19"),
        ("checkpoint_pruned", "checkpoint", "epoch_0_step_4"),
        ("orphan_removed", "path", "epoch_0_step_6"),
    ];
    for (kind, key, value) in told {
        let events = world.events(kind);
        assert_eq!(events.last().map(|event| event[key].clone()), Some(value.into()), "{kind}");
    }
    assert_eq!(world.core.status(&job()).map(|status| status.latest), Some("epoch_0_step_19".to_owned()));
}
