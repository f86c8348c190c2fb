//! `--set a.b=c`, and the two spellings that people's fingers know: `--a.b=c` and a bare `a.b=c`.

use std::ffi::OsString;

use clap::Args;
use trainctl_spec::Override;

/// The verbs that read a spec.
const VERBS: [&str; 5] = ["validate", "run", "submit", "resume", "fork"];
/// Hidden flag that carries a `--a.b=c` through clap.
const DOTTED: &str = "--dotted-override";

/// Overrides of spec keys.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct OverrideArgs {
    /// Override a key of the spec, for example --set optimizer.lr=1e-4; also --optimizer.lr=1e-4 or optimizer.lr=1e-4
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    #[arg(long = "dotted-override", hide = true, allow_hyphen_values = true)]
    dotted: Vec<String>,
    #[arg(value_name = "KEY=VALUE", hide = true)]
    pub(crate) bare: Vec<String>,
}

impl OverrideArgs {
    /// All of them; `--set` comes first.
    pub(crate) fn all(&self) -> Vec<Override> {
        let bare = self.dotted.iter().chain(&self.bare).map(|text| Override::bare(text));
        self.set.iter().map(|text| Override::set(text)).chain(bare).collect()
    }
}

/// Turns `--a.b=c` into a flag that clap knows. A flag's name never holds a dot, so none of ours is meant.
pub(crate) fn rewrite(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments = arguments.into_iter().peekable();
    let mut rewritten: Vec<OsString> = arguments.next().into_iter().collect();
    let applies = arguments.peek().and_then(|verb| verb.to_str()).is_some_and(|verb| VERBS.contains(&verb));
    for argument in arguments {
        if applies && argument.to_str().is_some_and(is_dotted) {
            let mut flag = OsString::from(DOTTED);
            flag.push("=");
            flag.push(argument);
            rewritten.push(flag);
        } else {
            rewritten.push(argument);
        }
    }
    rewritten
}

fn is_dotted(argument: &str) -> bool {
    argument
        .strip_prefix("--")
        .and_then(|rest| rest.split_once('='))
        .is_some_and(|(key, _)| key.contains('.') && is_key(key))
}

/// Whether an argument is a bare `a.b=c` rather than a path.
pub(crate) fn is_bare(argument: &str) -> bool {
    argument.split_once('=').is_some_and(|(key, _)| is_key(key))
}

fn is_key(key: &str) -> bool {
    !key.is_empty()
        && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '[' | ']'))
        && !key.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> String {
        let words = line.split(' ').map(OsString::from);
        rewrite(words).into_iter().map(|word| word.into_string().expect("UTF-8")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn only_dotted_flags_of_spec_verbs_are_rewritten() {
        let same = [
            "trainctl run job.yaml --run-dir=a.b",
            "trainctl logs --a.b=c",
            "trainctl run x --output=json",
            "trainctl",
        ];
        for line in same {
            assert_eq!(rewritten(line), line);
        }
        let want = "trainctl run job.yaml --dotted-override=--optimizer.lr=1e-4 --set a.b=c x.y=1";
        assert_eq!(rewritten("trainctl run job.yaml --optimizer.lr=1e-4 --set a.b=c x.y=1"), want);
    }

    #[test]
    fn a_bare_override_is_told_from_a_path() {
        assert!(is_bare("seed=1") && is_bare("a.b=c/d") && is_bare("a[0].weight=2"));
        assert!(!is_bare("runs/lr=1/job") && !is_bare("job.yaml") && !is_bare("=x") && !is_bare("./a=b"));
    }
}
