//! Loading a committed checkpoint at any world size (C8).
//!
//! First everything is checked against the headers, then tensors are read: a checkpoint of another model is refused with
//! the whole list of differences before a single weight has changed.

use std::collections::BTreeMap;

use tch::Tensor;
use trainctl_store::Location;
use trainctl_store::layout::CheckpointName;
use trainctl_store::shard::{ShardReader, TensorInfo};

use super::{EXP_AVG, EXP_AVG_SQ, MASTER, TRAINER_STATE, TrainerState, dtype};
use crate::error::{Error, TensorFault, TensorFaults};
use crate::optim::AdamW;
use crate::params::Parameters;

/// Loads weights and moments from the checkpoint `name` in `place`, whose manifest must hash to `manifest`
/// (hexadecimal): never from a pointer (C9). Every byte is verified while it is read.
///
/// # Errors
/// [`Error::Misfit`] when its tensors are not this model's (nothing has changed then), [`Error::Load`] otherwise.
pub fn load(
    place: &Location,
    name: &str,
    manifest: &str,
    params: &mut Parameters,
    optimizer: &mut AdamW,
) -> Result<TrainerState, Error> {
    let fail = |why: String| Error::Load { name: name.to_owned(), why };
    let parsed: CheckpointName = name.parse().map_err(|e| fail(format!("{e}")))?;
    let mut reader = ShardReader::open_at(place, parsed, Some(manifest)).map_err(|e| fail(e.to_string()))?;
    let trainer = reader
        .read_file(TRAINER_STATE)
        .map_err(|e| fail(e.to_string()))?
        .ok_or_else(|| fail(format!("{TRAINER_STATE} is missing")))?;
    let trainer: TrainerState = serde_json::from_slice(&trainer).map_err(|e| fail(format!("{TRAINER_STATE}: {e}")))?;

    let mut wanted = wanted(params, optimizer);
    let faults = differences(&wanted, reader.tensors());
    if !faults.is_empty() {
        return Err(Error::Misfit { name: name.to_owned(), faults: TensorFaults(faults) });
    }
    let mut bytes = Vec::new();
    for tensor_name in reader.in_file_order() {
        let (Some(tensor), Some(info)) = (wanted.get_mut(&tensor_name), reader.info(&tensor_name)) else { continue };
        bytes.resize(info.bytes() as usize, 0);
        reader.read_tensor(&tensor_name, &mut bytes).map_err(|e| fail(e.to_string()))?;
        trainctl_collective::copy_from_bytes(tensor, &bytes).map_err(Error::Shim)?;
    }
    Ok(trainer)
}

/// What this model and optimizer need, by the checkpoint's names. The handles share storage with what they name.
fn wanted(params: &Parameters, optimizer: &AdamW) -> BTreeMap<String, Tensor> {
    let (exp_avg, exp_avg_sq) = optimizer.moments();
    let mut wanted = BTreeMap::new();
    for (i, entry) in params.entries().iter().enumerate() {
        let mut add = |name: String, tensor: &Tensor| drop(wanted.insert(name, tensor.shallow_clone()));
        add(format!("model/{}", entry.name), &params.values()[i]);
        add(format!("optim/{EXP_AVG}{}", entry.name), &exp_avg[i]);
        add(format!("optim/{EXP_AVG_SQ}{}", entry.name), &exp_avg_sq[i]);
        if params.has_masters() {
            add(format!("optim/{MASTER}{}", entry.name), &params.masters()[i]);
        }
    }
    wanted
}

fn differences<'a>(
    wanted: &BTreeMap<String, Tensor>,
    found: impl Iterator<Item = (&'a str, &'a TensorInfo)>,
) -> Vec<TensorFault> {
    let shape = |info: &TensorInfo| info.shape.iter().map(|n| n.cast_signed()).collect::<Vec<_>>();
    let found: BTreeMap<&str, &TensorInfo> = found.collect();
    let mut faults = Vec::new();
    for (name, tensor) in wanted {
        let want = (dtype(tensor.kind()).unwrap_or("?").to_owned(), tensor.size());
        match found.get(name.as_str()) {
            None => faults.push(TensorFault::Missing { name: name.clone(), want: want.1 }),
            Some(info) => {
                let found = (info.dtype.clone(), shape(info));
                if found != want {
                    faults.push(TensorFault::Differs { name: name.clone(), want, found });
                }
            }
        }
    }
    let unknown = found.iter().filter(|(name, _)| !wanted.contains_key(**name));
    faults.extend(unknown.map(|(name, info)| TensorFault::Unknown { name: (*name).to_owned(), found: shape(info) }));
    faults
}
