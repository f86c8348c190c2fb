//! Replicas that differ.

use super::*;

/// Both ranks save after `step`, and hold this.
fn save_both(world: &mut World, step: u64, held: [u128; 2]) {
    world.held = (0..).zip(held).collect();
    world.shards(1, 0, step);
    world.shards(2, 1, step);
}

fn stopped_both(world: &mut World) {
    world.stopped(1, 0);
    world.stopped(2, 1);
}

/// Back at the newest commit, with the same workers.
fn form_again(world: &mut World, step: u64) {
    world.prepare(StartPoint { checkpoint: format!("epoch_0_step_{step}"), step: step + 1, ..StartPoint::default() });
    for (session, rank) in [(1, 0), (2, 1)] {
        world.report(session, rank, Report::Started(v1::TrainerStarted { pid: 20 + rank, start_time: 1 }));
        // The suspects are checked.
        world.report(session, rank, Report::BurnIn((&super::burn_in::report(7, 0)).into()));
        world.report(session, rank, Report::Formed(v1::Formed {}));
    }
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
}

#[test]
fn c2_replicas_that_differ_are_no_commit_and_end_the_generation() {
    let mut world = World::running();
    save_both(&mut world, 9, [7, 7]);
    assert_eq!(world.commits(), 1);
    world.committed(9, Ok(()));
    save_both(&mut world, 19, [7, 8]);
    assert_eq!(world.commits(), 1, "nothing of it is committed");
    let JobPhase::Stopping { why: StopReason::Restart { cause }, .. } = world.phase() else {
        panic!("{:?}", world.phase())
    };
    assert!(matches!(&cause, Cause::Corrupt { step: 19, replicas: 2, named: false, suspects } if suspects.len() == 2));
    assert_eq!(world.stops(), [1, 2]);
    assert_eq!(world.acked(1), world.seq[&1], "once the end is journaled nobody needs the reports");
    let event = &world.events("replicas_differ")[0];
    assert_eq!((&event["step"], &event["ranks"]), (&19.into(), &serde_json::json!([0, 1])));
    assert!(event["held"][1].as_str().unwrap().ends_with('8'), "{event}");

    // What comes late of that state is no commit either, also if the replicas agree again by then.
    save_both(&mut world, 29, [9, 9]);
    assert_eq!(world.commits(), 1);
    stopped_both(&mut world);
    let lost = &world.events("generation_lost")[0];
    assert_eq!((&lost["verdict"]["kind"], &lost["step"]), (&"corrupt".into(), &19.into()), "not that we stopped them");
    assert_eq!(world.core.jobs[&job()].record.budget.used, 1);
    form_again(&mut world, 9);
    save_both(&mut world, 19, [7, 7]);
    assert_eq!(world.commits(), 2, "the next generation's are its own");
}

#[test]
fn a_successor_commits_nothing_of_a_state_that_was_found_corrupt() {
    let mut world = World::running();
    save_both(&mut world, 19, [7, 8]);
    let record = world.journal.last().cloned().unwrap();
    let mut successor = World { generation: world.generation, ..World::new() };
    let at = Moment { now: successor.now, wall_ms: 0 };
    let effects = successor.core.adopt(record, JobSpec::from_yaml(SPEC).unwrap(), Term(3), at);
    successor.take(effects);
    successor.join(1, "w0", None);
    successor.join(2, "w1", None);
    save_both(&mut successor, 29, [9, 9]);
    assert_eq!(successor.commits(), 0);
}

#[test]
fn j5_replicas_that_differ_at_the_same_step_again_fail_the_job() {
    let mut world = World::running();
    save_both(&mut world, 9, [7, 7]);
    world.committed(9, Ok(()));
    for _ in 0..2 {
        save_both(&mut world, 19, [7, 8]);
        stopped_both(&mut world);
        if !world.phase().is_terminal() {
            form_again(&mut world, 9);
        }
    }
    let JobPhase::Failed { cause } = world.phase() else { panic!("{:?}", world.phase()) };
    let text = cause.to_string();
    assert!(text.starts_with("failed twice in the same way at step 19: the 2 replicas differ after step 19"), "{text}");
    assert!(text.contains("rank 0 (worker w0 on ") && text.contains("rank 1 (worker w1 on "), "{text}");
}

#[test]
fn a_last_save_whose_replicas_differ_does_not_complete_the_job() {
    let mut world = World::running();
    save_both(&mut world, 39, [7, 8]);
    world.finish(v1::FinishCause::Complete, 40);
    assert!(matches!(world.phase(), JobPhase::Stopping { why: StopReason::Restart { .. }, .. }), "{:?}", world.phase());
    form_again(&mut world, 29);
    save_both(&mut world, 39, [7, 7]);
    world.finish(v1::FinishCause::Complete, 40);
    world.committed(39, Ok(()));
    assert!(matches!(world.phase(), JobPhase::Succeeded), "{:?}", world.phase());
}

#[test]
fn a_spare_takes_the_place_of_a_suspect() {
    let mut world = World::running();
    world.join(3, "w9", None);
    save_both(&mut world, 9, [7, 8]);
    stopped_both(&mut world);
    world.prepare(StartPoint::default());
    let record = &world.core.jobs[&job()].record;
    assert_eq!(record.avoided.iter().collect::<Vec<_>>(), ["w0", "w1"]);
    // Either may be the one, and one must stay.
    assert_eq!(record.ranks.iter().map(|place| place.worker.as_str()).collect::<Vec<_>>(), ["w0", "w9"]);
    assert_eq!(world.journal.last().unwrap().avoided, record.avoided, "a successor avoids them too");
}
