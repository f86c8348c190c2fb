//! `trainctl export`

use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::Args;
use trainctl_store::export::{Dtype, ExportError, ExportOptions, Exported, parse_size};

use super::checkpoints::bar;
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line, note, people, size};
use crate::run_place::{RunPlace, RunRef, failure};

/// Write a checkpoint as a Hugging Face directory
///
/// The directory is what AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained load. It appears whole or not
/// at all. Memory does not depend on the size of the model.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  trainctl export --from runs/gpt2-124m --to gpt2-124m-hf\n  trainctl export --from runs/gpt2-124m/LOWEST_VAL --to out --dtype bf16 --max-shard-size 2GB"
)]
pub(super) struct Export {
    /// The checkpoint; without a name the latest one of the run. RUN/weights/NAME is a weights-only one
    #[arg(long, value_name = "RUN[/NAME]")]
    from: RunRef,
    /// New or empty directory
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// fp32, bf16 or fp16 [default: as the model was trained; fp32 of a bf16 run takes the master weights]
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<Dtype>,
    /// Largest safetensors file: KB, MB, GB are decimal, KiB, MiB, GiB binary
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
    /// Tokenizer directory or tokenizer.json [default: the run's dataset.tokenizer]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

impl Export {
    pub(super) async fn run(self) -> Outcome {
        let place = RunPlace::open(&self.from.run)?;
        let checkpoint = place.resolve(&self.from).await?.checkpoint;
        let options = ExportOptions {
            dtype: self.dtype,
            max_shard_bytes: self.max_shard_size,
            tokenizer: self.tokenizer,
            pin: place.has_pins(),
        };
        let bar = bar(checkpoint.manifest.total_bytes(), &checkpoint.name().to_string());
        let shown = bar.clone();
        let progress = move |done, total| {
            shown.set_length(total);
            shown.set_position(done);
            ControlFlow::Continue(())
        };
        let store = place.store(self.from.weights);
        let exported = store.export(checkpoint.name(), Some(&checkpoint.hash), &self.to, &options, progress).await;
        bar.finish_and_clear();
        let exported = exported.map_err(refusal)?;
        exported.warnings.iter().for_each(|warning| note(&format!("warning: {warning}")));
        if self.output.is_json() {
            json(&exported)?;
        } else {
            print(&exported)?;
        }
        Ok(Exit::Ok)
    }
}

fn print(exported: &Exported) -> Result<(), Failure> {
    let Exported { path, checkpoint, files, parameters, bytes, dtype, .. } = exported;
    line(&format!(
        "{}: {checkpoint}, {} parameters in {dtype}, {} of weights",
        path.display(),
        people(*parameters),
        size(*bytes)
    ))?;
    files.iter().try_for_each(|file| line(&format!("  {file}")))
}

fn refusal(error: ExportError) -> Failure {
    match error {
        ExportError::Store(error) => failure(error),
        ExportError::Stopped => Failure::internal(error.to_string()),
        ExportError::Target { .. } | ExportError::Overflow { .. } | ExportError::Tokenizer { .. } => {
            Failure::usage(error.to_string())
        }
        ExportError::Spec { .. } | ExportError::Tensors { .. } | ExportError::Dtype { .. } => {
            Failure { exit: Exit::JobFailed, message: error.to_string() }
        }
    }
}
