//! Index caches on disk: Megatron's file names, with a side-car that says what they were built from (D4).
//!
//! Megatron's names hash the request, not the data, so new data at an old path would silently get the old index. Here a
//! `…-fingerprint.json` holds size, mtime and a hash of both ends of the data files, and size and hash of both ends of each array. Anything
//! that does not match, or is torn, is rebuilt and never used. Each file is written to a temporary name and renamed, the side-car last; two
//! processes that build at once write the same bytes. The middle of a file is not hashed: arrays are synced before the side-car names them, and a
//! data file that changes gets another mtime.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::durable;
use crate::error::{Error, Result};
use crate::index::Rules;
use crate::npy::Ints;

/// Bytes hashed at each end of a file.
const END: u64 = 64 << 10;

/// One file's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    size: u64,
    /// Nanoseconds since 1970; 0 for arrays, whose time says nothing.
    mtime_ns: i128,
    /// blake3 of the first and last 64 KiB.
    ends: String,
}

impl Mark {
    /// Of a data file.
    pub(crate) fn of_data(path: &Path) -> Result<Self> {
        Self::of(path, true)
    }

    fn of(path: &Path, with_time: bool) -> Result<Self> {
        let mut file = File::open(path).map_err(Error::io("open", path))?;
        let metadata = file.metadata().map_err(Error::io("read the size of", path))?;
        let size = metadata.len();
        let mut hasher = blake3::Hasher::new();
        let mut read = |from: u64, file: &mut File| -> std::io::Result<()> {
            file.seek(SeekFrom::Start(from))?;
            let mut bytes = Vec::new();
            file.take(END).read_to_end(&mut bytes)?;
            hasher.update(&bytes);
            Ok(())
        };
        read(0, &mut file).and_then(|()| read(size.saturating_sub(END), &mut file)).map_err(Error::io("read", path))?;
        let mtime_ns = if with_time {
            i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec())
        } else {
            0
        };
        Ok(Self { size, mtime_ns, ends: hasher.finalize().to_hex().to_string() })
    }
}

/// What an index was built from: besides the request, which the file's name hashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Source {
    /// Marks of the data files; none for a blend, whose parts have their own.
    pub(crate) data: Vec<Mark>,
    pub(crate) rules: Option<Rules>,
    /// Lengths of a blend's parts.
    pub(crate) part_lengths: Vec<u64>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SideCar {
    version: u32,
    source: Source,
    arrays: Vec<Mark>,
}

const SIDE_CAR_VERSION: u32 = 1;

/// Where the files of one index lie, and its arrays' names and columns.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    stem: String,
    arrays: &'static [(&'static str, usize)],
}

impl Cache {
    /// Files `<folder>/<stem>-…`; each array has a name and a number of columns.
    pub(crate) fn new(folder: PathBuf, stem: String, arrays: &'static [(&'static str, usize)]) -> Self {
        Self { folder, stem, arrays }
    }

    pub(crate) fn path(&self, ending: &str) -> PathBuf {
        self.folder.join(format!("{}-{ending}", self.stem))
    }

    /// The arrays, if they are there, whole, and built from `source`; `None` and a reason in the log otherwise.
    pub(crate) fn load(&self, source: &Source) -> Option<Vec<Ints>> {
        match self.try_load(source) {
            Ok(arrays) => Some(arrays),
            Err(reason) => {
                tracing::info!(index = %self.path("*").display(), reason, "index cache is not usable, building it");
                None
            }
        }
    }

    fn try_load(&self, source: &Source) -> Result<Vec<Ints>, String> {
        let path = self.path("fingerprint.json");
        let text = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let car: SideCar = serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        if car.version != SIDE_CAR_VERSION {
            return Err(format!("fingerprint version {}, not {SIDE_CAR_VERSION}", car.version));
        }
        if car.source != *source {
            return Err("the data changed since it was built".to_owned());
        }
        if car.arrays.len() != self.arrays.len() {
            return Err(format!("fingerprint of {} arrays, not {}", car.arrays.len(), self.arrays.len()));
        }
        let mut arrays = Vec::with_capacity(self.arrays.len());
        for ((name, columns), mark) in self.arrays.iter().zip(&car.arrays) {
            let path = self.path(&format!("{name}.npy"));
            // Mapped first, marked second: whatever is renamed over it afterwards, the mapped file had to match.
            let array = Ints::load(&path, *columns).map_err(|error| error.to_string())?;
            if Mark::of(&path, false).map_err(|error| error.to_string())? != *mark {
                return Err(format!("{} is not the file that was written", path.display()));
            }
            arrays.push(array);
        }
        Ok(arrays)
    }

    /// Writes description, arrays and, last, the side-car.
    pub(crate) fn save(&self, description: &str, source: &Source, arrays: &[&Ints]) -> Result<()> {
        fs::create_dir_all(&self.folder).map_err(Error::io("create the directory", &self.folder))?;
        durable::write(&self.path("description.txt"), description.as_bytes())?;
        let mut marks = Vec::with_capacity(arrays.len());
        for ((name, columns), array) in self.arrays.iter().zip(arrays) {
            let path = self.path(&format!("{name}.npy"));
            array.save(&path, *columns)?;
            marks.push(Mark::of(&path, false)?);
        }
        let car = SideCar { version: SIDE_CAR_VERSION, source: source.clone(), arrays: marks };
        let path = self.path("fingerprint.json");
        let text = serde_json::to_vec_pretty(&car).map_err(|error| Error::Io {
            action: "write",
            path: path.clone(),
            source: error.into(),
        })?;
        durable::write(&path, &text)
    }

    /// Loads, else builds and saves. An index that cannot be saved (a read-only disk) is used from memory with a warning.
    pub(crate) fn load_or_build(
        &self,
        description: &str,
        source: &Source,
        build: impl FnOnce() -> Result<Vec<Ints>>,
    ) -> Result<Vec<Ints>> {
        if let Some(arrays) = self.load(source) {
            return Ok(arrays);
        }
        let arrays = build()?;
        if let Err(error) = self.save(description, source, &arrays.iter().collect::<Vec<_>>()) {
            tracing::warn!(%error, "cannot save the index cache; every process builds it in its own memory. Set dataset.index_mapping_dir to a directory that can be written");
            return Ok(arrays);
        }
        // Mapped pages are shared by the ranks of a node; the built ones are not.
        Ok(self.load(source).unwrap_or(arrays))
    }
}
