//! What NVML says of the GPUs that this worker's trainers may see.
//!
//! The library is opened at run time, so that the same program runs where there is none. Which GPUs those are says
//! `CUDA_VISIBLE_DEVICES`, as it says it to CUDA: UUIDs, or numbers in the order of the PCI bus; without it all of them.

use std::ffi::OsStr;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING};
use nvml_wrapper::{Device, Nvml};
use trainctl_proto::v1::DeviceHealth;

/// The driver's own name for it; the one without a version belongs to the development package.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Reasons to run slower that a person can do something about. The others are idleness, and clocks that somebody has set.
const THROTTLED: [(ThrottleReasons, &str); 5] = [
    (ThrottleReasons::HW_SLOWDOWN, "HW_SLOWDOWN"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "HW_THERMAL_SLOWDOWN"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "HW_POWER_BRAKE_SLOWDOWN"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "SW_THERMAL_SLOWDOWN"),
    (ThrottleReasons::SW_POWER_CAP, "SW_POWER_CAP"),
];

/// Asks about each GPU in `visible` (the value of `CUDA_VISIBLE_DEVICES`). Blocks for some milliseconds.
///
/// # Errors
/// In words for a person: no library, no driver, no such GPU.
pub(super) fn read(visible: Option<&str>) -> Result<Vec<DeviceHealth>, String> {
    let nvml = Nvml::builder().lib_path(OsStr::new(LIBRARY)).init();
    let nvml = nvml.map_err(|error| format!("NVML: {error}; is the NVIDIA driver installed on this machine?"))?;
    let failed = |error: NvmlError| format!("NVML: {error}");
    let names: Vec<String> = match visible {
        Some(visible) => {
            visible.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
        }
        None => (0..nvml.device_count().map_err(failed)?).map(|index| index.to_string()).collect(),
    };
    let device = |name: &String| {
        let found = match name.parse() {
            Ok(index) => nvml.device_by_index(index),
            Err(_) => nvml.device_by_uuid(name.as_str()),
        };
        found.and_then(|device| describe(&device)).map_err(|error| format!("NVML, GPU {name}: {error}"))
    };
    names.iter().map(device).collect()
}

fn describe(device: &Device<'_>) -> Result<DeviceHealth, NvmlError> {
    let memory = device.memory_info()?;
    let reasons = known(device.current_throttle_reasons())?.unwrap_or(ThrottleReasons::empty());
    let throttled = THROTTLED.iter().filter(|(reason, _)| reasons.contains(*reason));
    let [pending, failed] = remapped(device)?;
    let pids = known(device.running_compute_processes())?.unwrap_or_default();
    Ok(DeviceHealth {
        uuid: device.uuid()?,
        name: device.name()?,
        memory_free: memory.free,
        memory_total: memory.total,
        ecc_uncorrected: known(device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile))?,
        remap_pending: pending,
        remap_failed: failed,
        throttled: throttled.map(|(_, name)| (*name).to_owned()).collect(),
        link_width: known(device.current_pcie_link_width())?.unwrap_or_default(),
        max_link_width: known(device.max_pcie_link_width())?.unwrap_or_default(),
        pids: pids.iter().map(|process| process.pid).collect(),
    })
}

/// Whether a row waits to be remapped, and whether one could not be. Older GPUs do not know.
fn remapped(device: &Device<'_>) -> Result<[bool; 2], NvmlError> {
    let fields = [NVML_FI_DEV_REMAPPED_PENDING, NVML_FI_DEV_REMAPPED_FAILURE].map(FieldId);
    let Some(samples) = known(device.field_values_for(&fields))? else { return Ok([false; 2]) };
    let mut said = [false; 2];
    for (said, sample) in said.iter_mut().zip(samples) {
        let value = known(sample.and_then(|sample| sample.value))?;
        *said = value.is_some_and(|value| match value {
            SampleValue::U32(count) => count > 0,
            SampleValue::U64(count) => count > 0,
            SampleValue::I64(count) => count > 0,
            SampleValue::F64(count) => count > 0.0,
        });
    }
    Ok(said)
}

/// `None` for what this GPU or driver does not have.
fn known<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
