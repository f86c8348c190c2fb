//! The owner task over a transport, processes and a fence store of the tests: what a simulator plugs in.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::sync::mpsc;
use trainctl_proto::v1::{
    Assignment, Fence, Hello, StartTrainer, TrainerControl, Welcome, WorkerMessage,
    coordinator_message::Body as Command, worker_message::Body,
};
use trainctl_runtime::clock::SystemClock;
use trainctl_runtime::tasks::Shutdown;

use super::machine::{Event, Machine};
use super::owner::{EVENT_QUEUE, FenceStore, Owner, Parts, Processes};
use super::transport::{Transport, Wire};
use crate::spool::SpoolHandle;
use crate::state::{Fences, StateError};

type Link = (mpsc::Receiver<WorkerMessage>, mpsc::Sender<Result<Command, String>>);

/// Refuses the first dials, then gives one stream.
struct Flaky {
    refuse: usize,
    dials: Arc<AtomicUsize>,
    links: mpsc::Sender<Link>,
}

impl Transport for Flaky {
    fn dial(&self, hello: Hello) -> BoxFuture<'static, Result<Wire, String>> {
        let refused = self.dials.fetch_add(1, Ordering::SeqCst) < self.refuse;
        let links = self.links.clone();
        Box::pin(async move {
            if refused {
                return Err("refused by the test".to_owned());
            }
            let (outgoing, sent) = mpsc::channel(16);
            let (said, incoming) = mpsc::channel(16);
            outgoing.try_send(WorkerMessage { body: Some(Body::Hello(hello)), ..WorkerMessage::default() }).unwrap();
            links.send((sent, said)).await.unwrap();
            Ok(Wire { outgoing, incoming })
        })
    }
}

/// Trainers that exist in name only.
struct Names {
    events: mpsc::Sender<Event>,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Processes for Names {
    fn start(&mut self, assignment: Assignment) {
        let generation = assignment.fence.unwrap().generation;
        self.seen.lock().unwrap().push(format!("start {generation}"));
        self.events.try_send(Event::Started { pid: 1, start_time: 2 }).unwrap();
    }

    fn kill(&mut self, reason: &str) {
        self.seen.lock().unwrap().push(format!("kill: {reason}"));
        self.events.try_send(Event::Gone).unwrap();
    }

    fn control(&mut self, _: TrainerControl) {}

    fn place(&self) -> Option<trainctl_proto::v1::Place> {
        None
    }

    fn dump_stacks(&mut self) {}
}

/// Nobody looks at anything.
struct Blind;

impl super::owner::Probes for Blind {
    fn probe(&mut self, _: trainctl_proto::v1::Probe) {}
}

struct Stored(Arc<Mutex<Vec<String>>>);

impl FenceStore for Stored {
    fn save(&self, fences: &Fences) -> Result<(), StateError> {
        self.0.lock().unwrap().push(format!("store {}", fences.latest_term()));
        Ok(())
    }
}

#[tokio::test]
async fn it_dials_until_it_is_answered_carries_out_in_order_and_leaves_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(SystemClock::new());
    let (spool, _) = SpoolHandle::start(&dir.path().join("spool"), "s", "boot", clock.clone()).unwrap();
    let (links, mut next_link) = mpsc::channel(4);
    let (events_tx, events) = mpsc::channel(EVENT_QUEUE);
    let (dials, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let shutdown = Shutdown::new();
    let parts = Parts {
        transport: Arc::new(Flaky { refuse: 3, dials: dials.clone(), links }),
        clock,
        processes: Names { events: events_tx, seen: seen.clone() },
        probes: Box::new(Blind),
        spool,
        fences: Arc::new(Stored(seen.clone())),
        hello: Hello { worker_id: "w".to_owned(), ..Hello::default() },
        events,
    };
    let machine = Machine::new(Fences::default(), |_| Ok("/r".to_owned()));
    let began = Instant::now();
    let owner = Owner::new(machine, parts, shutdown.clone()).run();
    let coordinator = async {
        let (mut sent, said) = next_link.recv().await.unwrap();
        assert_eq!(dials.load(Ordering::SeqCst), 4);
        assert!(began.elapsed() < Duration::from_secs(4), "W5: at most a second apart");
        assert!(matches!(sent.recv().await.unwrap().body, Some(Body::Hello(hello)) if hello.worker_id == "w"));
        said.send(Ok(Command::Welcome(Welcome { incarnation: "c".to_owned(), lease_ms: 9_000 }))).await.unwrap();
        let fence = Some(Fence { job: "j".to_owned(), generation: 7, term: 5 });
        let assignment = Some(Assignment { fence, ..Assignment::default() });
        let start = StartTrainer { command_id: "a".to_owned(), assignment };
        said.send(Ok(Command::StartTrainer(start))).await.unwrap();
        while !matches!(sent.recv().await.unwrap().body, Some(Body::CommandResult(result)) if result.error.is_empty()) {
        }
        // The stream breaks: the next Hello tells what runs.
        said.send(Err("cut by the test".to_owned())).await.unwrap();
        let (mut sent, _said) = next_link.recv().await.unwrap();
        let Some(Body::Hello(hello)) = sent.recv().await.unwrap().body else { panic!("no hello") };
        assert_eq!((hello.running.map(|running| running.pid), hello.term), (Some(1), 5));
        shutdown.trigger("the test is over");
    };
    let (left, ()) = tokio::join!(owner, coordinator);
    left.unwrap();
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen, ["store 5", "start 7", "kill: the worker is shutting down"], "W3");
}
