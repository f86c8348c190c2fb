//! Initial weights from a Hugging Face directory (`model.init`).

use std::path::Path;

use tch::{Kind, Tensor};
use trainctl_spec::Architecture;
use trainctl_spec::model::Fit;
use trainctl_store::hugging_face::{self, Directory};
use trainctl_store::is_away;

use super::load::copy_weights;
use crate::Error;
use crate::params::Parameters;

/// Fills the fp32 weights of `params`, which are those of `architecture`, from a directory that `save_pretrained` wrote:
/// one file or shards, fp32, bf16 or fp16, names with or without the class's prefix. Every rank reads it for itself.
///
/// # Errors
/// [`Error::Misfit`] when its tensors are not this model's and [`Error::Load`] when it cannot be read or was made with other
/// hyperparameters; no weight has changed then, unless a read fails halfway.
pub fn load_pretrained(path: &Path, architecture: &Architecture, params: &mut Parameters) -> Result<(), Error> {
    let what = path.display().to_string();
    let fail = |why: String| Error::load(&what, why);
    let failed = |error: hugging_face::Error| match &error {
        hugging_face::Error::Io { source, .. } if is_away(source) => {
            Error::Load { what: what.clone(), why: error.to_string(), away: true }
        }
        _ => fail(error.to_string()),
    };
    let directory = Directory::open(path).map_err(failed)?;
    if let Some(config) = directory.config() {
        let theirs = Architecture::of_weights(config).map_err(|error| fail(format!("config.json: {error}")))?;
        if let Some((key, mine, theirs)) = architecture.disagreements(&theirs).first() {
            return Err(fail(format!("its config.json says {key} {theirs}, model.config says {mine}")));
        }
    }
    let Fit { names, tied_head } =
        architecture.fit(&directory.tensors()).map_err(|faults| Error::Misfit { what: what.clone(), faults })?;
    let mut bytes = Vec::new();
    let mut read = |name: &str, into: &mut Tensor| -> Result<(), Error> {
        let saved = directory.read(name, &mut bytes).map_err(failed)?;
        let saved = saved.ok_or_else(|| Error::Internal(format!("{name} was there and is not")))?;
        copy_weights(into, &saved.dtype, &bytes)
    };
    if let (Some(head), Some(embedding), Some(entry)) = (tied_head, names.first(), params.entries().first()) {
        let empty = || Tensor::f_zeros(entry.shape.as_slice(), (Kind::Float, tch::Device::Cpu));
        let (mut one, mut other) = (empty()?, empty()?);
        read(&head, &mut one)?;
        read(embedding, &mut other)?;
        if !one.f_equal(&other)? {
            return Err(fail(format!(
                "{head} differs from {embedding}, but the model ties them: set model.config.tie_word_embeddings: false"
            )));
        }
    }
    // The architecture's order and the blocks' need not be one.
    let parameters = architecture.parameters();
    for (parameter, name) in parameters.iter().zip(&names) {
        let index = params.entries().iter().position(|entry| entry.name == parameter.name);
        let index = index.ok_or_else(|| Error::Internal(format!("no block has {}", parameter.name)))?;
        read(name, &mut params.masters_mut()[index])?;
    }
    params.refresh()
}
