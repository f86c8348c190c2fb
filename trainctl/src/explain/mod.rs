//! Why a job lost generations, and why it ended: read from its events alone, so that it works after everything is gone.
//!
//! [`read`] is a pure function of the rows of `events.jsonl`; the coordinator's verdict (P6) stands in them.

mod show;
#[cfg(test)]
mod tests;

use serde::Serialize;
use serde_json::Value;
use trainctl_spec::state::Cause;

pub(crate) use show::text;

/// Lines of a log that are shown.
const EXCERPT: usize = 12;

/// What is known of one job.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Explanation {
    /// The job.
    pub(crate) job: String,
    /// How it ended; absent while it has not.
    pub(crate) ended: Option<String>,
    /// Why its workers do not form a generation now, where probes say so.
    pub(crate) waits: Option<String>,
    /// Generations that were lost, in order.
    pub(crate) lost: Vec<Lost>,
}

/// A generation that was lost.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Lost {
    pub(crate) generation: u64,
    /// When the verdict fell, UTC.
    pub(crate) at: String,
    /// The first cause, in words.
    pub(crate) cause: String,
    /// Rank to blame, where there is one.
    pub(crate) rank: Option<u64>,
    /// Its worker, whose name begins with its host's.
    pub(crate) worker: Option<String>,
    /// Last step that the rank had reported.
    pub(crate) step: Option<u64>,
    /// Last lines that it wrote.
    pub(crate) log: Vec<String>,
    /// At a hang: where the rank to blame stood, innermost first, else what was said of its threads.
    pub(crate) stack: Vec<String>,
    /// At a hang: the files with the stacks and the last collectives of all ranks, relative to the run directory.
    pub(crate) stacks: Vec<String>,
    /// How the other ranks ended.
    pub(crate) followed: Vec<Followed>,
    /// What came next.
    pub(crate) then: String,
    /// What a person should do; empty where nothing is to be done.
    pub(crate) action: String,
}

/// The end of a rank that was not to blame.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Followed {
    pub(crate) rank: u64,
    pub(crate) class: String,
}

/// Reads the rows of a run; of several jobs, the newest, or the one that is asked for.
pub(crate) fn read(rows: &[String], job: Option<&str>) -> Explanation {
    let events: Vec<Value> = rows.iter().filter_map(|row| serde_json::from_str(row).ok()).collect();
    let newest = || events.iter().rev().find_map(|event| event["job"].as_str());
    let Some(job) = job.or_else(newest) else { return Explanation::default() };
    let mut found = Explanation { job: job.to_owned(), ..Explanation::default() };
    let events: Vec<&Value> = events.iter().filter(|event| event["job"] == job).collect();
    for (index, event) in events.iter().enumerate() {
        match event["kind"].as_str() {
            Some("generation_lost") => {
                let delay = event["delay_ms"].as_u64().unwrap_or_default();
                found.lost.push(lost(&events[..index], event, after(&events[index..], delay)));
            }
            Some("probe_failed") => found.waits = event["error"].as_str().map(str::to_owned),
            Some("generation_formed") => found.waits = None,
            Some("job_finished") => {
                found.waits = None;
                let phase = event["phase"].as_str().unwrap_or("over");
                found.ended = Some(phase.to_owned());
                if event["verdict"].is_object() {
                    found.lost.push(lost(&events[..index], event, format!("the job {phase}: {}", reason(event))));
                }
            }
            _ => {}
        }
    }
    found
}

/// What was done about a loss.
fn after(later: &[&Value], delay_ms: u64) -> String {
    let formed = later.iter().find(|event| event["kind"] == "generation_formed");
    let pause = delay_ms as f64 / 1000.0;
    match formed {
        None => format!("another generation was to be formed after {pause:.1} s"),
        Some(formed) => {
            let from = match formed["started_from"].as_str() {
                Some(checkpoint) if !checkpoint.is_empty() => format!(" from {checkpoint}"),
                _ => " from the beginning".to_owned(),
            };
            format!("generation {} went on{from} after a pause of {pause:.1} s", formed["generation"])
        }
    }
}

fn reason(event: &Value) -> &str {
    event["reason"].as_str().or(event["cause"].as_str()).unwrap_or_default()
}

/// Frames of a rank that are shown.
const FRAMES: usize = 10;

fn stacks<'a>(before: &'a [&'a Value], event: &'a Value) -> impl Iterator<Item = &'a Value> {
    let of_this = |row: &&&Value| row["kind"] == "stacks" && row["generation"] == event["generation"];
    before.iter().filter(of_this).copied()
}

/// What was kept of a rank.
fn files(row: &Value) -> impl Iterator<Item = String> {
    ["path", "collectives_path"].into_iter().filter_map(|key| Some(row[key].as_str()?.to_owned()))
}

/// Where the rank stood; without one, where the first rank did.
fn stack(before: &[&Value], event: &Value, rank: Option<u64>) -> Vec<String> {
    let row = stacks(before, event).find(|row| rank.is_none() || row["rank"].as_u64() == rank);
    let Some(thread) = row.and_then(|row| row["threads"].get(0)) else { return Vec::new() };
    let state = thread["state"].as_str().filter(|state| !state.is_empty());
    let state = state.map(|state| format!("its main thread did not answer: {state}"));
    let frames = thread["frames"].as_array().into_iter().flatten().filter_map(Value::as_str).take(FRAMES);
    state.into_iter().chain(frames.map(str::to_owned)).collect()
}

fn lost(before: &[&Value], event: &Value, then: String) -> Lost {
    let verdict: Option<Cause> = serde_json::from_value(event["verdict"].clone()).ok();
    let first = verdict.as_ref().map(Cause::first);
    let rank = first.and_then(Cause::rank).map(|rank| u64::from(rank.0));
    let exits =
        before.iter().filter(|exit| exit["kind"] == "trainer_exited" && exit["generation"] == event["generation"]);
    let (blamed, others): (Vec<&Value>, Vec<&Value>) =
        exits.copied().partition(|exit| rank.is_some() && exit["rank"].as_u64() == rank);
    let blamed = blamed.first();
    let lines: Vec<&str> = blamed
        .and_then(|exit| exit["stderr_tail"].as_array())
        .map_or_else(Vec::new, |lines| lines.iter().filter_map(Value::as_str).collect());
    let followed =
        |exit: &Value| Some(Followed { rank: exit["rank"].as_u64()?, class: exit["class"].as_str()?.to_owned() });
    Lost {
        generation: event["generation"].as_u64().unwrap_or_default(),
        at: event["ts"].as_str().unwrap_or_default().to_owned(),
        cause: first.map_or_else(|| reason(event).to_owned(), ToString::to_string),
        rank,
        worker: blamed.and_then(|exit| exit["worker"].as_str()).map(str::to_owned),
        step: event["step"].as_u64().or_else(|| blamed.and_then(|exit| exit["step"].as_u64())),
        log: lines[lines.len().saturating_sub(EXCERPT)..].iter().map(|line| (*line).to_owned()).collect(),
        stack: stack(before, event, rank),
        stacks: stacks(before, event).flat_map(files).collect(),
        followed: others.into_iter().filter_map(followed).collect(),
        then,
        action: first.map(Cause::remedy).unwrap_or_default().to_owned(),
    }
}
