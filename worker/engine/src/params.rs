//! Parameters and their gradients.
//!
//! A block's gradients are views of one flat fp32 *bucket*, so that reducing a block is one all-reduce with no copy. The
//! values that the forward uses are the fp32 masters themselves, or bf16 copies of them under `precision: bf16`.

use std::ops::Range;

use tch::{Device, Kind, Tensor};
use trainctl_collective::random::{mix, normal};
use trainctl_spec::model::{Init, Parameter};

use crate::Error;

/// One parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Hugging Face name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
}

impl Entry {
    /// Elements.
    pub fn numel(&self) -> i64 {
        self.shape.iter().product()
    }
}

/// All parameters, block after block.
#[derive(Debug)]
pub struct Parameters {
    entries: Vec<Entry>,
    ranges: Vec<Range<usize>>,
    /// fp32, what the optimizer updates.
    masters: Vec<Tensor>,
    /// What the forward reads, leaves that require gradients. The masters' own storage in fp32.
    values: Vec<Tensor>,
    /// Views of `buckets`.
    grads: Vec<Tensor>,
    buckets: Vec<Tensor>,
}

impl Parameters {
    /// Zero-filled parameters for `blocks` (names by block) with the shapes of `known`; `kind` is what the forward
    /// computes in. Fails when the two lists do not name the same tensors.
    pub fn zeros(blocks: &[Vec<String>], known: &[Parameter], kind: Kind, device: Device) -> Result<Self, Error> {
        let shape_of = |name: &str| {
            let found = known.iter().find(|p| p.name == name);
            found.map(|p| p.shape.iter().map(|&n| n as i64).collect::<Vec<_>>())
        };
        let (mut entries, mut ranges) = (Vec::new(), Vec::new());
        for names in blocks {
            let start = entries.len();
            for name in names {
                let shape = shape_of(name).ok_or_else(|| Error::Spec(format!("model.config has no tensor {name}")))?;
                entries.push(Entry { name: name.clone(), shape });
            }
            ranges.push(start..entries.len());
        }
        if let Some(extra) = known.iter().find(|p| entries.iter().all(|e| e.name != p.name)) {
            return Err(Error::Spec(format!("model.config names the tensor {}, which no block uses", extra.name)));
        }
        let mut buckets = Vec::with_capacity(ranges.len());
        let mut grads = Vec::with_capacity(entries.len());
        for range in &ranges {
            let total: i64 = entries[range.clone()].iter().map(Entry::numel).sum();
            let bucket = Tensor::f_zeros([total], (Kind::Float, device))?;
            let mut offset = 0;
            for entry in &entries[range.clone()] {
                grads.push(bucket.f_narrow(0, offset, entry.numel())?.f_view(entry.shape.as_slice())?);
                offset += entry.numel();
            }
            buckets.push(bucket);
        }
        let masters = entries
            .iter()
            .map(|e| Tensor::f_zeros(e.shape.as_slice(), (Kind::Float, device)))
            .collect::<Result<Vec<_>, _>>()?;
        let values = masters
            .iter()
            .map(|m| {
                let value = if kind == Kind::Float { m.f_detach()? } else { m.f_to_kind(kind)? };
                value.f_set_requires_grad(true)
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { entries, ranges, masters, values, grads, buckets })
    }

    /// Fills the masters by the architecture's own initialisation. Each tensor's draws depend on (`seed`, its name) only,
    /// so every rank makes the same weights without a broadcast.
    pub fn init(&mut self, known: &[Parameter], seed: u64) -> Result<(), Error> {
        for (entry, master) in self.entries.iter().zip(&mut self.masters) {
            let Some(parameter) = known.iter().find(|p| p.name == entry.name) else { continue };
            match parameter.init {
                Init::Zeros => drop(master.f_zero_()?),
                Init::Ones => drop(master.f_fill_(1.0)?),
                Init::Normal(std) => {
                    let digest = blake3::hash(entry.name.as_bytes());
                    let mut word = [0; 8];
                    word.copy_from_slice(&digest.as_bytes()[..8]);
                    let seed = mix(&[seed, u64::from_le_bytes(word)]);
                    master.f_copy_(&normal(&entry.shape, 0.0, std, seed, Kind::Float).map_err(Error::Shim)?)?;
                }
            }
        }
        self.refresh()
    }

    /// Makes the compute copies equal to the masters again (nothing to do in fp32, where they share storage).
    pub fn refresh(&mut self) -> Result<(), Error> {
        tch::no_grad(|| {
            for (value, master) in self.values.iter_mut().zip(&self.masters) {
                if value.kind() != Kind::Float {
                    value.f_copy_(master)?;
                }
            }
            Ok(())
        })
    }

    /// Names and shapes, block after block.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.ranges.len()
    }

    /// What the forward of `block` reads.
    pub fn block(&self, block: usize) -> &[Tensor] {
        &self.values[self.ranges[block].clone()]
    }

    /// Gradients of `block`, to add to.
    pub fn block_grads(&mut self, block: usize) -> &mut [Tensor] {
        &mut self.grads[self.ranges[block].clone()]
    }

    /// The flat fp32 gradient of `block`.
    pub fn bucket(&self, block: usize) -> &Tensor {
        &self.buckets[block]
    }

    /// All flat gradients, by block.
    pub fn buckets_mut(&mut self) -> &mut [Tensor] {
        &mut self.buckets
    }

    /// Gradients by parameter.
    pub fn grads(&self) -> &[Tensor] {
        &self.grads
    }

    /// What the forward reads, by parameter.
    pub fn values(&self) -> &[Tensor] {
        &self.values
    }

    /// The fp32 weights, by parameter.
    pub fn masters(&self) -> &[Tensor] {
        &self.masters
    }

    /// The fp32 weights, by parameter. Call [`Parameters::refresh`] after changing them.
    pub fn masters_mut(&mut self) -> &mut [Tensor] {
        &mut self.masters
    }

    /// Are there masters besides the values (`precision: bf16`)?
    pub fn has_masters(&self) -> bool {
        self.values.first().is_some_and(|value| value.kind() != Kind::Float)
    }

    /// Does what failing memory does, for tests: another top bit of one weight's mantissa.
    pub(crate) fn flip_a_bit(&mut self) -> Result<(), Error> {
        let middle = self.masters.len() / 2;
        let bytes = trainctl_collective::bytes_mut(&mut self.masters[middle]).map_err(Error::Shim)?;
        let element = bytes.len() / 8 * 4;
        bytes[element + 2] ^= 0x40;
        Ok(())
    }

    /// Sets every gradient to zero.
    pub fn zero_grads(&mut self) -> Result<(), Error> {
        for bucket in &mut self.buckets {
            drop(bucket.f_zero_()?);
        }
        Ok(())
    }
}
