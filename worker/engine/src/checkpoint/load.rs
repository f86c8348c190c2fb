//! Loading a committed checkpoint at any world size (C8).
//!
//! First everything is checked against the headers, then tensors are read: a checkpoint of another model is refused with
//! the whole list of differences before a single weight has changed.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use tch::{Kind, Tensor};
use trainctl_spec::model::{Saved, WEIGHT_TYPES};
use trainctl_spec::report::SaveKind;
use trainctl_spec::start::StartFrom;
use trainctl_store::Location;
use trainctl_store::fault::{self, FailPoint};
use trainctl_store::layout::CheckpointName;
use trainctl_store::shard::{Part, Peers, Read, ShardReader, TensorInfo};
use trainctl_store::state_hash;

use super::{EXP_AVG, EXP_AVG_SQ, MASTER, TrainerState, dtype};
use crate::error::{Error, TensorFault, TensorFaults};
use crate::optim::AdamW;
use crate::params::Parameters;

/// Set to anything: after a load the state in memory is hashed and must have the manifest's hash.
pub const VERIFY_ENV: &str = "TRAINCTL_VERIFY_LOAD";

/// Weights of other types are read in groups of so many bytes, and then converted.
const GROUP_BYTES: u64 = 256 << 20;

/// How the ranks of a generation load together.
#[derive(Clone, Copy)]
pub struct Together<'a> {
    /// Threads that this rank reads with.
    pub threads: NonZeroUsize,
    /// This rank among those of its host, which share the proof of what they all read.
    pub peers: Peers,
    /// Waits until every rank has read all without an error. What a peer proved counts only from then on.
    pub all_have_read: &'a dyn Fn() -> Result<(), Error>,
}

/// Loads what `from.keep` says of the checkpoint `from.name` at `place`, whose manifest must hash to `from.manifest_blake3`:
/// never from a pointer (C9). Every block is verified while it is read, by this rank or by one of its peers. Returns the
/// optimizer updates that the loaded state has seen: 0 where the optimizer begins anew.
///
/// # Errors
/// [`Error::Misfit`] when its tensors are not this model's (nothing has changed then), [`Error::Load`] otherwise;
/// [`Error::Collective`] when another rank could not load.
pub fn load(
    place: &Location,
    from: &StartFrom,
    params: &mut Parameters,
    optimizer: &mut AdamW,
    together: Together<'_>,
) -> Result<u64, Error> {
    let what = format!("checkpoint {}", from.name);
    let fail = |why: String| Error::load(&what, why);
    let stored = |error: trainctl_store::Error| Error::load_stored(&what, &error);
    let name: CheckpointName = from.name.parse().map_err(|e| fail(format!("{e}")))?;
    let reader = ShardReader::open_at(place, name, Some(&from.manifest_blake3)).map_err(stored)?;
    let reader = reader.with_threads(together.threads).with_peers(together.peers);
    if reader.manifest().kind == SaveKind::Weights || !from.keep.optimizer {
        load_weights(&what, &reader, params)?;
        (together.all_have_read)()?;
        return Ok(0);
    }
    let trainer = reader.read_trainer_state().map_err(stored)?;
    let trainer = trainer.ok_or_else(|| fail("the trainer's state of rank 0 is missing".to_owned()))?;
    let trainer: TrainerState =
        serde_json::from_slice(&trainer).map_err(|e| fail(format!("the trainer's state of rank 0: {e}")))?;

    let mut wanted = wanted(params, optimizer);
    let faults = differences(&wanted, reader.tensors());
    if !faults.is_empty() {
        return Err(Error::Misfit { what, faults: TensorFaults(faults) });
    }
    fault::pass(FailPoint::LOAD_STATE).map_err(|e| Error::load_io(&what, &e))?;
    let mut reads = Vec::with_capacity(wanted.len());
    for (name, tensor) in &mut wanted {
        let out = trainctl_collective::bytes_mut(tensor).map_err(Error::Shim)?;
        reads.push(Read { name, part: Part::Whole, out });
    }
    reader.read_into(reads).map_err(stored)?;
    (together.all_have_read)()?;
    if std::env::var_os(VERIFY_ENV).is_some() {
        let (found, wanted) = (hash(&wanted).map_err(fail)?, &reader.manifest().state_hash);
        if found != *wanted {
            return Err(fail(format!("the loaded state hashes to {found}, the manifest says {wanted}")));
        }
        tracing::info!(state_hash = found, "the loaded state has the manifest's hash");
    }
    Ok(trainer.updates)
}

/// Weights of any type into the masters: those of the masters where they were saved, else those of the forward.
fn load_weights(what: &str, reader: &ShardReader, params: &mut Parameters) -> Result<(), Error> {
    let found: BTreeMap<String, Saved> = reader.tensors().map(|(name, info)| (name.to_owned(), saved(info))).collect();
    let mut names = Vec::with_capacity(params.entries().len());
    let mut faults = Vec::new();
    for entry in params.entries() {
        let master = format!("optim/{MASTER}{}", entry.name);
        let name = if found.contains_key(&master) { master } else { format!("model/{}", entry.name) };
        let shape: Vec<u64> = entry.shape.iter().map(|n| n.unsigned_abs()).collect();
        match found.get(&name) {
            None => faults.push(TensorFault::Missing { name: name.clone(), want: shape }),
            Some(saved) if saved.shape != shape || !WEIGHT_TYPES.contains(&saved.dtype.as_str()) => {
                let want = Saved { dtype: WEIGHT_TYPES.join("|"), shape };
                faults.push(TensorFault::Differs { name: name.clone(), want, found: saved.clone() });
            }
            Some(_) => {}
        }
        names.push(name);
    }
    let known = |name: &str| params.entries().iter().any(|entry| entry.name == name);
    let unknown = found.iter().filter(|(name, _)| name.strip_prefix("model/").is_some_and(|name| !known(name)));
    faults.extend(unknown.map(|(name, saved)| TensorFault::Unknown { name: name.clone(), found: saved.clone() }));
    if !faults.is_empty() {
        return Err(Error::Misfit { what: what.to_owned(), faults: TensorFaults(faults) });
    }
    fault::pass(FailPoint::LOAD_STATE).map_err(|e| Error::load_io(what, &e))?;
    let places: BTreeMap<&str, usize> = names.iter().map(String::as_str).zip(0..).collect();
    for group in reader.groups(GROUP_BYTES) {
        let group: Vec<(&str, usize)> = group
            .iter()
            .filter_map(|name| places.get_key_value(name.as_str()))
            .map(|(name, at)| (*name, *at))
            .collect();
        let size = |name: &str| reader.info(name).map_or(0, TensorInfo::bytes) as usize;
        let mut buffers: Vec<Vec<u8>> = group.iter().map(|(name, _)| vec![0; size(name)]).collect();
        let reads = group.iter().zip(&mut buffers).map(|((name, _), out)| Read { name, part: Part::Whole, out });
        reader.read_into(reads).map_err(|e| Error::load_stored(what, &e))?;
        for ((name, at), bytes) in group.iter().zip(&buffers) {
            copy_weights(&mut params.masters_mut()[*at], &found[*name].dtype, bytes)?;
        }
    }
    params.refresh()
}

/// Overwrites an fp32 master with saved bytes of type `dtype`, which is one of [`WEIGHT_TYPES`].
pub(super) fn copy_weights(master: &mut Tensor, dtype: &str, bytes: &[u8]) -> Result<(), Error> {
    let kind = match dtype {
        "F32" => Kind::Float,
        "BF16" => Kind::BFloat16,
        "F16" => Kind::Half,
        other => return Err(Error::Internal(format!("weights of type {other} were let through"))),
    };
    let saved = Tensor::f_from_data_size(bytes, &master.size(), kind)?;
    tch::no_grad(|| Ok(master.f_copy_(&saved).map(drop)?))
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
    let found: BTreeMap<&str, Saved> = found.map(|(name, info)| (name, saved(info))).collect();
    let mut faults = Vec::new();
    for (name, tensor) in wanted {
        let want = Saved { dtype: dtype(tensor.kind()).unwrap_or("?").to_owned(), shape: shape(tensor) };
        match found.get(name.as_str()) {
            None => faults.push(TensorFault::Missing { name: name.clone(), want: want.shape }),
            Some(found) if *found != want => {
                faults.push(TensorFault::Differs { name: name.clone(), want, found: found.clone() });
            }
            Some(_) => {}
        }
    }
    let unknown = found.into_iter().filter(|(name, _)| !wanted.contains_key(*name));
    faults.extend(unknown.map(|(name, found)| TensorFault::Unknown { name: name.to_owned(), found }));
    faults
}

fn saved(info: &TensorInfo) -> Saved {
    Saved { dtype: info.dtype.clone(), shape: info.shape.clone() }
}

fn shape(tensor: &Tensor) -> Vec<u64> {
    tensor.size().iter().map(|n| n.unsigned_abs()).collect()
}

/// The state hash of tensors in memory.
fn hash(tensors: &BTreeMap<String, Tensor>) -> Result<String, String> {
    let mut combiner = state_hash::Combiner::default();
    for (name, tensor) in tensors {
        let bytes = trainctl_collective::bytes(tensor).map_err(|e| e.to_string())?;
        let dtype = dtype(tensor.kind()).unwrap_or("?");
        let digest = state_hash::whole_tensor(name, dtype, &shape(tensor), bytes).map_err(|e| e.to_string())?;
        combiner.add(&digest).map_err(|e| e.to_string())?;
    }
    combiner.finish().map_err(|e| e.to_string())
}
