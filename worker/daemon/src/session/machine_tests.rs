//! W1–W5 on the pure machine.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trainctl_proto::v1::{
    Assignment, Beat, CommandResult, Fence, Formed, Phase, PhaseChanged, Place, RankReport, StartTrainer, StopRequest,
    StopTrainer, TrainerControl, Welcome, coordinator_message::Body as Command, rank_report::Report, trainer_control,
};

use super::machine::{Effect, Event, FIRST_LEASE, HEARTBEAT, Machine, Outgoing};
use crate::state::Fences;

const NOW: Duration = Duration::from_secs(100);

fn machine() -> Machine {
    Machine::new(Fences::default(), |assignment| match assignment.spec_yaml.as_str() {
        "" => Err("no spec".to_owned()),
        run => Ok(run.to_owned()),
    })
}

fn fence(generation: u64, term: u64) -> Fence {
    Fence { job: "j".to_owned(), generation, term }
}

fn start(id: &str, run: &str, generation: u64, term: u64) -> Event {
    let assignment = Assignment {
        fence: Some(fence(generation, term)),
        rank: 1,
        spec_yaml: run.to_owned(),
        ..Assignment::default()
    };
    Event::Heard(Command::StartTrainer(StartTrainer { command_id: id.to_owned(), assignment: Some(assignment) }))
}

fn stop(id: &str, generation: u64, term: u64) -> Event {
    Event::Heard(Command::StopTrainer(StopTrainer { command_id: id.to_owned(), fence: Some(fence(generation, term)) }))
}

fn control(generation: u64, term: u64) -> Event {
    let request = Some(trainer_control::Request::Stop(StopRequest {}));
    Event::Heard(Command::Control(TrainerControl { fence: Some(fence(generation, term)), request }))
}

fn started() -> Event {
    Event::Started { pid: 10, start_time: 20 }
}

/// A machine with a running trainer of generation 7, term 5, in run "/r".
fn running() -> Machine {
    let mut machine = machine();
    assert!(matches!(machine.on(NOW, start("a", "/r", 7, 5))[..], [Effect::Remember, Effect::Start(_)]));
    machine.on(NOW, started());
    machine
}

fn results(effects: &[Effect]) -> Vec<&CommandResult> {
    let result = |effect| match effect {
        &Effect::Send(Outgoing::Result(ref result)) => Some(result),
        _ => None,
    };
    effects.iter().filter_map(result).collect()
}

fn only_result(effects: &[Effect]) -> CommandResult {
    assert_eq!(effects.len(), 1, "{effects:?}");
    results(effects)[0].clone()
}

fn is_stale(effects: &[Effect], generation: u64, term: u64) -> bool {
    let result = only_result(effects);
    result.stale && !result.error.is_empty() && result.current == Some(fence(generation, term))
}

/// W1, J7.
#[test]
fn a_repeated_command_is_answered_and_not_carried_out_again() {
    let mut machine = machine();
    machine.on(NOW, start("a", "/r", 7, 5));
    assert_eq!(machine.on(NOW, start("a", "/r", 7, 5)), [], "still being carried out");
    let first = only_result(&machine.on(NOW, started()));
    assert_eq!((first.command_id.as_str(), first.error.as_str(), first.stale), ("a", "", false));
    assert_eq!(only_result(&machine.on(NOW, start("a", "/r", 7, 5))), first);
    let other_id = only_result(&machine.on(NOW, start("b", "/r", 7, 5)));
    assert_eq!((other_id.error.as_str(), other_id.stale), ("", false), "J7: the same generation is the same command");
    assert!(matches!(machine.on(NOW, stop("c", 7, 5))[..], [Effect::Kill { .. }]));
    assert_eq!(machine.on(NOW, stop("c", 7, 5)), []);
    let stopped = only_result(&machine.on(NOW, Event::Gone));
    assert_eq!(stopped.command_id, "c");
    assert_eq!(only_result(&machine.on(NOW, stop("c", 7, 5))), stopped);
}

/// W2, J2, J3.
#[test]
fn lower_terms_and_old_generations_change_nothing() {
    let mut machine = running();
    assert!(is_stale(&machine.on(NOW, stop("b", 7, 4)), 7, 5));
    assert!(is_stale(&machine.on(NOW, stop("c", 6, 5)), 7, 5));
    assert!(is_stale(&machine.on(NOW, start("d", "/r", 8, 4)), 7, 5));
    assert_eq!(machine.on(NOW, control(7, 4)), []);
    assert_eq!(machine.on(NOW, control(6, 5)), []);
    assert!(machine.has_trainer());
    machine.on(NOW, Event::Gone);
    assert!(is_stale(&machine.on(NOW, start("e", "/r", 7, 5)), 7, 5), "a generation is not started twice");
    assert!(is_stale(&machine.on(NOW, start("f", "/r", 9, 4)), 7, 5));
    assert!(!machine.has_trainer());
}

/// J2: a restarted coordinator adopts the generation under its new term; from then on the old term is over.
#[test]
fn a_higher_term_adopts_the_generation_and_is_remembered_first() {
    let mut machine = running();
    let effects = machine.on(NOW, control(7, 8));
    assert!(matches!(effects[..], [Effect::Remember, Effect::Control(_)]), "W3: {effects:?}");
    assert_eq!(machine.fences().latest_term(), 8);
    assert!(is_stale(&machine.on(NOW, stop("b", 7, 5)), 7, 8));
    assert!(matches!(machine.on(NOW, stop("c", 7, 8))[..], [Effect::Kill { .. }]));
}

/// Numbers belong to a run directory: those of another one are no smaller for it.
#[test]
fn another_run_directory_has_its_own_numbers() {
    let mut machine = running();
    machine.on(NOW, Event::Gone);
    assert!(matches!(machine.on(NOW, start("b", "/other", 2, 1))[..], [Effect::Remember, Effect::Start(_)]));
}

/// W4.
#[test]
fn nothing_starts_before_the_predecessor_is_gone() {
    let mut machine = running();
    let busy = only_result(&machine.on(NOW, start("b", "/r", 8, 5)));
    assert!(busy.error.contains("generation 7 has not ended") && !busy.stale, "{busy:?}");
    machine.on(NOW, Event::Gone);
    assert!(matches!(machine.on(NOW, start("e", "/r", 8, 5))[..], [Effect::Remember, Effect::Start(_)]));
}

/// W4: the coordinator learns of the end first and is quick.
#[test]
fn a_start_between_the_end_and_the_cleaning_waits() {
    let mut machine = running();
    machine.on(NOW, Event::Ended);
    assert_eq!(machine.on(NOW, start("b", "/r", 8, 5)), []);
    assert_eq!(machine.on(NOW, start("b", "/r", 8, 5)), [], "W1");
    let replaced = only_result(&machine.on(NOW, start("c", "/r", 9, 5)));
    assert!(replaced.command_id == "b" && replaced.error.contains("superseded by c"), "{replaced:?}");
    assert!(matches!(&machine.on(NOW, Event::Gone)[..], [Effect::Remember, Effect::Start(assignment)]
        if assignment.fence == Some(fence(9, 5))));
    assert_eq!(only_result(&machine.on(NOW, started())).command_id, "c");
}

#[test]
fn a_waiting_start_can_be_stopped_and_falls_with_a_stuck_trainer() {
    let mut machine = running();
    machine.on(NOW, stop("s", 7, 5));
    assert_eq!(machine.on(NOW, start("b", "/r", 8, 5)), [], "a stopped trainer will be gone");
    let effects = machine.on(NOW, stop("t", 8, 5));
    assert_eq!(results(&effects).iter().map(|result| result.command_id.as_str()).collect::<Vec<_>>(), ["b", "t"]);
    assert_eq!(machine.on(NOW, start("c", "/r", 9, 5)), []);
    let effects = machine.on(NOW, Event::Stuck { reason: "processes [9] still run".to_owned() });
    assert!(results(&effects).iter().all(|result| result.error.contains("[9]")) && effects.len() == 2, "{effects:?}");
    assert_eq!(machine.on(NOW, Event::Gone), []);
    assert!(is_stale(&machine.on(NOW, start("d", "/r", 8, 5)), 8, 5), "a stopped generation never starts");
}

#[test]
fn a_stop_during_the_start_kills_what_started() {
    let mut machine = machine();
    machine.on(NOW, start("a", "/r", 7, 5));
    assert_eq!(machine.on(NOW, stop("b", 7, 5)), []);
    let effects = machine.on(NOW, started());
    assert!(matches!(effects[0], Effect::Kill { .. }), "{effects:?}");
    assert_eq!(results(&effects)[0].command_id, "a");
    assert_eq!(only_result(&machine.on(NOW, Event::Gone)).command_id, "b");
}

#[test]
fn a_failed_start_is_answered_with_its_reason() {
    let mut machine = machine();
    machine.on(NOW, start("a", "/r", 7, 5));
    machine.on(NOW, stop("b", 7, 5));
    let effects = machine.on(NOW, Event::StartFailed { reason: "no log".to_owned() });
    let results = results(&effects);
    assert_eq!((results[0].error.as_str(), results[1].error.as_str()), ("no log", ""));
    assert!(!machine.has_trainer());
    assert_eq!(only_result(&machine.on(NOW, start("c", "", 8, 5))).error, "no spec");
}

/// T4: a worker with something that cannot be killed takes nothing more, and says so.
#[test]
fn a_stuck_worker_is_quarantined_until_it_is_clean() {
    let mut machine = running();
    machine.on(NOW, stop("b", 7, 5));
    let stuck = only_result(&machine.on(NOW, Event::Stuck { reason: "processes [9] still run".to_owned() }));
    assert_eq!((stuck.command_id.as_str(), stuck.error.as_str()), ("b", "processes [9] still run"));
    let refused = only_result(&machine.on(NOW, start("c", "/r", 8, 5)));
    assert!(refused.error.starts_with("quarantined: processes [9]"), "{}", refused.error);
    machine.on(NOW, Event::Gone);
    assert!(matches!(machine.on(NOW, start("d", "/r", 8, 5))[..], [Effect::Remember, Effect::Start(_)]));
}

#[test]
fn stopping_what_is_not_there_is_done() {
    let mut idle = machine();
    assert_eq!(only_result(&idle.on(NOW, stop("a", 7, 5))).error, "");
    let mut running = running();
    assert_eq!(only_result(&running.on(NOW, stop("b", 9, 6))).error, "");
    assert!(running.has_trainer());
}

/// W5.
#[test]
fn a_silent_coordinator_is_dialled_again_after_its_lease() {
    let mut machine = machine();
    assert_eq!(machine.on(NOW, Event::Tick), [Effect::Dial]);
    assert_eq!(machine.on(NOW, Event::Tick), [], "one dial at a time");
    machine.on(NOW, Event::Connected);
    assert_eq!(machine.on(NOW + HEARTBEAT / 2, Event::Tick), []);
    assert!(matches!(machine.on(NOW + HEARTBEAT, Event::Tick)[..], [Effect::Send(Outgoing::Heartbeat(_))]));
    let welcome = Welcome { incarnation: "x".to_owned(), lease_ms: 3_000 };
    assert_eq!(machine.on(NOW + HEARTBEAT, Event::Heard(Command::Welcome(welcome))), [Effect::Pump]);
    for ms in (1_300..=2_000).step_by(100) {
        machine.on(NOW + Duration::from_millis(ms), Event::Tick);
    }
    machine.on(NOW + 2 * HEARTBEAT, Event::Heard(Command::Beat(Beat::default())));
    let silent_from = NOW + 2 * HEARTBEAT;
    let in_lease = (1..=10).map(|tick| silent_from + Duration::from_millis(300) * tick);
    for now in in_lease {
        assert!(!matches!(machine.on(now, Event::Tick)[..], [Effect::HangUp { .. }]), "{now:?}");
    }
    let late = silent_from + Duration::from_millis(3_001);
    assert!(matches!(machine.on(late, Event::Tick)[..], [Effect::HangUp { .. }]));
    let retry_in = Duration::from_millis(700);
    machine.on(late, Event::Disconnected { reason: String::new(), retry_in });
    assert_eq!(machine.on(late + retry_in / 2, Event::Tick), []);
    assert_eq!(machine.on(late + retry_in, Event::Tick), [Effect::Dial]);
}

#[test]
fn a_stream_that_is_never_welcome_is_given_up() {
    let mut machine = machine();
    machine.on(NOW, Event::Tick);
    machine.on(NOW, Event::Connected);
    let mut given_up_at = None;
    for ms in (0..20_000).step_by(50) {
        let now = NOW + Duration::from_millis(ms);
        if matches!(machine.on(now, Event::Tick)[..], [Effect::HangUp { .. }]) {
            given_up_at = Some(now);
            break;
        }
    }
    assert_eq!(given_up_at, Some(NOW + FIRST_LEASE + Duration::from_millis(50)));
}

#[test]
fn that_the_trainer_is_formed_is_said_again_on_a_new_stream() {
    let mut machine = running();
    let welcome = || Event::Heard(Command::Welcome(Welcome { incarnation: "x".to_owned(), lease_ms: 3_000 }));
    assert_eq!(machine.on(NOW, welcome()), [Effect::Pump]);
    let formed = RankReport { fence: Some(fence(7, 5)), rank: 1, report: Some(Report::Formed(Formed {})) };
    assert_eq!(
        machine.on(NOW, Event::Said(formed.clone())),
        [Effect::Send(Outgoing::Report(Box::new(formed.clone())))]
    );
    assert_eq!(machine.on(NOW, welcome()), [Effect::Send(Outgoing::Report(Box::new(formed))), Effect::Pump]);
    machine.on(NOW, Event::Gone);
    assert_eq!(machine.on(NOW, welcome()), [Effect::Pump]);
}

/// W1–W4 under 2,000 random histories: repeated, reordered, stale and early commands of several coordinators, with
/// trainers that fail to start, end by themselves or get stuck.
#[test]
fn no_history_of_commands_breaks_an_invariant() {
    let base: u64 = rand::random();
    println!("seed {base}");
    for history in 0..2_000 {
        let seed = base.wrapping_add(history);
        let mut random = StdRng::seed_from_u64(seed);
        let mut machine = machine();
        // What the world outside knows: the trainer that really exists, and every fence that was ever obeyed.
        let (mut alive, mut starting) = (false, false);
        let mut remembered = machine.fences().get("/r").cloned();
        let mut obeyed = (0, 0);
        let mut started = std::collections::HashSet::new();
        for _ in 0..60 {
            let (generation, term) = (random.random_range(1..8), random.random_range(1..6));
            let id = format!("{}", random.random_range(0..12));
            let event = match random.random_range(0..10) {
                0..=3 => start(&id, "/r", generation, term),
                4..=5 => stop(&format!("s{id}"), generation, term),
                6 => control(generation, term),
                7 if starting => Event::Started { pid: 1, start_time: 1 },
                8 if starting => Event::StartFailed { reason: "x".to_owned() },
                8 if alive => Event::Stuck { reason: "x".to_owned() },
                9 if alive && random.random() => Event::Ended,
                9 if alive => Event::Gone,
                _ => Event::Tick,
            };
            match event {
                Event::Started { .. } => (starting, alive) = (false, true),
                Event::StartFailed { .. } => starting = false,
                Event::Gone => alive = false,
                _ => {}
            }
            for effect in machine.on(NOW, event) {
                match effect {
                    Effect::Remember => remembered = machine.fences().get("/r").cloned(),
                    Effect::Start(assignment) => {
                        assert!(!alive && !starting, "seed {seed}: W4");
                        let fence = assignment.fence.unwrap();
                        assert!(started.insert(fence.generation), "seed {seed}: W1: {fence:?} twice");
                        assert!(fence.generation > obeyed.0 && fence.term >= obeyed.1, "seed {seed}: W2: {fence:?}");
                        assert_eq!(remembered.as_ref(), machine.fences().get("/r"), "seed {seed}: W3");
                        obeyed = (fence.generation, fence.term);
                        starting = true;
                    }
                    Effect::Kill { .. } | Effect::Control(_) => {
                        assert!(alive || starting, "seed {seed}: nothing is there");
                        assert_eq!(remembered.as_ref(), machine.fences().get("/r"), "seed {seed}: W3");
                        obeyed.1 = machine.fences().latest_term().max(obeyed.1);
                    }
                    _ => {}
                }
            }
            assert_eq!(machine.has_trainer(), alive || starting, "seed {seed}");
        }
    }
}

/// J6: a worker that was stopped itself does not blame the coordinator.
#[test]
fn a_late_tick_extends_the_lease() {
    let mut machine = machine();
    machine.on(NOW, Event::Tick);
    machine.on(NOW, Event::Connected);
    let frozen = Duration::from_secs(60);
    assert!(!matches!(machine.on(NOW + frozen, Event::Tick)[..], [Effect::HangUp { .. }]));
}

#[test]
fn hello_and_heartbeat_carry_phase_and_step() {
    let mut machine = running();
    let said = |report| Event::Said(RankReport { fence: Some(fence(7, 5)), rank: 1, report: Some(report) });
    machine.on(NOW, said(Report::Phase(PhaseChanged { phase: Phase::Stepping.into() })));
    machine.on(NOW, Event::Place(Place { steps: 2, step: 41, compute_seconds: vec![0.25, 0.5], ..Place::default() }));
    let hello = machine.running().unwrap();
    assert_eq!((hello.pid, hello.start_time, hello.step), (10, 20, Some(41)));
    assert_eq!(hello.phase(), Phase::Stepping);
    machine.on(NOW, Event::Connected);
    let effects = machine.on(NOW + HEARTBEAT, Event::Tick);
    assert!(matches!(&effects[..], [Effect::Send(Outgoing::Heartbeat(beat))] if beat.step == Some(41)), "{effects:?}");
}

#[test]
fn heartbeats_tell_the_times_of_the_steps_since_the_last_and_how_long_the_page_stands_still() {
    let mut machine = running();
    machine.on(NOW, Event::Connected);
    let mut beat = |after: u64, beats: u64, times: &[f64]| {
        let now = NOW + HEARTBEAT * u32::try_from(after).unwrap();
        let steps = times.len() as u64;
        let step = 10 + steps.saturating_sub(1);
        machine.on(now, Event::Place(Place { beats, steps, step, compute_seconds: times.to_vec(), progress: None }));
        match &machine.on(now, Event::Tick)[..] {
            [Effect::Send(Outgoing::Heartbeat(beat))] => beat.clone(),
            other => panic!("a heartbeat, not {other:?}"),
        }
    };
    let first = beat(1, 1, &[]);
    assert_eq!((first.step, first.silent_ms), (None, 0));
    let second = beat(2, 2, &[0.5, 0.25]);
    assert_eq!((second.step, &second.compute_seconds[..]), (Some(11), &[0.5, 0.25][..]));
    let third = beat(3, 2, &[0.5, 0.25, 0.75]);
    assert_eq!((third.step, &third.compute_seconds[..]), (Some(12), &[0.75][..]));
    assert_eq!(third.silent_ms, 1_000, "steps do not count: only its own thread shows that the process runs");
}

#[test]
fn a_first_step_is_told_at_once() {
    let mut machine = running();
    machine.on(NOW, Event::Connected);
    machine.on(NOW, Event::Place(Place { beats: 1, steps: 1, step: 7, ..Place::default() }));
    assert!(
        matches!(&machine.on(NOW, Event::Tick)[..], [Effect::Send(Outgoing::Heartbeat(beat))] if beat.step == Some(7))
    );
    machine.on(NOW, Event::Place(Place { beats: 1, steps: 2, step: 8, ..Place::default() }));
    assert_eq!(machine.on(NOW, Event::Tick), [], "later ones with the heartbeats");
}
