//! Ranks that hold the others up.

use super::*;
use crate::decide::stragglers::{SUSTAINED, WINDOW};

/// Both ranks do as many steps as a window has, in these own times.
fn steps(world: &mut World, first: u64, seconds: [f64; 2]) {
    for step in first..first + WINDOW as u64 {
        for (rank, compute_seconds) in (0..).zip(seconds) {
            let (phase, compute_seconds) = (v1::Phase::Stepping.into(), vec![compute_seconds]);
            let beat = v1::Heartbeat { phase, step: Some(step), compute_seconds, ..v1::Heartbeat::default() };
            world.beat_of(rank + 1, beat);
        }
    }
    world.handle(Event::Tick);
    world.later(SUSTAINED);
}

fn asked_to_save(world: &World) -> usize {
    let is_save = |body: &Body| match body {
        Body::Control(control) => matches!(control.request, Some(v1::trainer_control::Request::Save(_))),
        _ => false,
    };
    world.sent.iter().filter(|(_, body)| is_save(body)).count()
}

#[test]
fn a_straggler_is_shown_and_logged_when_it_becomes_one_and_when_it_no_longer_is() {
    let mut world = World::running();
    steps(&mut world, 0, [1.0, 1.1]);
    let ranks = world.core.status(&job()).unwrap().ranks;
    assert_eq!((ranks[1].compute_seconds, ranks[1].straggler), (Some(1.1), false));
    assert!(world.events("straggler").is_empty());
    steps(&mut world, 100, [1.0, 2.0]);
    let events = world.events("straggler");
    assert_eq!(events.len(), 1, "once: {events:?}");
    assert_eq!(
        (&events[0]["rank"], &events[0]["is_straggler"], &events[0]["step"]),
        (&1.into(), &true.into(), &131.into())
    );
    assert_eq!((&events[0]["slower"], &events[0]["worker"]), (&2.0.into(), &"w1".into()));
    let shown = &world.published.as_ref().unwrap().ranks[1];
    assert!(shown.straggler && shown.straggler_score.unwrap() > 3.5, "{shown:?}");
    steps(&mut world, 200, [1.0, 1.0]);
    assert_eq!(world.events("straggler")[1]["is_straggler"], false);
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "observe only");
    assert_eq!(asked_to_save(&world), 0);
}

#[test]
fn with_evict_a_straggler_gives_way_to_a_spare_after_a_commit() {
    let mut world = World::running_with("fault_tolerance", "{max_restarts: 2, stragglers: evict}");
    steps(&mut world, 0, [1.0, 2.0]);
    assert_eq!(asked_to_save(&world), 0, "nobody could take its place");
    world.join(3, "w9", None);
    world.handle(Event::Tick);
    world.handle(Event::Tick);
    assert_eq!(asked_to_save(&world), 2, "both ranks, once");
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    world.shards(1, 0, 32);
    world.shards(2, 1, 32);
    world.committed(32, Ok(()));
    let JobPhase::Stopping { why: StopReason::Restart { cause: Cause::Straggler { suspect, slower } }, .. } =
        world.phase()
    else {
        panic!("{:?}", world.phase())
    };
    assert_eq!((suspect.worker.as_str(), slower), ("w1", 2.0));
    world.stopped(1, 0);
    world.stopped(2, 1);
    assert_eq!(world.events("generation_lost")[0]["verdict"]["kind"], "straggler");
    world.prepare(StartPoint::default());
    let record = &world.core.jobs[&job()].record;
    assert_eq!(record.ranks.iter().map(|place| place.worker.as_str()).collect::<Vec<_>>(), ["w0", "w9"]);
    assert_eq!((record.restarts, record.budget.used, record.evictions), (0, 0, 1), "no fault of the job");
}
