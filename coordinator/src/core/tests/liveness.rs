//! Workers that are not heard.

use super::*;

#[test]
fn j6_a_broken_stream_is_unknown_and_a_lapsed_lease_is_lost() {
    let mut world = World::running();
    world.handle(Event::Gone { session: 2 });
    for _ in 0..4 {
        world.later(Duration::from_secs(1));
        world.beat(1);
    }
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "unreachable is not dead");
    for _ in 0..3 {
        world.later(Duration::from_secs(1));
        world.beat(1);
    }
    let JobPhase::Stopping { why: StopReason::Restart { cause }, .. } = world.phase() else {
        panic!("{:?}", world.phase())
    };
    assert!(matches!(cause, Cause::WorkerLost { .. }), "{cause}");
}

#[test]
fn j6_workers_that_all_vanish_are_lost_when_that_lasts() {
    let mut world = World::running();
    world.handle(Event::Gone { session: 1 });
    world.handle(Event::Gone { session: 2 });
    for _ in 0..10 {
        world.later(Duration::from_secs(6));
        assert!(matches!(world.phase(), JobPhase::Running { .. }), "nobody is heard: more likely we are cut off");
    }
    world.later(Duration::from_secs(20));
    assert!(matches!(world.phase(), JobPhase::Suspended { .. }), "{:?}", world.phase());
}

#[test]
fn p5_workers_that_all_vanish_and_come_back_within_a_lease_of_the_first_lose_nothing() {
    let mut world = World::running();
    world.handle(Event::Gone { session: 1 });
    world.handle(Event::Gone { session: 2 });
    world.later(Duration::from_secs(20));
    world.join(3, "w0", Some(running(0)));
    world.later(Duration::from_secs(3));
    world.join(4, "w1", Some(running(1)));
    world.later(Duration::from_secs(2));
    assert!(matches!(world.phase(), JobPhase::Running { generation: Generation(2), .. }), "{:?}", world.phase());
    assert!(world.stops().is_empty());
}
