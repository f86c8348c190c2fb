//! Process groups and their works.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tch::{Device, Tensor};

use crate::error::Error;
use crate::ffi::group::{Group, Start, Work as RawWork};
use crate::store::{KeyValue, Prefixed};

/// How a reduction combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum, in the tensors' own kind.
    Sum,
    /// Maximum.
    Max,
    /// Minimum.
    Min,
}

impl ReduceOp {
    /// The number that csrc/group.cpp knows.
    fn code(self) -> i32 {
        match self {
            Self::Sum => 0,
            Self::Max => 1,
            Self::Min => 2,
        }
    }
}

/// Who a rank is in a group that forms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupOptions {
    /// This rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The local address at which the peers reach this rank. A number, since names can be slow or wrong.
    pub address: IpAddr,
    /// The time that forming, and later each operation, may take. The last resort: dead peers are noticed at once.
    pub timeout: Duration,
}

/// A group of ranks that run the same collectives in the same order. Clones share it.
///
/// Tensors must be contiguous, and on the CPU for Gloo; they are read and written by c10d's threads until the [`Work`] ends.
/// Dropping the last clone closes the connections, unless an operation is still under way: then its threads, tensors and
/// connections stay until the process ends, rather than that the drop waits for the timeout.
#[derive(Clone)]
pub struct ProcessGroup {
    group: Arc<Group>,
    store: Arc<dyn KeyValue>,
    options: GroupOptions,
    backend: Backend,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Backend {
    Gloo,
    Nccl { device: i32, plugin: PathBuf },
}

impl Backend {
    fn device(&self) -> Device {
        match self {
            Self::Gloo => Device::Cpu,
            Self::Nccl { device, .. } => Device::Cuda(usize::try_from(*device).unwrap_or(0)),
        }
    }
}

impl ProcessGroup {
    /// Forms a group over Gloo. Blocks until every rank has called it and is connected to every other.
    ///
    /// The keys that it uses begin with `world/`, so a store may form one such group only; see [`subgroup`](Self::subgroup).
    ///
    /// # Errors
    /// [`Error::Store`] as soon as the store answers with an error, [`Error::Argument`] for a rank outside the world, else c10d's
    /// error, sorted.
    pub fn gloo(store: Arc<dyn KeyValue>, options: &GroupOptions) -> Result<Self, Error> {
        let keys: Arc<dyn KeyValue> = Arc::new(Prefixed::new(store.clone(), "world"));
        Self::form(Backend::Gloo, keys, store, options)
    }

    /// Forms a group over NCCL for the CUDA device `device` of this process, by the plug-in at `plugin`
    /// (`libtrainctl_nccl.so`, built by `nccl/build.sh`). Communicators are made here, not at the first collective. NCCL finds its
    /// own addresses: `options.address` is not used.
    ///
    /// Compiled and not yet run on a GPU.
    ///
    /// # Errors
    /// [`Error::Library`] if libtorch_cuda or the plug-in cannot be opened, else as [`gloo`](Self::gloo).
    pub fn nccl(store: Arc<dyn KeyValue>, options: &GroupOptions, device: usize, plugin: &Path) -> Result<Self, Error> {
        let Ok(device) = i32::try_from(device) else {
            return Err(Error::Argument { operation: "form an NCCL group", message: format!("CUDA device {device}") });
        };
        let keys: Arc<dyn KeyValue> = Arc::new(Prefixed::new(store.clone(), "world"));
        Self::form(Backend::Nccl { device, plugin: plugin.to_owned() }, keys, store, options)
    }

    fn form(
        backend: Backend,
        keys: Arc<dyn KeyValue>,
        store: Arc<dyn KeyValue>,
        options: &GroupOptions,
    ) -> Result<Self, Error> {
        let operation = "form a process group";
        let argument = |message| Error::Argument { operation, message };
        let (rank, size) = (i32::try_from(options.rank), i32::try_from(options.world_size));
        let (Ok(rank), Ok(size)) = (rank, size) else {
            return Err(argument(format!("rank {} or world size {} is too large", options.rank, options.world_size)));
        };
        if rank >= size {
            return Err(argument(format!("rank {rank} lies outside a world of {size}")));
        }
        if options.timeout.is_zero() {
            return Err(argument("a timeout of 0: give at least a millisecond".to_owned()));
        }
        let group = match &backend {
            Backend::Gloo => Group::gloo(keys, rank, size, &options.address.to_string(), options.timeout)?,
            Backend::Nccl { device, plugin } => Group::nccl(keys, rank, size, *device, options.timeout, plugin)?,
        };
        Ok(Self { group: Arc::new(group), store, options: options.clone(), backend })
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.options.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.options.world_size
    }

    /// Forms a group of some of this group's ranks, in the order given; `None` for a rank that is not among them. Only those ranks
    /// need to call it. `name` must be new within the generation: the keys begin with `group/<name>/`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a rank outside the group or one named twice, else as [`gloo`](Self::gloo).
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Option<Self>, Error> {
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1])
            || sorted.last().is_some_and(|last| *last >= self.world_size())
        {
            let message = format!("ranks {ranks:?} of group {name} must differ and lie below {}", self.world_size());
            return Err(Error::Argument { operation: "subgroup", message });
        }
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank()) else {
            return Ok(None);
        };
        let keys: Arc<dyn KeyValue> = Arc::new(Prefixed::new(self.store.clone(), &format!("group/{name}")));
        let options = GroupOptions { rank, world_size: ranks.len(), ..self.options.clone() };
        Self::form(self.backend.clone(), keys, self.store.clone(), &options).map(Some)
    }

    /// Combines `tensor` over all ranks, in place.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor that the backend cannot take; else c10d's error, sorted.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work, Error> {
        let operation = "all_reduce";
        self.check(operation, &[tensor])?;
        self.start(operation, &Start::AllReduce { tensor, op: op.code() })
    }

    /// Copies the tensor of rank `root` over that of every other rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work, Error> {
        let operation = "broadcast";
        self.check(operation, &[tensor])?;
        if root >= self.world_size() {
            let message = format!("root {root} lies outside a group of {}", self.world_size());
            return Err(Error::Argument { operation, message });
        }
        self.start(operation, &Start::Broadcast { tensor, root: root as i32 })
    }

    /// Gathers every rank's `input` into `output`, in the order of ranks: `output` has world size × as many elements.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather_into(&self, output: &Tensor, input: &Tensor) -> Result<Work, Error> {
        let operation = "all_gather_into";
        self.check(operation, &[output, input])?;
        self.check_ratio(operation, output, input)?;
        self.start(operation, &Start::AllGather { output, input })
    }

    /// Combines `input` over all ranks and leaves rank r's part of it in `output`: `input` has world size × as many elements.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<Work, Error> {
        let operation = "reduce_scatter";
        self.check(operation, &[output, input])?;
        self.check_ratio(operation, input, output)?;
        self.start(operation, &Start::ReduceScatter { output, input, op: op.code() })
    }

    /// Ends on no rank before every rank has called it.
    ///
    /// # Errors
    /// c10d's error, sorted.
    pub fn barrier(&self) -> Result<Work, Error> {
        self.start("barrier", &Start::Barrier)
    }

    /// Ends every wait on this group's works at once, on any thread, with [`Error::Aborted`] and `reason`; closes the connections,
    /// so that the peers' operations fail too. Later operations are refused. For a rank that is about to end: an operation that
    /// was under way keeps its tensors and threads until the process exits. A second call does nothing.
    ///
    /// # Errors
    /// libtorch's error if the connections could not be closed; the waits have ended all the same.
    pub fn abort(&self, reason: &str) -> Result<(), Error> {
        self.group.abort(reason)
    }

    fn start(&self, operation: &'static str, start: &Start<'_>) -> Result<Work, Error> {
        Ok(Work { raw: self.group.start(operation, start)?, operation })
    }

    fn check(&self, operation: &'static str, tensors: &[&Tensor]) -> Result<(), Error> {
        for tensor in tensors {
            let wanted = self.backend.device();
            if tensor.device() != wanted {
                let message = format!("a tensor on {:?}: this group takes tensors on {wanted:?} only", tensor.device());
                return Err(Error::Argument { operation, message });
            }
            if !tensor.is_contiguous() {
                let message = format!("a tensor of shape {:?} that is not contiguous", tensor.size());
                return Err(Error::Argument { operation, message });
            }
        }
        Ok(())
    }

    fn check_ratio(&self, operation: &'static str, whole: &Tensor, part: &Tensor) -> Result<(), Error> {
        let needed = part.numel() * self.world_size();
        if whole.numel() != needed || whole.kind() != part.kind() {
            let message = format!(
                "{} elements of {:?} against {} of {:?} in a group of {}: {needed} of one kind are needed",
                whole.numel(),
                whole.kind(),
                part.numel(),
                part.kind(),
                self.world_size()
            );
            return Err(Error::Argument { operation, message });
        }
        Ok(())
    }
}

/// A collective under way. Dropping it does not stop it; the tensors stay alive until it ends (K-3).
#[must_use = "the tensors hold the result only after wait()"]
pub struct Work {
    raw: RawWork,
    operation: &'static str,
}

impl Work {
    /// Waits for the end. With NCCL it makes the current stream wait and returns at once.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Timeout`], [`Error::Aborted`], or libtorch's error.
    pub fn wait(self) -> Result<(), Error> {
        self.raw.wait(self.operation)
    }

    /// Whether the operation has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.raw.is_done()
    }
}
