use serde_json::json;
use trainctl_spec::Rank;
use trainctl_spec::report::Phase;
use trainctl_spec::state::{ExitClass, Fingerprint, RankFailure, WhyLost};

use super::*;

fn event(kind: &str, generation: u64, more: Value) -> String {
    let mut event = json!({"ts": "2026-11-30T14:40:15.951Z", "kind": kind, "job": "a", "generation": generation});
    event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    event.to_string()
}

fn failed(rank: u32, class: ExitClass, message: &str) -> Cause {
    let failure = RankFailure { rank: Rank(rank), class, phase: Phase::Stepping, message: message.to_owned() };
    Cause::Rank { failure }
}

fn lost_to(generation: u64, cause: &Cause) -> String {
    event(
        "generation_lost",
        generation,
        json!({"cause": cause.to_string(), "delay_ms": 500, "step": 11, "verdict": cause}),
    )
}

#[test]
fn what_a_job_waits_for_is_told_until_it_has_it() {
    let mut rows = vec![event("probe_failed", 1, json!({"error": "worker a on n1 cannot reach worker b on n2"}))];
    let told = "a: not over; no generation was lost\nit waits: worker a on n1 cannot reach worker b on n2";
    assert_eq!(text(&read(&rows, None)), told);
    rows.push(event("generation_formed", 1, json!({})));
    assert_eq!(text(&read(&rows, None)), "a: not over; no generation was lost");
}

#[test]
fn the_first_cause_is_told_from_what_followed() {
    let killed = failed(1, ExitClass::Signal { signal: 9, core: false }, "");
    let cause = failed(0, ExitClass::Error { code: 1 }, "error: index 12 is out of bounds");
    let fingerprint = Fingerprint(String::new());
    let twice = Cause::Deterministic { step: 12, fingerprint, last: Box::new(cause) };
    let rows = [
        event("trainer_exited", 2, json!({"rank": 0, "class": "lost its peer", "worker": "n1-aa", "stderr_tail": []})),
        event("trainer_exited", 2, json!({"rank": 1, "step": 11, "class": "killed by signal 9", "worker": "n2-bb"})),
        lost_to(2, &killed),
        event("generation_formed", 3, json!({"started_from": "epoch_0_step_9"})),
        event("trainer_exited", 3, json!({"rank": 1, "class": "lost its peer", "worker": "n2-bb"})),
        event(
            "trainer_exited",
            3,
            json!({
                "rank": 0, "step": 12, "class": "exited with code 1", "worker": "n1-aa",
                "stderr_tail": ["reading", "error: index 12 is out of bounds"],
            }),
        ),
        event("job_finished", 3, json!({"phase": "failed", "reason": twice.to_string(), "verdict": twice})),
    ];
    let found = read(&rows, None);
    assert_eq!(found.lost[0].then, "generation 3 went on from epoch_0_step_9 after a pause of 0.5 s");
    assert_eq!((found.lost[0].rank, found.lost[0].worker.as_deref()), (Some(1), Some("n2-bb")));
    assert_eq!(found.lost[1].log, ["reading", "error: index 12 is out of bounds"]);
    insta::assert_snapshot!(text(&found), @r"
    a: failed; 2 generations were lost

    2026-11-30T14:40:15.951Z  g2    rank 1 killed by signal 9 (SIGKILL) while stepping

    2026-11-30T14:40:15.951Z  g3    the last one
      first cause    rank 0 exited with code 1 while stepping: error: index 12 is out of bounds
      worker         n1-aa
      step           12 was the last that was reported
      its log ends   reading
                     error: index 12 is out of bounds
      what followed  rank 1 lost its peer
      then           the job failed: failed twice in the same way at step 12: rank 0 exited with code 1 while stepping: error: index 12 is out of bounds
      to do          look at the rank's log and repair the cause
    ");
}

#[test]
fn a_lost_worker_has_no_log_and_a_job_that_lost_nothing_says_so() {
    let cause = Cause::WorkerLost { worker: "n2-bb".to_owned(), rank: Some(Rank(1)), why: WhyLost::LeaseExpired };
    let rows = [event("trainer_exited", 2, json!({"rank": 1, "class": "lost", "worker": "n2-bb"})), lost_to(2, &cause)];
    insta::assert_snapshot!(text(&read(&rows, None)), @r"
    a: not over; 1 generation was lost

    2026-11-30T14:40:15.951Z  g2    the last one
      first cause    worker n2-bb (rank 1) was not heard from within its lease
      worker         n2-bb
      step           11 was the last that was reported
      then           another generation was to be formed after 0.5 s
      to do          look at the node: it was restarted, lost its network, or its worker was killed
    ");
    assert_eq!(text(&read(&[event("job_submitted", 0, json!({}))], None)), "a: not over; no generation was lost");
    assert_eq!(read(&[], None), Explanation::default());
    assert_eq!(read(&rows, Some("b")).lost, []);
}

#[test]
fn rows_of_an_older_trainctl_are_told_in_their_own_words() {
    let rows = [event("generation_lost", 2, json!({"cause": "rank 0 panicked while stepping", "delay_ms": 0}))];
    let found = read(&rows, None);
    assert_eq!((found.lost[0].cause.as_str(), found.lost[0].action.as_str()), ("rank 0 panicked while stepping", ""));
}
