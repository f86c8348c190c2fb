//! Rounds of probes: before workers get ranks of a job they prove that they see its run directory and reach each other.
//!
//! A round has two steps, since nobody can look for what its peer has not written yet: each member sees the coordinator's
//! file, writes one and listens; then each looks for the others' files and dials them. Whoever has proved itself does not again
//! while its daemon lives: a restart with the same workers waits for nothing. Spares prove themselves while the job runs. A
//! generation that did not form is a reason to look once more.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_proto::v1::probe::Step;
use trainctl_proto::v1::probe_result::Result as Answer;
use trainctl_spec::job::ModelConfigSource;
use trainctl_spec::model::Architecture;
use trainctl_spec::state::JobPhase;
use trainctl_spec::{Generation, JobId};

use super::{Core, Effect, Job, Moment};
use crate::decide::health::{self, Newcomer};
use crate::decide::liveness::{Liveness, Seen, standing};
use crate::decide::placement::Candidate;
use crate::decide::probes::{Begun, Failed, Member, Verdict, judge_begun, judge_pairs, plan};
use crate::events::Entry;
use crate::record::QuarantinedBy;

/// How long a step may take: a worker's own limits add up to less.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// What a job knows of its workers' sight.
#[derive(Debug, Default)]
pub struct Probing {
    round: Option<Round>,
    /// Incarnation of each worker that has proved itself.
    proven: BTreeMap<String, String>,
    /// No further round before this.
    retry_at: Duration,
    /// The generation whose failed formation made everybody prove itself again.
    doubted: Generation,
}

/// One round.
#[derive(Debug)]
struct Round {
    id: u64,
    members: Vec<Member>,
    incarnations: Vec<String>,
    stage: Stage,
    deadline: Duration,
}

/// The step that it waits for, with the answers so far.
#[derive(Debug)]
enum Stage {
    Begin(BTreeMap<String, v1::ProbeBegun>),
    Check(BTreeMap<String, v1::ProbeChecked>),
}

impl Stage {
    fn has(&self, worker: &str) -> bool {
        match self {
            Self::Begin(answers) => answers.contains_key(worker),
            Self::Check(answers) => answers.contains_key(worker),
        }
    }
}

impl Core {
    /// Workers prove themselves from now on. `nonce` is what the `endpoint.json` of every run directory that is held here
    /// names.
    pub fn probe(&mut self, nonce: String) {
        self.nonce = Some(nonce);
    }

    fn is_proven(&self, job: &Job, worker: &str) -> bool {
        let incarnation = self.workers.get(worker).map(|worker| &worker.incarnation);
        self.nonce.is_none() || (incarnation.is_some() && job.probing.proven.get(worker) == incarnation)
    }

    /// Those of the workers that may get a rank of the job without a round.
    pub(super) fn proven(&self, id: &JobId, candidates: Vec<Candidate>) -> Vec<Candidate> {
        let Some(job) = self.jobs.get(id) else { return Vec::new() };
        candidates.into_iter().filter(|candidate| self.is_proven(job, &candidate.worker)).collect()
    }

    /// Whether all of these have proved themselves; if not, a round begins or is under way.
    pub(super) fn have_proved(&mut self, id: &JobId, placed: &[Candidate], at: Moment, out: &mut Vec<Effect>) -> bool {
        let Some(job) = self.jobs.get_mut(id) else { return false };
        if let Some(live) = &job.live
            && live.generation != job.probing.doubted
            && live.ranks.iter().any(|rank| !rank.formed)
        {
            job.probing.doubted = live.generation;
            job.probing.proven.clear();
        }
        let Some(job) = self.jobs.get(id) else { return false };
        if placed.iter().all(|candidate| self.is_proven(job, &candidate.worker)) {
            return true;
        }
        let workers: Vec<String> = placed.iter().map(|candidate| candidate.worker.clone()).collect();
        self.begin_round(id, workers, at, out);
        false
    }

    /// Spares prove themselves while the job runs, so that none is waited for when it is needed. J4: nothing that is found ends
    /// the generation.
    pub(super) fn prove_spares(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let (JobPhase::Running { .. }, Some(live)) = (&job.record.phase, &job.live) else { return };
        let mut workers: Vec<String> = self.candidates(at.now).into_iter().map(|candidate| candidate.worker).collect();
        workers.retain(|worker| !self.is_proven(job, worker));
        if workers.is_empty() {
            return;
        }
        let ranks = live.ranks.iter().filter(|rank| rank.ended.is_none()).map(|rank| rank.worker.clone());
        let is_there = |worker: &String| self.workers.get(worker).is_some_and(|worker| worker.session.is_some());
        workers.extend(ranks.filter(is_there));
        self.begin_round(id, workers, at, out);
    }

    fn begin_round(&mut self, id: &JobId, workers: Vec<String>, at: Moment, out: &mut Vec<Effect>) {
        self.commands += 1;
        let round = self.commands;
        let (Some(job), Some(nonce)) = (self.jobs.get(id), self.nonce.clone()) else { return };
        if job.probing.round.is_some() || at.now < job.probing.retry_at {
            return;
        }
        let seen: Vec<&super::Worker> = workers.iter().filter_map(|worker| self.workers.get(worker)).collect();
        let incarnations = seen.iter().map(|worker| worker.incarnation.clone()).collect();
        let member = |worker: &&super::Worker| Member {
            worker: worker.id.clone(),
            host: worker.host.clone(),
            machine: worker.machine.clone(),
            address: worker.address.clone(),
            is_proven: self.is_proven(job, &worker.id),
        };
        let members: Vec<Member> = seen.iter().map(member).collect();
        info!(job = %id, round, workers = workers.join(", "), "workers look at the run directory and at each other");
        let is_dialled = plan(&members).iter().any(|task| !task.dial.is_empty());
        for member in &members {
            let address = if is_dialled { member.address.clone() } else { String::new() };
            let run_dir = job.spec.run_dir.display().to_string();
            let begin = Step::Begin(v1::ProbeBegin { run_dir, nonce: nonce.clone(), address });
            self.ask(&member.worker, round, begin, out);
        }
        let deadline = at.now + ANSWER_LIMIT;
        let begun = Round { id: round, members, incarnations, stage: Stage::Begin(BTreeMap::new()), deadline };
        if let Some(job) = self.jobs.get_mut(id) {
            job.probing.round = Some(begun);
        }
    }

    fn ask(&self, worker: &str, round: u64, step: Step, out: &mut Vec<Effect>) {
        if let Some(session) = self.workers.get(worker).and_then(|worker| worker.session) {
            let probe = v1::Probe { round, step: Some(step) };
            out.push(Effect::Send { session, message: Box::new(Body::Probe(probe)) });
        }
    }

    /// A worker's answer; that of a round which is over changes nothing.
    pub(super) fn probed(&mut self, worker: &str, result: v1::ProbeResult, at: Moment, out: &mut Vec<Effect>) {
        if let Some(Answer::Begun(v1::ProbeBegun { health: Some(health), .. })) = &result.result
            && let Some(seen) = self.workers.get_mut(worker)
        {
            seen.health = Some(v1::Health { busy: seen.running.is_some(), ..health.clone() });
            self.judge_health(worker, at, out);
        }
        let rounds = self.jobs.values_mut().filter_map(|job| job.probing.round.as_mut());
        let Some(round) = rounds.into_iter().find(|round| round.id == result.round) else { return };
        if !round.members.iter().any(|member| member.worker == worker) {
            return;
        }
        match (&mut round.stage, result.result) {
            (Stage::Begin(answers), Some(Answer::Begun(begun))) => {
                answers.insert(worker.to_owned(), begun);
            }
            (Stage::Check(answers), Some(Answer::Checked(checked))) => {
                answers.insert(worker.to_owned(), checked);
            }
            _ => {}
        }
    }

    /// Takes a job's round further, where all have answered or the time is up.
    pub(super) fn watch_round(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(round) = &job.probing.round else { return };
        let is_there = |(member, incarnation): (&Member, &String)| {
            let worker = self.workers.get(&member.worker);
            worker.is_some_and(|worker| worker.session.is_some() && worker.incarnation == *incarnation)
        };
        // Whoever is left begins again.
        if job.record.phase.is_terminal() || !round.members.iter().zip(&round.incarnations).all(is_there) {
            return self.end_round(id, out);
        }
        if round.members.iter().all(|member| round.stage.has(&member.worker)) || at.now >= round.deadline {
            let (verdict, short) = match &round.stage {
                Stage::Begin(answers) => {
                    (self.judge_first(job, round, answers, at), self.short_of_memory(job, round, answers))
                }
                Stage::Check(answers) => (self.judge_second(round, answers, at), BTreeMap::new()),
            };
            if verdict != Verdict::Pass || short.is_empty() {
                return self.judged_round(id, verdict, at, out);
            }
            self.end_round(id, out);
            for (worker, reason) in short {
                self.quarantine(&worker, QuarantinedBy::Health, reason, at, out);
            }
        }
    }

    /// Members that are heard but have not answered.
    fn mute<'a>(&'a self, round: &'a Round, at: Moment) -> impl Iterator<Item = String> + 'a {
        let beats = move |worker: &str| {
            let seen = |worker: &super::Worker| Seen { heard_at: worker.heard_at, connected: true };
            let worker = self.workers.get(worker);
            worker.is_some_and(|w| standing(at.now, &seen(w), &self.policy.liveness) == Liveness::Alive)
        };
        let silent = round.members.iter().filter(|member| !round.stage.has(&member.worker));
        silent.filter(move |member| beats(&member.worker)).map(|member| member.worker.clone())
    }

    fn judge_first(&self, job: &Job, round: &Round, answers: &BTreeMap<String, v1::ProbeBegun>, at: Moment) -> Verdict {
        let mut begun: BTreeMap<String, Begun> =
            answers.iter().map(|(worker, answer)| (worker.clone(), of_begun(answer))).collect();
        begun.extend(self.mute(round, at).map(|worker| (worker, Begun::Mute)));
        if begun.len() < round.members.len() {
            return Verdict::Undecided("a worker fell silent while it looked at the run directory".to_owned());
        }
        let others_prove = job.probing.proven.keys().any(|worker| !begun.contains_key(worker));
        judge_begun(&begun, others_prove, ANSWER_LIMIT.as_secs())
    }

    /// Newcomers of the round for whose ranks the memory does not suffice.
    fn short_of_memory(
        &self,
        job: &Job,
        round: &Round,
        answers: &BTreeMap<String, v1::ProbeBegun>,
    ) -> BTreeMap<String, String> {
        let ModelConfigSource::Inline(config) = &job.spec.model.config else { return BTreeMap::new() };
        // A resolved spec has a model that was understood.
        let Ok(model) = Architecture::from_config(config) else { return BTreeMap::new() };
        let newcomer = |member: &'_ Member| {
            let is_busy = self.workers.get(&member.worker).is_none_or(|worker| worker.running.is_some());
            let health = answers.get(&member.worker)?.health.as_ref().filter(|_| !is_busy && !member.is_proven)?;
            health.memory_available
        };
        let newcomers: Vec<Newcomer<'_>> = round
            .members
            .iter()
            .filter_map(|member| {
                let available = newcomer(member)?;
                Some(Newcomer { worker: &member.worker, machine: &member.machine, available })
            })
            .collect();
        health::short_of_memory(&model.memory(job.spec.precision), &newcomers)
    }

    fn judge_second(&self, round: &Round, answers: &BTreeMap<String, v1::ProbeChecked>, at: Moment) -> Verdict {
        let mute: BTreeMap<String, String> = self
            .mute(round, at)
            .map(|worker| (worker, "it beats, but did not look at its peers in time".to_owned()))
            .collect();
        if !mute.is_empty() {
            return Verdict::Blame(mute);
        }
        if answers.len() < round.members.len() {
            return Verdict::Undecided("a worker fell silent while it looked at its peers".to_owned());
        }
        let name = |worker: &str| match round.members.iter().find(|member| member.worker == worker) {
            Some(member) => format!("worker {worker} on {}", member.host),
            None => format!("worker {worker}"),
        };
        let pair = |from: &String, to: &str, what: String| Failed { from: from.clone(), to: to.to_owned(), what };
        let failed = answers.iter().flat_map(|(from, checked)| {
            let unseen = checked.unseen.iter().map(|unseen| {
                let (path, error, to) = (&unseen.path, &unseen.error, name(&unseen.worker));
                pair(from, &unseen.worker, format!("{} does not see {path} of {to}: {error}", name(from)))
            });
            let unreached = checked.unreached.iter().map(|unreached| {
                // Without its port, which each round has anew: the same news is told once.
                let address = host_of(&unreached.address);
                let (error, to) = (&unreached.error, name(&unreached.worker));
                pair(from, &unreached.worker, format!("{} cannot reach {to} at {address}: {error}", name(from)))
            });
            unseen.chain(unreached).collect::<Vec<_>>()
        });
        judge_pairs(&failed.collect::<Vec<_>>())
    }

    fn judged_round(&mut self, id: &JobId, verdict: Verdict, at: Moment, out: &mut Vec<Effect>) {
        match verdict {
            Verdict::Pass => self.passed(id, at, out),
            Verdict::Blame(blamed) => {
                self.end_round(id, out);
                for (worker, reason) in blamed {
                    self.quarantine(&worker, QuarantinedBy::Probe, reason, at, out);
                }
            }
            Verdict::Undecided(what) => {
                self.end_round(id, out);
                warn!(job = %id, what, "workers cannot work together: looking again later");
                let retry = self.policy.prepare_retry;
                let Some(job) = self.jobs.get_mut(id) else { return };
                job.probing.retry_at = at.now + retry;
                let waits = !matches!(job.record.phase, JobPhase::Running { .. });
                let is_news = waits && job.waiting != what;
                if is_news {
                    job.waiting.clone_from(&what);
                    self.event_row(id, Entry::new("probe_failed").with("error", what.into()), at, out);
                    self.publish(id, out);
                }
            }
        }
    }

    /// The first step went well: on to the second. The second did: all have proved themselves.
    fn passed(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(round) = self.jobs.get_mut(id).and_then(|job| job.probing.round.as_mut()) else { return };
        let Stage::Begin(answers) = &round.stage else {
            let proven: Vec<(String, String)> =
                round.members.iter().map(|member| member.worker.clone()).zip(round.incarnations.clone()).collect();
            self.end_round(id, out);
            if let Some(job) = self.jobs.get_mut(id) {
                job.probing.proven.extend(proven);
            }
            return;
        };
        let port = |worker: &str| answers.get(worker).map_or(0, |begun| begun.port);
        let tasks: Vec<v1::ProbeCheck> = plan(&round.members)
            .into_iter()
            .map(|task| {
                let peer = |other: usize| {
                    let Member { worker, address, .. } = &round.members[other];
                    v1::ProbePeer { worker: worker.clone(), address: address.clone(), port: port(worker) }
                };
                let seen = task.see.into_iter().map(|other| round.members[other].worker.clone()).collect();
                v1::ProbeCheck { seen, dial: task.dial.into_iter().map(peer).collect() }
            })
            .collect();
        round.stage = Stage::Check(BTreeMap::new());
        round.deadline = at.now + ANSWER_LIMIT;
        let (number, workers) =
            (round.id, round.members.iter().map(|member| member.worker.clone()).collect::<Vec<_>>());
        for (worker, check) in workers.iter().zip(tasks) {
            self.ask(worker, number, Step::Check(check), out);
        }
    }

    fn end_round(&mut self, id: &JobId, out: &mut Vec<Effect>) {
        let Some(round) = self.jobs.get_mut(id).and_then(|job| job.probing.round.take()) else { return };
        for member in &round.members {
            self.ask(&member.worker, round.id, Step::End(v1::ProbeEnd {}), out);
        }
    }
}

/// The host of `host:port`.
fn host_of(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

fn of_begun(answer: &v1::ProbeBegun) -> Begun {
    match &answer.fault {
        Some(fault) => {
            let errno = if fault.errno == 0 { String::new() } else { format!(" (errno {})", fault.errno) };
            let error = format!("{}: {}{errno}", fault.path, fault.error);
            match fault.kind() {
                v1::ProbeFaultKind::Unwritable => Begun::Unwritable(error),
                v1::ProbeFaultKind::Stale => Begun::Stale(error),
                v1::ProbeFaultKind::Blind | v1::ProbeFaultKind::Unspecified => Begun::Blind(error),
            }
        }
        None if !answer.listen_error.is_empty() => Begun::Deaf(answer.listen_error.clone()),
        None => Begun::Well,
    }
}
