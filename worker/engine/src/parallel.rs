//! The ranks of a generation: the few collectives that data parallelism needs.
//!
//! Every rank calls every function here in the same order with the same shapes, whether or not it had a micro-batch (D2).

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};
use trainctl_collective::{ProcessGroup, ReduceOp, Work};
use trainctl_spec::Step;

use crate::Error;
use crate::executor::Sink;
use crate::params::Parameters;
use crate::pulse::{Collective, Pulse};

/// The data-parallel group of this rank.
pub struct World {
    group: ProcessGroup,
    device: Device,
    pulse: Arc<Pulse>,
    waited: Cell<Duration>,
}

/// The in-band vector of a step, summed over ranks: whoever heard a request, all act on it at the same step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Label tokens of the global batch.
    pub tokens: i64,
    /// Ranks that want to stop.
    pub stop: i64,
    /// Ranks that want a save.
    pub save: i64,
    /// Ranks that want a profile.
    pub profile: i64,
}

impl World {
    /// Takes the group and proves it by one collective, so that all connections exist before the store is sealed. `pulse` counts
    /// this and every later one.
    pub fn new(group: ProcessGroup, device: Device, size: u32, step: Step, pulse: Arc<Pulse>) -> Result<Self, Error> {
        let world = Self { group, device, pulse, waited: Cell::default() };
        let ones = world.sum(&[1i64], Collective::First, step)?;
        if ones != [i64::from(size)] {
            return Err(Error::Internal(format!("the process group counts {ones:?} ranks where {size} belong")));
        }
        Ok(world)
    }

    /// Sums `counts` over ranks.
    pub fn sum_counts(&self, counts: Counts, step: Step) -> Result<Counts, Error> {
        let Counts { tokens, stop, save, profile } = counts;
        let sum = self.sum(&[tokens, stop, save, profile], Collective::Counts, step)?;
        match sum[..] {
            [tokens, stop, save, profile] => Ok(Counts { tokens, stop, save, profile }),
            _ => Err(Error::Internal("an all-reduce changed a tensor's length".to_owned())),
        }
    }

    /// Waits until every rank has come here without an error.
    pub fn all_have_loaded(&self, step: Step) -> Result<(), Error> {
        self.sum(&[1i64], Collective::Loaded, step).map(drop)
    }

    /// Sums numbers over ranks.
    pub fn sum<T: tch::kind::Element + Copy>(&self, values: &[T], what: Collective, step: Step) -> Result<Vec<T>, Error>
    where
        Vec<T>: TryFrom<Tensor, Error = tch::TchError>,
    {
        let tensor = Tensor::f_from_slice(values)?.f_to(self.device)?;
        let fail = |source| Error::Collective { what: what.to_string(), step, source };
        self.pulse.enter(what);
        self.timed(|| self.group.all_reduce(&tensor, ReduceOp::Sum)?.wait()).map_err(fail)?;
        self.pulse.leave();
        Ok(Vec::<T>::try_from(tensor.f_to(Device::Cpu)?)?)
    }

    /// A group of some of the ranks, in order; `None` for a rank that is not among them. Only they call it, before the rendezvous
    /// store is sealed. `name` must be new within the generation.
    pub(crate) fn subgroup(&self, name: &str, ranks: &[usize], step: Step) -> Result<Option<ProcessGroup>, Error> {
        let fail = |source| Error::Collective { what: format!("make the process group {name}"), step, source };
        self.group.subgroup(name, ranks).map_err(fail)
    }

    /// Sums `vector` in place over the ranks of `group`, or all. How long that took once all of them had come, so that it is the
    /// time of the network and not of who came last.
    pub(crate) fn sum_timed(
        &self,
        group: Option<&ProcessGroup>,
        vector: &Tensor,
        what: Collective,
        step: Step,
    ) -> Result<Duration, Error> {
        let group = group.unwrap_or(&self.group);
        // The value must be read: on a GPU the wait for a sum is the stream's, not this thread's.
        let sum = |tensor: &Tensor| {
            let fail = |source| Error::Collective { what: what.to_string(), step, source };
            self.timed(|| group.all_reduce(tensor, ReduceOp::Sum)?.wait()).map_err(fail)?;
            Ok::<_, Error>(f64::try_from(&tensor.f_narrow(0, 0, 1)?)?)
        };
        self.pulse.enter(what);
        sum(&Tensor::f_ones([1], (Kind::Float, self.device))?)?;
        let started = Instant::now();
        sum(vector)?;
        let took = started.elapsed();
        self.pulse.leave();
        Ok(took)
    }

    /// Counts a collective that other ranks have among themselves, so that the counts of all stay comparable.
    pub(crate) fn pass_by(&self, what: Collective) {
        self.pulse.enter(what);
        self.pulse.leave();
    }

    /// How long this rank has waited for collectives so far. What is left of a step's time is its own: a rank that is slow waits
    /// for nobody, and the others for it.
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    fn timed<T>(&self, wait: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = wait();
        self.waited.set(self.waited.get() + started.elapsed());
        result
    }

    /// Starts the reduction of gradients; see [`Reducer`].
    pub fn reducer(&self, step: Step) -> Reducer<'_> {
        Reducer { world: self, step, works: Vec::new() }
    }
}

/// Sums each block's bucket over ranks while the backward of earlier blocks goes on.
pub struct Reducer<'a> {
    world: &'a World,
    step: Step,
    works: Vec<(usize, Work)>,
}

impl Sink for Reducer<'_> {
    fn block_done(&mut self, params: &Parameters, block: usize) -> Result<(), Error> {
        self.world.pulse.enter(gradients(block));
        let work = self
            .world
            .group
            .all_reduce(params.bucket(block), ReduceOp::Sum)
            .map_err(|source| self.fail(block, source))?;
        self.works.push((block, work));
        Ok(())
    }
}

impl Reducer<'_> {
    /// Waits until every block's sum is there.
    pub fn finish(mut self) -> Result<(), Error> {
        for (block, work) in std::mem::take(&mut self.works) {
            self.world.timed(|| work.wait()).map_err(|source| self.fail(block, source))?;
            self.world.pulse.leave();
        }
        Ok(())
    }

    fn fail(&self, block: usize, source: trainctl_collective::Error) -> Error {
        Error::Collective { what: gradients(block).to_string(), step: self.step, source }
    }
}

fn gradients(block: usize) -> Collective {
    Collective::Gradients(u32::try_from(block).unwrap_or(u32::MAX))
}
