//! Follows a job to its end, over restarts of its coordinator.

use std::time::Duration;

use futures::StreamExt;
use tonic::{Code, Streaming};
use trainctl_proto::v1;
use trainctl_runtime::backoff::Backoff;
use trainctl_runtime::endpoint;
use trainctl_runtime::signals::Signals;

use crate::client::{self, Client};
use crate::exit::Failure;
use crate::progress::Progress;
use crate::view::is_terminal;

/// Where to dial again when the coordinator restarts.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    /// What `--coordinator` said, or the control directory of `trainctl run`.
    pub(crate) place: Option<String>,
}

impl Dialer {
    /// One try, with the endpoint file read again.
    pub(crate) async fn dial(&self) -> Result<Client, Failure> {
        let located =
            endpoint::locate(self.place.as_deref()).map_err(|error| Failure::unreachable(error.to_string()))?;
        client::connect(&located).await
    }
}

/// What Ctrl-C does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnInterrupt {
    /// Once = save and stop, twice = stop now (`run`).
    Cancel,
    /// Leave the job alone and end (`submit --follow`).
    Detach,
}

/// How following ended.
#[derive(Debug)]
pub(crate) enum Followed {
    /// The job is in a terminal state.
    Ended(Box<v1::Job>),
    /// Ctrl-C with [`OnInterrupt::Detach`].
    Detached,
    /// The second Ctrl-C: stop everything. The job may not have ended.
    StopNow,
}

/// Shows a job until it ends.
///
/// The coordinator may go away for any time: it is dialled again for ever, at most a second apart, because its trainers go
/// on without it. The caller bounds that by dropping the future.
pub(crate) async fn follow(
    mut client: Client,
    dialer: &Dialer,
    job: &str,
    signals: &mut Signals,
    on_interrupt: OnInterrupt,
    progress: &mut Progress,
) -> Result<Followed, Failure> {
    let mut asked = Asked::default();
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
    let mut told_away = false;
    'following: loop {
        match watch(&mut client, job).await {
            Ok(mut stream) => {
                if std::mem::take(&mut told_away) {
                    progress.say("the coordinator is back");
                }
                backoff.reset();
                loop {
                    tokio::select! {
                        event = stream.next() => match event {
                            Some(Ok(event)) => if let Some(ended) = show(event, progress) {
                                return Ok(Followed::Ended(Box::new(ended)));
                            },
                            // This process stood still for long (Ctrl-Z, Ctrl-S). The rows since are in the run's files.
                            Some(Err(status)) if status.code() == Code::ResourceExhausted => {
                                progress.say("nothing was shown for a while: following from here");
                                continue 'following;
                            }
                            Some(Err(status)) if !client::is_away(&status) => return Err(client::failure(&status)),
                            Some(Err(_)) | None => break,
                        },
                        () = asked.interrupted(signals) => {
                            if on_interrupt == OnInterrupt::Detach {
                                return Ok(Followed::Detached);
                            }
                            asked.tell(progress, job);
                            asked.send(&mut client, job).await?;
                            if asked.now {
                                return Ok(Followed::StopNow);
                            }
                        }
                    }
                }
            }
            Err(status) if !client::is_away(&status) => return Err(client::failure(&status)),
            Err(_) => {}
        }
        if !std::mem::replace(&mut told_away, true) {
            progress.say("the coordinator is away; the trainers go on, dialling again");
        }
        client = loop {
            tokio::select! {
                () = tokio::time::sleep(backoff.next_delay()) => {}
                () = asked.interrupted(signals) => {
                    if on_interrupt == OnInterrupt::Detach {
                        return Ok(Followed::Detached);
                    }
                    asked.tell(progress, job);
                    if asked.now {
                        return Ok(Followed::StopNow);
                    }
                }
            }
            if let Ok(client) = dialer.dial().await {
                break client;
            }
        };
        asked.send(&mut client, job).await?;
    }
}

async fn watch(client: &mut Client, job: &str) -> Result<Streaming<v1::WatchEvent>, tonic::Status> {
    let request = v1::WatchRequest { job: job.to_owned(), from_start: false, once: false };
    client.watch(request).await.map(tonic::Response::into_inner)
}

/// The job when this event ends it.
fn show(event: v1::WatchEvent, progress: &mut Progress) -> Option<v1::Job> {
    match event.kind? {
        v1::watch_event::Kind::Job(job) => {
            progress.job(&job);
            return is_terminal(job.phase()).then_some(job);
        }
        v1::watch_event::Kind::Train(row) => progress.train(row),
        v1::watch_event::Kind::Validation(row) => progress.validation(&row),
        v1::watch_event::Kind::EventJson(json) => progress.event(&json),
    }
    None
}

/// What the person asked for by Ctrl-C, and whether the coordinator knows.
#[derive(Debug, Default)]
struct Asked {
    save: bool,
    now: bool,
    sent_save: bool,
    sent_now: bool,
}

impl Asked {
    /// Returns when a signal came that was not acted on yet. Cancel-safe.
    async fn interrupted(&mut self, signals: &mut Signals) {
        if self.save {
            signals.second().await
        } else {
            signals.first().await
        }
        self.now = self.save || signals.count() > 1;
        self.save = true;
    }

    fn tell(&self, progress: &Progress, job: &str) {
        if self.now {
            progress.say(&format!("stopping {job} now; steps since the last checkpoint are lost"));
        } else {
            progress.say(&format!("saving {job} after the running step, then stopping; Ctrl-C again stops at once"));
        }
    }

    /// Sends what was asked and not sent. A coordinator that is away gets it after the next dial.
    async fn send(&mut self, client: &mut Client, job: &str) -> Result<(), Failure> {
        let mode = match self {
            Self { now: true, sent_now: false, .. } => v1::CancelMode::Now,
            Self { now: false, save: true, sent_save: false, .. } => v1::CancelMode::Save,
            _ => return Ok(()),
        };
        match client.cancel(v1::CancelRequest { job: job.to_owned(), mode: mode.into() }).await {
            Ok(_) => {
                self.sent_save = true;
                self.sent_now = self.now;
                Ok(())
            }
            // Between two states of the job: it ended by itself, and Watch says so.
            Err(status) if client::is_away(&status) || status.code() == Code::FailedPrecondition => Ok(()),
            Err(status) => Err(client::failure(&status)),
        }
    }
}
