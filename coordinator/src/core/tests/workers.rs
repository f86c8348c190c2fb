//! What workers say of themselves when they dial.

use super::*;

#[test]
fn a_hello_from_between_a_trainers_exit_and_its_session_hearing_of_it_leaves_the_worker_free() {
    let mut world = World::running();
    world.killed(2, 1);
    world.stopped(1, 0);
    world.join(3, "w1", Some(running(1)));
    world.prepare(StartPoint::default());
    assert_eq!(world.starts().len(), 4, "both workers can take a rank");
}

#[test]
fn j6_a_late_hello_of_a_dial_that_was_given_up_does_not_end_a_rank() {
    let mut world = World::running();
    world.join_at("m", 3, "w1", None, 1);
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    world.step(2, 7);
    let status = world.core.status(&job()).unwrap();
    assert_eq!(status.ranks[1].step, Some(7), "its stream goes on");
}

#[test]
fn j7_whoever_steps_is_formed_though_its_word_for_it_was_lost() {
    let mut world = World::forming();
    for (session, rank) in [(1, 0), (2, 1)] {
        world.report(session, rank, Report::Started(v1::TrainerStarted { pid: 10 + rank, start_time: 20 }));
    }
    world.step(1, 0);
    assert!(matches!(world.phase(), JobPhase::Forming { .. }), "{:?}", world.phase());
    // This one's was lost with its heartbeats; its trainer has ended, and the spool brings what it did.
    world.report(2, 1, Report::TrainRow(v1::TrainRow { timestamp: "t".to_owned(), ..v1::TrainRow::default() }));
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    assert_eq!(world.events("generation_formed").len(), 1);
}

#[test]
fn a_worker_is_free_when_it_has_stopped_what_nobody_wanted() {
    let mut world = World::new();
    world.submit();
    world.join(1, "w0", None);
    // Of a generation whose exit a coordinator before this one has taken in and acknowledged.
    world.join(2, "w1", Some(running(1)));
    let Some((_, Body::StopTrainer(stop))) = world.sent.pop() else { panic!("a trainer that nobody wants is stopped") };
    let result = v1::CommandResult { command_id: stop.command_id, ..v1::CommandResult::default() };
    let body = Some(v1::worker_message::Body::CommandResult(result));
    let message = Box::new(v1::WorkerMessage { seq: 0, age_ms: 0, body });
    world.handle(Event::Message { session: 2, message });
    world.prepare(StartPoint::default());
    assert_eq!(world.starts().len(), 2);
}

#[test]
fn a_start_that_fails_under_a_successor_is_not_waited_for() {
    let mut world = World::forming();
    let mut successor = World::new();
    let (record, at) = (world.journal.pop().unwrap(), Moment { now: successor.now, wall_ms: 0 });
    assert!(matches!(record.phase, JobPhase::Forming { .. }));
    let effects = successor.core.adopt(record, JobSpec::from_yaml(SPEC).unwrap(), Term(3), at);
    successor.take(effects);
    successor.known("");
    successor.generation = 2;
    let starting = |rank| Some(v1::RunningTrainer { pid: 0, ..running(rank) });
    successor.join(1, "w0", starting(0));
    successor.join(2, "w1", starting(1));
    assert_eq!(successor.stops(), [1, 2], "the formation is given up");
    successor.stopped(2, 1);
    // The command was the predecessor's.
    let current = running(0).fence;
    let command_id = "start-of-the-predecessor".to_owned();
    let not_started =
        v1::CommandResult { command_id, error: "no process".to_owned(), current, not_started: true, stale: false };
    let result = |result| {
        let body = Some(v1::worker_message::Body::CommandResult(result));
        Event::Message { session: 1, message: Box::new(v1::WorkerMessage { seq: 0, age_ms: 0, body }) }
    };
    let waits = |world: &World| matches!(world.phase(), JobPhase::Stopping { .. });
    successor.handle(result(v1::CommandResult { not_started: false, ..not_started.clone() }));
    assert!(waits(&successor), "it may run yet");
    successor.handle(result(not_started));
    assert!(!waits(&successor), "{:?}", successor.phase());
}

#[test]
fn j5_a_start_that_a_worker_had_before_it_restarted_is_a_lost_worker_and_no_fault_of_the_job() {
    let mut world = World::forming();
    let start = world.sent.iter().find_map(|(session, body)| match body {
        Body::StartTrainer(start) if *session == 2 => Some(start.command_id.clone()),
        _ => None,
    });
    let result = v1::CommandResult {
        command_id: start.unwrap(),
        error: "generation 2 is over on this worker".to_owned(),
        stale: true,
        ..v1::CommandResult::default()
    };
    let body = Some(v1::worker_message::Body::CommandResult(result));
    world.handle(Event::Message { session: 2, message: Box::new(v1::WorkerMessage { seq: 0, age_ms: 0, body }) });
    let JobPhase::Stopping { why: StopReason::Restart { cause }, .. } = world.phase() else {
        panic!("{:?}", world.phase())
    };
    assert!(matches!(cause, Cause::WorkerLost { .. }) && cause.is_external(), "{cause}");
}

#[test]
fn p6_a_start_that_is_taken_back_is_nobodys_fault() {
    let mut world = World::forming();
    // Whether the start came is not known; the other rank gives up waiting for its peer.
    world.handle(Event::Gone { session: 2 });
    let code = Some(trainctl_spec::state::exit::code::PEER_LOST);
    world.report(1, 0, Report::Exited(v1::TrainerExit { code, ..v1::TrainerExit::default() }));
    assert!(matches!(world.phase(), JobPhase::Stopping { .. }), "{:?}", world.phase());
    world.join(3, "w1", None);
    let lost = world.events("generation_lost");
    assert_eq!(lost.len(), 1, "{lost:?}");
    assert!(!lost[0].to_string().contains("w1"), "{}", lost[0]);
}
