//! Process groups over real processes.
//!
//! Coverage: K-1 `a_generation_that_ends_ends_the_rendezvous`; K-2 `a_panicking_store_is_an_error`; K-3
//! `works_may_be_dropped`; K-4 `abort_ends_waits_and_is_seen_by_peers`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper fails the test that called it")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{PATIENCE, World, scenario, this_rank};
use tch::{Kind, Tensor};
use trainctl_collective::{Error, GroupOptions, KeyValue, KvError, KvErrorKind, ProcessGroup, ReduceOp};

/// What each rank process runs. In the test process itself there is no scenario and nothing to do.
#[test]
fn rank_process() {
    match scenario().as_deref() {
        None => {}
        Some("operations") => operations(),
        Some("subgroups") => subgroups(),
        Some("lost peer") => lost_peer(),
        Some("ended generation") => ended_generation(),
        Some("abort") => abort(),
        Some("timeout") => timeout(),
        Some("dropped works") => dropped_works(),
        Some(other) => panic!("unknown scenario {other}"),
    }
}

/// A group of this rank's world, and its store.
fn form(timeout: Duration) -> (ProcessGroup, Arc<dyn KeyValue>) {
    let (options, store) = this_rank(timeout);
    (ProcessGroup::gloo(store.clone(), &options).unwrap(), store)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

#[test]
fn every_operation_at_two_and_three_ranks() {
    for size in [2, 3] {
        World::start("operations", size, 0..size).finish(None);
    }
}

fn operations() {
    let (group, _store) = form(PATIENCE);
    let (rank, size) = (group.rank() as i64, group.world_size() as i64);
    for kind in [Kind::Float, Kind::BFloat16, Kind::Int64] {
        let own = |rank: i64| Tensor::from_slice(&[rank + 1, 10 * (rank + 1), -rank]).to_kind(kind);
        let expected = |combine: fn(f64, f64) -> f64| {
            let all = (0..size).map(|rank| values(&own(rank)));
            all.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| combine(*a, *b)).collect()).unwrap()
        };
        let sum = expected(|a, b| a + b);
        for (op, want) in
            [(ReduceOp::Sum, sum.clone()), (ReduceOp::Max, expected(f64::max)), (ReduceOp::Min, expected(f64::min))]
        {
            let tensor = own(rank);
            group.all_reduce(&tensor, op).unwrap().wait().unwrap();
            assert_eq!(values(&tensor), want, "all_reduce {op:?} {kind:?}");
        }
        for root in 0..size {
            let tensor = own(rank);
            group.broadcast(&tensor, root as usize).unwrap().wait().unwrap();
            assert_eq!(values(&tensor), values(&own(root)), "broadcast from {root} {kind:?}");
        }
        let gathered = Tensor::zeros([size, 3], (kind, tch::Device::Cpu));
        group.all_gather_into(&gathered, &own(rank)).unwrap().wait().unwrap();
        let all: Vec<f64> = (0..size).flat_map(|rank| values(&own(rank))).collect();
        assert_eq!(values(&gathered), all, "all_gather {kind:?}");

        let whole = Tensor::cat(&(0..size).map(|part| own(rank) * (part + 1)).collect::<Vec<_>>(), 0);
        let part = Tensor::zeros([3], (kind, tch::Device::Cpu));
        group.reduce_scatter(&part, &whole, ReduceOp::Sum).unwrap().wait().unwrap();
        let want: Vec<f64> = sum.iter().map(|sum| sum * (rank + 1) as f64).collect();
        assert_eq!(values(&part), want, "reduce_scatter {kind:?}");
    }
    let work = group.barrier().unwrap();
    work.wait().unwrap();

    let transposed = Tensor::zeros([2, 3], (Kind::Float, tch::Device::Cpu)).transpose(0, 1);
    assert!(matches!(group.all_reduce(&transposed, ReduceOp::Sum), Err(Error::Argument { .. })));
    let short = Tensor::zeros([1], (Kind::Float, tch::Device::Cpu));
    assert!(matches!(group.all_gather_into(&short, &short), Err(Error::Argument { .. })));
    assert!(matches!(group.broadcast(&short, size as usize), Err(Error::Argument { .. })));
}

#[test]
fn a_group_of_some_ranks_in_another_order() {
    World::start("subgroups", 3, 0..3).finish(None);
}

fn subgroups() {
    let (group, _store) = form(PATIENCE);
    let sub = group.subgroup("ends", &[2, 0]).unwrap();
    assert_eq!(sub.is_none(), group.rank() == 1);
    if let Some(sub) = sub {
        assert_eq!(sub.rank(), if group.rank() == 2 { 0 } else { 1 });
        let gathered = Tensor::zeros([2], (Kind::Int64, tch::Device::Cpu));
        sub.all_gather_into(&gathered, &Tensor::from_slice(&[group.rank() as i64])).unwrap().wait().unwrap();
        assert_eq!(values(&gathered), [2.0, 0.0]);
    }
    assert!(matches!(group.subgroup("wrong", &[0, 3]), Err(Error::Argument { .. })));
    group.barrier().unwrap().wait().unwrap();
}

#[test]
fn a_killed_peer_is_told_from_a_slow_one() {
    let mut world = World::start("lost peer", 3, 0..3);
    world.store.wait(&["started/0", "started/1", "started/2"], PATIENCE).unwrap();
    world.kill(2);
    world.finish(Some(2));
}

fn lost_peer() {
    let (group, store) = form(10 * PATIENCE);
    let tensor = Tensor::ones([1000], (Kind::Float, tch::Device::Cpu));
    group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait().unwrap();
    let started = Instant::now();
    if group.rank() == 2 {
        store.set("started/2", b"").unwrap();
        loop {
            std::thread::park();
        }
    }
    let work = group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
    store.set(&format!("started/{}", group.rank()), b"").unwrap();
    let error = work.wait().unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    assert!(error.is_consequence());
    assert!(started.elapsed() < PATIENCE, "noticed after {:?}", started.elapsed());
}

#[test]
fn a_generation_that_ends_ends_the_rendezvous() {
    let world = World::start("ended generation", 2, 0..1);
    assert!(world.store.until_waiting(1, PATIENCE), "rank 0 never waited for its peer");
    world.store.close("generation 3 is over");
    world.finish(None);
}

fn ended_generation() {
    let (options, store) = this_rank(10 * PATIENCE);
    let started = Instant::now();
    let Err(error) = ProcessGroup::gloo(store, &options) else { panic!("formed a group of two alone") };
    let source = KvError::closed("generation 3 is over");
    assert_eq!(error, Error::Store { operation: "form a Gloo group", source });
    assert!(error.to_string().ends_with("generation 3 is over"), "{error}");
    assert!(started.elapsed() < PATIENCE, "noticed after {:?}", started.elapsed());
}

#[test]
fn a_rendezvous_without_its_peer_times_out() {
    let options = GroupOptions {
        rank: 0,
        world_size: 2,
        address: "127.0.0.1".parse().unwrap(),
        timeout: Duration::from_millis(200),
    };
    let store = Arc::new(trainctl_collective::MemoryStore::new());
    let Err(error) = ProcessGroup::gloo(store, &options) else { panic!("formed a group of two alone") };
    assert!(
        matches!(
            &error,
            Error::Store { source: KvError { kind: KvErrorKind::Timeout, .. }, .. } | Error::Timeout { .. }
        ),
        "{error}"
    );
}

#[test]
fn abort_ends_waits_and_is_seen_by_peers() {
    World::start("abort", 3, 0..3).finish(None);
}

fn abort() {
    let (group, store) = form(10 * PATIENCE);
    let tensor = Tensor::ones([1000], (Kind::Float, tch::Device::Cpu));
    let error = match group.rank() {
        0 => {
            let work = group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
            store.wait(&["started/1"], PATIENCE).unwrap();
            let (other, reason) = (group.clone(), "the worker asked to stop");
            let thread = std::thread::spawn(move || other.abort(reason));
            let error = work.wait().unwrap_err();
            thread.join().unwrap().unwrap();
            assert_eq!(error, Error::Aborted { operation: "all_reduce", reason: reason.to_owned() });
            assert!(matches!(group.barrier(), Err(Error::Aborted { .. })));
            store.set("aborted", b"").unwrap();
            store.wait(&["seen/1", "seen/2"], PATIENCE).unwrap();
            return;
        }
        1 => {
            let work = group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
            store.set("started/1", b"").unwrap();
            work.wait().unwrap_err()
        }
        _ => {
            store.wait(&["aborted"], PATIENCE).unwrap();
            group.all_reduce(&tensor, ReduceOp::Sum).and_then(trainctl_collective::Work::wait).unwrap_err()
        }
    };
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    store.set(&format!("seen/{}", group.rank()), b"").unwrap();
}

#[test]
fn a_peer_that_does_not_come_is_a_timeout() {
    World::start("timeout", 2, 0..2).finish(None);
}

fn timeout() {
    let (group, store) = form(Duration::from_secs(2));
    if group.rank() == 0 {
        let tensor = Tensor::ones([10], (Kind::Float, tch::Device::Cpu));
        let error = group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait().unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        store.set("timed out", b"").unwrap();
    } else {
        store.wait(&["timed out"], PATIENCE).unwrap();
    }
}

#[test]
fn works_may_be_dropped() {
    World::start("dropped works", 2, 0..2).finish(None);
}

fn dropped_works() {
    let (group, _store) = form(PATIENCE);
    for _ in 0..20 {
        let tensor = Tensor::ones([100_000], (Kind::Float, tch::Device::Cpu));
        drop(group.all_reduce(&tensor, ReduceOp::Sum).unwrap());
    }
    let last = Tensor::ones([5], (Kind::Float, tch::Device::Cpu));
    group.all_reduce(&last, ReduceOp::Sum).unwrap().wait().unwrap();
    assert_eq!(values(&last), [2.0; 5]);
    drop(group.all_reduce(&last, ReduceOp::Sum).unwrap());
}

#[test]
fn a_world_of_one() {
    let options = GroupOptions { rank: 0, world_size: 1, address: "127.0.0.1".parse().unwrap(), timeout: PATIENCE };
    let group = ProcessGroup::gloo(Arc::new(trainctl_collective::MemoryStore::new()), &options).unwrap();
    let tensor = Tensor::from_slice(&[1.0_f32, 2.0]);
    group.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait().unwrap();
    assert_eq!(values(&tensor), [1.0, 2.0]);
    group.barrier().unwrap().wait().unwrap();
}

#[test]
fn a_panicking_store_is_an_error() {
    struct Panics;
    impl KeyValue for Panics {
        fn set(&self, key: &str, _: &[u8]) -> Result<(), KvError> {
            panic!("no room for {key}");
        }
        fn get(&self, _: &str, _: Duration) -> Result<Vec<u8>, KvError> {
            panic!("no value");
        }
        fn add(&self, _: &str, _: i64) -> Result<i64, KvError> {
            panic!("no number");
        }
        fn check(&self, _: &[&str]) -> Result<bool, KvError> {
            panic!("nothing to check");
        }
        fn wait(&self, _: &[&str], _: Duration) -> Result<(), KvError> {
            panic!("no patience");
        }
        fn delete(&self, _: &str) -> Result<bool, KvError> {
            panic!("nothing to delete");
        }
        fn compare_set(&self, _: &str, _: &[u8], _: &[u8]) -> Result<Vec<u8>, KvError> {
            panic!("nothing to compare");
        }
        fn num_keys(&self) -> Result<i64, KvError> {
            panic!("no keys");
        }
    }
    let options = GroupOptions { rank: 0, world_size: 2, address: "127.0.0.1".parse().unwrap(), timeout: PATIENCE };
    let Err(error) = ProcessGroup::gloo(Arc::new(Panics), &options) else { panic!("formed a group") };
    assert!(matches!(error, Error::Store { .. }), "{error}");
    assert!(error.to_string().contains("panicked: no room for world/"), "{error}");
}

#[test]
fn the_flight_recorder_has_noted_the_last_collectives() {
    let options = GroupOptions { rank: 0, world_size: 1, address: "127.0.0.1".parse().unwrap(), timeout: PATIENCE };
    let group = ProcessGroup::gloo(Arc::new(trainctl_collective::MemoryStore::new()), &options).unwrap();
    let vector = Tensor::ones([3, 5], (Kind::Float, tch::Device::Cpu));
    group.all_reduce(&vector, ReduceOp::Sum).unwrap().wait().unwrap();
    let record = trainctl_collective::flight_record().unwrap();
    assert!(record.contains("all_reduce") && record.contains("[3,5]"), "{record}");
}

#[test]
fn a_rank_outside_the_world_is_refused() {
    let options = GroupOptions { rank: 2, world_size: 2, address: "127.0.0.1".parse().unwrap(), timeout: PATIENCE };
    let made = ProcessGroup::gloo(Arc::new(trainctl_collective::MemoryStore::new()), &options);
    assert!(matches!(made, Err(Error::Argument { .. })));
}

/// On a machine with the whole CUDA install libtorch_cuda opens even without a GPU; then it is the plug-in that is missing.
#[test]
fn a_missing_library_is_named() {
    let options = GroupOptions { rank: 0, world_size: 1, address: "127.0.0.1".parse().unwrap(), timeout: PATIENCE };
    let store = Arc::new(trainctl_collective::MemoryStore::new());
    let missing = std::path::Path::new("/nonexistent/libtrainctl_nccl.so");
    let Err(error) = ProcessGroup::nccl(store, &options, 0, missing) else { panic!("opened nothing") };
    let Error::Library { library, message, .. } = &error else { panic!("{error}") };
    match trainctl_collective::open_cuda() {
        Ok(()) => assert!(library.contains("/nonexistent/") && message.contains("nccl/build.sh"), "{error}"),
        Err(_) => assert!(library == "libtorch_cuda.so" && message.contains("LIBTORCH"), "{error}"),
    }
}
