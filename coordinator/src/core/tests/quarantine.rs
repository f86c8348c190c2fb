//! Workers that take no rank.

use super::*;
use crate::record::{Quarantine, QuarantinedBy};

impl World {
    fn quarantine(&mut self, worker: &str, now: bool) {
        self.handle(Event::Quarantine { worker: worker.to_owned(), reason: "fan".to_owned(), now });
    }

    fn release(&mut self, worker: &str) {
        self.handle(Event::Release { worker: worker.to_owned() });
    }

    fn say(&mut self, session: SessionId, body: v1::worker_message::Body) {
        let message = v1::WorkerMessage { seq: 0, age_ms: 0, body: Some(body) };
        self.handle(Event::Message { session, message: Box::new(message) });
    }

    fn measure(&mut self, session: SessionId, memory_mib: u64) {
        let memory_available = Some(memory_mib << 20);
        self.say(session, v1::worker_message::Body::Health(v1::Health { memory_available, ..v1::Health::default() }));
        self.clock(session, 0);
    }

    /// A heartbeat that answers a beat at once, from a worker whose wall clock is ahead.
    fn clock(&mut self, session: SessionId, ahead_ms: u64) {
        let beat_us = u64::try_from(self.now.as_micros()).unwrap();
        let beat = v1::Heartbeat { wall_ms: Some(ahead_ms), beat_us, ..v1::Heartbeat::default() };
        self.say(session, v1::worker_message::Body::Heartbeat(beat));
    }

    fn state(&self, worker: &str) -> v1::WorkerState {
        self.core.worker_status(worker).unwrap().state()
    }

    fn waiting(&self) -> String {
        self.core.status(&job()).unwrap().reason
    }
}

#[test]
fn a_quarantined_worker_takes_no_rank_and_the_job_says_who_it_waits_for() {
    let mut world = World::new();
    world.submit();
    world.join(1, "w0", None);
    world.quarantine("w0", false);
    world.join(2, "w1", None);
    assert!(world.io.iter().all(|request| !matches!(request, IoRequest::Prepare(_))));
    assert_eq!(world.waiting(), "waiting for 1 more worker (1 of 2); quarantined: w0");
    assert_eq!((world.state("w0"), world.state("w1")), (v1::WorkerState::Quarantined, v1::WorkerState::Spare));
    world.quarantine("w1", false);
    assert_eq!(world.waiting(), "waiting for 2 more workers (0 of 2); quarantined: w0, w1");
    world.release("w1");
    world.release("w0");
    world.prepare(StartPoint::default());
    assert_eq!(world.starts().len(), 2);
}

#[test]
fn those_who_would_not_be_enough_are_not_what_a_job_waits_for() {
    let mut world = World::new();
    world.submit();
    world.join(1, "w0", None);
    world.quarantine("w0", false);
    assert_eq!(world.waiting(), "waiting for 2 more workers (0 of 2)");
}

#[test]
fn j4_what_a_quarantined_worker_carries_goes_on_and_the_next_generation_takes_a_spare() {
    let mut world = World::running();
    world.join(3, "w2", None);
    world.quarantine("w0", false);
    assert!(world.stops().is_empty() && matches!(world.phase(), JobPhase::Running { .. }));
    assert_eq!(world.core.worker_status("w0").unwrap().carries.unwrap().rank, 0);
    world.killed(2, 1);
    world.stopped(1, 0);
    world.prepare(StartPoint::default());
    let places: Vec<String> = world.core.jobs[&job()].record.ranks.iter().map(|place| place.worker.clone()).collect();
    assert_eq!(places, ["w2", "w1"]);
    assert_eq!(world.events("worker_quarantined")[0]["reason"], "fan");
}

#[test]
fn j5_with_now_its_rank_is_given_up_and_no_restart_is_charged() {
    let mut world = World::running();
    world.join(3, "w2", None);
    world.quarantine("w1", true);
    assert_eq!(world.stops(), [2, 1], "its own trainer and its peer's");
    world.stopped(1, 0);
    world.stopped(2, 1);
    let lost = &world.events("generation_lost")[0];
    assert_eq!(lost["cause"], "worker w1 (rank 1) was taken out of service by `trainctl workers quarantine --now`");
    assert_eq!(world.core.jobs[&job()].record.restarts, 0);
    world.prepare(StartPoint::default());
    assert_eq!(world.starts().len(), 4);
}

#[test]
fn a_successor_knows_the_quarantine_and_a_release_ends_it() {
    let mut world = World::new();
    world.join(1, "w0", None);
    world.quarantine("w0", false);
    world.quarantine("w0", false);
    assert_eq!(world.workers.len(), 1, "J7: asking twice is asking once");
    let mut successor = World::new();
    successor.core.know(world.workers[0].clone());
    assert_eq!(successor.state("w0"), v1::WorkerState::Quarantined, "although it has not dialled yet");
    successor.join(1, "w0", None);
    successor.submit();
    successor.join(2, "w1", None);
    assert!(successor.waiting().ends_with("quarantined: w0"));
    successor.release("w0");
    assert_eq!(successor.workers[0].quarantine, None);
    assert_eq!(successor.state("w0"), v1::WorkerState::Spare);
    successor.release("w0");
    assert_eq!(successor.workers.len(), 1);
}

#[test]
fn a_worker_with_bad_figures_is_out_until_they_are_good_again() {
    let mut world = World::new();
    world.join(1, "w0", None);
    world.measure(1, 64);
    let quarantine = world.core.worker_status("w0").unwrap().quarantine.unwrap();
    assert_eq!(
        (quarantine.by.as_str(), quarantine.reason.split(',').next()),
        ("health", Some("64 MiB of memory are available"))
    );
    assert!(quarantine.figures.contains("64 MiB of memory available"), "{}", quarantine.figures);
    world.clock(1, 0);
    assert_eq!(world.state("w0"), v1::WorkerState::Quarantined);
    world.measure(1, 4096);
    assert_eq!(world.state("w0"), v1::WorkerState::Idle);
    assert_eq!(world.workers.len(), 2);
}

#[test]
fn a_persons_word_stands_over_good_figures() {
    let mut world = World::new();
    world.join(1, "w0", None);
    world.measure(1, 64);
    world.quarantine("w0", false);
    world.measure(1, 4096);
    let by = |world: &World| world.workers.last().and_then(|record| record.quarantine.clone());
    assert!(matches!(by(&world), Some(Quarantine { by: QuarantinedBy::Person, .. })));
    world.measure(1, 64);
    assert!(matches!(by(&world), Some(Quarantine { by: QuarantinedBy::Person, .. })));
}

#[test]
fn a_clock_that_is_off_is_said_and_one_that_stores_refuse_is_out() {
    let mut world = World::new();
    world.join(1, "w0", None);
    world.clock(1, 20_000);
    let status = world.core.worker_status("w0").unwrap();
    assert_eq!((status.clock.unwrap().ms, status.state()), (20_000.0, v1::WorkerState::Idle));
    assert!(status.warnings[0].contains("+20.0 s"), "{:?}", status.warnings);
    world.clock(1, 700_000);
    assert_eq!(world.state("w0"), v1::WorkerState::Quarantined);
}

#[test]
fn j6_a_silent_worker_is_shown_as_unknown_before_its_lease_ends() {
    let mut world = World::running();
    world.later(Duration::from_secs(4));
    assert_eq!(world.state("w0"), v1::WorkerState::Unknown);
    world.beat(1);
    assert_eq!((world.state("w0"), world.state("w1")), (v1::WorkerState::Running, v1::WorkerState::Unknown));
    world.handle(Event::Gone { session: 1 });
    assert_eq!(world.state("w0"), v1::WorkerState::Unknown, "without a stream");
}

/// Probes.
mod probes {
    use trainctl_proto::v1::probe::Step;
    use trainctl_proto::v1::probe_result::Result as Answer;

    use super::*;

    impl World {
        fn probing() -> Self {
            let mut world = Self::new();
            world.core.probe("nonce".to_owned());
            world
        }

        /// The newest probe that was sent to each session, and its round.
        fn probe_of(&self, session: SessionId) -> (u64, Step) {
            let probes = self.sent.iter().rev().filter_map(|(to, body)| match body {
                Body::Probe(probe) if *to == session => Some(probe.clone()),
                _ => None,
            });
            let probe = probes.into_iter().next().expect("no probe was sent");
            (probe.round, probe.step.unwrap())
        }

        fn answer(&mut self, session: SessionId, result: Answer) {
            let (round, _) = self.probe_of(session);
            let result = v1::ProbeResult { round, result: Some(result) };
            self.say(session, v1::worker_message::Body::ProbeResult(result));
        }

        fn well(&mut self, session: SessionId) {
            let answer = match self.probe_of(session).1 {
                Step::Begin(_) => Answer::Begun(v1::ProbeBegun { port: 7, ..v1::ProbeBegun::default() }),
                Step::Check(_) => Answer::Checked(v1::ProbeChecked::default()),
                Step::End(_) => panic!("session {session}: the round is over"),
            };
            self.answer(session, answer);
        }

        fn preparations(&self) -> usize {
            self.io.iter().filter(|request| matches!(request, IoRequest::Prepare(_))).count()
        }
    }

    fn unwritable() -> Answer {
        let fault = v1::ProbeFault {
            kind: v1::ProbeFaultKind::Unwritable.into(),
            path: "/runs/tiny/control/probes/w1.1".to_owned(),
            error: "Read-only file system".to_owned(),
            errno: 30,
        };
        Answer::Begun(v1::ProbeBegun { fault: Some(fault), ..v1::ProbeBegun::default() })
    }

    #[test]
    fn workers_prove_themselves_once_before_a_job_forms() {
        let mut world = World::probing();
        world.submit();
        world.join_from("a", 1, "w0", None);
        world.join_from("a", 2, "w1", None);
        let (_, Step::Begin(begin)) = world.probe_of(2) else { panic!("{:?}", world.probe_of(2)) };
        assert_eq!((begin.nonce.as_str(), begin.run_dir.as_str(), begin.address.as_str()), ("nonce", "/runs/tiny", ""));
        world.well(1);
        assert!(matches!(world.probe_of(1).1, Step::Begin(_)), "nobody looks before all have written");
        world.well(2);
        let (_, Step::Check(check)) = world.probe_of(1) else { panic!("{:?}", world.probe_of(1)) };
        assert_eq!((check.seen, check.dial.len()), (vec!["w1".to_owned()], 0), "one machine: nobody dials");
        assert_eq!(world.preparations(), 0);
        world.well(1);
        world.well(2);
        assert!(matches!(world.probe_of(2).1, Step::End(_)));
        world.prepare(StartPoint::default());
        let mut world = world.run();
        let probes = |world: &World| world.sent.iter().filter(|(_, body)| matches!(body, Body::Probe(_))).count();
        let before = probes(&world);
        world.killed(1, 0);
        world.stopped(2, 1);
        world.prepare(StartPoint::default());
        assert_eq!(probes(&world), before, "a restart with the same workers waits for nothing");
    }

    #[test]
    fn a_rank_that_the_memory_of_its_machine_cannot_hold_is_not_started() {
        let mut world = World::probing();
        // 67 M parameters of 16 bytes each.
        world.spec = SPEC.replace("n_embd: 8", "n_embd: 1024").replace("vocab_size: 64", "vocab_size: 53248");
        world.submit();
        world.join_from("a", 1, "w0", None);
        world.join_from("a", 2, "w1", None);
        let well = |world: &mut World, session, memory_mib: u64| {
            let health = v1::Health { memory_available: Some(memory_mib << 20), ..v1::Health::default() };
            let begun = v1::ProbeBegun { health: Some(health), ..v1::ProbeBegun::default() };
            world.answer(session, Answer::Begun(begun));
        };
        well(&mut world, 1, 1_500);
        well(&mut world, 2, 1_500);
        assert_eq!((world.workers.len(), world.preparations()), (1, 0));
        let quarantine = world.workers[0].quarantine.clone().unwrap();
        assert_eq!((world.workers[0].id.as_str(), quarantine.by), ("w1", QuarantinedBy::Health));
        assert!(
            quarantine.reason.starts_with("1500 MiB of memory are available, a rank beside 1 more"),
            "{quarantine:?}"
        );
        assert_eq!(world.waiting(), "waiting for 1 more worker (1 of 2); quarantined: w1");
        world.join_from("b", 3, "w2", None);
        well(&mut world, 1, 1_500);
        well(&mut world, 3, 1_500);
        world.well(1);
        world.well(3);
        world.prepare(StartPoint::default());
        assert_eq!(world.starts().len(), 2, "a machine of its own has room");
    }

    #[test]
    fn workers_of_two_hosts_dial_each_other_and_a_pair_that_fails_is_named() {
        let mut world = World::probing();
        world.submit();
        for (session, machine) in [(1, "a"), (2, "b")] {
            world.join_from(machine, session, &format!("w{session}"), None);
        }
        let (_, Step::Begin(begin)) = world.probe_of(1) else { panic!("{:?}", world.probe_of(1)) };
        assert_eq!(begin.address, "127.0.0.1");
        world.well(1);
        world.well(2);
        let (_, Step::Check(check)) = world.probe_of(2) else { panic!("{:?}", world.probe_of(2)) };
        assert_eq!((check.dial[0].worker.as_str(), check.dial[0].port), ("w1", 7));
        world.well(1);
        let (worker, address, error) = ("w1".to_owned(), "127.0.0.1:7".to_owned(), "Connection refused".to_owned());
        let unreached = vec![v1::ProbeUnreached { worker, address, error }];
        world.answer(2, Answer::Checked(v1::ProbeChecked { unreached, ..v1::ProbeChecked::default() }));
        assert_eq!(world.waiting(), "worker w2 on  cannot reach worker w1 on  at 127.0.0.1: Connection refused");
        assert_eq!((world.workers.len(), world.preparations()), (0, 0), "one pair blames nobody");
        world.beat(1);
        assert!(matches!(world.probe_of(1).1, Step::End(_)), "not at once");
        let retry = Policy::default().prepare_retry;
        let end = world.now + retry;
        while world.now < end {
            world.later(Duration::from_secs(1));
            world.beat(1);
            world.beat(2);
        }
        assert!(matches!(world.probe_of(1).1, Step::Begin(_)));
        for session in [1, 2, 1, 2] {
            world.well(session);
        }
        world.prepare(StartPoint::default());
        assert_eq!(world.waiting(), "");
    }

    #[test]
    fn who_alone_cannot_write_is_quarantined_and_a_spare_takes_its_place() {
        let mut world = World::probing();
        world.join(1, "w0", None);
        world.join(2, "w1", None);
        world.join(3, "w2", None);
        world.submit();
        world.well(1);
        world.answer(2, unwritable());
        let quarantine = world.core.worker_status("w1").unwrap().quarantine.unwrap();
        assert_eq!(
            (quarantine.by.as_str(), quarantine.reason.as_str()),
            (
                "probe",
                "it cannot write into the run directory: /runs/tiny/control/probes/w1.1: Read-only file system (errno 30)"
            )
        );
        for session in [1, 3, 1, 3] {
            world.well(session);
        }
        world.prepare(StartPoint::default());
        let ranks = &world.core.jobs[&job()].record.ranks;
        assert_eq!(ranks.iter().map(|place| place.worker.as_str()).collect::<Vec<_>>(), ["w0", "w2"]);
        assert_eq!(world.events("worker_quarantined").len(), 1);
        world.measure(2, 4096);
        assert_eq!(world.state("w1"), v1::WorkerState::Quarantined, "good figures do not lift it");
    }

    #[test]
    fn a_spare_proves_itself_while_the_job_runs() {
        let mut world = World::probing();
        world.submit();
        world.join(1, "w0", None);
        world.join(2, "w1", None);
        for session in [1, 2, 1, 2] {
            world.well(session);
        }
        world.prepare(StartPoint::default());
        let mut world = world.run();
        world.join(3, "w2", None);
        world.handle(Event::Tick);
        let (_, Step::Begin(_)) = world.probe_of(3) else { panic!("{:?}", world.probe_of(3)) };
        for session in [1, 2, 3, 1, 2, 3] {
            world.well(session);
        }
        let rounds =
            |world: &World| world.sent.iter().filter(|(to, body)| *to == 3 && matches!(body, Body::Probe(_))).count();
        assert_eq!(rounds(&world), 3);
        world.handle(Event::Gone { session: 1 });
        world.beat(2);
        world.beat(3);
        world.later(Duration::from_secs(4));
        world.beat(2);
        world.beat(3);
        world.later(Duration::from_secs(2));
        world.stopped(2, 1);
        world.prepare(StartPoint::default());
        assert_eq!(rounds(&world), 3, "it is not asked again when it is needed");
        assert_eq!(world.core.jobs[&job()].record.ranks[0].worker, "w2");
    }

    #[test]
    fn a_round_that_loses_a_member_begins_again_without_it() {
        let mut world = World::probing();
        world.submit();
        world.join(1, "w0", None);
        world.join(2, "w1", None);
        world.join(3, "w2", None);
        let (first, _) = world.probe_of(1);
        world.well(1);
        world.handle(Event::Gone { session: 2 });
        let (second, Step::Begin(_)) = world.probe_of(1) else { panic!("{:?}", world.probe_of(1)) };
        assert!(second > first);
        let late = v1::ProbeResult { round: first, result: Some(Answer::Begun(v1::ProbeBegun::default())) };
        world.say(1, v1::worker_message::Body::ProbeResult(late));
        for session in [3, 1, 3] {
            world.well(session);
        }
        assert_eq!(world.preparations(), 0, "J3: an answer to the round before counts nothing");
        world.well(1);
        assert_eq!(world.preparations(), 1);
    }

    #[test]
    fn who_beats_and_does_not_answer_is_quarantined() {
        let mut world = World::probing();
        world.submit();
        world.join(1, "w0", None);
        world.join(2, "w1", None);
        world.well(1);
        for _ in 0..32 {
            world.beat(1);
            world.beat(2);
            world.later(Duration::from_millis(500));
        }
        let quarantine = world.core.worker_status("w1").unwrap().quarantine.unwrap();
        assert!(quarantine.reason.contains("a file system that hangs?"), "{}", quarantine.reason);
        assert!(world.waiting().ends_with("quarantined: w1"), "{}", world.waiting());
    }
}
