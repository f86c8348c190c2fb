//! Reading the weights of a Hugging Face directory: `model.safetensors`, or its shards with an index.
//!
//! Headers are read when the directory is opened, tensors when they are asked for. Nothing is written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;
use serde::Deserialize;
use serde_json::{Map, Value};
use trainctl_spec::model::Saved;

use crate::state_hash::{element_bytes, elements};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// The format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// There are no weights in it.
    #[error(
        "{} has no {SINGLE} and no {INDEX}; save the model with transformers' `save_pretrained`, which writes them",
        path.display()
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// A file is not what its name says.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// In which way.
        reason: String,
    },
}

#[derive(Debug)]
struct Place {
    file: usize,
    start: u64,
    saved: Saved,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// A directory as `save_pretrained` writes it.
#[derive(Debug)]
pub struct Directory {
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Place>,
    config: Option<Map<String, Value>>,
}

impl Directory {
    /// Reads the headers of all weights.
    ///
    /// # Errors
    /// [`Error`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mut directory = Self { files: Vec::new(), tensors: BTreeMap::new(), config: None };
        if let Some(text) = read_if_there(&path.join(CONFIG))? {
            directory.config = Some(parse(&path.join(CONFIG), &text)?);
        }
        // transformers prefers the single file too.
        if path.join(SINGLE).is_file() {
            directory.add(path.join(SINGLE), None)?;
            return Ok(directory);
        }
        let index = path.join(INDEX);
        let text = read_if_there(&index)?.ok_or_else(|| Error::NoWeights { path: path.to_owned() })?;
        let Index { weight_map } = parse(&index, &text)?;
        let mut by_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in &weight_map {
            by_file.entry(file).or_default().push(name);
        }
        for (file, names) in by_file {
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return Err(content(&index, format!("{file:?} is no file name")));
            }
            directory.add(path.join(file), Some(&names))?;
        }
        Ok(directory)
    }

    /// Every tensor by name.
    pub fn tensors(&self) -> BTreeMap<String, Saved> {
        self.tensors.iter().map(|(name, place)| (name.clone(), place.saved.clone())).collect()
    }

    /// `config.json`, if there is one.
    pub fn config(&self) -> Option<&Map<String, Value>> {
        self.config.as_ref()
    }

    /// The bytes of a tensor, row-major, into `out`, which is made as long as they are. `None` if there is no such tensor.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(&self, name: &str, out: &mut Vec<u8>) -> Result<Option<&Saved>, Error> {
        let Some(Place { file, start, saved }) = self.tensors.get(name) else { return Ok(None) };
        let path = &self.files[*file];
        let failed = |source| Error::Io { path: path.clone(), source };
        out.resize(elements(&saved.shape) as usize * element_bytes(&saved.dtype).unwrap_or(0), 0);
        File::open(path).and_then(|file| file.read_exact_at(out, *start)).map_err(failed)?;
        Ok(Some(saved))
    }

    /// Adds a file's tensors; with `names` exactly those.
    fn add(&mut self, path: PathBuf, names: Option<&[&str]>) -> Result<(), Error> {
        let failed = |source| Error::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(failed)?;
        let length = u64::from_le_bytes(length);
        let data = length.checked_add(8).filter(|end| *end <= size && length <= MAX_HEADER);
        let data = data.ok_or_else(|| content(&path, format!("is no safetensors file: a header of {length} bytes")))?;
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(failed)?;
        let metadata: Metadata = parse(&path, &header)?;
        let found = metadata.tensors();
        let all: Vec<&str> = found.keys().map(String::as_str).collect();
        for &name in names.unwrap_or(&all) {
            let Some(tensor) = found.get(name) else {
                return Err(content(&path, format!("has no tensor {name}, which {INDEX} places there")));
            };
            let saved =
                Saved { dtype: tensor.dtype.to_string(), shape: tensor.shape.iter().map(|n| *n as u64).collect() };
            let (start, end) = (tensor.data_offsets.0 as u64, tensor.data_offsets.1 as u64);
            let bytes = element_bytes(&saved.dtype).map(|size| elements(&saved.shape) * size as u64);
            if bytes.is_some_and(|bytes| bytes != end.saturating_sub(start)) || end > size - data {
                return Err(content(&path, format!("is cut off or damaged: {name} does not lie in it")));
            }
            self.tensors.insert(name.to_owned(), Place { file: self.files.len(), start: data + start, saved });
        }
        self.files.push(path);
        Ok(())
    }
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path: path.to_owned(), source }),
    }
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, bytes: &'a [u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|error| content(path, format!("is not understood: {error}")))
}

fn content(path: &Path, reason: String) -> Error {
    Error::Content { path: path.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/hf-gpt2").join(name)
    }

    #[test]
    fn one_file_and_shards_hold_the_same_tensors() {
        let (single, sharded) =
            (Directory::open(&golden("single")).unwrap(), Directory::open(&golden("sharded")).unwrap());
        assert_eq!(single.tensors(), sharded.tensors());
        assert_eq!((single.files.len(), sharded.files.len()), (1, 3));
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for (name, saved) in single.tensors() {
            assert_eq!(single.read(&name, &mut one).unwrap(), Some(&saved));
            assert_eq!(sharded.read(&name, &mut other).unwrap(), Some(&saved));
            assert_eq!(one, other, "{name}");
        }
        assert_eq!(single.read("nothing", &mut one).unwrap(), None);
        assert_eq!(single.config().unwrap()["model_type"], "gpt2");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let said = || Directory::open(dir.path()).unwrap_err().to_string();
        assert!(said().contains("has no model.safetensors"), "{}", said());
        let index = dir.path().join(INDEX);
        std::fs::write(&index, r#"{"weight_map": {"a": "../x.safetensors"}}"#).unwrap();
        assert!(said().contains("\"../x.safetensors\" is no file name"), "{}", said());
        std::fs::write(&index, r#"{"weight_map": {"a": "x.safetensors"}}"#).unwrap();
        assert!(said().contains("x.safetensors: No such file"), "{}", said());
        let bytes = std::fs::read(golden("single").join(SINGLE)).unwrap();
        std::fs::write(dir.path().join("x.safetensors"), &bytes).unwrap();
        assert!(said().contains("has no tensor a, which model.safetensors.index.json places there"), "{}", said());
        std::fs::remove_file(&index).unwrap();
        std::fs::write(dir.path().join(SINGLE), &bytes[..bytes.len() - 1]).unwrap();
        assert!(said().contains("model.safetensors: is cut off or damaged"), "{}", said());
    }
}
