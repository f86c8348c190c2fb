//! Conversions between wire messages and domain types.
//!
//! prost makes every message field optional. Daemons convert on receipt and then work with types in which nothing can be
//! missing; a message that does not convert is answered with `INVALID_ARGUMENT`, which names the field.

use std::path::{Component, Path};

use trainctl_spec::report;
use trainctl_spec::start::{DataPhase, Keep, StartFrom};
use trainctl_spec::state::exit::ProcessExit;
use trainctl_spec::{Generation, JobId, Step, Term};

use crate::v1;

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A field that must be there is not.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A field holds what it may not.
    #[error("{field} is invalid: {reason}")]
    Invalid {
        /// Message and field.
        field: &'static str,
        /// What is wrong.
        reason: String,
    },
}

impl From<ProtocolError> for tonic::Status {
    fn from(error: ProtocolError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}

/// The value of a field, or [`ProtocolError::Missing`].
///
/// # Errors
/// When it is `None`.
pub fn required<T>(value: Option<T>, field: &'static str) -> Result<T, ProtocolError> {
    value.ok_or(ProtocolError::Missing(field))
}

fn invalid(field: &'static str, reason: impl Into<String>) -> ProtocolError {
    ProtocolError::Invalid { field, reason: reason.into() }
}

/// One formation of the world of one job, under one coordinator's tenure (J2, J3).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    /// The job.
    pub job: JobId,
    /// Its generation; 0 before the first.
    pub generation: Generation,
    /// The coordinator's term.
    pub term: Term,
}

impl TryFrom<v1::Fence> for Fence {
    type Error = ProtocolError;

    fn try_from(wire: v1::Fence) -> Result<Self, ProtocolError> {
        if wire.job.is_empty() {
            return Err(ProtocolError::Missing("fence.job"));
        }
        Ok(Self { job: JobId(wire.job), generation: Generation(wire.generation), term: Term(wire.term) })
    }
}

impl TryFrom<Option<v1::Fence>> for Fence {
    type Error = ProtocolError;

    fn try_from(wire: Option<v1::Fence>) -> Result<Self, ProtocolError> {
        required(wire, "fence")?.try_into()
    }
}

impl From<Fence> for v1::Fence {
    fn from(fence: Fence) -> Self {
        Self { job: fence.job.0, generation: fence.generation.0, term: fence.term.0 }
    }
}

impl From<&Fence> for v1::Fence {
    fn from(fence: &Fence) -> Self {
        fence.clone().into()
    }
}

impl TryFrom<v1::Phase> for report::Phase {
    type Error = ProtocolError;

    fn try_from(wire: v1::Phase) -> Result<Self, ProtocolError> {
        Ok(match wire {
            v1::Phase::Unspecified => return Err(ProtocolError::Missing("phase")),
            v1::Phase::Starting => Self::Starting,
            v1::Phase::Rendezvous => Self::Rendezvous,
            v1::Phase::Loading => Self::Loading,
            v1::Phase::Stepping => Self::Stepping,
            v1::Phase::Validating => Self::Validating,
            v1::Phase::Saving => Self::Saving,
            v1::Phase::Finished => Self::Finished,
        })
    }
}

impl From<report::Phase> for v1::Phase {
    fn from(phase: report::Phase) -> Self {
        match phase {
            report::Phase::Starting => Self::Starting,
            report::Phase::Rendezvous => Self::Rendezvous,
            report::Phase::Loading => Self::Loading,
            report::Phase::Stepping => Self::Stepping,
            report::Phase::Validating => Self::Validating,
            report::Phase::Saving => Self::Saving,
            report::Phase::Finished => Self::Finished,
        }
    }
}

/// The phase in an enum field, which prost hands out as a number.
///
/// # Errors
/// Unspecified, or a number of a newer version.
pub fn phase(number: i32) -> Result<report::Phase, ProtocolError> {
    v1::Phase::try_from(number).map_err(|_| invalid("phase", format!("unknown number {number}")))?.try_into()
}

impl TryFrom<v1::FinishCause> for report::FinishCause {
    type Error = ProtocolError;

    fn try_from(wire: v1::FinishCause) -> Result<Self, ProtocolError> {
        Ok(match wire {
            v1::FinishCause::Unspecified => return Err(ProtocolError::Missing("finished.cause")),
            v1::FinishCause::Complete => Self::Complete,
            v1::FinishCause::UntilStep => Self::UntilStep,
            v1::FinishCause::Stopped => Self::Stopped,
        })
    }
}

impl From<report::FinishCause> for v1::FinishCause {
    fn from(cause: report::FinishCause) -> Self {
        match cause {
            report::FinishCause::Complete => Self::Complete,
            report::FinishCause::UntilStep => Self::UntilStep,
            report::FinishCause::Stopped => Self::Stopped,
        }
    }
}

/// The cause in an enum field, which prost hands out as a number.
///
/// # Errors
/// Unspecified, or a number of a newer version.
pub fn finish_cause(number: i32) -> Result<report::FinishCause, ProtocolError> {
    v1::FinishCause::try_from(number)
        .map_err(|_| invalid("finished.cause", format!("unknown number {number}")))?
        .try_into()
}

/// A rank's row: its generation is the report's fence, whatever the row says.
#[must_use]
pub fn train_row(wire: v1::TrainRow, generation: Generation) -> report::TrainRow {
    report::TrainRow {
        step: wire.step,
        epoch: wire.epoch,
        timestamp: wire.timestamp,
        loss: wire.loss,
        grad_norm: wire.grad_norm,
        lr: wire.lr,
        mem: wire.mem,
        tps: wire.tps,
        tps_per_gpu: wire.tps_per_gpu,
        mfu: wire.mfu,
        num_tokens_per_step: wire.num_tokens_per_step,
        num_label_tokens: wire.num_label_tokens,
        generation: generation.0,
    }
}

impl From<&report::TrainRow> for v1::TrainRow {
    fn from(row: &report::TrainRow) -> Self {
        Self {
            step: row.step,
            epoch: row.epoch,
            timestamp: row.timestamp.clone(),
            loss: row.loss,
            grad_norm: row.grad_norm,
            lr: row.lr,
            mem: row.mem,
            tps: row.tps,
            tps_per_gpu: row.tps_per_gpu,
            mfu: row.mfu,
            num_tokens_per_step: row.num_tokens_per_step,
            num_label_tokens: row.num_label_tokens,
            generation: row.generation,
        }
    }
}

/// As [`train_row`]. The name becomes part of a file name, so it must be one: letters, digits, `_`, `-`, `.`.
///
/// # Errors
/// An empty name, or one that could leave the run directory.
pub fn validation_row(wire: v1::ValidationRow, generation: Generation) -> Result<report::ValidationRow, ProtocolError> {
    if wire.name.is_empty() {
        return Err(ProtocolError::Missing("validation_row.name"));
    }
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    if !wire.name.chars().all(is_plain) || wire.name.starts_with('.') {
        return Err(invalid("validation_row.name", format!("{:?} is not a plain name", wire.name)));
    }
    Ok(report::ValidationRow {
        name: wire.name,
        step: wire.step,
        epoch: wire.epoch,
        timestamp: wire.timestamp,
        val_loss: wire.val_loss,
        lr: wire.lr,
        num_label_tokens: wire.num_label_tokens,
        mem: wire.mem,
        generation: generation.0,
    })
}

impl From<&report::ValidationRow> for v1::ValidationRow {
    fn from(row: &report::ValidationRow) -> Self {
        Self {
            name: row.name.clone(),
            step: row.step,
            epoch: row.epoch,
            timestamp: row.timestamp.clone(),
            val_loss: row.val_loss,
            lr: row.lr,
            num_label_tokens: row.num_label_tokens,
            mem: row.mem,
            generation: row.generation,
        }
    }
}

impl TryFrom<v1::ShardFile> for report::ShardFile {
    type Error = ProtocolError;

    fn try_from(wire: v1::ShardFile) -> Result<Self, ProtocolError> {
        if wire.path.is_empty() {
            return Err(ProtocolError::Missing("shard_file.path"));
        }
        if !Path::new(&wire.path).components().all(|component| matches!(component, Component::Normal(_))) {
            return Err(invalid("shard_file.path", format!("{:?} leaves the checkpoint's directory", wire.path)));
        }
        let blake3 = hex(&digest(&wire.blake3, "shard_file.blake3")?);
        let block_blake3 = wire
            .block_blake3
            .iter()
            .map(|block| digest(block, "shard_file.block_blake3").map(|block| hex(&block)))
            .collect::<Result<_, _>>()?;
        let header = wire.header.map(|header| {
            let blake3 = hex(&digest(&header.blake3, "file_header.blake3")?);
            Ok::<_, ProtocolError>(report::FileHeader { size: header.size, blake3 })
        });
        Ok(Self { path: wire.path, size: wire.size, blake3, block_blake3, header: header.transpose()? })
    }
}

impl TryFrom<&report::ShardFile> for v1::ShardFile {
    type Error = ProtocolError;

    fn try_from(file: &report::ShardFile) -> Result<Self, ProtocolError> {
        let block_blake3 =
            file.block_blake3.iter().map(|block| unhex(block, "shard_file.block_blake3")).collect::<Result<_, _>>()?;
        let header = file.header.as_ref().map(|header| {
            let blake3 = unhex(&header.blake3, "file_header.blake3")?;
            Ok::<_, ProtocolError>(v1::FileHeader { size: header.size, blake3 })
        });
        Ok(Self {
            path: file.path.clone(),
            size: file.size,
            blake3: unhex(&file.blake3, "shard_file.blake3")?,
            block_blake3,
            header: header.transpose()?,
        })
    }
}

impl TryFrom<v1::TensorDigest> for report::TensorDigest {
    type Error = ProtocolError;

    fn try_from(wire: v1::TensorDigest) -> Result<Self, ProtocolError> {
        if wire.name.is_empty() {
            return Err(ProtocolError::Missing("tensor_digest.name"));
        }
        let (blocks, rest) = wire.blocks.as_chunks::<32>();
        if !rest.is_empty() {
            let reason = format!("{} bytes is not a whole number of 32-byte digests", wire.blocks.len());
            return Err(invalid("tensor_digest.blocks", reason));
        }
        Ok(Self {
            name: wire.name,
            dtype: wire.dtype,
            shape: wire.shape,
            first_block: wire.first_block,
            blocks: blocks.to_vec(),
        })
    }
}

impl From<&report::TensorDigest> for v1::TensorDigest {
    fn from(digest: &report::TensorDigest) -> Self {
        Self {
            name: digest.name.clone(),
            dtype: digest.dtype.clone(),
            shape: digest.shape.clone(),
            first_block: digest.first_block,
            blocks: digest.blocks.as_flattened().to_vec(),
        }
    }
}

impl TryFrom<v1::ShardsDurable> for report::ShardReport {
    type Error = ProtocolError;

    fn try_from(wire: v1::ShardsDurable) -> Result<Self, ProtocolError> {
        if wire.checkpoint.is_empty() {
            return Err(ProtocolError::Missing("shards.checkpoint"));
        }
        let mut components = Path::new(&wire.checkpoint).components();
        if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
            let reason = format!("{:?} is not the name of a directory", wire.checkpoint);
            return Err(invalid("shards.checkpoint", reason));
        }
        Ok(Self {
            kind: wire.kind().try_into()?,
            step: wire.step,
            checkpoint: wire.checkpoint,
            files: wire.files.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            tensors: wire.tensors.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            consumed_samples: wire.consumed_samples,
            train_loss: wire.train_loss,
            val_losses: wire.val_losses.into_iter().collect(),
            corpora: wire.corpora.into_iter().collect(),
            stall_seconds: wire.stall_seconds,
            write_seconds: wire.write_seconds,
            replica: wire.replica.map(TryInto::try_into).transpose()?,
        })
    }
}

impl TryFrom<&report::ShardReport> for v1::ShardsDurable {
    type Error = ProtocolError;

    fn try_from(report: &report::ShardReport) -> Result<Self, ProtocolError> {
        Ok(Self {
            step: report.step,
            checkpoint: report.checkpoint.clone(),
            files: report.files.iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            tensors: report.tensors.iter().map(Into::into).collect(),
            consumed_samples: report.consumed_samples,
            train_loss: report.train_loss,
            val_losses: report.val_losses.clone().into_iter().collect(),
            kind: v1::SaveKind::from(report.kind).into(),
            corpora: report.corpora.clone().into_iter().collect(),
            stall_seconds: report.stall_seconds,
            write_seconds: report.write_seconds,
            replica: report.replica.map(Into::into),
        })
    }
}

impl TryFrom<v1::ReplicaDigest> for report::ReplicaDigest {
    type Error = ProtocolError;

    fn try_from(wire: v1::ReplicaDigest) -> Result<Self, ProtocolError> {
        let number = |bytes: &[u8], field| match bytes.try_into() {
            Ok(bytes) => Ok(u128::from_le_bytes(bytes)),
            Err(_) => Err(invalid(field, format!("{} bytes instead of 16", bytes.len()))),
        };
        let written = (!wire.written.is_empty()).then(|| number(&wire.written, "replica.written")).transpose()?;
        Ok(Self { held: number(&wire.held, "replica.held")?, written })
    }
}

impl From<report::ReplicaDigest> for v1::ReplicaDigest {
    fn from(digest: report::ReplicaDigest) -> Self {
        let bytes = |number: u128| number.to_le_bytes().to_vec();
        Self { held: bytes(digest.held), written: digest.written.map(bytes).unwrap_or_default() }
    }
}

impl TryFrom<v1::BurnIn> for report::BurnInReport {
    type Error = ProtocolError;

    fn try_from(wire: v1::BurnIn) -> Result<Self, ProtocolError> {
        let digest = wire.digest.as_slice().try_into();
        let digest =
            digest.map_err(|_| invalid("burn_in.digest", format!("{} bytes instead of 16", wire.digest.len())))?;
        let sum =
            |check: v1::SumCheck| report::SumCheck { seconds: check.seconds, wrong_elements: check.wrong_elements };
        Ok(Self {
            digest: u128::from_le_bytes(digest),
            rounds: wire.rounds,
            wrong_rounds: wire.wrong_rounds,
            seconds: wire.seconds,
            gigaflops: wire.gigaflops,
            node_sum: wire.node_sum.map(sum),
            world_sum: wire.world_sum.map(sum),
            device: wire.device,
            work: wire.work,
        })
    }
}

impl From<&report::BurnInReport> for v1::BurnIn {
    fn from(report: &report::BurnInReport) -> Self {
        let sum =
            |check: report::SumCheck| v1::SumCheck { seconds: check.seconds, wrong_elements: check.wrong_elements };
        Self {
            digest: report.digest.to_le_bytes().to_vec(),
            rounds: report.rounds,
            wrong_rounds: report.wrong_rounds,
            seconds: report.seconds,
            gigaflops: report.gigaflops,
            node_sum: report.node_sum.map(sum),
            world_sum: report.world_sum.map(sum),
            device: report.device.clone(),
            work: report.work.clone(),
        }
    }
}

impl TryFrom<v1::SaveKind> for report::SaveKind {
    type Error = ProtocolError;

    fn try_from(wire: v1::SaveKind) -> Result<Self, ProtocolError> {
        match wire {
            v1::SaveKind::Full => Ok(Self::Full),
            v1::SaveKind::Weights => Ok(Self::Weights),
            v1::SaveKind::Unspecified => Err(ProtocolError::Missing("the kind of a save")),
        }
    }
}

impl From<report::SaveKind> for v1::SaveKind {
    fn from(kind: report::SaveKind) -> Self {
        match kind {
            report::SaveKind::Full => Self::Full,
            report::SaveKind::Weights => Self::Weights,
        }
    }
}

impl TryFrom<v1::CheckpointRef> for StartFrom {
    type Error = ProtocolError;

    fn try_from(wire: v1::CheckpointRef) -> Result<Self, ProtocolError> {
        let manifest_blake3 = hex(&digest(&wire.manifest_blake3, "start_from.manifest_blake3")?);
        let keep = Keep { optimizer: wire.keep_optimizer, data: wire.keep_data, schedule: wire.keep_schedule };
        Ok(Self { store: wire.store, name: wire.name, manifest_blake3, keep })
    }
}

impl TryFrom<&StartFrom> for v1::CheckpointRef {
    type Error = ProtocolError;

    fn try_from(start: &StartFrom) -> Result<Self, ProtocolError> {
        Ok(Self {
            name: start.name.clone(),
            manifest_blake3: unhex(&start.manifest_blake3, "start_from.manifest_blake3")?,
            store: start.store.clone(),
            keep_optimizer: start.keep.optimizer,
            keep_data: start.keep.data,
            keep_schedule: start.keep.schedule,
        })
    }
}

impl From<v1::DataPhase> for DataPhase {
    fn from(wire: v1::DataPhase) -> Self {
        let corpora = wire.corpora.into_iter().collect();
        Self { first_step: wire.first_step, first_sample: wire.first_sample, corpora }
    }
}

impl From<&DataPhase> for v1::DataPhase {
    fn from(phase: &DataPhase) -> Self {
        let corpora = phase.corpora.clone().into_iter().collect();
        Self { first_step: phase.first_step, first_sample: phase.first_sample, corpora }
    }
}

/// How a trainer ended, as its worker's wait saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainerExit {
    /// Code or signal, exactly one of them.
    pub process: ProcessExit,
    /// Last lines of its standard error.
    pub stderr_tail: Vec<String>,
    /// Its last phase.
    pub phase: report::Phase,
    /// Last zero-based step that it reported.
    pub step: Option<Step>,
}

impl TryFrom<v1::TrainerExit> for TrainerExit {
    type Error = ProtocolError;

    fn try_from(wire: v1::TrainerExit) -> Result<Self, ProtocolError> {
        match (wire.code, wire.signal) {
            (Some(_), None) | (None, Some(_)) => {}
            (None, None) => return Err(ProtocolError::Missing("exited.code or exited.signal")),
            (Some(_), Some(_)) => return Err(invalid("exited", "both a code and a signal")),
        }
        Ok(Self {
            process: ProcessExit {
                code: wire.code,
                signal: wire.signal,
                core: wire.core,
                oom: wire.oom,
                stopped_by_us: wire.stopped_by_us,
            },
            stderr_tail: wire.stderr_tail,
            phase: phase(wire.phase)?,
            step: wire.step.map(Step),
        })
    }
}

impl From<&TrainerExit> for v1::TrainerExit {
    fn from(exit: &TrainerExit) -> Self {
        let ProcessExit { code, signal, core, oom, stopped_by_us } = exit.process;
        Self {
            code,
            signal,
            core,
            oom,
            stopped_by_us,
            stderr_tail: exit.stderr_tail.clone(),
            phase: v1::Phase::from(exit.phase).into(),
            step: exit.step.map(|step| step.0),
        }
    }
}

fn digest(bytes: &[u8], field: &'static str) -> Result<[u8; 32], ProtocolError> {
    bytes.try_into().map_err(|_| invalid(field, format!("{} bytes instead of 32", bytes.len())))
}

/// Lower-case hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The 32 bytes of a lower-case hexadecimal blake3.
///
/// # Errors
/// Another length or other characters; `field` names the place.
pub fn unhex(text: &str, field: &'static str) -> Result<Vec<u8>, ProtocolError> {
    let nibble = |byte: &u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let nibbles: Option<Vec<u8>> = text.as_bytes().iter().map(nibble).collect();
    match nibbles {
        Some(nibbles) if nibbles.len() == 64 => {
            Ok(nibbles.chunks(2).map(|pair| pair.iter().fold(0, |a, b| a << 4 | b)).collect())
        }
        _ => Err(invalid(field, format!("{text:?} is not 64 lower-case hexadecimal digits"))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn shard_report() -> report::ShardReport {
        report::ShardReport {
            step: 999,
            checkpoint: "epoch_0_step_999".into(),
            files: vec![report::ShardFile {
                path: "model/shard-00000-of-00002.g7.safetensors".into(),
                size: 10,
                blake3: "0f".repeat(32),
                block_blake3: vec!["a0".repeat(32)],
                header: Some(report::FileHeader { size: 4096, blake3: "b1".repeat(32) }),
            }],
            tensors: vec![report::TensorDigest {
                name: "model/wte".into(),
                dtype: "F32".into(),
                shape: vec![2, 1024],
                first_block: 1,
                blocks: vec![[7; 32], [8; 32]],
            }],
            consumed_samples: 32_000,
            train_loss: Some(2.5),
            val_losses: BTreeMap::from([("default".to_owned(), 2.75)]),
            kind: report::SaveKind::Weights,
            corpora: BTreeMap::from([("data/web".to_owned(), 31_000)]),
            stall_seconds: 0.25,
            write_seconds: 1.5,
            replica: Some(report::ReplicaDigest { held: u128::MAX - 5, written: Some(7) }),
        }
    }

    fn wire() -> v1::ShardsDurable {
        (&shard_report()).try_into().expect("to wire")
    }

    #[test]
    fn a_shard_report_survives_the_wire() {
        assert_eq!(report::ShardReport::try_from(wire()), Ok(shard_report()));
    }

    #[test]
    fn a_burn_in_survives_the_wire_and_a_torn_digest_does_not() {
        let report = report::BurnInReport {
            digest: u128::MAX - 5,
            rounds: 412,
            wrong_rounds: 3,
            seconds: 5.0,
            gigaflops: 95.0,
            node_sum: None,
            world_sum: Some(report::SumCheck { seconds: 0.25, wrong_elements: 2 }),
            device: "cpu".into(),
            work: "matmul".into(),
        };
        let mut wire = v1::BurnIn::from(&report);
        assert_eq!(report::BurnInReport::try_from(wire.clone()), Ok(report));
        wire.digest.pop();
        let error = report::BurnInReport::try_from(wire).expect_err("15 bytes");
        assert_eq!(error.to_string(), "burn_in.digest is invalid: 15 bytes instead of 16");
    }

    #[test]
    fn a_path_that_leaves_the_checkpoint_is_refused() {
        for path in ["/etc/passwd", "../x", "model/../../x", "./x"] {
            let mut report = wire();
            report.files[0].path = path.into();
            assert!(matches!(report::ShardReport::try_from(report), Err(ProtocolError::Invalid { .. })), "{path}");
        }
        for name in ["a/b", "..", "/a", "."] {
            let report = v1::ShardsDurable { checkpoint: name.into(), ..wire() };
            assert!(matches!(report::ShardReport::try_from(report), Err(ProtocolError::Invalid { .. })), "{name}");
        }
        for name in ["a/b", "..", "a b"] {
            let row = v1::ValidationRow { name: name.into(), ..Default::default() };
            assert!(matches!(validation_row(row, Generation(1)), Err(ProtocolError::Invalid { .. })), "{name}");
        }
    }

    #[test]
    fn torn_digests_are_refused_with_the_field_name() {
        let mut report = wire();
        report.files[0].blake3.pop();
        let error = report::ShardReport::try_from(report).expect_err("31 bytes");
        let status = tonic::Status::from(error);
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert_eq!(status.message(), "shard_file.blake3 is invalid: 31 bytes instead of 32");
        let mut report = wire();
        report.tensors[0].blocks.pop();
        assert!(report::ShardReport::try_from(report).is_err());
        let mut report = wire();
        report.replica.as_mut().expect("a digest").held.pop();
        let error = report::ShardReport::try_from(report).expect_err("15 bytes");
        assert_eq!(error.to_string(), "replica.held is invalid: 15 bytes instead of 16");
    }

    #[test]
    fn every_phase_and_cause_survives_the_wire() {
        for number in 0..20 {
            if let Ok(phase) = phase(number) {
                assert_eq!(i32::from(v1::Phase::from(phase)), number);
            }
            if let Ok(cause) = finish_cause(number) {
                assert_eq!(i32::from(v1::FinishCause::from(cause)), number);
            }
        }
        assert_eq!(phase(0), Err(ProtocolError::Missing("phase")));
        assert!(phase(7).is_ok() && phase(8).is_err() && finish_cause(3).is_ok() && finish_cause(4).is_err());
    }

    #[test]
    fn an_exit_is_a_code_or_a_signal() {
        let exit = TrainerExit {
            process: ProcessExit { signal: Some(9), ..ProcessExit::default() },
            stderr_tail: vec!["x".into()],
            phase: report::Phase::Stepping,
            step: Some(Step(4)),
        };
        let wire = v1::TrainerExit::from(&exit);
        assert_eq!(TrainerExit::try_from(wire.clone()), Ok(exit));
        assert!(TrainerExit::try_from(v1::TrainerExit { code: Some(1), ..wire.clone() }).is_err());
        assert!(TrainerExit::try_from(v1::TrainerExit { signal: None, ..wire }).is_err());
    }

    #[test]
    fn a_fence_needs_a_job() {
        let fence = Fence { job: JobId("a-1".into()), generation: Generation(7), term: Term(3) };
        assert_eq!(Fence::try_from(Some(v1::Fence::from(&fence))), Ok(fence));
        assert_eq!(Fence::try_from(None), Err(ProtocolError::Missing("fence")));
        assert_eq!(Fence::try_from(v1::Fence::default()), Err(ProtocolError::Missing("fence.job")));
    }

    #[test]
    fn hexadecimal_is_lower_case_and_whole() {
        let bytes: Vec<u8> = (0..32).map(|n| n * 8).collect();
        assert_eq!(unhex(&hex(&bytes), "x"), Ok(bytes));
        for text in [String::new(), "AA".repeat(32), "0".repeat(63), "g0".repeat(32)] {
            assert!(unhex(&text, "x").is_err(), "{text}");
        }
    }
}
