//! What callers must not be able to do: each abuse is refused or bounded, and a running job does not notice. Proof 6 of
//! supervision; DESIGN's section on security says what is promised.
//!
//! The listener speaks TLS (`0.0.0.0` is not loopback) unless a test says otherwise.

mod callers;
mod certificates;
mod floods;
mod secrets;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use trainctl_runtime::auth;
use trainctl_runtime::certificates::{Certified, Key, LIFE};
use trainctl_runtime::clock::{Clock, SystemClock};
use trainctl_runtime::endpoint::Endpoint;
use trainctl_runtime::rpc::{self, AuthedChannel, Credentials};
use trainctl_runtime::tls::{self, ServerTls};
use trainctl_tests::daemons::{self, Coordinator};
use trainctl_tests::job::Job;
use trainctl_tests::process::Process;
use trainctl_tests::programs;
use trainctl_tests::run::{Run, Trainer};
use trainctl_tests::scratch::Scratch;

/// `trainctl status` answers within this, whatever goes on.
const ANSWER: Duration = Duration::from_secs(5);
const TLS: &[&str] = &["--listen", "0.0.0.0:0"];

/// A coordinator with a job that runs on two workers.
struct Place {
    coordinator: Coordinator,
    workers: Vec<Process>,
    job: String,
    run: Run,
    state: PathBuf,
    restarts: u64,
    scratch: Scratch,
}

impl Place {
    /// `None` where there is no trainer to run.
    fn start(name: &str, arguments: &[&str], environment: &[(&'static str, &str)]) -> Option<Self> {
        if !programs::have_trainer() {
            return None;
        }
        let mut scratch = Scratch::new(name);
        scratch.set_environment(environment.iter().map(|(key, value)| (*key, (*value).to_owned())).collect());
        let job = Job { steps: 1_000_000, ckpt_every: 500, ..Job::new(scratch.join("run")) };
        let (state, run) = (scratch.join("state"), Run::new(&job.run_dir));
        let coordinator = Coordinator::start_with(&scratch, &state, arguments, &[]);
        let workers = (0..2).map(|index| daemons::start_worker(&scratch, &state, index, None)).collect();
        let id = daemons::submit(&scratch, &state, &job.write(scratch.join("job.yaml")));
        run.wait_for_step(5);
        Some(Self { coordinator, workers, job: id, run, state, restarts: 0, scratch })
    }

    fn endpoint(&self) -> Endpoint {
        self.coordinator.endpoint()
    }

    fn owner(&self) -> String {
        auth::read_owner(&self.state).unwrap()
    }

    fn join(&self) -> String {
        auth::read_join(&self.state).unwrap()
    }

    /// Lines of the coordinator's log with this text.
    fn said(&self, text: &str) -> usize {
        self.coordinator.process.stderr().lines().filter(|line| line.contains(text)).count()
    }

    /// The coordinator's CA.
    fn authority(&self) -> ServerTls {
        tls::load_or_create(&self.state).unwrap()
    }

    /// `trainctl`, told which coordinator.
    fn trainctl(&self, arguments: &[&str]) -> Process {
        let coordinator = self.state.to_str().unwrap();
        self.scratch.trainctl(arguments.iter().copied().chain(["--coordinator", coordinator]))
    }

    /// `trainctl auth grant`, into a file; its path.
    fn grant(&self, name: &str) -> String {
        let file = self.scratch.join(&format!("{name}.json")).to_str().unwrap().to_owned();
        self.trainctl(&["auth", "grant", name, "--expires", "1h", "--file", &file]).wait().expect_code(0);
        file
    }

    /// The job goes on with the same trainers, and who asks for it is answered.
    #[track_caller]
    fn assert_undisturbed(&mut self, trainers: &[Trainer], what: &str) {
        let step = self.run.last_step().unwrap();
        let asked = Instant::now();
        let status = daemons::status(&self.scratch, &self.state, &self.job).unwrap();
        assert!(asked.elapsed() < ANSWER, "{what}: the status took {:?}", asked.elapsed());
        assert_eq!((status["phase"].as_str(), status["restarts"].as_u64()), (Some("running"), Some(self.restarts)));
        self.run.wait_for_step(step + 3);
        assert_eq!(self.run.trainers(), trainers, "{what}: the job noticed");
        assert!(self.coordinator.process.is_running(), "{what}: the coordinator ended");
    }

    /// The coordinator found nothing that a person must look at, and the job ends as it should.
    fn finish(mut self) {
        assert!(self.workers.iter_mut().all(Process::is_running));
        let log = self.coordinator.process.stderr();
        let bad: Vec<&str> = log.lines().filter(|line| line.contains("panicked") || line.contains(" ERROR ")).collect();
        assert!(bad.is_empty(), "{bad:#?}");
        assert_eq!(daemons::cancel(&self.scratch, &self.state, &self.job)["restarts"], self.restarts);
    }

    /// A number of `/proc/<coordinator>/status`, in KiB.
    fn memory_kib(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.coordinator.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Files that the coordinator has open.
    fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.coordinator.process.pid())).unwrap().count()
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

async fn connect<'a>(endpoint: &Endpoint, credentials: impl Into<Credentials<'a>>) -> AuthedChannel {
    rpc::connect(endpoint, credentials).await.unwrap()
}

/// A worker's certificate that was made `since` ago, or `ahead` of now where that is given.
fn certificate(authority: &ServerTls, worker: &str, since: Duration, ahead: Duration) -> Certified {
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap();
    let now = SystemClock::new().wall_ms() - ms(since) + ms(ahead);
    let key = Key::generate().unwrap();
    let pem = authority.authority.sign(worker, &key.request().unwrap(), now, LIFE).unwrap();
    key.certified(pem)
}
