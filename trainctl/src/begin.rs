//! What a run without checkpoints begins with, for people. Writes nothing.

use trainctl_dataset::{CorpusCounts, Split, corpus_key, passes};
use trainctl_spec::JobSpec;
use trainctl_spec::fork::Beginning;
use trainctl_spec::job::Dataset;
use trainctl_spec::start::DataPhase;
use trainctl_store::origin::{FindError, Parent};

use crate::exit::Failure;
use crate::output::people;

/// Whether the run may begin with it.
pub(crate) async fn examine(parent: &Parent, spec: &JobSpec, stop_at: u64) -> Result<Beginning, Failure> {
    let name = parent.origin.text();
    let decided = parent.decide(spec, stop_at).await.map_err(|error| Failure::internal(format!("{name}: {error}")))?;
    decided.map_err(|reasons| {
        let list: Vec<String> = reasons.iter().map(|reason| format!("  {reason}")).collect();
        Failure::usage(format!("the run cannot begin with {name}:\n{}", list.join("\n")))
    })
}

/// A checkpoint that is not there is the person's affair, a disk that fails is not.
pub(crate) fn not_found(what: &str, error: FindError) -> Failure {
    let text = format!("{what}: {error}");
    match error.of_the_place() {
        Ok(_) => Failure::internal(text),
        Err(_) => Failure::usage(text),
    }
}

/// Lines for people: from where, what is kept, where steps and data go on, what differs.
pub(crate) fn describe(parent: &Parent, spec: &JobSpec, beginning: &Beginning) -> Vec<String> {
    let max_steps = spec.step_scheduler.max_steps;
    let mut lines = parent.notes.clone();
    lines.push(format!("begins with {} ({} steps done)", parent.origin.text(), people(parent.source().step + 1)));
    lines.push(format!("  kept     {}", parent.origin.keep));
    lines.push(format!("  steps    from {} to {}", people(beginning.start_step), people(max_steps)));
    lines.push(format!("  data     {}", data(parent, spec, &beginning.phase)));
    if parent.origin.keep.data {
        lines.extend(other_orders(parent, spec, &beginning.phase).into_iter().map(|line| format!("           {line}")));
    }
    lines.extend(beginning.differences.iter().map(|difference| format!("  differs  {difference}")));
    lines
}

fn data(parent: &Parent, spec: &JobSpec, phase: &DataPhase) -> String {
    if !parent.origin.keep.data {
        return "from the start".to_owned();
    }
    if phase.first_sample > 0 {
        return format!("the same blend goes on at its sample {}", people(phase.first_sample));
    }
    let mut parts = vec!["another blend, from its sample 0".to_owned()];
    for path in &spec.dataset.paths {
        let key = corpus_key(&path.prefix);
        parts.push(match phase.corpora.get(&key) {
            Some(used) if *used > 0 => format!("{key} goes on behind {} samples", people(*used)),
            _ => format!("{key} is new"),
        });
    }
    parts.join("; ")
}

/// Corpora that both runs read, but whose order is another one now: Megatron's depends on the number of passes.
fn other_orders(parent: &Parent, spec: &JobSpec, phase: &DataPhase) -> Vec<String> {
    let wanted = |spec: &JobSpec, phase: &DataPhase| {
        phase.position(spec.step_scheduler.max_steps, spec.step_scheduler.global_batch_size)
    };
    let plan = |dataset: &Dataset, wanted: u64, used: &CorpusCounts| passes(dataset, Split::Train, Some(wanted), used);
    let source = parent.source();
    let before = plan(&source.spec.dataset, wanted(source.spec, source.phase), &source.phase.corpora);
    let now = plan(&spec.dataset, wanted(spec, phase), &phase.corpora);
    let (before, now) = match (before, now) {
        (Ok(before), Ok(now)) => (before, now),
        (Err(error), _) | (_, Err(error)) => {
            return vec![format!("the order of the samples cannot be compared with the parent's: {error}")];
        }
    };
    let differs =
        now.iter().filter_map(|(key, now)| Some((key, before.get(key).filter(|before| *before != now)?, now)));
    differs
        .map(|(key, before, now)| {
            format!(
                "{key} is in another order than before: it takes {} passes now and took {}, and its shuffle depends on that; \
                 what was read may come again sooner",
                now.num_epochs, before.num_epochs
            )
        })
        .collect()
}
