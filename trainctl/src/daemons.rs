//! Where the daemons' programs are: beside this one, as they are installed and built.

use std::path::PathBuf;

use crate::exit::Failure;

/// Path of a program in the folder of this one.
pub(crate) fn beside(name: &str) -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().map_err(|error| Failure::internal(format!("find own program: {error}")))?;
    let path = own.with_file_name(name);
    if path.is_file() {
        Ok(path)
    } else {
        Err(Failure::internal(format!(
            "{} is missing: trainctl, trainctl-coordinator, trainctl-worker and trainctl-trainer must lie in one folder; build or install them together (`make build`)",
            path.display()
        )))
    }
}
