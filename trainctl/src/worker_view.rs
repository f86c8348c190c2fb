//! Workers as `--output json` shows them and as people read them. The JSON names are a contract.

use serde::Serialize;
use trainctl_proto::v1;

use crate::output::{moment, size};

/// A worker, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct WorkerView {
    id: String,
    host: String,
    address: String,
    boot_id: String,
    state: &'static str,
    reason: Option<String>,
    job: Option<String>,
    generation: Option<u64>,
    rank: Option<u32>,
    quarantine: Option<QuarantineView>,
    connected: bool,
    silent_ms: Option<u64>,
    pid: u32,
    cores: u32,
    device: String,
    clock_ms: Option<f64>,
    clock_error_ms: Option<f64>,
    warnings: Vec<String>,
    health: Option<HealthView>,
    gigaflops: Option<f64>,
}

#[derive(Debug, Serialize)]
struct QuarantineView {
    by: String,
    reason: String,
    figures: String,
    since_ms: u64,
}

#[derive(Debug, Serialize)]
struct HealthView {
    memory_available: Option<u64>,
    memory_total: Option<u64>,
    state_free: Option<u64>,
    run_free: Option<u64>,
    busy: bool,
    devices: Vec<DeviceView>,
}

#[derive(Debug, Serialize)]
struct DeviceView {
    uuid: String,
    name: String,
    memory_free: u64,
    memory_total: u64,
    ecc_uncorrected: Option<u64>,
    remap_pending: bool,
    remap_failed: bool,
    throttled: Vec<String>,
    link_width: u32,
    max_link_width: u32,
    pids: Vec<u32>,
}

impl From<v1::WorkerStatus> for WorkerView {
    fn from(worker: v1::WorkerStatus) -> Self {
        let quarantine = worker.quarantine.clone().map(|quarantine| QuarantineView {
            by: quarantine.by,
            reason: quarantine.reason,
            figures: quarantine.figures,
            since_ms: quarantine.since_ms,
        });
        Self {
            state: state_name(worker.state()),
            id: worker.id,
            host: worker.host,
            address: worker.address,
            boot_id: worker.boot_id,
            reason: Some(worker.reason).filter(|reason| !reason.is_empty()),
            job: worker.carries.as_ref().map(|carried| carried.job.clone()),
            generation: worker.carries.as_ref().map(|carried| carried.generation),
            rank: worker.carries.as_ref().map(|carried| carried.rank),
            quarantine,
            connected: worker.connected,
            silent_ms: worker.silent_ms,
            pid: worker.pid,
            cores: worker.cores,
            device: worker.device,
            clock_ms: worker.clock.map(|clock| clock.ms),
            clock_error_ms: worker.clock.map(|clock| clock.error_ms),
            warnings: worker.warnings,
            health: worker.health.map(Into::into),
            gigaflops: worker.gigaflops,
        }
    }
}

impl From<v1::Health> for HealthView {
    fn from(health: v1::Health) -> Self {
        Self {
            memory_available: health.memory_available,
            memory_total: health.memory_total,
            state_free: health.state_free,
            run_free: health.run_free,
            busy: health.busy,
            devices: health.devices.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<v1::DeviceHealth> for DeviceView {
    fn from(device: v1::DeviceHealth) -> Self {
        Self {
            uuid: device.uuid,
            name: device.name,
            memory_free: device.memory_free,
            memory_total: device.memory_total,
            ecc_uncorrected: device.ecc_uncorrected,
            remap_pending: device.remap_pending,
            remap_failed: device.remap_failed,
            throttled: device.throttled,
            link_width: device.link_width,
            max_link_width: device.max_link_width,
            pids: device.pids,
        }
    }
}

/// As people and programs read it.
fn state_name(state: v1::WorkerState) -> &'static str {
    match state {
        v1::WorkerState::Unspecified => "?",
        v1::WorkerState::Idle => "idle",
        v1::WorkerState::Spare => "spare",
        v1::WorkerState::Starting => "starting",
        v1::WorkerState::Running => "running",
        v1::WorkerState::Unknown => "UNKNOWN",
        v1::WorkerState::Quarantined => "quarantined",
        v1::WorkerState::Settling => "settling",
    }
}

/// "rank 3 of gpt2-124m-7f3a (g7)".
pub(crate) fn carried(worker: &v1::WorkerStatus) -> Option<String> {
    let carried = worker.carries.as_ref()?;
    Some(format!("rank {} of {} (g{})", carried.rank, carried.job, carried.generation))
}

/// Columns of the list.
pub(crate) const HEADER: [&str; 9] =
    ["WORKER", "HOST", "ADDRESS", "STATE", "CARRIES", "CORES", "DEVICE", "MEMORY FREE", "CLOCK"];

/// A worker's row.
pub(crate) fn row(worker: &v1::WorkerStatus) -> Vec<String> {
    let memory = worker.health.as_ref().and_then(|health| health.memory_available);
    let clock = |clock: v1::ClockSkew| format!("{:+.0} ms ± {:.0}", clock.ms, clock.error_ms.ceil());
    vec![
        worker.id.clone(),
        worker.host.clone(),
        worker.address.clone(),
        state_name(worker.state()).to_owned(),
        carried(worker).unwrap_or_default(),
        if worker.cores == 0 { String::new() } else { worker.cores.to_string() },
        worker.device.clone(),
        memory.map(size).unwrap_or_default(),
        worker.clock.map(clock).unwrap_or_default(),
    ]
}

/// What the columns have no room for, a line each.
pub(crate) fn notes(worker: &v1::WorkerStatus) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(quarantine) = &worker.quarantine {
        let v1::Quarantine { by, reason, figures, since_ms } = quarantine;
        let mut note = format!("{}: quarantined by {by} since {}: {reason}", worker.id, moment(*since_ms));
        if !figures.is_empty() {
            note.push_str(&format!(" [{figures}]"));
        }
        notes.push(note);
    }
    if !worker.reason.is_empty() {
        notes.push(format!("{}: {}", worker.id, worker.reason));
    }
    notes.extend(worker.warnings.iter().map(|warning| format!("{}: warning: {warning}", worker.id)));
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_reads_from_left_to_right_and_says_why_it_is_out() {
        let worker = v1::WorkerStatus {
            id: "n7-0".to_owned(),
            host: "n7".to_owned(),
            address: "10.0.0.7".to_owned(),
            state: v1::WorkerState::Quarantined.into(),
            carries: Some(v1::CarriedRank { job: "a-1".to_owned(), generation: 7, rank: 3 }),
            quarantine: Some(v1::Quarantine {
                by: "person".to_owned(),
                reason: "fan".to_owned(),
                figures: "8192 MiB of memory available".to_owned(),
                since_ms: 0,
            }),
            cores: 4,
            device: "cpu".to_owned(),
            health: Some(v1::Health { memory_available: Some(8 << 30), ..v1::Health::default() }),
            clock: Some(v1::ClockSkew { ms: -12.4, error_ms: 0.3 }),
            warnings: vec!["512 MiB are free in the run directory".to_owned()],
            ..v1::WorkerStatus::default()
        };
        let wanted =
            ["n7-0", "n7", "10.0.0.7", "quarantined", "rank 3 of a-1 (g7)", "4", "cpu", "8.0 GiB", "-12 ms ± 1"];
        assert_eq!(row(&worker), wanted);
        assert_eq!(
            notes(&worker),
            [
                "n7-0: quarantined by person since 1970-01-01 00:00:00Z: fan [8192 MiB of memory available]",
                "n7-0: warning: 512 MiB are free in the run directory",
            ]
        );
        let json = serde_json::to_value(WorkerView::from(worker)).unwrap();
        assert_eq!(
            (&json["state"], &json["rank"], &json["quarantine"]["by"]),
            (&"quarantined".into(), &3.into(), &"person".into())
        );
    }
}
