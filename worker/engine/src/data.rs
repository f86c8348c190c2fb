//! Samples as tensors.

use std::ops::Range;

use tch::{Device, Tensor};
use trainctl_dataset::{CorpusCounts, Samples, Split, open_split_after};
use trainctl_spec::job::Dataset;
use trainctl_store::fault::{self, FailPoint};

use crate::Error;
use crate::executor::Batch;

/// One split of one data set, ready to be read in micro-batches.
pub struct Source {
    name: String,
    samples: Samples,
    seq_length: usize,
    vocab: i64,
    device: Device,
    sample: Vec<i64>,
    ids: Vec<i64>,
    targets: Vec<i64>,
}

impl Source {
    /// Opens `split` of `dataset` for `num_samples` samples, behind those that were `used` of each corpus. `name` is `train` or
    /// the validation set's name; token ids must be below `vocab`.
    pub fn open(
        name: &str,
        dataset: &Dataset,
        split: Split,
        num_samples: u64,
        used: &CorpusCounts,
        vocab: i64,
        device: Device,
    ) -> Result<Self, Error> {
        let samples = open_split_after(dataset, split, Some(num_samples), used)
            .map_err(|source| Error::Data { what: format!("the {name} set"), source: Box::new(source) })?;
        Ok(Self {
            name: name.to_owned(),
            samples,
            seq_length: dataset.seq_length as usize,
            vocab,
            device,
            sample: Vec::new(),
            ids: Vec::new(),
            targets: Vec::new(),
        })
    }

    /// Samples that can be read.
    pub fn len(&self) -> u64 {
        self.samples.len()
    }

    /// Is there nothing to read?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Samples of each corpus that are used when all below sampler position `position` are read.
    pub fn used(&self, position: u64) -> CorpusCounts {
        self.samples.used(position)
    }

    /// Tokens of one sample, not counting the one more that is only a label.
    pub fn seq_length(&self) -> u64 {
        self.seq_length as u64
    }

    /// The samples `range`, whose first is sequence `first_sequence` of the global batch.
    pub fn batch(&mut self, range: Range<u64>, first_sequence: u64) -> Result<Batch, Error> {
        fault::pass(FailPoint::DATA_BATCH)
            .map_err(|source| Error::Data { what: format!("the {} set", self.name), source: source.into() })?;
        self.ids.clear();
        self.targets.clear();
        let rows = range.end.saturating_sub(range.start);
        for id in range {
            self.read(id)?;
            self.ids.extend_from_slice(&self.sample[..self.seq_length]);
            self.targets.extend_from_slice(&self.sample[1..]);
        }
        let shape = [rows.cast_signed(), self.seq_length as i64];
        let ids = Tensor::f_from_slice(&self.ids)?.f_view(shape)?.f_to(self.device)?;
        let targets = Tensor::f_from_slice(&self.targets)?.f_to(self.device)?;
        Ok(Batch { ids, targets, first_sequence })
    }

    fn read(&mut self, id: u64) -> Result<(), Error> {
        let what = || format!("sample {id} of the {} set", self.name);
        self.samples
            .tokens(id, &mut self.sample)
            .map_err(|source| Error::Data { what: what(), source: Box::new(source) })?;
        if self.sample.len() != self.seq_length + 1 {
            let why = format!("{} tokens where seq_length + 1 = {} belong", self.sample.len(), self.seq_length + 1);
            return Err(Error::Data { what: what(), source: why.into() });
        }
        match self.sample.iter().find(|&&t| t < 0 || t >= self.vocab) {
            None => Ok(()),
            Some(&token) => Err(Error::Token { set: self.name.clone(), sample: id, token, vocab: self.vocab }),
        }
    }
}
