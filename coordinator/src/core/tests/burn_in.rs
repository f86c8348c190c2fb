//! Burn-ins: when they are asked for, and what follows from what ranks say.

use trainctl_spec::report::{BurnInReport, SumCheck};

use super::*;
use crate::record::{Quarantine, QuarantinedBy};

pub(super) fn report(digest: u128, wrong_rounds: u64) -> BurnInReport {
    BurnInReport {
        digest,
        rounds: 412,
        wrong_rounds,
        seconds: 0.5,
        gigaflops: 95.0,
        node_sum: None,
        world_sum: Some(SumCheck { seconds: 0.01, wrong_elements: 0 }),
        device: "Xeon".to_owned(),
        work: "matmul".to_owned(),
    }
}

impl World {
    /// Generation 2 of a job with these keys of `fault_tolerance` forms on two workers.
    fn forming_with(keys: &str) -> Self {
        let spec = SPEC.replace("{max_restarts: 2}", &format!("{{max_restarts: 2, {keys}}}"));
        Self { spec, ..Self::new() }.form()
    }

    fn burn_in(&mut self, session: SessionId, rank: u32, report: &BurnInReport) {
        self.report(session, rank, Report::BurnIn(report.into()));
    }

    /// Both ranks of the newest generation start and burn in.
    fn burn_in_both(&mut self, reports: [BurnInReport; 2]) {
        for (rank, report) in (0..).zip(&reports) {
            self.start(rank);
            self.burn_in(self.session_of(rank), rank, report);
        }
    }

    /// The stream to the worker of a rank.
    fn session_of(&self, rank: u32) -> SessionId {
        let worker = &self.core.jobs[&job()].record.ranks[rank as usize].worker;
        self.core.workers[worker].session.unwrap()
    }

    fn start(&mut self, rank: u32) {
        self.report(self.session_of(rank), rank, Report::Started(v1::TrainerStarted { pid: 10 + rank, start_time: 1 }));
    }

    fn form_both(&mut self) {
        for rank in 0..2 {
            self.report(self.session_of(rank), rank, Report::Formed(v1::Formed {}));
        }
        assert!(matches!(self.phase(), JobPhase::Running { .. }), "{:?}", self.phase());
    }

    fn stop_both(&mut self) {
        for rank in 0..2 {
            self.stopped(self.session_of(rank), rank);
        }
    }

    /// What the newest starts ask for, milliseconds.
    fn asked_to_burn_in(&self) -> Vec<u32> {
        self.starts().iter().rev().take(2).rev().map(|start| start.burn_in_ms).collect()
    }

    fn placed(&self) -> Vec<&str> {
        self.core.jobs[&job()].record.ranks.iter().map(|place| place.worker.as_str()).collect()
    }

    /// Both ranks end, and a generation forms again, in which the first one was killed or not.
    fn next_generation(&mut self, is_killed: bool) {
        if is_killed {
            self.killed(self.session_of(1), 1);
            self.stopped(self.session_of(0), 0);
        } else {
            self.stop_both();
        }
        // A second failure in a row is waited for.
        self.later(Duration::from_secs(1));
        self.prepare(StartPoint::default());
    }

    /// Why the generation is stopping.
    fn stop_cause(&self) -> Cause {
        match self.phase() {
            JobPhase::Stopping { why: StopReason::Restart { cause }, .. } => cause,
            phase => panic!("{phase:?}"),
        }
    }
}

#[test]
fn workers_burn_in_once_and_again_when_a_daemon_has_come_anew() {
    let mut world = World::forming_with("burn_in_seconds: 0.5");
    let starts = world.starts();
    assert_eq!(starts.iter().map(|start| start.burn_in_ms).collect::<Vec<_>>(), [500, 500]);
    assert!(starts.iter().all(|start| start.node_ranks == [0, 1]), "both are on one machine");
    (0..2).for_each(|rank| world.start(rank));
    world.burn_in(1, 0, &report(7, 0));
    assert!(world.events("burned_in").is_empty(), "rank 1 has said nothing");
    world.burn_in(2, 1, &BurnInReport { gigaflops: 190.0, ..report(7, 0) });
    world.form_both();
    let event = &world.events("burned_in")[0];
    assert_eq!((&event["work"], &event["ranks"][1]["worker"]), (&"matmul".into(), &"w1".into()));
    assert_eq!((&event["ranks"][0]["slower"], &event["ranks"][1]["slower"]), (&2.0.into(), &1.0.into()));
    assert_eq!(world.acked(1), world.seq[&1]);
    assert_eq!(world.core.worker_status("w1").unwrap().gigaflops, Some(190.0));

    world.next_generation(true);
    assert_eq!(world.asked_to_burn_in(), [0, 0], "a restart with the same workers is fast");
    assert!(world.starts().last().unwrap().node_ranks.is_empty());
    (0..2).for_each(|rank| world.start(rank));
    world.form_both();
    world.join(3, "w1", None);
    world.stopped(1, 0);
    world.later(Duration::from_secs(1));
    world.prepare(StartPoint::default());
    assert_eq!(world.asked_to_burn_in(), [500, 500], "all, since they sum together");
    assert_eq!(world.events("burned_in").len(), 1);
}

#[test]
fn a_generation_is_not_formed_before_its_devices_are_judged() {
    let mut world = World::forming_with("burn_in_seconds: 0.5");
    for rank in 0..2 {
        world.start(rank);
        world.report(world.session_of(rank), rank, Report::Formed(v1::Formed {}));
    }
    world.burn_in(1, 0, &report(7, 0));
    assert!(matches!(world.phase(), JobPhase::Forming { .. }), "{:?}", world.phase());
    world.burn_in(2, 1, &report(7, 0));
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
}

#[test]
fn a_successor_checks_whom_a_burn_in_had_named_when_a_person_lets_it_in_again() {
    let mut world = World::new();
    let quarantine =
        Quarantine { by: QuarantinedBy::BurnIn, reason: String::new(), figures: String::new(), since_ms: 0 };
    world.core.know(WorkerRecord { id: "w1".to_owned(), host: String::new(), quarantine: Some(quarantine) });
    world.handle(Event::Release { worker: "w1".to_owned() });
    assert_eq!(world.form().asked_to_burn_in(), [5_000, 5_000]);
}

#[test]
fn a_burn_in_that_a_rank_did_not_live_through_is_repeated() {
    let mut world = World::forming_with("burn_in_seconds: 0.5");
    world.burn_in(1, 0, &report(7, 0));
    world.next_generation(true);
    assert_eq!(world.asked_to_burn_in(), [500, 500]);
    world.burn_in_both([report(7, 0), report(7, 0)]);
    assert_eq!(world.events("burned_in").len(), 1);
}

#[test]
fn p6_who_computes_wrongly_is_quarantined_until_a_person_has_looked_and_the_job_pays_nothing() {
    let mut world = World::forming_with("burn_in_seconds: 0.5");
    world.burn_in_both([report(7, 0), report(7, 3)]);
    let cause = world.stop_cause();
    assert_eq!(
        cause.to_string(),
        "rank 1 (worker w1 on ) failed the burn-in: matmul: 3 of 412 products differed from the first; 95 gigaflop/s over 0.5 s \
         on Xeon"
    );
    assert_eq!((cause.rank().map(|rank| rank.0), world.stops()), (Some(1), vec![1, 2]));
    let journaled = world.workers.last().unwrap();
    let quarantine = journaled.quarantine.clone().unwrap();
    assert_eq!((journaled.id.as_str(), quarantine.by.name()), ("w1", "burn_in"));
    assert!(quarantine.reason.starts_with("burn-in: matmul: 3 of 412 products"), "{}", quarantine.reason);
    let event = &world.events("burn_in_failed")[0];
    assert_eq!((&event["suspects"], &event["named"]), (&serde_json::json!([1]), &true.into()));

    world.stop_both();
    let lost = &world.events("generation_lost")[0];
    assert_eq!((&lost["verdict"]["kind"], &lost["verdict"]["named"]), (&"burn_in".into(), &true.into()));
    assert!(lost["step"].is_null(), "it has done none: {lost}");
    let record = &world.core.jobs[&job()].record;
    assert_eq!((record.budget.used, record.restarts), (0, 0));
    assert_eq!(world.core.status(&job()).unwrap().reason, "waiting for 1 more worker (1 of 2); quarantined: w1");

    // Good figures of the machine say nothing of what its device computes.
    let health = v1::Health { memory_available: Some(4096 << 20), ..v1::Health::default() };
    let body = Some(v1::worker_message::Body::Health(health));
    let message = v1::WorkerMessage { seq: 0, age_ms: 0, body };
    world.handle(Event::Message { session: 2, message: Box::new(message) });
    let beat_us = u64::try_from(world.now.as_micros()).unwrap();
    world.beat_of(2, v1::Heartbeat { wall_ms: Some(0), beat_us, ..v1::Heartbeat::default() });
    assert_eq!(world.core.worker_status("w1").unwrap().state(), v1::WorkerState::Quarantined);

    world.join(3, "w2", None);
    world.prepare(StartPoint::default());
    assert_eq!((world.placed(), world.asked_to_burn_in()), (vec!["w0", "w2"], vec![500, 500]));
    world.burn_in_both([report(7, 0), report(7, 0)]);
    world.form_both();
}

#[test]
fn j5_where_nobody_can_be_named_others_take_the_ranks_and_without_others_the_job_fails_the_second_time() {
    let differ = || [report(7, 0), report(8, 0)];
    let mut world = World::forming_with("burn_in_seconds: 0.5");
    world.burn_in_both(differ());
    assert!(matches!(world.stop_cause(), Cause::BurnIn { named: false, suspects, .. } if suspects.len() == 2));
    assert!(world.workers.is_empty(), "nobody is quarantined for what another may have done");
    let mut alone = World::forming_with("burn_in_seconds: 0.5");
    alone.burn_in_both(differ());

    world.join(3, "w2", None);
    world.join(4, "w3", None);
    world.next_generation(false);
    assert_eq!((world.placed(), world.core.jobs[&job()].record.budget.used), (vec!["w2", "w3"], 1));

    alone.next_generation(false);
    assert_eq!((alone.placed(), alone.asked_to_burn_in()), (vec!["w0", "w1"], vec![500, 500]));
    alone.burn_in_both(differ());
    alone.stop_both();
    let JobPhase::Failed { cause } = alone.phase() else { panic!("{:?}", alone.phase()) };
    let text = cause.to_string();
    assert!(text.starts_with("failed twice in the same way at step 0: the burn-in failed at one of rank 0 "), "{text}");
    assert!(text.ends_with("and nothing says at which: matmul: the products of 2 ranks on Xeon differ"), "{text}");
}

#[test]
fn suspects_of_silent_corruption_are_checked_on_any_device_unless_the_spec_says_never() {
    for (keys, wanted) in [("on_nonfinite: stop", 5000), ("burn_in_seconds: 0.5", 500), ("burn_in_seconds: 0", 0)] {
        let mut world = World::forming_with(keys);
        if wanted == 500 {
            world.burn_in_both([report(7, 0), report(7, 0)]);
        } else {
            assert_eq!(world.asked_to_burn_in(), [0, 0], "{keys}: CPUs are not checked without a reason");
            (0..2).for_each(|rank| world.start(rank));
        }
        world.form_both();
        world.held = BTreeMap::from([(0, 7), (1, 8)]);
        world.shards(1, 0, 9);
        world.shards(2, 1, 9);
        let journaled = world.journal.last().cloned().unwrap();
        world.next_generation(false);
        assert_eq!(world.asked_to_burn_in(), [wanted, wanted], "{keys}");
        world.burn_in_both([report(7, 0), report(7, 0)]);
        world.form_both();
        world.next_generation(true);
        assert_eq!(world.asked_to_burn_in(), [0, 0], "{keys}: they have passed");

        // A successor does not know who has passed what.
        let mut successor = World { generation: world.generation, spec: world.spec.clone(), ..World::new() };
        let (spec, at) = (JobSpec::from_yaml(&successor.spec).unwrap(), Moment { now: successor.now, wall_ms: 0 });
        let effects = successor.core.adopt(journaled, spec, Term(3), at);
        successor.take(effects);
        successor.known("");
        successor.join(1, "w0", None);
        successor.join(2, "w1", None);
        successor.beat(1);
        successor.beat(2);
        successor.later(Duration::from_secs(1));
        successor.prepare(StartPoint::default());
        assert_eq!(successor.asked_to_burn_in(), [wanted, wanted], "{keys}");
    }
}

#[test]
fn what_is_said_of_a_burn_in_when_the_generation_ends_changes_nothing() {
    let mut world = World::forming_with("burn_in_seconds: 0.5");
    world.burn_in(1, 0, &report(7, 0));
    world.killed(2, 1);
    world.burn_in(1, 0, &report(7, 3));
    assert!(matches!(world.stop_cause(), Cause::Rank { .. }), "the verdict stands");
    assert!(world.workers.is_empty());
}

#[test]
fn a_burn_in_is_no_hang_and_no_history_of_meeting() {
    let mut world = World::forming_with("burn_in_seconds: 60, hang: {rendezvous_seconds: 2}");
    world.handle(Event::Tick);
    let phase = |phase: v1::Phase| Report::Phase(v1::PhaseChanged { phase: phase.into() });
    for (session, rank) in [(1, 0), (2, 1)] {
        world.start(rank);
        world.report(session, rank, phase(v1::Phase::Rendezvous));
    }
    let stand = |world: &mut World, seconds: u64| {
        for _ in 0..2 * seconds {
            world.now += Duration::from_millis(500);
            for session in [1, 2] {
                world.beat_of(
                    session,
                    v1::Heartbeat { phase: v1::Phase::Rendezvous.into(), ..v1::Heartbeat::default() },
                );
            }
            world.handle(Event::Tick);
        }
    };
    stand(&mut world, 61);
    assert!(world.events("hang_detected").is_empty(), "60 s of burn-in and 2 s to meet");
    world.report(1, 0, phase(v1::Phase::Loading));
    let learned = world.core.jobs[&job()].record.history.clone();
    let mut without = crate::decide::deadlines::History::default();
    without.record(crate::decide::deadlines::Stage::Start, Duration::ZERO);
    without.record(crate::decide::deadlines::Stage::Rendezvous, Duration::from_secs(1));
    assert_eq!(learned, without);
    stand(&mut world, 10);
    assert_eq!(
        world.events("hang_detected").len(),
        1,
        "rank 1 has stood for 71 s, and may for 70: 10 times the second"
    );
}
