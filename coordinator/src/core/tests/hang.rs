//! Runs that stand still.

use super::*;

/// Where a rank is: collectives that it has entered and left.
type Place = (u64, u64);

impl World {
    /// A heartbeat of a rank that steps.
    fn at(&mut self, session: SessionId, step: u64, (entered, left): Place) {
        let collective = "all-reduce the loss".to_owned();
        let progress = Some(v1::Progress { entered, left, collective });
        let phase = v1::Phase::Stepping.into();
        let beat = v1::Heartbeat { phase, step: Some(step), progress, silent_ms: 500, ..v1::Heartbeat::default() };
        self.beat_of(session, beat);
    }

    /// Both ranks' heartbeats and ticks, for so long.
    fn stand(&mut self, seconds: u64, step: u64, places: [Place; 2]) {
        for _ in 0..2 * seconds {
            self.now += Duration::from_millis(500);
            self.at(1, step, places[0]);
            self.at(2, step, places[1]);
            self.handle(Event::Tick);
        }
    }

    /// Workers that were asked for stacks.
    fn asked(&self) -> Vec<SessionId> {
        let asked = self.sent.iter().filter(|(_, body)| matches!(body, Body::DumpStacks(_)));
        asked.map(|(session, _)| *session).collect()
    }

    fn is_stopped(&self) -> bool {
        self.sent.iter().any(|(_, body)| matches!(body, Body::StopTrainer(_)))
    }

    fn stacks(&mut self, session: SessionId, rank: u32) {
        let thread = v1::ThreadStack { name: "main".to_owned(), frames: vec!["read".to_owned()], ..Default::default() };
        let stacks = v1::Stacks {
            threads: vec![thread],
            path: format!("logs/g0002/rank-0000{rank}.stacks"),
            ..v1::Stacks::default()
        };
        self.report(session, rank, Report::Stacks(stacks));
    }

    fn kinds(&self) -> Vec<&'static str> {
        let kind = |request: &IoRequest| match request {
            IoRequest::Event(entry) => Some(entry.kind()),
            _ => None,
        };
        self.io.iter().filter_map(kind).collect()
    }
}

#[test]
fn p6_stacks_come_first_then_the_generation_ends_and_the_rank_that_did_not_arrive_is_named() {
    let mut world = World::running();
    for step in 0..5 {
        world.stand(1, step, [(10 * step, 10 * step), (10 * step, 10 * step)]);
    }
    world.stand(59, 4, [(42, 41), (41, 41)]);
    assert_eq!((world.asked(), world.is_stopped()), (vec![], false), "within its deadline");
    world.stand(3, 4, [(42, 41), (41, 41)]);
    assert_eq!(
        (world.asked(), world.is_stopped()),
        (vec![1, 2], false),
        "nothing is killed before its stacks are taken"
    );
    world.stacks(1, 0);
    assert!(!world.is_stopped());
    world.stacks(2, 1);
    assert!(world.is_stopped());
    world.stopped(1, 0);
    world.stopped(2, 1);
    match world.phase() {
        JobPhase::Stopping { why: StopReason::Restart { cause }, .. } => {
            let text = cause.to_string();
            assert!(text.starts_with("rank 1 made no progress for 6"), "{text}");
            assert!(text.ends_with("while stepping; another rank waited for it in: all-reduce the loss"), "{text}");
        }
        phase => panic!("{phase:?}"),
    }
    let kinds = world.kinds();
    let told = ["hang_detected", "stacks", "stacks", "generation_stopping", "generation_lost"];
    let told = told.map(|kind| kinds.iter().filter(|found| **found == kind).count());
    assert_eq!(told, [1, 2, 2, 1, 1], "{kinds:?}");
    assert!(!world.journal.last().unwrap().history.eq(&Default::default()), "a successor knows what steps take");
}

#[test]
fn p6_stacks_that_do_not_come_are_waited_for_in_vain_only_so_long() {
    let mut world = World::running();
    world.stand(1, 0, [(10, 10), (10, 10)]);
    world.stand(62, 0, [(12, 11), (11, 11)]);
    world.stacks(1, 0);
    world.stand(10, 0, [(12, 11), (11, 11)]);
    assert!(!world.is_stopped());
    world.stand(6, 0, [(12, 11), (11, 11)]);
    assert!(world.is_stopped());
}

#[test]
fn a_run_that_goes_on_while_its_stacks_are_taken_is_left_alone() {
    let mut world = World::running();
    world.stand(1, 0, [(10, 10), (10, 10)]);
    world.stand(62, 0, [(12, 11), (11, 11)]);
    world.stacks(1, 0);
    world.stand(1, 1, [(20, 20), (20, 20)]);
    world.stacks(2, 1);
    assert!(!world.is_stopped());
    assert_eq!(world.kinds().last(), Some(&"hang_over"));
}

#[test]
fn j6_a_rank_whose_worker_is_not_heard_does_not_hang() {
    let mut world = World::running();
    world.stand(1, 0, [(10, 10), (10, 10)]);
    world.stand(59, 0, [(12, 11), (11, 11)]);
    world.handle(Event::Gone { session: 2 });
    for _ in 0..8 {
        world.now += Duration::from_millis(500);
        world.at(1, 0, (12, 11));
        world.handle(Event::Tick);
    }
    assert_eq!(world.asked(), Vec::<SessionId>::new());
}

#[test]
fn j6_our_own_standstill_is_not_charged_to_the_ranks() {
    let mut world = World::running();
    world.stand(1, 0, [(10, 10), (10, 10)]);
    world.stand(30, 0, [(12, 11), (11, 11)]);
    world.now += Duration::from_secs(100);
    world.stand(20, 0, [(12, 11), (11, 11)]);
    assert_eq!(world.asked(), Vec::<SessionId>::new());
    world.stand(12, 0, [(12, 11), (11, 11)]);
    assert_eq!(world.asked(), [1, 2]);
}

#[test]
fn hangs_are_not_looked_for_where_the_spec_says_so() {
    let mut world = World::running_with("fault_tolerance", "{max_restarts: 2, hang: {enabled: false}}");
    world.stand(1, 0, [(10, 10), (10, 10)]);
    world.stand(700, 0, [(12, 11), (11, 11)]);
    assert_eq!(world.asked(), Vec::<SessionId>::new());
}
