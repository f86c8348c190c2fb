//! Coordinator, workers and job on this machine, as children of this process: `trainctl run`, and `resume` without a
//! coordinator.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tonic::Code;
use trainctl_proto::v1;
use trainctl_runtime::endpoint::{self, Located};
use trainctl_runtime::signals::Signals;
use trainctl_runtime::tasks::Shutdown;
use trainctl_spec::JobSpec;
use trainctl_spec::job::Device;
use trainctl_store::RunDir;

use crate::client::{self, Client};
use crate::commands::submission::Submission;
use crate::daemons;
use crate::exit::{Exit, Failure, Outcome};
use crate::follow::{Dialer, Followed, OnInterrupt, follow};
use crate::output::{line, note};
use crate::precheck::{Asked, Verdict, precheck};
use crate::progress::Progress;
use crate::summary;
use crate::supervise::{Daemon, GaveUp, Supervisor};
use crate::view::is_terminal;

/// How often a condition outside this process is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// After so long a person is told what we wait for.
const TELL_AFTER: Duration = Duration::from_secs(2);
/// A coordinator that is not ready by then never will be: J2's lease and patience are shorter.
const READY_LIMIT: Duration = Duration::from_secs(90);
/// How long a job may take to end after it was told to stop now.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Checks the run directory, then runs the job to its end.
pub(crate) async fn run(spec: &JobSpec, asked: &Asked) -> Outcome {
    let from = match precheck(spec, asked).await? {
        Verdict::Go(from) => from,
        Verdict::Finished(message) => {
            line(&message)?;
            return Ok(Exit::Ok);
        }
    };
    let shutdown = Shutdown::new();
    let mut signals = Signals::listen(&shutdown)?;
    let site = Site::prepare(spec)?;
    let supervisor = Supervisor::new(&shutdown)?;
    let submission =
        Submission { spec, from, until_step: asked.until_step, fresh: asked.fresh, allow_older: asked.allow_older };
    let mut progress = Progress::new();
    let ended = site.job(&supervisor, &submission, &mut signals, &mut progress).await;
    progress.finish();
    supervisor.stop(!matches!(ended, Ok(Ended::Job(_) | Ended::Nothing(_)))).await;
    shutdown.trigger("the job has ended");
    match ended? {
        Ended::Job(job) => {
            line(&summary::summary(&job))?;
            Ok(summary::exit_of(job.phase()))
        }
        Ended::Nothing(message) => {
            line(&message)?;
            Ok(Exit::Ok)
        }
        Ended::Interrupted => {
            note("stopped");
            Ok(Exit::JobFailed)
        }
    }
}

/// How the attached job ended.
enum Ended {
    /// In a terminal state.
    Job(Box<v1::Job>),
    /// There was nothing to do.
    Nothing(String),
    /// Ctrl-C before there was a job, or twice and the job did not end in time.
    Interrupted,
}

/// The run directory and the programs.
struct Site<'a> {
    run_dir: RunDir,
    spec: &'a JobSpec,
    coordinator: Daemon,
    workers: Vec<Daemon>,
    has_workers: std::cell::Cell<bool>,
}

impl<'a> Site<'a> {
    /// Finds the programs first, so that a broken installation leaves no folder behind.
    fn prepare(spec: &'a JobSpec) -> Result<Self, Failure> {
        let (coordinator, worker) = (daemons::beside("trainctl-coordinator")?, daemons::beside("trainctl-worker")?);
        daemons::beside("trainctl-trainer")?;
        let run_dir = RunDir::new(&spec.run_dir);
        let (control, logs) = (run_dir.control(), run_dir.root().join("logs"));
        let utf8 = |path: &Path| {
            path.to_str().map(str::to_owned).ok_or_else(|| Failure::usage(format!("{}: must be UTF-8", path.display())))
        };
        let control_text = utf8(&control)?;
        let mut workers = Vec::new();
        for index in 0..spec.resources.workers.saturating_add(spec.resources.spares) {
            let state = control.join(format!("workers/w{index}"));
            make_dir(&state)?;
            let state = utf8(&state)?;
            let device = match spec.resources.device {
                Device::Cpu => "cpu",
                Device::Cuda => "cuda",
            };
            let arguments = ["--state-dir", &state, "--coordinator", &control_text, "--device", device];
            let arguments = arguments.map(str::to_owned).to_vec();
            let log = logs.join(format!("worker-{index}.log"));
            workers.push(Daemon { name: format!("worker {index}"), program: worker.clone(), arguments, log }.tied()?);
        }
        make_dir(&control)?;
        make_dir(&logs)?;
        let coordinator = Daemon {
            name: "coordinator".to_owned(),
            program: coordinator,
            arguments: vec!["--state-dir".to_owned(), control_text],
            log: logs.join("coordinator.log"),
        }
        .tied()?;
        Ok(Self { run_dir, spec, coordinator, workers, has_workers: std::cell::Cell::new(false) })
    }

    async fn job(
        &self,
        supervisor: &Supervisor,
        submission: &Submission<'_>,
        signals: &mut Signals,
        progress: &mut Progress,
    ) -> Result<Ended, Failure> {
        let pid =
            supervisor.start(self.coordinator.clone()).map_err(|error| start_failure(&self.coordinator, &error))?;
        let accepted = tokio::select! {
            accepted = self.accepted(supervisor, &pid, submission) => accepted?,
            gave_up = supervisor.gave_up() => return Err(failure(&gave_up)),
            () = signals.first() => return Ok(Ended::Interrupted),
        };
        let (client, response) = accepted;
        if response.already_finished {
            return Ok(Ended::Nothing(response.message));
        }
        if !response.message.is_empty() {
            progress.say(&response.message);
        }
        let job = response.job.ok_or_else(|| Failure::internal("the coordinator answered without a job"))?;
        // Workers come after the job is accepted, so that a refused one starts nothing.
        self.start_workers(supervisor)?;
        progress.job(&job);
        let dialer = Dialer { place: Some(self.run_dir.control().to_string_lossy().into_owned()) };
        let followed = tokio::select! {
            followed = follow(client, &dialer, &job.id, signals, OnInterrupt::Cancel, progress) => followed?,
            gave_up = supervisor.gave_up() => return Err(failure(&gave_up)),
        };
        match followed {
            Followed::Ended(job) => {
                tokio::select! {
                    () = commands_end(&dialer, &job) => {}
                    gave_up = supervisor.gave_up() => return Err(failure(&gave_up)),
                    () = signals.another() => note("commands of the job are stopped"),
                }
                Ok(Ended::Job(job))
            }
            Followed::StopNow | Followed::Detached => {
                let ended = tokio::time::timeout(END_LIMIT, wait_for_end(&dialer, &job.id)).await;
                Ok(ended.map_or(Ended::Interrupted, |job| Ended::Job(Box::new(job))))
            }
        }
    }

    /// Waits for the coordinator and submits. A coordinator that dies meanwhile is waited for again; the request's key
    /// makes the repetition harmless.
    async fn accepted(
        &self,
        supervisor: &Supervisor,
        pid: &watch::Receiver<Option<u32>>,
        submission: &Submission<'_>,
    ) -> Result<(Client, v1::SubmitResponse), Failure> {
        let request = submission.request()?;
        loop {
            let mut client = self.ready(pid).await?;
            match client.submit(request.clone()).await {
                Ok(response) => return Ok((client, response.into_inner())),
                Err(status) if client::is_away(&status) => tokio::time::sleep(LOOK_EVERY).await,
                Err(status) if status.code() == Code::AlreadyExists => {
                    if let Some(response) = self.leftover(supervisor, &mut client, submission).await? {
                        return Ok((client, response));
                    }
                }
                Err(status) => return Err(client::failure(&status)),
            }
        }
    }

    /// A job that an earlier `trainctl run` left when it was killed: the journal still has it. The same spec goes on under
    /// it, with its restart budget; another one ends it first.
    async fn leftover(
        &self,
        supervisor: &Supervisor,
        client: &mut Client,
        submission: &Submission<'_>,
    ) -> Result<Option<v1::SubmitResponse>, Failure> {
        let jobs = client.list(v1::ListRequest {}).await.map_err(|status| client::failure(&status))?.into_inner().jobs;
        let here = |job: &v1::Job| Path::new(&job.run_dir) == self.run_dir.root() && !is_terminal(job.phase());
        // Ended between the two calls.
        let Some(job) = jobs.into_iter().find(here) else { return Ok(None) };
        if self.is_same(&job, submission) {
            let message = format!("goes on with {}, which an earlier run left when it was killed", job.id);
            return Ok(Some(v1::SubmitResponse { job: Some(job), message, already_finished: false }));
        }
        note(&format!("ending {}, which an earlier run left when it was killed", job.id));
        let request = v1::CancelRequest { job: job.id.clone(), mode: v1::CancelMode::Now.into() };
        client.cancel(request).await.map_err(|status| client::failure(&status))?;
        // The coordinator believes that its ranks are gone once their workers say so, or after their leases.
        self.start_workers(supervisor)?;
        while !is_terminal(client::get_job(client, Some(&job.id)).await?.phase()) {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(None)
    }

    /// Once.
    fn start_workers(&self, supervisor: &Supervisor) -> Result<(), Failure> {
        if !self.has_workers.replace(true) {
            for worker in &self.workers {
                supervisor.start(worker.clone()).map_err(|error| start_failure(worker, &error))?;
            }
        }
        Ok(())
    }

    fn is_same(&self, job: &v1::Job, submission: &Submission<'_>) -> bool {
        let stored = std::fs::read_to_string(self.run_dir.job_spec()).ok();
        let stored = stored.and_then(|yaml| JobSpec::from_yaml(&yaml).ok());
        let is_plain = matches!(submission.from.as_str(), "" | "LATEST");
        is_plain && stored.as_ref() == Some(self.spec) && job.until_step == submission.until_step
    }

    /// Waits until our own coordinator has published its endpoint and answers.
    async fn ready(&self, pid: &watch::Receiver<Option<u32>>) -> Result<Client, Failure> {
        let dir = self.run_dir.control();
        let look = async {
            loop {
                // The file of a predecessor is there until ours has the term.
                if let Ok(endpoint) = endpoint::read(&dir)
                    && Some(endpoint.pid) == *pid.borrow()
                    && let Ok(client) = client::connect(&Located { endpoint, dir: dir.clone() }).await
                {
                    return client;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let told = async {
            tokio::time::sleep(TELL_AFTER).await;
            note(
                "waiting for the coordinator: the run directory's last holder has not released it, its lease must run out",
            );
            std::future::pending::<()>().await;
        };
        tokio::select! {
            client = look => Ok(client),
            () = told => Err(Failure::internal("waiting ended")),
            () = tokio::time::sleep(READY_LIMIT) => Err(Failure::internal(format!(
                "the coordinator was not ready after {} s; its log is {}",
                READY_LIMIT.as_secs(),
                self.coordinator.log.display()
            ))),
        }
    }
}

/// Waits until on_commit and on_end are over: they are the coordinator's children, and it ends when we do. It gives them a
/// limit of its own.
async fn commands_end(dialer: &Dialer, job: &v1::Job) {
    let mut told = job.commands.is_empty();
    loop {
        if let Ok(mut client) = dialer.dial().await
            && let Ok(job) = client::get_job(&mut client, Some(&job.id)).await
        {
            if job.commands.is_empty() {
                return;
            }
            if !told {
                note(&format!("waiting for {} (at most ten minutes each; Ctrl-C stops them)", job.commands.join(", ")));
                told = true;
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn wait_for_end(dialer: &Dialer, id: &str) -> v1::Job {
    loop {
        if let Ok(mut client) = dialer.dial().await
            && let Ok(job) = client::get_job(&mut client, Some(id)).await
            && is_terminal(job.phase())
        {
            return job;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn make_dir(path: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(path)
        .map_err(|error| Failure::usage(format!("create {}: {error}; name another --run-dir", path.display())))
}

fn start_failure(daemon: &Daemon, error: &std::io::Error) -> Failure {
    Failure::internal(format!("start the {} ({}): {error}", daemon.name, daemon.program.display()))
}

fn failure(gave_up: &GaveUp) -> Failure {
    let GaveUp { name, how, live_holder, log, tail } = gave_up;
    let message = format!("the {name} {how}; the end of {}:\n{tail}", log.display());
    Failure { exit: if *live_holder { Exit::Unreachable } else { Exit::Internal }, message }
}
