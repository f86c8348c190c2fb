//! Does a run stand still, and which rank do the others wait for?
//!
//! Each stage of a rank has a deadline: the larger of the spec's floor and `factor` × what the run has needed for that stage
//! before. All times are the coordinator's own (J6): how long a rank has not moved, as far as it was heard. Which rank is to
//! blame follows from the count of collectives that each has entered: all enter the same ones in the same order, so the
//! lowest count is the one that the others wait for.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trainctl_proto::v1::Progress;
use trainctl_spec::job::HangDetection;
use trainctl_spec::report::Phase;

/// Durations of a stage that are remembered.
const REMEMBERED: usize = 32;
/// A trainer says once a second where it is; one that has not for so long is frozen.
const FROZEN: Duration = Duration::from_secs(4);

/// What a rank is at, as far as deadlines go: a phase, with the first step of a generation apart from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The process is to start.
    Start,
    /// The ranks meet.
    Rendezvous,
    /// Data, weights and optimizer state are read.
    Load,
    /// The first step of the generation.
    FirstStep,
    /// Any other step.
    Step,
    /// An evaluation.
    Validate,
    /// A snapshot.
    Save,
    /// The process is to end.
    Finish,
}

impl Stage {
    /// The stage of a rank in `phase` that has done a step of its generation, or has not.
    pub fn of(phase: Phase, has_stepped: bool) -> Self {
        match phase {
            Phase::Starting => Self::Start,
            Phase::Rendezvous => Self::Rendezvous,
            Phase::Loading => Self::Load,
            Phase::Stepping if has_stepped => Self::Step,
            Phase::Stepping => Self::FirstStep,
            Phase::Validating => Self::Validate,
            Phase::Saving => Self::Save,
            Phase::Finished => Self::Finish,
        }
    }

    fn floor(self, limits: &HangDetection) -> Duration {
        let seconds = match self {
            Self::Start | Self::Finish => limits.start_seconds,
            Self::Rendezvous => limits.rendezvous_seconds,
            Self::Load => limits.load_seconds,
            Self::FirstStep => limits.first_step_seconds,
            Self::Step => limits.step_seconds,
            Self::Validate => limits.validate_seconds,
            Self::Save => limits.save_seconds,
        };
        Duration::from_secs(seconds.into())
    }
}

/// What a run has needed for each stage, newest last: journaled with the job, so that a successor knows it too.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History(BTreeMap<Stage, VecDeque<Duration>>);

impl History {
    /// A stage was left after `took`.
    pub fn record(&mut self, stage: Stage, took: Duration) {
        let times = self.0.entry(stage).or_default();
        if times.len() == REMEMBERED {
            times.pop_front();
        }
        times.push_back(took);
    }

    /// The median of steps, of which there are many; the longest of what is rare and varies.
    fn needed(&self, stage: Stage) -> Option<Duration> {
        let times = self.0.get(&stage)?;
        if stage != Stage::Step {
            return times.iter().max().copied();
        }
        let mut sorted: Vec<Duration> = times.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }
}

/// How long a rank may stay in `stage`. `collective` (`dist_env.timeout_minutes`) is the most that history makes of a step;
/// `burn_in` comes on top of meeting, whose history is without it.
pub fn deadline(
    stage: Stage,
    history: &History,
    limits: &HangDetection,
    collective: Duration,
    burn_in: Duration,
) -> Duration {
    let learned = history.needed(stage).unwrap_or_default().saturating_mul(limits.factor);
    let most = if matches!(stage, Stage::Step | Stage::FirstStep) { collective } else { Duration::MAX };
    let known = if stage == Stage::Rendezvous { burn_in } else { Duration::ZERO };
    stage.floor(limits).max(learned.min(most)) + known
}

/// One rank as it is seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Its number.
    pub rank: u32,
    /// What it is at.
    pub stage: Stage,
    /// For how long, without a step.
    pub stands: Duration,
    /// Where it last said that it was.
    pub progress: Option<Progress>,
    /// How long it has said nothing, though its worker is heard.
    pub silent: Duration,
}

impl Seen {
    fn entered(&self) -> u64 {
        self.progress.as_ref().map_or(0, |progress| progress.entered)
    }

    fn is_inside(&self) -> bool {
        self.progress.as_ref().is_some_and(|progress| progress.entered > progress.left)
    }

    fn collective(&self) -> String {
        self.progress.as_ref().map(|progress| progress.collective.clone()).unwrap_or_default()
    }
}

/// A run that stands still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hang {
    /// The stage whose deadline passed.
    pub stage: Stage,
    /// That deadline.
    pub deadline: Duration,
    /// How long it has stood.
    pub stands: Duration,
    /// The rank that the others wait for; absent where they all stand in the same place.
    pub rank: Option<u32>,
    /// Why it is that one.
    pub why: Why,
    /// What the others wait in; empty where they wait in no collective.
    pub collective: String,
    /// Ranks that wait there.
    pub waiting: u32,
}

/// Why a rank is blamed for a hang, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It has entered fewer collectives than the others.
    NotArrived,
    /// It has come less far than the others in starting, meeting or loading.
    Behind,
    /// All are in the same place, and its process has stopped to say so.
    Frozen,
    /// There is no other.
    Alone,
    /// All are in the same collective: the network or the library.
    AllInside,
    /// All are outside of collectives: something that they share, such as a file system.
    AllOutside,
}

/// Looks at the ranks of a generation that are not over. `None` while each is within its deadline.
pub fn decide_hang(ranks: &[Seen], deadline: impl Fn(Stage) -> Duration) -> Option<Hang> {
    let late = ranks.iter().filter(|seen| seen.stands > deadline(seen.stage)).max_by_key(|seen| seen.stands)?;
    let (blamed, why) = blame(ranks);
    let most = ranks.iter().map(Seen::entered).max().unwrap_or_default();
    let waits = |seen: &&Seen| seen.entered() == most && seen.is_inside() && Some(seen.rank) != blamed;
    let waiting = ranks.iter().filter(waits);
    let collective = ranks.iter().find(waits).map(Seen::collective).unwrap_or_default();
    // What the rank to blame is at says more than what the one that waits for it is at.
    let stage = ranks.iter().find(|seen| Some(seen.rank) == blamed).unwrap_or(late).stage;
    Some(Hang {
        stage,
        deadline: deadline(late.stage),
        stands: late.stands,
        rank: blamed,
        why,
        collective,
        waiting: u32::try_from(waiting.count()).unwrap_or(u32::MAX),
    })
}

fn blame(ranks: &[Seen]) -> (Option<u32>, Why) {
    if let [only] = ranks {
        return (Some(only.rank), Why::Alone);
    }
    // Before the first collective the stages are passed in order; later they come again and again.
    let place = |seen: &Seen| (seen.entered(), if seen.entered() == 0 { seen.stage } else { Stage::Step });
    let lowest = ranks.iter().map(place).min();
    let behind: Vec<&Seen> = ranks.iter().filter(|seen| Some(place(seen)) == lowest).collect();
    let frozen = |seen: &&&Seen| seen.silent > FROZEN;
    if behind.len() < ranks.len() {
        let first = behind.iter().find(frozen).or(behind.first());
        let why = match lowest {
            Some((0, _)) if ranks.iter().all(|seen| seen.entered() == 0) => Why::Behind,
            _ => Why::NotArrived,
        };
        return (first.map(|seen| seen.rank), why);
    }
    match behind.iter().find(frozen) {
        Some(seen) if behind.iter().any(|other| other.silent <= FROZEN) => (Some(seen.rank), Why::Frozen),
        _ if ranks.iter().all(Seen::is_inside) => (None, Why::AllInside),
        _ => (None, Why::AllOutside),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(rank: u32, stage: Stage, stands: u64, entered: u64, left: u64) -> Seen {
        let collective = format!("collective {entered}");
        let progress = Some(Progress { entered, left, collective });
        Seen { rank, stage, stands: Duration::from_secs(stands), progress, silent: Duration::from_secs(1) }
    }

    fn judge(ranks: &[Seen]) -> Option<Hang> {
        let (history, limits) = (History::default(), HangDetection::default());
        decide_hang(ranks, |stage| deadline(stage, &history, &limits, Duration::from_secs(1_800), Duration::ZERO))
    }

    #[test]
    fn a_deadline_is_learned_from_the_run_and_has_a_floor() {
        let (mut history, limits) = (History::default(), HangDetection::default());
        let collective = Duration::from_secs(1_800);
        let at =
            |history: &History, stage| deadline(stage, history, &limits, collective, Duration::from_secs(60)).as_secs();
        assert_eq!((at(&history, Stage::FirstStep), at(&history, Stage::Step)), (600, 60));
        assert_eq!(at(&history, Stage::Rendezvous), 360, "a burn-in of a minute is no hang");
        for seconds in [1, 2, 30, 2, 2] {
            history.record(Stage::Step, Duration::from_secs(seconds));
        }
        assert_eq!(at(&history, Stage::Step), 60, "10 × the median of 2 s is below the floor");
        for _ in 0..REMEMBERED {
            history.record(Stage::Step, Duration::from_secs(20));
        }
        assert_eq!(at(&history, Stage::Step), 200);
        for _ in 0..REMEMBERED {
            history.record(Stage::Step, Duration::from_secs(400));
        }
        assert_eq!(at(&history, Stage::Step), 1_800, "dist_env.timeout_minutes");
        history.record(Stage::Save, Duration::from_secs(700));
        history.record(Stage::Save, Duration::from_secs(3));
        assert_eq!(at(&history, Stage::Save), 7_000, "a save that was long once may be long again");
        let json = serde_json::to_string(&history).unwrap();
        assert_eq!(serde_json::from_str::<History>(&json).unwrap(), history);
    }

    #[test]
    fn nobody_hangs_within_the_deadline() {
        assert_eq!(judge(&[seen(0, Stage::Step, 60, 9, 8), seen(1, Stage::Step, 59, 8, 8)]), None);
        assert_eq!(judge(&[seen(0, Stage::Load, 1_000, 1, 1), seen(1, Stage::Save, 1_000, 2, 1)]), None);
    }

    #[test]
    fn the_rank_that_did_not_arrive_is_named_with_what_the_others_wait_in() {
        let ranks =
            [seen(0, Stage::Step, 61, 40, 39), seen(1, Stage::Step, 61, 39, 39), seen(2, Stage::Step, 61, 40, 39)];
        let hang = judge(&ranks).unwrap();
        assert_eq!((hang.rank, hang.why, hang.waiting), (Some(1), Why::NotArrived, 2));
        assert_eq!(hang.collective, "collective 40");
        assert_eq!((hang.stage, hang.deadline), (Stage::Step, Duration::from_secs(60)));
    }

    #[test]
    fn the_stage_is_that_of_the_rank_to_blame() {
        // Rank 0 has finished its snapshot and waits in the next step; rank 1 still saves, as it may.
        let ranks = [seen(0, Stage::Step, 61, 40, 39), seen(1, Stage::Save, 70, 39, 39)];
        let hang = judge(&ranks).unwrap();
        assert_eq!((hang.rank, hang.stage), (Some(1), Stage::Save));
    }

    #[test]
    fn before_the_first_collective_the_one_that_has_come_least_far_is_named() {
        let without = |rank, stage, stands| Seen { progress: None, ..seen(rank, stage, stands, 0, 0) };
        let ranks = [without(0, Stage::Rendezvous, 301), without(1, Stage::Start, 100)];
        let hang = judge(&ranks).unwrap();
        assert_eq!((hang.rank, hang.why, hang.stage), (Some(1), Why::Behind, Stage::Start));
        assert_eq!((hang.collective.as_str(), hang.waiting), ("", 0));
    }

    #[test]
    fn of_equal_ones_the_frozen_one_is_named() {
        let mut ranks = [seen(0, Stage::Step, 61, 40, 39), seen(1, Stage::Step, 61, 40, 39)];
        assert_eq!(judge(&ranks).map(|hang| (hang.rank, hang.why)), Some((None, Why::AllInside)));
        ranks[1].silent = Duration::from_secs(50);
        assert_eq!(judge(&ranks).map(|hang| (hang.rank, hang.why)), Some((Some(1), Why::Frozen)));
        ranks[0].silent = Duration::from_secs(50);
        assert_eq!(judge(&ranks).map(|hang| hang.rank), Some(None), "all of them frozen: nobody stands out");
    }

    #[test]
    fn all_outside_is_nobodys_fault_unless_there_is_but_one() {
        let mut ranks = vec![seen(0, Stage::Validate, 1_801, 40, 40), seen(1, Stage::Validate, 1_801, 40, 40)];
        assert_eq!(judge(&ranks).map(|hang| (hang.rank, hang.why)), Some((None, Why::AllOutside)));
        ranks.pop();
        assert_eq!(judge(&ranks).map(|hang| (hang.rank, hang.why)), Some((Some(0), Why::Alone)));
    }
}
