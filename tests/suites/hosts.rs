//! Runs over real hosts (network namespaces behind a relay) whose network fails or which freeze: no second writer, no lost
//! commit, the bits of an untouched run, and the right cause (J3, J6, C2, C6, P4, P5, P6).
//!
//! Host 0 has the coordinator, the next ones a worker each, the last one is where a person sits. Between hosts everything
//! speaks TLS, and Gloo goes over the relay too. The run directory is their shared file system, which stays.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use trainctl_netns::{Link, Net, have_netns};
use trainctl_store::CheckpointName;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::{self, Process};
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::{programs, seed, wait};

use rand::Rng;

/// The coordinator's host.
const CENTRE: usize = 0;
/// Each step takes so much longer, without computing: there is time for something to happen, for several tests at once.
const PACE_MS: u64 = 100;

/// A coordinator, workers and a person, each on a host of its own. Fields are dropped in order.
struct Site {
    workers: Vec<Process>,
    coordinator: Coordinator,
    state: PathBuf,
    job: Job,
    /// What in the spec's text is replaced, and by what.
    edit: Option<(&'static str, String)>,
    run: Run,
    scratch: Scratch,
    net: Net,
}

impl Site {
    /// `None`: this machine cannot have such hosts, or cannot train.
    fn new(test: &str, num_workers: u8, steps: u64) -> Option<Self> {
        if !programs::have_trainer() || !have_netns() {
            return None;
        }
        let net = Net::new(num_workers + 3, seed::seeded().random()).unwrap();
        let mut scratch = Scratch::new(test);
        let desk = net.host(usize::from(num_workers) + 2).clone();
        scratch.set_desk(Box::new(move |command| desk.spawn(command)));
        let state = scratch.join("state");
        let coordinator = start_coordinator(&scratch, &net, CENTRE).ready();
        let trainer = scratch.join("paced-trainer");
        let pace = format!("export TRAINCTL_FAULT='step.begin:*:wait{PACE_MS}'\nexec \"$TRAINER\" \"$@\"");
        scratch.write_trainer(&trainer, &pace);
        let start = |host: u8| {
            let command = daemons::worker_command(&scratch, &state, host.into(), Some(&trainer));
            scratch.start_by(command, &format!("worker-{host}"), |command| net.host(host.into()).spawn(command))
        };
        let workers = (1..=num_workers).map(start).collect();
        let job = Job { steps, ..Job::new(scratch.join("run")) };
        let run = Run::new(&job.run_dir);
        Some(Self { workers, coordinator, state, run, job, edit: None, scratch, net })
    }

    fn submit(&self) -> String {
        let list = || {
            let state = self.state.to_str().unwrap();
            let ended = self.scratch.trainctl(["workers", "list", "--coordinator", state, "--output", "json"]).wait();
            serde_json::from_str::<Vec<Value>>(&ended.expect_code(0).stdout).unwrap()
        };
        wait::until_true("all workers", || list().len() == self.workers.len());
        let spec = self.scratch.join("job.yaml");
        let yaml = self.job.yaml();
        let yaml = self.edit.as_ref().map_or_else(|| yaml.clone(), |(from, to)| yaml.replace(from, to));
        std::fs::write(&spec, yaml).unwrap();
        daemons::submit(&self.scratch, &self.state, &spec)
    }

    /// The id of the worker on a host.
    fn worker_on(&self, host: usize) -> String {
        std::fs::read_to_string(self.scratch.join(&format!("w{host}/worker-id"))).unwrap().trim().to_owned()
    }

    /// The trainer on a host; none on a spare's.
    fn trainer_on(&self, host: usize) -> Option<u32> {
        let here = self.net.host(host).processes();
        self.run.trainers().iter().map(|trainer| trainer.pid).find(|pid| here.contains(pid))
    }

    fn explain(&self) -> String {
        self.scratch.trainctl(["explain", self.run.dir().to_str().unwrap()]).wait().expect_code(0).stdout
    }

    fn wait_for_loss(&self) -> Value {
        wait::until("a lost generation", || self.run.events_of("generation_lost").into_iter().next())
    }

    /// The run ended after so many generations as if nothing had happened, and all that was ever said to be committed is there.
    fn assert_whole(&self, id: &str, num_generations: usize) {
        let status = daemons::wait_for_success(&self.scratch, &self.state, id);
        assert_eq!(self.run.generations().len(), num_generations, "{status:#}");
        let want = unbroken(&self.job);
        assert_same_rows(&self.run, &want, self.job.steps);
        assert_eq!(self.run.latest().state_hash, want.latest().state_hash);
        let reported = self.run.events_of("checkpoint_committed");
        assert!(reported.len() as u64 >= self.job.steps / self.job.ckpt_every, "{reported:?}");
        for event in reported {
            let name = event["checkpoint"].as_str().unwrap();
            assert!(name.parse::<CheckpointName>().is_ok() && self.run.manifest(name).is_some(), "{event} is lost");
        }
        let steps = |run: &Run| run.commits().iter().map(|commit| commit.step).collect::<Vec<_>>();
        assert_eq!(steps(&self.run), steps(&want));
        assert_eq!(self.run.left_behind(), Vec::<String>::new());
        let run_dir = self.run.dir().to_str().unwrap();
        self.scratch.trainctl(["checkpoints", "verify", run_dir]).wait().expect_code(0);
    }
}

fn start_coordinator(scratch: &Scratch, net: &Net, host: usize) -> Coordinator {
    let host = net.host(host);
    let spawn = |command| host.spawn(command);
    Coordinator::launch_by(scratch, &scratch.join("state"), IpAddr::V4(host.address()), spawn)
}

/// Time passes while something is cut: how long is part of what is proved.
fn pass(time: Duration) {
    let began = Instant::now();
    wait::until_true("the end of a pause", || began.elapsed() >= time);
}

#[test]
fn p6_a_worker_that_is_cut_off_is_lost_after_its_lease_and_comes_back() {
    let Some(site) = Site::new("host-cut-off", 2, 60) else { return };
    let id = site.submit();
    site.run.wait_for_step(15);
    let old = site.trainer_on(2).unwrap();
    site.net.set_all_of(2, Link::CUT);
    let lost = site.wait_for_loss();
    let cause = lost["cause"].as_str().unwrap();
    let wanted = format!("worker {}", site.worker_on(2));
    assert!(cause.contains(&wanted) && cause.contains("was not heard from within its lease"), "{lost}");
    let waits =
        |status: &Value| status["reason"].as_str().is_some_and(|reason| reason.contains("waiting for 1 more worker"));
    daemons::wait_for_status(&site.scratch, &site.state, &id, "the job to wait for a worker", waits);
    site.net.set_all_of(2, Link::default());
    wait::until_true("the end of the trainer that was cut off", || !process::exists(old));
    site.assert_whole(&id, 2);
    let explained = site.explain();
    assert!(explained.contains(&wanted) && explained.contains("was not heard from within its lease"), "{explained}");
}

/// A coordinator without network for so long.
fn coordinator_cut_off(test: &str, outage: Duration, steps: u64) {
    let Some(site) = Site::new(test, 2, steps) else { return };
    let id = site.submit();
    site.run.wait_for_step(12);
    site.net.set_all_of(CENTRE, Link::CUT);
    let before = (site.run.last_step().unwrap(), site.run.commits().len());
    pass(outage);
    let during = (site.run.last_step().unwrap(), site.run.commits().len());
    // What was under way when the link was cut.
    assert!(during.0 <= before.0 + 1 && during.1 <= before.1 + 1, "nothing comes through: {before:?} {during:?}");
    site.net.set_all_of(CENTRE, Link::default());
    site.assert_whole(&id, 1);
    let rows = site.run.rows();
    let cut_at = rows[during.0 as usize].at_ms;
    let outage_ms = i64::try_from(outage.as_millis()).unwrap();
    let within = rows.iter().filter(|row| row.at_ms > cut_at && row.at_ms < cut_at + outage_ms).count();
    assert!(within as i64 > outage_ms / 300, "the trainers went on: {within} steps");
}

#[test]
fn p5_a_coordinator_that_is_cut_off_is_not_missed_and_commits_later() {
    coordinator_cut_off("coordinator-cut-off", Duration::from_secs(3), 60);
}

#[test]
fn p5_a_coordinator_that_is_cut_off_for_longer_than_a_lease_restarts_nothing() {
    coordinator_cut_off("coordinator-cut-off-long", Duration::from_secs(12), 160);
}

#[test]
fn p6_a_worker_that_hears_and_is_not_heard_is_lost_after_its_lease() {
    let Some(site) = Site::new("host-not-heard", 2, 60) else { return };
    let id = site.submit();
    site.run.wait_for_step(15);
    site.net.set_one_way(2, CENTRE, Link::CUT);
    let lost = site.wait_for_loss();
    assert!(site.net.count(2, CENTRE).dropped > 0);
    let cause = lost["cause"].as_str().unwrap();
    let wanted = format!("worker {}", site.worker_on(2));
    assert!(cause.contains(&wanted) && cause.contains("was not heard from within its lease"), "{lost}");
    site.net.set_one_way(2, CENTRE, Link::default());
    site.assert_whole(&id, 2);
    assert!(site.explain().contains(&wanted));
}

/// A network that is bad all the time costs time only.
fn bears(test: &str, steps: u64, link: Link) {
    let Some(mut site) = Site::new(test, 2, steps) else { return };
    site.job.ckpt_every = steps / 2;
    site.net.set_all(link);
    let began = Instant::now();
    let id = site.submit();
    site.assert_whole(&id, 1);
    eprintln!("{test}: {steps} steps in {:.1} s over {link:?}", began.elapsed().as_secs_f64());
    let (there, back) = (site.net.count(1, 2), site.net.count(2, 1));
    assert!(there.passed > 10 * steps && back.passed > 10 * steps, "Gloo goes over the relay: {there:?} {back:?}");
    assert_eq!(there.dropped > 0, link.loss > 0.0, "{there:?}");
    assert!(site.explain().contains("no generation was lost"));
}

#[test]
fn p4_a_latency_of_200_ms_costs_time_only() {
    bears("slow-links", 8, Link { delay: Duration::from_millis(200), ..Link::default() });
}

#[test]
fn p4_losing_and_reordering_every_twentieth_packet_costs_time_only() {
    bears("lossy-links", 40, Link { loss: 0.05, reorder: 0.05, ..Link::default() });
}

#[test]
fn j3_a_frozen_host_that_wakes_after_its_lease_changes_nothing() {
    let Some(site) = Site::new("frozen-host", 3, 100) else { return };
    let id = site.submit();
    site.run.wait_for_step(15);
    let (frozen, old) = (1..=3).find_map(|host| Some((host, site.trainer_on(host)?))).unwrap();
    site.net.host(frozen).freeze();
    let lost = site.wait_for_loss();
    let wanted = format!("worker {}", site.worker_on(frozen));
    assert!(lost["cause"].as_str().unwrap().contains(&wanted), "{lost}");
    let first = lost["generation"].as_u64().unwrap();
    let trainers = site.run.wait_for_trainers(2, first);
    let formed = || site.run.rows().last().is_some_and(|row| row.generation > first);
    wait::until_true("a step of the next generation", formed);
    site.net.host(frozen).thaw();
    wait::until_true("the end of the trainer that was frozen", || !process::exists(old));
    assert_eq!(site.run.trainers(), trainers, "the others go on");
    site.assert_whole(&id, 2);
    assert!(site.explain().contains(&wanted));
}

#[test]
fn c2_a_frozen_coordinators_host_that_wakes_after_a_takeover_by_another_host_changes_nothing() {
    let Some(mut site) = Site::new("frozen-centre", 2, 240) else { return };
    let id = site.submit();
    site.run.wait_for_step(15);
    site.net.host(CENTRE).freeze();
    let last_before = site.run.last_step().unwrap();
    let second = start_coordinator(&site.scratch, &site.net, 3).ready();
    let committed = wait::until("a commit of the second coordinator", || {
        site.run.commits().pop().filter(|newest| newest.step > last_before && newest.term > 1)
    });
    site.net.host(CENTRE).thaw();
    let ended = site.coordinator.process.wait();
    assert!(ended.signal.is_none() && ended.stderr.contains("higher term"), "{ended:?}");
    site.assert_whole(&id, 1);
    assert!(site.run.latest().term >= committed.term && site.run.latest().step > committed.step);
    drop(second);
}

/// The probe names the two workers and what was tried.
fn assert_pair_is_named(site: &Site, id: &str) {
    let failed = wait::until("a probe that fails", || site.run.events_of("probe_failed").into_iter().next());
    let error = failed["error"].as_str().unwrap();
    let hosts = ["on host1", "on host2"].map(str::to_owned);
    for part in [site.worker_on(1), site.worker_on(2), "cannot reach".to_owned()].iter().chain(&hosts) {
        assert!(error.contains(part), "{part}: {error}");
    }
    let names = |status: &Value| status["reason"].as_str().is_some_and(|reason| reason.contains("cannot reach"));
    daemons::wait_for_status(&site.scratch, &site.state, id, "the pair in the status", names);
    let explained = site.explain();
    assert!(explained.contains("it waits: ") && explained.contains("cannot reach"), "{explained}");
}

#[test]
fn p6_two_workers_that_cannot_reach_each_other_are_named() {
    let Some(site) = Site::new("split-pair", 2, 20) else { return };
    site.net.set(1, 2, Link::CUT);
    let id = site.submit();
    assert_pair_is_named(&site, &id);
    site.net.set(1, 2, Link::default());
    site.assert_whole(&id, 1);
}

#[test]
fn p6_two_workers_that_lose_each_other_in_a_run_are_named_before_it_goes_on() {
    let Some(mut site) = Site::new("pair-lost", 2, 60) else { return };
    let floors = ["start", "rendezvous", "load", "first_step", "step", "validate", "save"];
    let floors = floors.map(|stage| format!("    {stage}_seconds: 5\n")).concat();
    let hang = format!("fault_tolerance:\n  hang:\n    factor: 2\n{floors}");
    site.edit = Some(("fault_tolerance:\n", hang));
    let id = site.submit();
    site.run.wait_for_step(15);
    site.net.set(1, 2, Link::CUT);
    let lost = site.wait_for_loss();
    assert!(lost["cause"].as_str().unwrap().contains("all waited in: all-reduce"), "{lost}");
    assert_pair_is_named(&site, &id);
    site.net.set(1, 2, Link::default());
    daemons::wait_for_success(&site.scratch, &site.state, &id);
    site.assert_whole(&id, site.run.generations().len());
}
