//! Refusals as gRPC statuses: a message for people, and the details of google.rpc's error model for programs.

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, PreconditionViolation, StatusExt};
use trainctl_spec::Faults;
use trainctl_store::admission::{LookError, Refusal};
use trainctl_store::tenure::AcquireError;

use crate::runs;

/// A spec with faults: INVALID_ARGUMENT with one `BadRequest` field violation per fault.
pub fn bad_spec(faults: &Faults) -> Status {
    let violations = faults.errors().map(|fault| FieldViolation::new(&fault.key, fault.to_string()));
    let details = ErrorDetails::with_bad_request(violations.collect::<Vec<_>>());
    Status::with_error_details(Code::InvalidArgument, faults.to_string(), details)
}

/// A submission that was not admitted: ALREADY_EXISTS names the live job as a `ResourceInfo`, FAILED_PRECONDITION lists what
/// stands against it.
pub fn not_admitted(refusal: &Refusal, run_dir: &str) -> Status {
    let message = format!("{run_dir}: {refusal}");
    let violated = |kind: &str, subjects: &[String]| {
        let violations = subjects.iter().map(|subject| PreconditionViolation::new(kind, run_dir, subject));
        ErrorDetails::with_precondition_failure(violations.collect::<Vec<_>>())
    };
    let (code, details) = match refusal {
        Refusal::LiveJob(job) => {
            let details = ErrorDetails::with_resource_info("job", job, "", "it lives in this run directory");
            (Code::AlreadyExists, details)
        }
        Refusal::NotEmpty => (Code::FailedPrecondition, violated("NOT_EMPTY", &["--fresh".to_owned()])),
        Refusal::Differs(keys) => (Code::FailedPrecondition, violated("DIFFERS", keys)),
        Refusal::Missing { reason, .. } => {
            (Code::FailedPrecondition, violated("NOTHING_COMMITTED", std::slice::from_ref(reason)))
        }
        Refusal::NothingToDo { name, .. } => (Code::FailedPrecondition, violated("NOTHING_TO_DO", &[name.to_string()])),
        Refusal::CannotBegin { reasons, .. } => (Code::FailedPrecondition, violated("CANNOT_BEGIN", reasons)),
    };
    Status::with_error_details(code, message, details)
}

/// Nothing could be decided on a submission.
pub fn not_looked(error: &LookError) -> Status {
    match error {
        LookError::Asked(_) => Status::invalid_argument(error.to_string()),
        LookError::Spec { .. } => Status::failed_precondition(error.to_string()),
        LookError::Store(_) => Status::internal(error.to_string()),
    }
}

/// A run directory that cannot be held: ALREADY_EXISTS with its holder as a `ResourceInfo`, else INTERNAL.
pub fn not_held(error: &runs::Error) -> Status {
    match error {
        runs::Error::Tenure(AcquireError::LiveHolder { holder, .. }) => {
            let address = holder.info.addresses.first().map(|address| format!("{address}:{}", holder.info.port));
            let owner = format!("pid {} on {}", holder.info.process.pid, holder.info.process.host);
            let details =
                ErrorDetails::with_resource_info("coordinator", address.unwrap_or_default(), owner, "holds it");
            Status::with_error_details(Code::AlreadyExists, error.to_string(), details)
        }
        _ => Status::internal(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_can_read_what_a_person_is_told() {
        let faults = trainctl_spec::JobSpec::from_yaml("name: a b").unwrap_err();
        let details = bad_spec(&faults).get_error_details();
        let fields = details.bad_request().unwrap().field_violations.iter().map(|v| v.field.clone());
        assert!(fields.collect::<Vec<_>>().contains(&"name".to_owned()));

        let differs = Refusal::Differs(vec!["seed: 1 → 2".to_owned()]);
        let status = not_admitted(&differs, "/runs/a");
        assert_eq!(status.code(), Code::FailedPrecondition);
        let details = status.get_error_details();
        let violations = &details.precondition_failure().unwrap().violations;
        assert_eq!((violations[0].r#type.as_str(), violations[0].description.as_str()), ("DIFFERS", "seed: 1 → 2"));
    }
}
