//! Kinds of failure, each with real processes: `trainctl explain` names the rank that failed first and the class, whichever end
//! the coordinator hears of first (P6, J5). `decide/verdict` has the orders that cannot be forced here.
//!
//! | kind | proved by |
//! |---|---|
//! | exit code | [`p6_exit_code`], `failing_trainers` |
//! | SIGSEGV | [`p6_segmentation_fault`] |
//! | SIGABRT, as after an assertion of libtorch | [`p6_abort`] |
//! | panic | [`p6_panic`] |
//! | SIGKILL | [`p6_kill`], `killed_trainers` |
//! | out of memory, killed by the kernel | [`p6_killed_by_the_kernel_for_lack_of_memory`] |
//! | an allocation that fails | [`p6_bad_allocation`] |
//! | reading fails | [`p6_read_error`] |
//! | corrupt data | [`p6_corrupt_data`] |
//! | loss not finite | [`p6_loss_that_is_not_finite`] |
//! | lost worker | [`p6_lost_worker`], `killed_workers`, `hosts` |
//! | lost peer, as a consequence | each of these: `followed` |
//! | coordinator lost, which costs no generation | `coordinator_away`, `hosts` |
//! | disk full while saving, which costs that save | `disk` |
//! | hang | `hangs` |
//! | replicas that differ | `corruption` |

use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::programs;
use trainctl_tests::reference::unbroken;
use trainctl_tests::run::{Run, assert_same_rows};
use trainctl_tests::scratch::Scratch;
use trainctl_tests::wait;

/// Each step takes so much longer: there is time to freeze a daemon between two of them.
const PACE: &str = "step.begin:*:wait100";

/// A coordinator and two workers, one of which has trainers that fail. Fields are dropped in order.
struct Site {
    healthy: Process,
    faulty: Process,
    _coordinator: Coordinator,
    state: PathBuf,
    job: Job,
    run: Run,
    scratch: Scratch,
}

impl Site {
    /// The faulty worker's first trainers have these faults, one each. `wrap` may start the worker in its own way.
    fn new(test: &str, faults: &[String], wrap: impl FnOnce(Command) -> Command) -> Option<Self> {
        if !programs::have_trainer() {
            return None;
        }
        let scratch = Scratch::new(test);
        let state = scratch.join("state");
        let coordinator = Coordinator::start(&scratch, &state);
        let starts = scratch.join("starts");
        std::fs::create_dir(&starts).unwrap();
        let of_start = |(number, fault)| {
            let folder = starts.join(format!("{number}")).display().to_string();
            format!(
                "if mkdir '{folder}' 2>/dev/null; then TRAINCTL_FAULT='{fault},{PACE}' exec \"$TRAINER\" \"$@\"; fi\n"
            )
        };
        let script: String = faults.iter().enumerate().map(of_start).collect();
        let trainer = scratch.join("faulty-trainer");
        // Its last words are not the frames of a backtrace.
        let script = format!("unset RUST_BACKTRACE\n{script}");
        scratch.write_trainer(&trainer, &format!("{script}TRAINCTL_FAULT='{PACE}' exec \"$TRAINER\" \"$@\""));
        // Without a standby each start of the script is a generation.
        let command = |index| {
            let mut command = daemons::worker_command(&scratch, &state, index, (index == 1).then_some(&*trainer));
            command.arg("--no-standby");
            command
        };
        let healthy = scratch.start(command(0), "worker-0");
        let faulty = scratch.start(wrap(command(1)), "worker-1");
        let job = Job { steps: 30, ..Job::new(scratch.join("run")) };
        Some(Self { healthy, faulty, _coordinator: coordinator, state, run: Run::new(&job.run_dir), job, scratch })
    }

    fn submit(&self) -> String {
        daemons::submit(&self.scratch, &self.state, &self.job.write(self.scratch.join("job.yaml")))
    }

    fn faulty_worker(&self) -> String {
        std::fs::read_to_string(self.scratch.join("w1/worker-id")).unwrap().trim().to_owned()
    }

    /// The generation with this index that makes steps, and the rank that its faulty worker has.
    fn wait_for_steps(&self, index: usize) -> (u64, u64) {
        let first =
            wait::until("a generation's first step", || self.run.events_of("step_first").into_iter().nth(index));
        let worker = self.faulty_worker();
        let is_faulty =
            |row: &&Value| row["generation"] == first["generation"] && row["worker"].as_str() == Some(&worker);
        let started = self.run.events_of("trainer_started");
        let rank = started.iter().find(is_faulty).unwrap()["rank"].as_u64().unwrap();
        (first["generation"].as_u64().unwrap(), rank)
    }

    /// Ends of a generation's ranks, in the order in which the coordinator heard of them.
    fn ends(&self, generation: u64) -> Vec<u64> {
        let events = self.run.events_of("trainer_exited").into_iter();
        events.filter(|row| row["generation"] == generation).map(|row| row["rank"].as_u64().unwrap()).collect()
    }

    /// A generation whose end of `first` is heard before the other rank's, whose daemon is held up meanwhile.
    fn fail_in_order(&self, generation: u64, first: u64, held_up: &Process) {
        held_up.signal(Signal::SIGSTOP);
        wait::until_true("the first end", || self.ends(generation) == [first]);
        held_up.signal(Signal::SIGCONT);
        self.wait_for_verdict(generation);
        assert_eq!(self.ends(generation), [first, 1 - first]);
    }

    fn wait_for_verdict(&self, generation: u64) {
        let is_it = |row: &Value| row["generation"] == generation;
        wait::until_true("the verdict", || self.run.events_of("generation_lost").iter().any(is_it));
    }

    fn explain(&self) -> Value {
        let explained = self.scratch.trainctl(["explain", self.run.dir().to_str().unwrap(), "--output", "json"]).wait();
        serde_json::from_str(&explained.expect_code(0).stdout).unwrap()
    }
}

/// The rank of the faulty worker is to blame, in these words; the other one followed.
fn assert_named(lost: &Value, rank: u64, words: &str) {
    assert_eq!(lost["rank"], rank, "{lost:#}");
    let cause = lost["cause"].as_str().unwrap();
    assert!(cause.contains(words), "`{words}`: {lost:#}");
    let followed = lost["followed"].as_array().unwrap();
    let class = followed[0]["class"].as_str().unwrap();
    assert!(followed.len() == 1 && followed[0]["rank"] == 1 - rank, "{lost:#}");
    assert!(["lost its peer", "stopped by its worker"].contains(&class), "{lost:#}");
}

/// Fails twice, at different steps: once the peer that lost it is heard of first, once it is. The run ends whole.
fn named_in_both_orders(test: &str, faults: [String; 2], words: &str, wrap: impl FnOnce(Command) -> Command) {
    named(test, faults, words, wrap, |site, generation, rank| site.fail_in_order(generation, 1 - rank, &site.faulty));
}

/// The same for a failure that its process can tell of: then no peer ends before it. First without any interference.
fn named_however_soon(test: &str, faults: [String; 2], words: &str) {
    named(test, faults, words, |command| command, |site, generation, _| site.wait_for_verdict(generation));
}

fn named(
    test: &str,
    faults: [String; 2],
    words: &str,
    wrap: impl FnOnce(Command) -> Command,
    first: impl FnOnce(&Site, u64, u64),
) {
    let Some(site) = Site::new(test, &faults, wrap) else { return };
    let id = site.submit();
    let (generation, first_rank) = site.wait_for_steps(0);
    first(&site, generation, first_rank);
    let (generation, second_rank) = site.wait_for_steps(1);
    site.fail_in_order(generation, second_rank, &site.healthy);
    daemons::wait_for_success(&site.scratch, &site.state, &id);

    let explained = site.explain();
    assert_eq!(explained["lost"].as_array().unwrap().len(), 2, "{explained:#}");
    assert_named(&explained["lost"][0], first_rank, words);
    assert_named(&explained["lost"][1], second_rank, words);
    let want = unbroken(&site.job);
    assert_same_rows(&site.run, &want, site.job.steps);
    assert_eq!(site.run.latest().state_hash, want.latest().state_hash);
}

/// At the begin of step 11 of the first generation, and of step 15 of the second, which begins with step 10.
fn at_steps(what: &str) -> [String; 2] {
    [12, 6].map(|nth| format!("step.begin:{nth}:{what}"))
}

#[test]
fn p6_exit_code() {
    named_in_both_orders("cause-code", at_steps("code3"), "exited with code 3", |command| command);
}

#[test]
fn p6_segmentation_fault() {
    named_in_both_orders("cause-segv", at_steps("segv"), "killed by signal 11 (SIGSEGV", |command| command);
}

#[test]
fn p6_abort() {
    named_in_both_orders("cause-abort", at_steps("abort"), "aborted (SIGABRT", |command| command);
}

#[test]
fn p6_panic() {
    named_however_soon("cause-panic", at_steps("panic"), "panicked while stepping: ");
}

#[test]
fn p6_kill() {
    named_in_both_orders("cause-kill", at_steps("exit"), "killed by signal 9 (SIGKILL)", |command| command);
}

#[test]
fn p6_bad_allocation() {
    named_in_both_orders("cause-alloc", at_steps("alloc"), "ran out of memory", |command| command);
}

#[test]
fn p6_read_error() {
    let faults = [24, 12].map(|nth| format!("data.batch:{nth}:eio"));
    named_however_soon("cause-read", faults, "reading or writing files failed");
}

/// A memory cgroup of this test's own. Dropped, it is removed.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    fn new(limit: u64) -> Option<Self> {
        let version_1 = Path::new("/sys/fs/cgroup/memory");
        let (root, file) = if version_1.is_dir() {
            (version_1, "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let group = Self(root.join(format!("trainctl-test-{}", std::process::id())));
        let made = std::fs::create_dir(&group.0).and_then(|()| std::fs::write(group.0.join(file), limit.to_string()));
        if let Err(error) = made {
            programs::lacks("cgroup", &format!("{} cannot be a memory cgroup: {error}", group.0.display()));
            return None;
        }
        Some(group)
    }

    /// Starts in it.
    fn wrap(&self, command: Command) -> Command {
        let mut wrapped = Command::new("sh");
        wrapped.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(self.0.join("cgroup.procs"));
        carry_over(&command, &mut wrapped);
        wrapped
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Empty as soon as the kernel has seen the end of its last process.
        let removed = || std::fs::remove_dir(&self.0).is_ok();
        let began = std::time::Instant::now();
        while !removed() && began.elapsed() < wait::PATIENCE {
            std::thread::yield_now();
        }
    }
}

/// Program, arguments, variables and folder of a command become arguments, variables and folder of another one.
fn carry_over(from: &Command, to: &mut Command) {
    to.arg(from.get_program()).args(from.get_args());
    for (key, value) in from.get_envs() {
        match value {
            Some(value) => to.env(key, value),
            None => to.env_remove(key),
        };
    }
    if let Some(folder) = from.get_current_dir() {
        to.current_dir(folder);
    }
}

#[test]
fn p6_killed_by_the_kernel_for_lack_of_memory() {
    // Twice what a worker and its trainer take. To take so much may last longer than a daemon can be held up.
    let Some(group) = MemoryGroup::new(512 << 20) else { return };
    let wrap = |command| group.wrap(command);
    named("cause-oom", at_steps("grow"), "ran out of memory", wrap, |site, generation, _| {
        site.wait_for_verdict(generation);
    });
}

#[test]
fn p6_lost_worker() {
    let Some(mut site) = Site::new("cause-worker", &[], |command| command) else { return };
    let id = site.submit();
    let (_, rank) = site.wait_for_steps(0);
    let lost = site.faulty_worker();
    site.faulty.kill9();
    wait::until_true("the verdict", || !site.run.events_of("generation_lost").is_empty());
    let _replacement = daemons::start_worker(&site.scratch, &site.state, 2, None);
    daemons::wait_for_success(&site.scratch, &site.state, &id);
    let explained = site.explain();
    let words = format!("worker {lost} (rank {rank}) was not heard from within its lease");
    assert_named(&explained["lost"][0], rank, &words);
    assert_eq!(explained["lost"][0]["worker"], lost.as_str(), "{explained:#}");
}

#[test]
fn p6_corrupt_data() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    // The faulty worker sees other bytes where the others see the corpus.
    let see_other_bytes = |command: Command| {
        let mut wrapped = Command::new("unshare");
        wrapped.args(["--mount", "sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\""]);
        let good = Job::new("").corpus.prefix.with_extension("bin");
        let bad = command.get_current_dir().unwrap().join("bad.bin");
        let mut bytes = std::fs::read(&good).unwrap();
        // Tokens far beyond the vocabulary.
        bytes.iter_mut().for_each(|byte| *byte |= 0x80);
        std::fs::write(&bad, bytes).unwrap();
        wrapped.arg(&bad).arg(&good);
        carry_over(&command, &mut wrapped);
        wrapped
    };
    let Some(site) = Site::new("cause-data", &[], see_other_bytes) else { return };
    let id = site.submit();
    let status = daemons::wait_for_end(&site.scratch, &site.state, &id);
    assert_eq!(status["phase"], "failed", "{status:#}");
    let explained = site.explain();
    let started = site.run.events_of("trainer_started");
    let worker = site.faulty_worker();
    let is_faulty = |row: &&Value| row["worker"].as_str() == Some(&worker);
    let rank = started.iter().find(is_faulty).unwrap()["rank"].as_u64().unwrap();
    assert_named(&explained["lost"][0], rank, "token");
}

#[test]
fn p6_loss_that_is_not_finite() {
    if !programs::have_trainer() {
        return;
    }
    let scratch = Scratch::new("cause-not-finite");
    let job = Job { lr: 1e30, ..Job::new(scratch.join("run")) };
    let spec = job.write(scratch.join("job.yaml"));
    scratch.trainctl(["run", spec.to_str().unwrap()]).wait().expect_code(1);
    let explained = scratch.trainctl(["explain", job.run_dir.to_str().unwrap()]).wait().expect_code(0);
    explained.expect_said("loss or gradient not finite while stepping").expect_said("lower the learning rate");
}
