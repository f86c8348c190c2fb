//! Real commands, one job, no coordinator.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::Mutex;
use trainctl_runtime::proc;
use trainctl_store::Unfenced;
use trainctl_store::manifest::{Manifest, Metrics};

use super::*;

const SPEC: &str = "
name: tiny
run_dir: RUN
model: {config: {model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 8, vocab_size: 64, n_positions: 16}}
dataset: {paths: /data/text, seq_length: 8, split: '99,1,0'}
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 40}
";

/// A job's task with what it answered.
struct World {
    dir: tempfile::TempDir,
    requests: mpsc::UnboundedSender<HookRequest>,
    answers: Arc<Mutex<Vec<HookResult>>>,
    shutdown: Shutdown,
    task: tokio::task::JoinHandle<()>,
}

fn name(step: u64) -> CheckpointName {
    CheckpointName { epoch: 0, step }
}

fn on_commit(step: u64) -> Hook {
    let pointers = vec!["LATEST".to_owned(), "LOWEST_VAL".to_owned()];
    let (which, kind, cause) = (Which::OnCommit, SaveKind::Full, String::new());
    Hook { which, kind, checkpoint: Some(name(step)), pointers, state: "", cause }
}

async fn commit(store: &CheckpointStore, step: u64) {
    let draft = Manifest {
        format: 0,
        name: name(step),
        job: "tiny-1".to_owned(),
        generation: 2,
        term: 1,
        step,
        epoch: 0,
        consumed_samples: 0,
        world_size: 1,
        mesh: Vec::new(),
        skipped: Vec::new(),
        metrics: Metrics::default(),
        state_hash: String::new(),
        spec_hash: String::new(),
        max_steps: 40,
        until_step: None,
        started_from: None,
        kind: SaveKind::Full,
        parent: None,
        phase: Default::default(),
        corpora: Default::default(),
        created_at: String::new(),
        files: Vec::new(),
    };
    fs::create_dir_all(store.path(name(step))).unwrap();
    store.commit(&Unfenced, draft, "seed: 1\n").await.unwrap();
    store.pin(name(step), pin_of(SaveKind::Full)).await.unwrap();
}

impl World {
    #[expect(clippy::disallowed_methods, reason = "as the coordinator makes it")]
    async fn start(keys: &str, steps: &[u64], end_limit: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let spec = SPEC.replace("RUN", dir.path().to_str().unwrap()) + keys;
        let spec = JobSpec::from_yaml(&spec).unwrap();
        let store = CheckpointStore::open(dir.path());
        for step in steps {
            commit(&store, *step).await;
        }
        let (requests, asked) = mpsc::unbounded_channel();
        let answers: Arc<Mutex<Vec<HookResult>>> = Arc::default();
        let (shutdown, kept) = (Shutdown::new(), answers.clone());
        let grace = Duration::from_millis(200);
        let task = HookTask { job: JobId("tiny-1".to_owned()), spec, store, end_limit, grace };
        let answer = move |result| {
            let kept = kept.clone();
            async move {
                kept.lock().await.push(result);
                Ok::<(), std::convert::Infallible>(())
            }
        };
        let leaving = shutdown.clone();
        let task = tokio::task::spawn(async move { task.run(asked, leaving, answer).await.unwrap() });
        Self { dir, requests, answers, shutdown, task }
    }

    fn ask(&self, request: HookRequest) {
        self.requests.send(request).unwrap();
    }

    fn committed(&self, step: u64) {
        self.ask(HookRequest::Run(Box::new(on_commit(step))));
    }

    fn ended(&self, state: &'static str, cause: &str) {
        let (which, kind, pointers) = (Which::OnEnd, SaveKind::Full, Vec::new());
        let hook = Hook { which, kind, checkpoint: Some(name(9)), pointers, state, cause: cause.to_owned() };
        self.ask(HookRequest::Run(Box::new(hook)));
        self.ask(HookRequest::End);
    }

    /// What the task answered, at its end.
    async fn answers(self) -> Vec<HookResult> {
        tokio::time::timeout(Duration::from_secs(30), self.task).await.expect("the task ends").unwrap();
        self.answers.lock().await.clone()
    }

    async fn file(&self, file: &str) -> String {
        let path = self.dir.path().join(file);
        for _ in 0..3000 {
            match fs::read_to_string(&path) {
                Ok(text) if text.ends_with('\n') => return text,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
        panic!("{file} does not appear")
    }
}

fn outcomes(answers: &[HookResult]) -> Vec<(String, Option<Outcome>)> {
    let all = answers.iter().filter_map(|answer| match answer {
        HookResult::Ended { hook, outcome, .. } => Some((hook.label(), Some(outcome.clone()))),
        HookResult::Skipped { hook, .. } => Some((hook.label(), None)),
        HookResult::Over => None,
    });
    all.collect()
}

fn pins(dir: &Path) -> usize {
    fs::read_dir(dir.join("control/pins")).unwrap().count()
}

#[tokio::test]
async fn commands_run_in_order_and_know_what_they_are_told_of() {
    let keys = "on_commit: 'echo \"$TRAINCTL_STEP $TRAINCTL_CHECKPOINT_NAME $TRAINCTL_POINTERS\" >> seen; test -d \"$TRAINCTL_CHECKPOINT\"'\n\
                on_end: 'echo \"$TRAINCTL_STATE: $TRAINCTL_CAUSE\" >> seen; env | grep -c ^TRAINCTL_ ; exit 3'\n";
    let world = World::start(keys, &[9, 19], Duration::from_secs(20)).await;
    world.committed(9);
    world.committed(19);
    world.ended("failed", "rank 1: boom");
    let dir = world.dir.path().to_owned();
    let log = world.file("logs/hooks/on_end-9.log").await;
    let seen = world.file("seen").await;
    let kept = world.dir.path().join("control");
    assert!(kept.exists());
    let answers = {
        let World { task, answers, dir: _keep, .. } = world;
        tokio::time::timeout(Duration::from_secs(30), task).await.unwrap().unwrap();
        assert_eq!(pins(&dir), 0, "the pins go with the commands");
        answers.lock().await.clone()
    };
    assert_eq!(
        seen.lines().collect::<Vec<_>>(),
        ["9 epoch_0_step_9 LATEST LOWEST_VAL", "19 epoch_0_step_19 LATEST LOWEST_VAL", "failed: rank 1: boom"]
    );
    let (ok, three) = (Some(Outcome::Code(0)), Some(Outcome::Code(3)));
    let label = |step: u64| format!("on_commit epoch_0_step_{step}");
    assert_eq!(outcomes(&answers), [(label(9), ok.clone()), (label(19), ok), ("on_end".to_owned(), three)]);
    assert_eq!(answers.last(), Some(&HookResult::Over));
    assert_eq!(log.trim(), "9", "its variables and none of the coordinator's own");
}

#[tokio::test]
async fn the_oldest_that_wait_are_left_out_and_a_retired_checkpoint_is_too() {
    let steps: Vec<u64> = (0..20).collect();
    let keys = "on_commit: 'until test -e go; do sleep 0.01; done'\n";
    let world = World::start(keys, &steps[..19], Duration::from_secs(20)).await;
    for step in &steps {
        world.committed(*step);
    }
    world.ask(HookRequest::End);
    // All of it is heard before the first one may end.
    while world.answers.lock().await.len() < 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    fs::write(world.dir.path().join("go"), "").unwrap();
    let answers = world.answers().await;
    let skipped: Vec<u64> = answers
        .iter()
        .filter_map(|answer| match answer {
            HookResult::Skipped { hook, .. } => Some(hook.checkpoint.unwrap().step),
            _ => None,
        })
        .collect();
    assert_eq!(skipped, [1, 2, 3, 19], "step 19 was never committed");
}

#[tokio::test]
async fn a_command_that_outlives_its_limit_goes_with_its_group() {
    // A child that ignores SIGTERM, in the background of a shell that does as well.
    let keys = "on_end: \"trap '' TERM; sh -c 'trap \\\"\\\" TERM; echo $$ > child; sleep 300' & echo on; wait\"\n";
    let world = World::start(keys, &[9], Duration::from_millis(500)).await;
    world.ended("succeeded", "");
    let child: u32 = world.file("child").await.trim().parse().unwrap();
    let answers = world.answers().await;
    assert_eq!(outcomes(&answers), [("on_end".to_owned(), Some(Outcome::Signal(9)))]);
    for _ in 0..1000 {
        if proc::start_time(child).is_none() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{child} lives");
}

#[tokio::test]
async fn a_shutdown_ends_the_running_command_and_starts_no_other() {
    let keys = "on_commit: 'echo $$ >> pids; sleep 300'\n";
    let world = World::start(keys, &[9, 19], Duration::from_secs(20)).await;
    world.committed(9);
    world.committed(19);
    let pid: u32 = world.file("pids").await.trim().parse().unwrap();
    world.shutdown.trigger("test");
    let pids = world.dir.path().join("pids");
    let World { task, dir: _keep, .. } = world;
    tokio::time::timeout(Duration::from_secs(30), task).await.unwrap().unwrap();
    assert!(proc::start_time(pid).is_none());
    assert_eq!(fs::read_to_string(pids).unwrap().lines().count(), 1);
}
