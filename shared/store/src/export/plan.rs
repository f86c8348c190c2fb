//! What an export writes where, decided before a byte is read.

use std::collections::BTreeMap;

use serde_json::json;
use trainctl_spec::Architecture;

use super::{Dtype, ExportError};
use crate::batches::Whole;
use crate::shard::TensorInfo;
use crate::state_hash::elements;

/// Prefix of weights in a checkpoint.
const MODEL: &str = "model/";
/// Prefix of fp32 master weights in a checkpoint.
const MASTER: &str = "optim/master.";
/// The only file of a model that fits into one.
const SINGLE: &str = "model.safetensors";

/// One tensor on its way.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlannedTensor {
    /// Hugging Face's name.
    pub(super) name: String,
    /// The checkpoint's name of the tensor that is read.
    pub(super) source: String,
    /// Its type there.
    pub(super) from: Dtype,
    /// Its type in the export.
    pub(super) to: Dtype,
    /// Its shape.
    pub(super) shape: Vec<u64>,
}

impl PlannedTensor {
    /// Bytes in the export.
    pub(super) fn bytes(&self) -> u64 {
        elements(&self.shape) * self.to.size() as u64
    }

    /// What is read of it.
    pub(super) fn whole(&self) -> Whole<'_> {
        Whole { name: &self.source, shape: &self.shape, element_bytes: self.from.size() as u64 }
    }

    /// Bytes in the checkpoint.
    pub(super) fn source_bytes(&self) -> u64 {
        elements(&self.shape) * self.from.size() as u64
    }
}

/// One safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlannedFile {
    /// Its name.
    pub(super) path: String,
    /// What it holds, in its order.
    pub(super) tensors: Vec<PlannedTensor>,
}

/// All safetensors files.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// In order of their numbers.
    pub(super) files: Vec<PlannedFile>,
    /// The type that most bytes have, for `config.json`.
    pub(super) dtype: Dtype,
}

impl Plan {
    /// Decides what is read and where it goes. The tensors are those of the architecture, no more and no fewer. `dtype`
    /// `None` keeps what the checkpoint's model has. A wider source is the better one: what is cast to fp32 or fp16 is
    /// taken from the master weights where there are any.
    ///
    /// # Errors
    /// [`ExportError::Tensors`] lists everything that is missing, unknown or misshapen; [`ExportError::Dtype`].
    pub(super) fn new<'a>(
        architecture: &Architecture,
        found: impl Iterator<Item = (&'a str, &'a TensorInfo)>,
        dtype: Option<Dtype>,
        max_shard_bytes: u64,
    ) -> Result<Self, ExportError> {
        let found: BTreeMap<&str, &TensorInfo> = found.collect();
        check_names(architecture, &found)?;
        let mut tensors = Vec::new();
        for parameter in architecture.parameters() {
            let stored = format!("{MODEL}{}", parameter.name);
            let master = format!("{MASTER}{}", parameter.name);
            let Some(model) = found.get(stored.as_str()) else { continue };
            let dtype_of = |info: &TensorInfo, name: &str| {
                let unknown = || ExportError::Dtype { name: name.to_owned(), dtype: info.dtype.clone() };
                Dtype::from_safetensors(&info.dtype).ok_or_else(unknown)
            };
            let own = dtype_of(model, &stored)?;
            let to = dtype.unwrap_or(own);
            let better = found.get(master.as_str()).filter(|info| to != own && info.shape == model.shape);
            let (source, from) = match better {
                Some(info) => (master.clone(), dtype_of(info, &master)?),
                None => (stored, own),
            };
            tensors.push(PlannedTensor { name: parameter.name, source, from, to, shape: model.shape.clone() });
        }
        // By name, as the shards of a checkpoint are: so each of them is read from its beginning to its end.
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let dtype = widest_share(&tensors);
        Ok(Self { files: deal(tensors, max_shard_bytes), dtype })
    }

    /// Bytes that will be read.
    pub(super) fn source_bytes(&self) -> u64 {
        self.tensors().map(PlannedTensor::source_bytes).sum()
    }

    /// Bytes of all tensors in the export.
    pub(super) fn bytes(&self) -> u64 {
        self.tensors().map(PlannedTensor::bytes).sum()
    }

    /// Elements of all tensors.
    pub(super) fn parameters(&self) -> u64 {
        self.tensors().map(|tensor| elements(&tensor.shape)).sum()
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &PlannedTensor> {
        self.files.iter().flat_map(|file| &file.tensors)
    }

    /// `model.safetensors.index.json`; `None` where one file holds all.
    pub(super) fn index(&self) -> Option<serde_json::Value> {
        if self.files.len() < 2 {
            return None;
        }
        let map: BTreeMap<&str, &str> = self
            .files
            .iter()
            .flat_map(|file| file.tensors.iter().map(|tensor| (tensor.name.as_str(), file.path.as_str())))
            .collect();
        let metadata = json!({ "total_parameters": self.parameters(), "total_size": self.bytes() });
        Some(json!({ "metadata": metadata, "weight_map": map }))
    }
}

fn check_names(architecture: &Architecture, found: &BTreeMap<&str, &TensorInfo>) -> Result<(), ExportError> {
    let mut faults = Vec::new();
    let wanted: BTreeMap<String, Vec<u64>> = architecture
        .parameters()
        .into_iter()
        .map(|parameter| (format!("{MODEL}{}", parameter.name), parameter.shape))
        .collect();
    for (name, shape) in &wanted {
        match found.get(name.as_str()) {
            None => faults.push(format!("{name} {shape:?} is missing")),
            Some(info) if info.shape != *shape => {
                faults.push(format!("{name} is {:?}, the model's config says {shape:?}", info.shape));
            }
            Some(_) => {}
        }
    }
    let unknown = found.iter().filter(|(name, _)| name.starts_with(MODEL) && !wanted.contains_key(**name));
    faults.extend(unknown.map(|(name, info)| format!("{name} {:?} is no tensor of the model", info.shape)));
    if faults.is_empty() { Ok(()) } else { Err(ExportError::Tensors { faults }) }
}

fn widest_share(tensors: &[PlannedTensor]) -> Dtype {
    let mut bytes: BTreeMap<Dtype, u64> = BTreeMap::new();
    tensors.iter().for_each(|tensor| *bytes.entry(tensor.to).or_default() += tensor.bytes());
    bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map_or(Dtype::F32, |(dtype, _)| dtype)
}

/// Deals tensors to files as `huggingface_hub.split_torch_state_dict_into_shards` does: in order, a new file where the next
/// tensor would go beyond the limit, and a file of its own for a tensor that is larger than the limit.
fn deal(tensors: Vec<PlannedTensor>, max_bytes: u64) -> Vec<PlannedFile> {
    let (mut files, mut current, mut filled) = (Vec::new(), Vec::new(), 0);
    for tensor in tensors {
        let bytes = tensor.bytes();
        if bytes > max_bytes {
            files.push(vec![tensor]);
            continue;
        }
        if filled + bytes > max_bytes {
            files.push(std::mem::take(&mut current));
            filled = 0;
        }
        filled += bytes;
        current.push(tensor);
    }
    if !current.is_empty() {
        files.push(current);
    }
    let count = files.len();
    let path = |index: usize| match count {
        1 => SINGLE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let mut planned: Vec<PlannedFile> = Vec::with_capacity(count);
    for (index, mut tensors) in files.into_iter().enumerate() {
        // Wide elements first: so every tensor is aligned to its elements.
        tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.to.size()));
        planned.push(PlannedFile { path: path(index), tensors });
    }
    planned
}
