//! An explanation for people.

use super::{Explanation, Lost};

/// The last loss in full, the ones before it in a line each.
pub(crate) fn text(explanation: &Explanation) -> String {
    let Explanation { job, ended, waits, lost } = explanation;
    let state = ended.as_deref().unwrap_or("not over");
    let waits = waits.as_ref().map(|why| format!("it waits: {why}"));
    let Some((last, earlier)) = lost.split_last() else {
        let state = format!("{job}: {state}; no generation was lost");
        return std::iter::once(state).chain(waits).collect::<Vec<_>>().join("\n");
    };
    let mut lines = vec![format!("{job}: {state}; {} lost", count(lost.len()))];
    lines.extend(waits);
    if !earlier.is_empty() {
        lines.push(String::new());
        lines.extend(earlier.iter().map(|lost| format!("{}  g{:<4} {}", lost.at, lost.generation, lost.cause)));
    }
    lines.push(String::new());
    lines.extend(block(last));
    lines.join("\n")
}

fn count(number: usize) -> String {
    if number == 1 { "1 generation was".to_owned() } else { format!("{number} generations were") }
}

fn block(lost: &Lost) -> Vec<String> {
    let step = lost.step.map(|step| format!("{step} was the last that was reported"));
    let mut facts = vec![
        ("first cause", lost.cause.clone()),
        ("worker", lost.worker.clone().unwrap_or_default()),
        ("step", step.unwrap_or_default()),
    ];
    facts.extend(listed("its log ends", lost.log.iter().cloned()));
    facts.extend(listed("it stood in", lost.stack.iter().cloned()));
    facts.extend(listed("all stacks and collectives", lost.stacks.iter().cloned()));
    let ends = lost.followed.iter().map(|end| format!("rank {} {}", end.rank, end.class));
    facts.extend(listed("what followed", ends));
    facts.extend([("then", lost.then.clone()), ("to do", lost.action.clone())]);
    let facts = facts.into_iter().filter(|(_, text)| !text.is_empty());
    let head = format!("{}  g{:<4} the last one", lost.at, lost.generation);
    std::iter::once(head).chain(facts.map(|(name, text)| format!("  {name:<14} {text}"))).collect()
}

/// Lines of which the first has the name.
fn listed(name: &'static str, lines: impl Iterator<Item = String>) -> impl Iterator<Item = (&'static str, String)> {
    lines.enumerate().map(move |(index, line)| (if index == 0 { name } else { "" }, line))
}
