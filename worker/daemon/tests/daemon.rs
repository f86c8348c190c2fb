//! The real daemon against a coordinator stub on a real socket: process hygiene (T1–T4), commands (W1–W5, J2, J3, J7), the
//! spool over reconnects and kills (S1–S4, P5), rendezvous (R1, R2), the keeper.

// The kit is test code, but clippy's leave for tests covers only functions marked as tests.
#[allow(unreachable_pub, clippy::unwrap_used, clippy::panic)]
mod kit;

use std::time::{Duration, Instant};

use kit::stub::Stub;
use kit::{Daemon, Place, eventually, fence, lives, pid_in, stop, trainer};
use nix::sys::signal::Signal;
use trainctl_proto::v1::coordinator_message::Body as Command;
use trainctl_proto::v1::rank_report::Report;
use trainctl_proto::v1::{
    Probe, ProbeBegin, ProbeCheck, ProbeEnd, ProbeFaultKind, ProbePeer, StopRequest, TrainerControl, probe::Step,
    probe_result::Result as Answer, trainer_control, worker_message::Body,
};
use trainctl_runtime::proc;

/// Leaves a grandchild behind that ignores SIGTERM and has a session of its own; its pid is in `grandchild`.
const DOUBLE_FORK: &str = "\
echo 'about to wait' >&2
(setsid sh -c 'trap \"\" TERM HUP INT; echo $$ >> grandchild; while :; do sleep 1; done' </dev/null >/dev/null 2>&1 &)
exec sleep 600";

#[test]
#[ignore = "not a test: the trainer that the others start"]
fn trainer_of_the_tests() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(trainer::main());
}

#[test]
fn a_killed_trainer_is_noticed_within_a_second_and_the_next_generation_starts() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let daemon = Daemon::start(&place, &place.script(DOUBLE_FORK), "");
    let hello = stub.hello(1);
    assert_eq!((hello.worker_id.as_str(), hello.pid, hello.running), ("w0", daemon.pid(), None));
    assert_eq!((hello.address.as_str(), hello.device.as_str()), ("127.0.0.1", "cpu"));
    stub.send(place.start("a", 7, 5));
    assert_eq!(stub.result("a").error, "");
    let started = stub.started(7);
    assert_eq!(proc::start_time(started.pid), Some(started.start_time));
    let grandchild = pid_in(&place.path("grandchild"));

    let killed_at = Instant::now();
    assert!(proc::send(started.pid, Signal::SIGKILL));
    let (heard, exit) = stub.exited(7);
    assert!(heard.at - killed_at < Duration::from_secs(1), "noticed after {:?}", heard.at - killed_at);
    assert_eq!((exit.code, exit.signal, exit.stopped_by_us, exit.oom), (None, Some(9), false, false));
    assert_eq!(exit.stderr_tail, ["about to wait"]);
    assert!(!lives(grandchild), "T3: a double fork outlived its trainer");

    stub.send(place.start("b", 8, 5));
    assert_eq!(stub.result("b").error, "", "W4");
    assert_ne!(stub.started(8).pid, started.pid);
    let log = std::fs::read_to_string(place.run().join("logs/g0008/rank-00003.log")).unwrap();
    assert!(log.is_empty() || log.contains("about to wait"), "{log}");
}

#[test]
fn exit_code_and_last_lines_are_reported() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let script =
        place.script("for i in $(seq 1 60); do echo line $i; done; echo 'trainctl-trainer: error: x' >&2; exit 77");
    let _daemon = Daemon::start(&place, &script, "");
    stub.send(place.start("a", 7, 5));
    let (_, exit) = stub.exited(7);
    assert_eq!((exit.code, exit.signal, exit.core), (Some(77), None, false));
    assert_eq!(exit.stderr_tail.len(), 40);
    assert_eq!(exit.stderr_tail.last().map(String::as_str), Some("trainctl-trainer: error: x"));
}

#[test]
fn stop_kills_the_trainer_and_a_double_forked_grandchild_that_ignores_sigterm() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let _daemon = Daemon::start(&place, &place.script(DOUBLE_FORK), "");
    stub.send(place.start("a", 7, 5));
    let started = stub.started(7);
    let grandchild = pid_in(&place.path("grandchild"));
    assert!(lives(grandchild));
    stub.send(stop("b", 7, 5));
    assert_eq!(stub.result("b").error, "");
    assert!(!lives(started.pid) && !lives(grandchild), "the result means: gone");
    let (heard, exit) = stub.exited(7);
    assert!(exit.stopped_by_us && heard.seq > 0, "{exit:?}");
}

#[test]
fn a_killed_daemon_leaves_nothing_behind_and_its_successor_reports_the_trainers_end() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let script = place.script(DOUBLE_FORK);
    let daemon = Daemon::start(&place, &script, "");
    stub.send(place.start("a", 7, 5));
    let started = stub.started(7);
    let grandchild = pid_in(&place.path("grandchild"));
    let keepers = daemon.children_with("keeper");
    assert_eq!(keepers.len(), 1);
    // What would end the daemon in order does not end its keeper.
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        assert!(proc::send(keepers[0], signal));
    }
    daemon.kill();
    eventually("trainer, grandchild and keeper are gone", || {
        (!lives(started.pid) && !lives(grandchild) && !lives(keepers[0])).then_some(())
    });

    let _successor = Daemon::start(&place, &script, "");
    let (_, exit) = stub.exited(7);
    assert_eq!((exit.signal, exit.stopped_by_us), (Some(9), false));
    let tail = exit.stderr_tail.join("\n");
    assert!(tail.contains("about to wait") && tail.contains("the worker was killed"), "{tail}");
    let (first, second) = (stub.hello(1), stub.hello(2));
    assert_eq!((&first.worker_id, &first.spool), (&second.worker_id, &second.spool));
    assert_ne!(first.incarnation, second.incarnation);
    assert_eq!((second.running, second.term), (None, 5));
    stub.send(place.start("old", 7, 4));
    assert!(stub.result("old").stale, "W3: the fence survives the kill");
    stub.send(place.start("b", 8, 5));
    assert_eq!(stub.result("b").error, "");
}

#[test]
fn a_killed_keeper_is_replaced() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let daemon = Daemon::start(&place, &place.script("exec sleep 600"), "");
    stub.hello(1);
    let first = daemon.children_with("keeper");
    assert!(proc::send(first[0], Signal::SIGKILL));
    let second =
        eventually("another keeper", || daemon.children_with("keeper").first().copied().filter(|pid| *pid != first[0]));
    stub.send(place.start("a", 7, 5));
    stub.started(7);
    stub.send(stop("b", 7, 5));
    assert_eq!(stub.result("b").error, "");
    assert!(lives(second), "cleaning spares the keeper");
}

/// W1, W2, J7.
#[test]
fn commands_are_carried_out_once_and_stale_ones_never() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let _daemon = Daemon::start(&place, &place.script("echo $$ >> starts\nexec sleep 600"), "");
    for _ in 0..3 {
        stub.send(place.start("a", 7, 5));
    }
    let started = stub.started(7);
    stub.send(place.start("a", 7, 5));
    eventually("the repeated answer", || (stub.results("a") >= 2).then_some(()));
    stub.send(stop("low term", 7, 4));
    let refused = stub.result("low term");
    assert!(refused.stale && refused.current == Some(fence(7, 5)), "{refused:?}");
    stub.send(stop("old generation", 6, 5));
    assert!(stub.result("old generation").stale);
    assert!(lives(started.pid));
    assert_eq!(pid_in(&place.path("starts")), started.pid);
    let starts = std::fs::read_to_string(place.path("starts")).unwrap();
    assert_eq!(starts.lines().count(), 1, "started once");
}

#[test]
fn a_trainer_that_cannot_start_is_an_answer_and_not_an_end() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let script = place.script("exec sleep 600");
    let _daemon = Daemon::start(&place, &script, "");
    stub.hello(1);
    std::fs::write(place.run().join("logs"), "a file where a folder must be").unwrap();
    stub.send(place.start("a", 7, 5));
    let error = stub.result("a").error;
    assert!(error.contains("logs/g0007/rank-00003.log"), "{error}");
    std::fs::remove_file(place.run().join("logs")).unwrap();
    stub.send(place.start("b", 8, 5));
    assert_eq!(stub.result("b").error, "");
}

/// S1: after a reconnect exactly the unacknowledged records come again, with their numbers.
#[test]
fn a_reconnect_sends_what_is_not_acknowledged_again_and_nothing_else() {
    const ROWS: usize = 500;
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let _daemon = Daemon::start(&place, &trainer::program(&place), &format!("rows {ROWS}"));
    stub.send(place.start("a", 7, 5));
    let (_, exit) = stub.exited(7);
    assert_eq!(exit.code, Some(0), "{exit:?}");
    let first = stub.rows(1, ROWS);
    assert_eq!(first.iter().map(|(_, step)| *step).collect::<Vec<_>>(), (0..ROWS as u64).collect::<Vec<_>>());
    assert!(first.windows(2).all(|pair| pair[0].0 < pair[1].0), "numbers rise");

    stub.hang_up();
    assert_eq!(stub.rows(2, ROWS), first, "nothing was acknowledged");
    stub.ack(first[299].0);
    eventually("the worker has the acknowledgement", || {
        let session = stub.sessions() + 1;
        stub.hang_up();
        (stub.hello(session).acked_up_to == first[299].0).then_some(())
    });
    let third = stub.sessions();
    assert_eq!(stub.rows(third, ROWS - 300), first[300..]);
    let hello = stub.hello(third);
    let (_, _, last) = stub.wait_report("the exit again", |heard, report| match &report.report {
        Some(Report::Exited(_)) if heard.session == third => Some((heard.session, heard.age_ms, heard.seq)),
        _ => None,
    });
    assert_eq!(hello.spooled_up_to, last);
}

/// P5: the trainer goes on while the coordinator is away, a kill of the daemon loses no row that the trainer was told is
/// safe, and the coordinator may come back on another port.
#[test]
fn rows_survive_an_absent_coordinator_and_a_killed_daemon() {
    let place = Place::new();
    let mut stub = Stub::start(&place.control());
    let program = trainer::program(&place);
    let daemon = Daemon::start(&place, &program, "steps");
    stub.send(place.start("a", 7, 5));
    stub.rows(1, 3);
    stub.down();
    let step = || std::fs::read_to_string(place.path("step")).ok()?.strip_suffix('\n')?.parse::<u64>().ok();
    let at_loss = eventually("a step", step);
    let safe = eventually("100 steps without a coordinator", || step().filter(|step| *step > at_loss + 100));
    daemon.kill();
    let _successor = Daemon::start(&place, &program, "steps");
    stub.up();
    let rows = stub.rows(2, usize::try_from(safe).unwrap() + 1);
    let steps: Vec<u64> = rows.iter().map(|(_, step)| *step).collect();
    assert_eq!(steps, (0..steps.len() as u64).collect::<Vec<_>>(), "in order, none twice, none missing");
    assert_eq!(stub.hello(1).spool, stub.hello(2).spool);
    let (heard, exit) = stub.exited(7);
    assert_eq!(exit.signal, Some(9));
    assert!(heard.seq > rows.last().unwrap().0);
}

/// W5: silence for a lease is a loss, although the connection stands.
#[test]
fn a_frozen_coordinator_is_dialled_again() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let _daemon = Daemon::start(&place, &place.script("exec sleep 600"), "");
    stub.send(place.start("a", 7, 5));
    let started = stub.started(7);
    let sessions = stub.sessions();
    stub.beat(false);
    eventually("another session", || (stub.sessions() > sessions).then_some(()));
    stub.beat(true);
    let running = stub.hello(sessions + 1).running.unwrap();
    assert_eq!((running.pid, running.start_time, running.rank), (started.pid, started.start_time, 3));
    assert!(lives(started.pid), "the trainer has not noticed");
}

#[test]
fn a_stop_request_reaches_the_trainer_in_band() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let _daemon = Daemon::start(&place, &trainer::program(&place), "steps");
    stub.send(place.start("a", 7, 5));
    stub.rows(1, 1);
    let request = |generation| {
        let request = Some(trainer_control::Request::Stop(StopRequest {}));
        Command::Control(TrainerControl { fence: Some(fence(generation, 5)), request })
    };
    stub.send(request(6));
    stub.send(request(7));
    let (_, exit) = stub.exited(7);
    assert_eq!((exit.code, exit.stopped_by_us), (Some(0), false), "{exit:?}");
    let (heard, finished) = stub.wait_report("the finish", |heard, report| match &report.report {
        Some(Report::Finished(finished)) => Some((heard.clone(), *finished)),
        _ => None,
    });
    assert!(heard.seq > 0 && Some(finished.steps_done - 1) == exit.step, "{finished:?} {exit:?}");
}

/// R1: a waiting call outlives the coordinator that it waited at; J3: an old generation's call is refused.
#[test]
fn rendezvous_calls_wait_for_a_coordinator_that_is_away() {
    let place = Place::new();
    let mut stub = Stub::start(&place.control());
    let _daemon = Daemon::start(&place, &trainer::program(&place), "keys");
    stub.send(place.start("a", 7, 5));
    assert_eq!(stub.key("from-trainer"), b"hello");
    stub.wait_for_a_waiting_get();
    stub.down();
    stub.set("to-trainer", b"welcome back");
    stub.up();
    assert_eq!(stub.key("echo"), b"welcome back");
    assert_eq!(stub.key("refused"), b"Aborted");
    let (_, exit) = stub.exited(7);
    assert_eq!(exit.code, Some(0), "{exit:?}");
}

#[test]
fn a_signal_ends_the_daemon_in_order() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let daemon = Daemon::start(&place, &place.script(DOUBLE_FORK), "");
    stub.send(place.start("a", 7, 5));
    let started = stub.started(7);
    let grandchild = pid_in(&place.path("grandchild"));
    let keeper = daemon.children_with("keeper")[0];
    let asked_at = Instant::now();
    daemon.signal(Signal::SIGTERM);
    let (heard, exit) = stub.exited(7);
    assert!(exit.stopped_by_us, "said before it left");
    stub.ack(heard.seq);
    let status = daemon.wait();
    assert_eq!(status.code(), Some(0));
    assert!(asked_at.elapsed() < Duration::from_secs(20), "it waited for something: {:?}", asked_at.elapsed());
    assert!(!lives(started.pid) && !lives(grandchild) && !lives(keeper));
    assert!(!place.path("state/running.json").exists());
}

/// A worker measures itself, sees the run directory, is seen in it and is reached, and leaves nothing behind.
#[test]
fn a_worker_proves_itself_in_a_round_of_probes() {
    let place = Place::new();
    let stub = Stub::start(&place.control());
    let _daemon = Daemon::start(&place, &place.script("exec sleep 600"), "");
    let health = stub.wait_body("its figures", |body| match body {
        Body::Health(health) => Some(health.clone()),
        _ => None,
    });
    assert!(health.memory_available > Some(0) && health.state_free > Some(0) && !health.busy, "{health:?}");

    let ask = |round, step| stub.send(Command::Probe(Probe { round, step: Some(step) }));
    let answer = |round: u64, is_it: fn(&Answer) -> bool| {
        stub.wait_body("an answer", |body| match body {
            Body::ProbeResult(result) if result.round == round => result.result.clone().filter(is_it),
            _ => None,
        })
    };
    let begin = |nonce: &str| {
        let run_dir = place.run().display().to_string();
        Step::Begin(ProbeBegin { run_dir, nonce: nonce.to_owned(), address: "127.0.0.1".to_owned() })
    };
    let nonce = trainctl_runtime::endpoint::read(&place.control()).unwrap().incarnation;
    ask(1, begin(&nonce));
    let Answer::Begun(begun) = answer(1, |answer| matches!(answer, Answer::Begun(_))) else { panic!() };
    assert_eq!((&begun.fault, begun.listen_error.as_str()), (&None, ""));
    assert!(begun.health.unwrap().run_free > Some(0));
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let peer = |worker: &str, port| {
        let (worker, address) = (worker.to_owned(), "127.0.0.1".to_owned());
        ProbePeer { worker, address, port }
    };
    let dial = vec![peer("w0", begun.port), peer("nobody", closed.into())];
    ask(1, Step::Check(ProbeCheck { seen: vec!["w0".to_owned(), "nobody".to_owned()], dial }));
    let Answer::Checked(checked) = answer(1, |answer| matches!(answer, Answer::Checked(_))) else { panic!() };
    let [unseen] = checked.unseen.as_slice() else { panic!("{checked:?}") };
    assert!(unseen.worker == "nobody" && unseen.path.ends_with("control/probes/nobody.1"), "{unseen:?}");
    let [unreached] = checked.unreached.as_slice() else { panic!("{checked:?}") };
    assert!(unreached.worker == "nobody" && unreached.error.contains("refused"), "{unreached:?}");
    let files = || std::fs::read_dir(place.control().join("probes")).unwrap().count();
    assert_eq!(files(), 1);
    ask(1, Step::End(ProbeEnd {}));
    eventually("its file is gone", || (files() == 0).then_some(()));
    let port = u16::try_from(begun.port).unwrap();
    eventually("it listens no longer", || std::net::TcpStream::connect(("127.0.0.1", port)).is_err().then_some(()));

    // As a worker that has another file system at that path would see it.
    std::fs::remove_file(place.control().join("endpoint.json")).unwrap();
    ask(2, begin(&nonce));
    let Answer::Begun(blind) = answer(2, |answer| matches!(answer, Answer::Begun(_))) else { panic!() };
    let fault = blind.fault.unwrap();
    assert!(fault.path.ends_with("run/control/endpoint.json"), "{fault:?}");
    assert_eq!((fault.kind(), fault.errno), (ProbeFaultKind::Blind, nix::libc::ENOENT));
}

#[test]
fn wrong_use_is_exit_code_64_with_one_line() {
    let place = Place::new();
    let run = |arguments: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_trainctl-worker"))
            .args(arguments)
            .env_remove("TRAINCTL_COORDINATOR")
            .env_remove(proc::PARENT_VARIABLE)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run(&["--help"]).0, Some(0));
    assert_eq!(run(&[]).0, Some(64));
    let state = place.path("state");
    let state = state.to_str().unwrap();
    let (code, text) = run(&["--state-dir", state, "--coordinator", "x", "--trainer", "/nonexistent"]);
    assert_eq!(code, Some(64));
    assert!(text.contains("/nonexistent") && text.contains("--trainer"), "{text}");

    let stub = Stub::start(&place.control());
    let script = place.script("exec sleep 600");
    let _daemon = Daemon::start(&place, &script, "");
    stub.hello(1);
    let (code, text) = run(&["--state-dir", state, "--coordinator", "x", "--trainer", script.to_str().unwrap()]);
    assert_eq!(code, Some(64));
    assert!(text.contains("in use by another trainctl-worker"), "{text}");
}
