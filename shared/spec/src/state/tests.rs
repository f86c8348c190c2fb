//! Coverage: J1 `terminal_phases_reject_every_event`; J3 `another_generation_changes_nothing`; the whole table
//! `every_phase_by_every_event`.

use super::*;

fn cause() -> Cause {
    Cause::Preempted
}

fn reasons() -> Vec<StopReason> {
    vec![
        StopReason::Restart { cause: cause() },
        StopReason::Suspend { cause: cause() },
        StopReason::Cancel { save: true },
        StopReason::Fail { cause: cause() },
        StopReason::UntilStep,
        StopReason::Complete,
    ]
}

fn phases() -> Vec<JobPhase> {
    let generation = Generation(7);
    let mut all = vec![
        JobPhase::Queued,
        JobPhase::Held,
        JobPhase::Forming { generation },
        JobPhase::Running { generation, step: Step(3) },
        JobPhase::Suspended { cause: cause() },
        JobPhase::Succeeded,
        JobPhase::Failed { cause: cause() },
        JobPhase::Cancelled,
    ];
    all.extend(reasons().into_iter().map(|why| JobPhase::Stopping { generation, why }));
    all
}

fn events(generation: Generation) -> Vec<JobEvent> {
    let mut all = vec![
        JobEvent::Hold,
        JobEvent::Release,
        JobEvent::Form(Generation(8)),
        JobEvent::Formed { generation, from: Step(3) },
        JobEvent::Stepped { generation, done: Step(3) },
        JobEvent::Stopped(generation),
        JobEvent::Suspend(cause()),
        JobEvent::Cancel,
        JobEvent::Fail(cause()),
    ];
    all.extend(reasons().into_iter().map(|why| JobEvent::Stop { generation, why }));
    all
}

#[test]
fn terminal_phases_reject_every_event() {
    for phase in phases().into_iter().filter(JobPhase::is_terminal) {
        for event in events(Generation(7)) {
            let name = event.name();
            assert_eq!(phase.apply(event), Err(Illegal::Terminal { phase: phase.name(), event: name }), "J1");
        }
    }
}

#[test]
fn another_generation_changes_nothing() {
    for other in [Generation(6), Generation(8)] {
        for phase in phases().into_iter().filter(|phase| phase.generation().is_some()) {
            for event in events(other).into_iter().filter(|event| event.generation().is_some()) {
                let event_name = event.name();
                let expected = Illegal::Stale { event: event_name, sent: other, current: Generation(7) };
                assert_eq!(phase.apply(event), Err(expected), "J3 in {phase}");
            }
        }
    }
}

/// The doc comment's table, written a second time as phase name, event name -> phase name.
fn table(phase: &JobPhase, event: &JobEvent) -> Option<&'static str> {
    use StopReason as R;
    let why = match phase {
        JobPhase::Stopping { why, .. } => Some(why),
        _ => None,
    };
    match (phase.name(), event.name()) {
        ("queued", "hold") => Some("held"),
        ("held", "release") => Some("queued"),
        ("queued" | "suspended", "form") => Some("forming"),
        ("stopping", "form") if matches!(why, Some(R::Restart { .. })) => Some("forming"),
        ("stopping", "suspend") if matches!(why, Some(R::Restart { .. })) => Some("suspended"),
        ("forming", "formed") => Some("running"),
        ("running", "stepped") => Some("running"),
        ("stopping", "stepped") => Some("stopping"),
        ("forming" | "running" | "stopping", "stop") => Some("stopping"),
        ("stopping", "stopped") => match why {
            Some(R::Suspend { .. }) => Some("suspended"),
            Some(R::Cancel { .. }) => Some("cancelled"),
            Some(R::Fail { .. }) => Some("failed"),
            Some(R::UntilStep | R::Complete) => Some("succeeded"),
            _ => None,
        },
        ("queued" | "held" | "suspended", "cancel") => Some("cancelled"),
        ("queued" | "held" | "suspended", "fail") => Some("failed"),
        _ => None,
    }
}

#[test]
fn every_phase_by_every_event() {
    for phase in phases() {
        for event in events(Generation(7)) {
            let expected = table(&phase, &event);
            let got = phase.apply(event.clone());
            assert_eq!(got.as_ref().ok().map(JobPhase::name), expected, "{phase:?} + {event:?} = {got:?}");
        }
    }
}

#[test]
fn a_step_never_goes_back_within_a_generation() {
    let running = JobPhase::Running { generation: Generation(1), step: Step(10) };
    let late = running.apply(JobEvent::Stepped { generation: Generation(1), done: Step(4) });
    assert_eq!(late, Ok(running.clone()));
    let next = running.apply(JobEvent::Stepped { generation: Generation(1), done: Step(10) });
    assert_eq!(next, Ok(JobPhase::Running { generation: Generation(1), step: Step(11) }));
}

#[test]
fn a_stop_gives_way_only_to_a_weightier_reason() {
    for old in reasons() {
        for new in reasons() {
            let phase = JobPhase::Stopping { generation: Generation(1), why: old.clone() };
            let got = phase.apply(JobEvent::Stop { generation: Generation(1), why: new.clone() });
            let stands = if new.outweighs(&old) { new.clone() } else { old.clone() };
            assert_eq!(got, Ok(JobPhase::Stopping { generation: Generation(1), why: stands }));
        }
    }
}

#[test]
fn a_formation_is_never_followed_by_an_older_number() {
    let phase = JobPhase::Stopping { generation: Generation(7), why: StopReason::Restart { cause: cause() } };
    for old in [5, 7] {
        let got = phase.apply(JobEvent::Form(Generation(old)));
        assert_eq!(got, Err(Illegal::Stale { event: "form", sent: Generation(old), current: Generation(7) }));
    }
}

#[test]
fn phases_survive_the_journal() {
    for phase in phases() {
        let text = serde_json::to_string(&phase).unwrap();
        assert_eq!(serde_json::from_str::<JobPhase>(&text).unwrap(), phase, "{text}");
    }
}

#[test]
fn exits_are_classed() {
    let raw = ProcessExit::default();
    let cases = [
        (ProcessExit { code: Some(0), ..raw }, "finished", false, false),
        (ProcessExit { signal: Some(9), ..raw }, "killed by signal 9 (SIGKILL)", false, true),
        (ProcessExit { signal: Some(9), oom: true, ..raw }, "ran out of memory", false, false),
        (ProcessExit { signal: Some(9), stopped_by_us: true, ..raw }, "stopped by its worker", true, true),
        (
            ProcessExit { signal: Some(11), core: true, ..raw },
            "killed by signal 11 (SIGSEGV, core dumped)",
            false,
            false,
        ),
        (ProcessExit { signal: Some(6), ..raw }, "aborted (SIGABRT: a failed assertion)", false, false),
        (ProcessExit { code: Some(101), ..raw }, "panicked", false, false),
        (ProcessExit { code: Some(71), ..raw }, "lost its peer", true, true),
        (ProcessExit { code: Some(3), ..raw }, "exited with code 3", false, false),
        (raw, "lost", false, true),
    ];
    for (exit, text, consequence, external) in cases {
        let class = ExitClass::of(&exit);
        assert_eq!(
            (class.to_string().as_str(), class.is_consequence(), class.is_external()),
            (text, consequence, external)
        );
    }
}

#[test]
fn an_abort_for_lack_of_memory_is_told_by_its_last_words() {
    let abort = ExitClass::of(&ProcessExit { signal: Some(6), ..ProcessExit::default() });
    let class = |class: ExitClass, line: &str| class.with_last_words(&["loading".to_owned(), line.to_owned()]);
    let rust = "memory allocation of 9223372036854775807 bytes failed";
    let cpp = "terminate called after throwing an instance of 'std::bad_alloc'";
    assert_eq!([class(abort, rust), class(abort, cpp)], [ExitClass::OutOfMemory; 2]);
    assert_eq!(class(abort, "terminate called after throwing an instance of 'c10::Error'"), abort);
    assert_eq!(class(ExitClass::Panic, rust), ExitClass::Panic);
}

#[test]
fn a_fingerprint_ignores_numbers() {
    let failure = |message: &str| RankFailure {
        rank: Rank(1),
        class: ExitClass::Panic,
        phase: Phase::Stepping,
        message: message.to_owned(),
    };
    assert_eq!(failure("index 41 out of range").fingerprint(), failure("index 7 out of range").fingerprint());
    assert_ne!(failure("index 41 out of range").fingerprint(), failure("disk full").fingerprint());
    let cause = Cause::Rank { failure: failure("index 41 out of range") };
    assert_eq!(cause.to_string(), "rank 1 panicked while stepping: index 41 out of range");
}

use crate::ids::Rank;
use crate::report::Phase;

#[test]
fn of_two_cancels_the_one_that_does_not_wait_for_a_save_stands() {
    let cancel = |phase: &JobPhase, save| {
        phase.apply(JobEvent::Stop { generation: Generation(1), why: StopReason::Cancel { save } }).unwrap()
    };
    let saving = cancel(&JobPhase::Running { generation: Generation(1), step: Step(3) }, true);
    let now = cancel(&saving, false);
    assert_eq!(now, JobPhase::Stopping { generation: Generation(1), why: StopReason::Cancel { save: false } });
    assert_eq!(cancel(&now, true), now);
}
