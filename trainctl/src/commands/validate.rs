//! `trainctl validate`

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json as print_json, line, note};
use crate::overrides::OverrideArgs;
use crate::spec_file;

/// Check a job spec and the files that it names; nothing is started or written
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl validate job.yaml --set optimizer.lr=1e-4")]
pub(super) struct Validate {
    /// The spec
    #[arg(value_name = "JOB_YAML")]
    spec: PathBuf,
    #[command(flatten)]
    overrides: OverrideArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Validate {
    pub(super) fn run(self) -> Outcome {
        let checked = spec_file::check(&self.spec, &self.overrides.all())?;
        if self.output.is_json() {
            let faults = &checked.faults;
            print_json(&json!({ "valid": !faults.has_errors(), "faults": faults }))?;
            return Ok(if faults.has_errors() { Exit::Usage } else { Exit::Ok });
        }
        if checked.faults.has_errors() {
            return Err(spec_file::refuse(&checked.faults));
        }
        checked.faults.warnings().for_each(|warning| note(&warning.to_string()));
        line(&format!("{}: ok", self.spec.display()))?;
        for fact in checked.spec.iter().flat_map(spec_file::describe) {
            line(&format!("  {fact}"))?;
        }
        Ok(Exit::Ok)
    }
}
