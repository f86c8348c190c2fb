use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

#[derive(Default)]
struct World {
    answers: AtomicBool,
    lives: AtomicBool,
}

#[async_trait]
impl Probe for World {
    async fn answers(&self, _: &Holder) -> bool {
        self.answers.load(Ordering::Relaxed)
    }

    fn lives(&self, _: u32, _: u64) -> bool {
        self.lives.load(Ordering::Relaxed)
    }
}

fn info(host: &str) -> HolderInfo {
    HolderInfo {
        process: Taker { host: host.into(), pid: 7, boot_id: format!("boot-{host}"), start_time: 9 },
        addresses: vec!["127.0.0.1".into()],
        port: 4000,
        incarnation: "x".into(),
        slurm_job: Some("1234".into()),
    }
}

async fn take(dir: &std::path::Path, host: &str, world: &World) -> (Result<Tenure, AcquireError>, Duration) {
    let clock = TokioClock::default();
    let tenure = Tenure::acquire(Io::new(dir), info(host), world, &clock, &Policy::default()).await;
    (tenure, clock.now())
}

#[tokio::test(start_paused = true)]
async fn a_free_directory_is_taken_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (tenure, waited) = take(dir.path(), "a", &World::default()).await;
    let tenure = tenure.unwrap();
    assert_eq!((tenure.term(), waited), (Term(1), Duration::ZERO));
    assert_eq!(tenure.beat().await.unwrap(), Standing::Mine);
    assert_eq!(read_holder(&Io::new(dir.path())).await.unwrap().unwrap().beat, 1);
}

#[tokio::test(start_paused = true)]
async fn a_released_directory_is_taken_at_once_and_the_old_holder_is_fenced() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path(), "a", &World::default()).await.0.unwrap();
    old.release().await.unwrap();
    old.beat().await.unwrap();
    let holder = read_holder(&Io::new(dir.path())).await.unwrap().unwrap();
    assert!(holder.released, "no late beat takes the release back");
    let (new, waited) = take(dir.path(), "b", &World::default()).await;
    assert_eq!((new.unwrap().term(), waited), (Term(2), Duration::ZERO));
    assert_eq!(old.beat().await.unwrap(), Standing::Superseded { term: Term(2) });
    let before = std::fs::read(dir.path().join("holder.json")).unwrap();
    assert_eq!(old.beat().await.unwrap(), Standing::Superseded { term: Term(2) });
    assert_eq!(old.release().await.unwrap(), Standing::Superseded { term: Term(2) });
    assert!(matches!(old.pass().await, Err(Error::Superseded { mine: 1, theirs: 2 })));
    assert_eq!(std::fs::read(dir.path().join("holder.json")).unwrap(), before, "J2: a fenced holder writes nothing");
}

#[tokio::test(start_paused = true)]
async fn a_dead_process_on_this_host_is_succeeded_at_once() {
    let dir = tempfile::tempdir().unwrap();
    take(dir.path(), "a", &World::default()).await.0.unwrap();
    let (new, waited) = take(dir.path(), "a", &World::default()).await;
    assert_eq!((new.unwrap().term(), waited), (Term(2), Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_silent_holder_elsewhere_or_a_frozen_one_here_is_succeeded_after_a_lease() {
    for successor in ["b", "a"] {
        let dir = tempfile::tempdir().unwrap();
        let world = World { lives: AtomicBool::new(true), ..World::default() };
        take(dir.path(), "a", &world).await.0.unwrap();
        let (new, waited) = take(dir.path(), successor, &world).await;
        assert_eq!(new.unwrap().term(), Term(2));
        assert!(waited >= Duration::from_secs(15) && waited < Duration::from_secs(17), "{waited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_answers_is_named() {
    let dir = tempfile::tempdir().unwrap();
    take(dir.path(), "a", &World::default()).await.0.unwrap();
    let world = World { answers: AtomicBool::new(true), lives: AtomicBool::new(true) };
    let (refused, waited) = take(dir.path(), "b", &world).await;
    assert_eq!(waited, Duration::ZERO);
    let message = refused.unwrap_err().to_string();
    for part in ["127.0.0.1:4000", "host a", "pid 7", "Slurm job 1234", "term 1", "answers"] {
        assert!(message.contains(part), "{message}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_beats_without_answering_is_never_succeeded() {
    let dir = tempfile::tempdir().unwrap();
    let old = take(dir.path(), "a", &World::default()).await.0.unwrap();
    let beating = async {
        loop {
            old.beat().await.unwrap();
            tokio::time::sleep(BEAT_EVERY).await;
        }
    };
    let world = World::default();
    let refused = tokio::select! {
        (refused, _) = take(dir.path(), "b", &world) => refused,
        () = beating => unreachable!(),
    };
    assert!(matches!(refused, Err(AcquireError::LiveHolder { answered: false, .. })));
    assert_eq!(old.check().await.unwrap(), Standing::Mine);
}

#[test]
fn takeover_decisions() {
    let holder = |term, released| Holder { term, info: info("a"), beat: 0, released, at: String::new() };
    let view = |highest, holder, same_for| View {
        highest: Term(highest),
        holder,
        taker_gone: false,
        same_for: Duration::from_secs(same_for),
        waited: Duration::from_secs(same_for),
        answers: None,
    };
    let decide = |view: View| decide_takeover(&view, &Policy::default());
    assert_eq!(decide(view(0, None, 0)), (Decision::Take, Reason::NeverHeld));
    assert_eq!(decide(view(3, Some(holder(3, true)), 0)), (Decision::Take, Reason::Released));
    // Released by term 3, but somebody has term 4 and has not written yet.
    assert_eq!(decide(view(4, Some(holder(3, true)), 0)), (Decision::Wait, Reason::LeaseRuns));
    assert_eq!(decide(view(4, None, 14)), (Decision::Wait, Reason::LeaseRuns));
    assert_eq!(decide(view(4, None, 15)), (Decision::Probe, Reason::LeaseOver));
    let probed = View { answers: Some(false), ..view(3, Some(holder(3, false)), 15) };
    assert_eq!(decide(probed), (Decision::Take, Reason::Expired));
    let gone = View { taker_gone: true, ..view(3, Some(holder(3, false)), 0) };
    assert_eq!(decide(gone.clone()), (Decision::Probe, Reason::ProcessGone));
    assert_eq!(decide(View { answers: Some(false), ..gone.clone() }), (Decision::Take, Reason::ProcessGone));
    assert_eq!(decide(View { answers: Some(true), ..gone }), (Decision::Refuse, Reason::Answers));
    let answered = View { answers: Some(true), ..view(3, Some(holder(3, false)), 60) };
    assert_eq!(decide(answered), (Decision::Refuse, Reason::Answers));
}
