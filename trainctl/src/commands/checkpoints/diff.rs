//! `trainctl checkpoints diff`

use clap::Args;
use trainctl_store::checkpoints::{Committed, ReadPin, Selector};
use trainctl_store::{CheckpointStore, diff};

use super::bar;
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line, note, people, table};
use crate::run_place::{RunPlace, RunRef, failure};

/// Compare two checkpoints tensor by tensor
///
/// Values are compared in fp64, whatever their types. Ends with 1 if a tensor is missing, has another shape, or differs by
/// more than the tolerance.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  trainctl checkpoints diff runs/a/epoch_0_step_999 LATEST\n  trainctl checkpoints diff runs/a runs/b --weights-only --tolerance 1e-5"
)]
pub(super) struct Diff {
    /// The first checkpoint; without a name the latest one of the run
    #[arg(value_name = "RUN[/NAME]")]
    first: RunRef,
    /// The second one; a name alone is one of the same run
    #[arg(value_name = "RUN[/NAME]|NAME")]
    second: String,
    /// Largest difference of two values that passes
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = tolerance)]
    tolerance: f64,
    /// Compare the model's tensors only
    #[arg(long)]
    weights_only: bool,
    #[command(flatten)]
    output: OutputArgs,
}

fn tolerance(text: &str) -> Result<f64, String> {
    let wrong = || "must be a number ≥ 0, for example 1e-5".to_owned();
    text.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0).ok_or_else(wrong)
}

impl Diff {
    pub(super) async fn run(self) -> Outcome {
        let second = match self.second.parse::<Selector>() {
            Ok(name) => RunRef { name: Some(name), ..self.first.clone() },
            Err(_) => self.second.parse().map_err(Failure::usage)?,
        };
        let (store_a, a, pin_a) = open(&self.first).await?;
        let (store_b, b, pin_b) = open(&second).await?;
        let bytes = if self.weights_only { 0 } else { a.manifest.total_bytes() };
        let bar = bar(bytes, "comparing");
        let (weights_only, shown) = (self.weights_only, bar.clone());
        let (name_a, name_b) = (a.name(), b.name());
        let hashes = (a.hash.clone(), b.hash.clone());
        let compare = move || {
            let first = store_a.reader(name_a, Some(&hashes.0))?;
            let second = store_b.reader(name_b, Some(&hashes.1))?;
            let wanted = |tensor: &str| !weights_only || tensor.starts_with("model/");
            diff::diff(&first, &second, &wanted, &mut |done, total| {
                shown.set_length(total);
                shown.set_position(done);
            })
        };
        let compared = tokio::task::spawn_blocking(compare).await;
        if let Some(warning) = ReadPin::release_all(pin_a.into_iter().chain(pin_b)).await {
            note(&warning);
        }
        let diff = compared.map_err(|error| Failure::internal(error.to_string()))?.map_err(failure)?;
        bar.finish_and_clear();
        let equal = diff.is_within(self.tolerance);
        if self.output.is_json() {
            let [first, second] = [(&self.first, &a), (&second, &b)].map(|(run, checkpoint)| {
                serde_json::json!({ "run": run.run, "name": checkpoint.name(), "manifest": checkpoint.hash })
            });
            json(&serde_json::json!({
                "first": first, "second": second, "tolerance": self.tolerance, "within": equal, "diff": diff,
            }))?;
        } else {
            self.print(&diff, equal)?;
        }
        Ok(if equal { Exit::Ok } else { Exit::JobFailed })
    }

    /// Tensors that differ at all, the largest difference first, then a sentence.
    fn print(&self, diff: &diff::Diff, equal: bool) -> Result<(), Failure> {
        let mut differing: Vec<_> = diff.tensors.iter().filter(|tensor| tensor.unequal > 0).collect();
        differing.sort_by(|a, b| {
            b.nonfinite.cmp(&a.nonfinite).then(b.max.total_cmp(&a.max)).then_with(|| a.name.cmp(&b.name))
        });
        let row = |tensor: &&diff::TensorDiff| {
            let [a, b] = &tensor.dtypes;
            let mut notes = Vec::new();
            if a != b {
                notes.push(format!("{a} and {b}"));
            }
            if tensor.nonfinite > 0 {
                notes.push(format!("{} not finite in one of them", people(tensor.nonfinite)));
            }
            let elements: u64 = tensor.shape.iter().product();
            vec![
                tensor.name.clone(),
                format!("{:.3e}", tensor.max),
                format!("{:.3e}", tensor.rms),
                format!("{} of {}", people(tensor.unequal), people(elements)),
                notes.join(", "),
            ]
        };
        if !differing.is_empty() {
            let rows: Vec<_> = differing.iter().map(row).collect();
            line(&table(&["TENSOR", "MAX", "RMS", "UNEQUAL", ""], &rows))?;
        }
        for (names, which) in [(&diff.only_first, "first"), (&diff.only_second, "second")] {
            for name in names {
                line(&format!("{name} is in the {which} only"))?;
            }
        }
        for tensor in &diff.misshapen {
            line(&format!(
                "{} is {:?} in the first and {:?} in the second",
                tensor.name, tensor.shapes[0], tensor.shapes[1]
            ))?;
        }
        let (count, unequal) = (people(diff.tensors.len() as u64), people(differing.len() as u64));
        let verdict = match (equal, differing.is_empty()) {
            (true, true) => "equal in every value".to_owned(),
            (true, false) => format!("within {:e}; {unequal} of {count} tensors differ", self.tolerance),
            (false, _) => format!("NOT within {:e}; {unequal} of {count} common tensors differ", self.tolerance),
        };
        line(&format!("{count} common tensors: {verdict}"))
    }
}

/// A checkpoint that stays while it is compared.
async fn open(wanted: &RunRef) -> Result<(CheckpointStore, Committed, Option<ReadPin>), Failure> {
    let place = RunPlace::open(&wanted.run)?;
    let name = place.resolve(wanted).await?.checkpoint.name();
    let store = place.store(wanted.weights);
    let pin = match place.has_pins() {
        true => Some(store.pin_to_read(name, "diff").await.map_err(failure)?),
        false => None,
    };
    match store.read_manifest(name).await {
        Ok(checkpoint) => Ok((store, checkpoint, pin)),
        Err(error) => {
            if let Some(warning) = ReadPin::release_all(pin).await {
                note(&warning);
            }
            Err(failure(error))
        }
    }
}
