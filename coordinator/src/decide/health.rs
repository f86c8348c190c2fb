//! Is a worker fit to carry a rank, by what it measured of itself?
//!
//! Unfit is only what would harm a run whichever rank the worker got; what costs speed or comfort is a warning. A worker that
//! is unfit by these figures is quarantined until it measures itself well again, so nothing here may depend on what a
//! healthy trainer does to its machine: memory is judged by a low floor, and not while a trainer runs.
//!
//! The wall clock: no lease and no order of events depends on it (J6), so a clock that is off by minutes makes times hard to
//! read and nothing else. Object stores refuse requests that are signed a quarter of an hour off; before that a worker is
//! unfit.

use std::collections::BTreeMap;
use std::time::Duration;

use trainctl_proto::v1;
use trainctl_spec::model::Memory;

/// What is too little or too much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Available memory below which even the daemon is in danger, bytes.
    pub memory: u64,
    /// … and below which it is said.
    pub memory_warning: u64,
    /// Free bytes below which a spool cannot hold a trainer's last words.
    pub state_free: u64,
    /// Free bytes, of spool or run directory, below which it is said.
    pub free_warning: u64,
    /// Difference of wall clocks at which signatures are refused.
    pub skew: Duration,
    /// … and at which times are misleading.
    pub skew_warning: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: 128 << 20,
            memory_warning: 1 << 30,
            state_free: 16 << 20,
            free_warning: 1 << 30,
            skew: Duration::from_secs(600),
            skew_warning: Duration::from_secs(5),
        }
    }
}

/// A worker's wall clock less ours, with the bound of the error: half the round trip.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Skew {
    /// Milliseconds.
    pub ms: f64,
    /// Milliseconds.
    pub error_ms: f64,
}

impl Skew {
    /// From one exchange: our beat came back after `round_trip` with the worker's wall clock.
    pub fn measured(worker_wall_ms: u64, own_wall_ms: u64, round_trip: Duration) -> Self {
        let half = round_trip.as_secs_f64() * 500.0;
        Self { ms: worker_wall_ms as f64 - (own_wall_ms as f64 - half), error_ms: half }
    }

    /// Whether it is surely more than this.
    fn exceeds(&self, limit: Duration) -> bool {
        self.ms.abs() - self.error_ms > limit.as_secs_f64() * 1e3
    }
}

/// The answer: with nothing in `unfit` the worker may carry a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// Why it must not.
    pub unfit: Vec<String>,
    /// What a person should know.
    pub warnings: Vec<String>,
}

/// Judges the figures.
pub fn judge(health: Option<&v1::Health>, skew: Option<Skew>, limits: &Limits) -> Judgement {
    let mut judged = Judgement::default();
    if let Some(health) = health {
        judge_memory(health, limits, &mut judged);
        judge_disks(health, limits, &mut judged);
        health.devices.iter().for_each(|device| judge_device(device, health.busy, &mut judged));
        if !health.device_error.is_empty() {
            judged.warnings.push(format!("its GPUs cannot be asked: {}", health.device_error));
        }
        judged.warnings.extend(health.errors.iter().cloned());
    }
    if let Some(skew) = skew {
        let text = format!("its clock is off by {:+.1} s (± {:.3} s)", skew.ms / 1e3, skew.error_ms / 1e3);
        if skew.exceeds(limits.skew) {
            judged.unfit.push(text);
        } else if skew.exceeds(limits.skew_warning) {
            judged.warnings.push(text);
        }
    }
    judged
}

fn judge_memory(health: &v1::Health, limits: &Limits, judged: &mut Judgement) {
    let Some(available) = health.memory_available.filter(|_| !health.busy) else { return };
    let text = format!("{} of memory are available", mib(available));
    if available < limits.memory {
        judged.unfit.push(format!("{text}, at least {} must be", mib(limits.memory)));
    } else if available < limits.memory_warning {
        judged.warnings.push(text);
    }
}

fn judge_disks(health: &v1::Health, limits: &Limits, judged: &mut Judgement) {
    if let Some(free) = health.state_free {
        let text = format!("{} are free in its state directory", mib(free));
        if free < limits.state_free {
            judged.unfit.push(format!("{text}, at least {} must be", mib(limits.state_free)));
        } else if free < limits.free_warning {
            judged.warnings.push(text);
        }
    }
    // All workers see the same disk, and a run outlives a full one.
    if let Some(free) = health.run_free.filter(|free| *free < limits.free_warning) {
        judged.warnings.push(format!("{} are free in the run directory", mib(free)));
    }
}

fn judge_device(device: &v1::DeviceHealth, busy: bool, judged: &mut Judgement) {
    let name = format!("GPU {}", device.uuid);
    if let Some(errors) = device.ecc_uncorrected.filter(|errors| *errors > 0) {
        judged.unfit.push(format!("{name}: {errors} memory errors that ECC could not correct; reset the GPU"));
    }
    if device.remap_failed {
        judged.unfit.push(format!("{name}: a row of its memory could not be remapped; have it replaced"));
    }
    if device.remap_pending {
        judged.unfit.push(format!("{name}: a row of its memory waits to be remapped; reset the GPU"));
    }
    if !device.throttled.is_empty() {
        judged.warnings.push(format!("{name}: throttled ({})", device.throttled.join(", ")));
    }
    if device.link_width < device.max_link_width {
        let (width, max) = (device.link_width, device.max_link_width);
        judged.warnings.push(format!("{name}: its PCIe link has {width} of {max} lanes"));
    }
    if !busy && !device.pids.is_empty() {
        let pids: Vec<String> = device.pids.iter().map(ToString::to_string).collect();
        judged.warnings.push(format!("{name}: processes {} compute on it", pids.join(", ")));
    }
}

/// A worker that is about to get a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newcomer<'a> {
    /// Worker id.
    pub worker: &'a str,
    /// Machine (kernel boot id): its workers share its memory.
    pub machine: &'a str,
    /// What it measured just now.
    pub available: u64,
}

/// Those for whose ranks the memory of their machine surely does not suffice, each with the reason. `need` counts no
/// activations, so whoever passes may still run out of memory.
pub fn short_of_memory(need: &Memory, newcomers: &[Newcomer<'_>]) -> BTreeMap<String, String> {
    let mut short = BTreeMap::new();
    let mut taken: BTreeMap<&str, u64> = BTreeMap::new();
    for Newcomer { worker, machine, available } in newcomers {
        let ranks = taken.entry(machine).or_default();
        if available / need.total().max(1) > *ranks {
            *ranks += 1;
            continue;
        }
        let beside = if *ranks == 0 { String::new() } else { format!(" beside {ranks} more of this job") };
        let reason = format!("{} of memory are available, a rank{beside} needs at least {need}", mib(*available));
        short.insert((*worker).to_owned(), reason);
    }
    short
}

/// All figures in one line, for a ticket.
pub fn figures(health: Option<&v1::Health>, skew: Option<Skew>) -> String {
    let mut parts = Vec::new();
    if let Some(health) = health {
        let of = |free: Option<u64>, what: &str| free.map(|free| format!("{} {what}", mib(free)));
        parts.extend(of(health.memory_available, "of memory available"));
        parts.extend(of(health.memory_total, "of memory in all"));
        parts.extend(of(health.state_free, "free in the state directory"));
        parts.extend(of(health.run_free, "free in the run directory"));
        for device in &health.devices {
            let ecc = device.ecc_uncorrected.map_or_else(|| "off".to_owned(), |errors| errors.to_string());
            parts.push(format!(
                "GPU {} ({}): {} of {} free, ECC uncorrected {ecc}, remap pending {} failed {}, link {}/{}",
                device.uuid,
                device.name,
                mib(device.memory_free),
                mib(device.memory_total),
                device.remap_pending,
                device.remap_failed,
                device.link_width,
                device.max_link_width
            ));
        }
    }
    parts.extend(skew.map(|skew| format!("clock {:+.3} s ± {:.3} s", skew.ms / 1e3, skew.error_ms / 1e3)));
    parts.join("; ")
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn well() -> v1::Health {
        v1::Health {
            memory_available: Some(8 << 30),
            memory_total: Some(16 << 30),
            state_free: Some(10 << 30),
            run_free: Some(10 << 30),
            ..v1::Health::default()
        }
    }

    fn judged(health: &v1::Health) -> Judgement {
        judge(Some(health), None, &Limits::default())
    }

    #[test]
    fn ranks_of_one_machine_share_its_memory() {
        let need = Memory { weights: 1 << 30, master: 0, gradients: 1 << 30, optimizer: 2 << 30 };
        let newcomer = |worker, machine, gib: u64| Newcomer { worker, machine, available: gib << 30 };
        let fits = [newcomer("a", "m", 8), newcomer("b", "m", 8), newcomer("c", "n", 4)];
        assert_eq!(short_of_memory(&need, &fits), BTreeMap::new());
        let short = short_of_memory(&need, &[newcomer("a", "m", 7), newcomer("b", "m", 7), newcomer("c", "n", 3)]);
        let told: Vec<(&str, &str)> = short.iter().map(|(worker, reason)| (worker.as_str(), reason.as_str())).collect();
        let figures = "4096 MiB (weights 1024, master 0, gradients 1024, optimizer 2048)";
        assert_eq!(
            told,
            [
                (
                    "b",
                    &*format!(
                        "7168 MiB of memory are available, a rank beside 1 more of this job needs at least {figures}"
                    )
                ),
                ("c", &*format!("3072 MiB of memory are available, a rank needs at least {figures}")),
            ]
        );
    }

    #[test]
    fn good_figures_and_none_at_all_stand_against_nobody() {
        assert_eq!(judged(&well()), Judgement::default());
        assert_eq!(judge(None, None, &Limits::default()), Judgement::default());
        assert_eq!(judged(&v1::Health::default()), Judgement::default(), "what was not measured is not zero");
    }

    #[test]
    fn too_little_memory_is_unfit_but_not_while_a_trainer_has_it() {
        let starved = v1::Health { memory_available: Some(64 << 20), ..well() };
        assert_eq!(judged(&starved).unfit, ["64 MiB of memory are available, at least 128 MiB must be"]);
        assert_eq!(judged(&v1::Health { busy: true, ..starved }), Judgement::default());
        let low = v1::Health { memory_available: Some(512 << 20), ..well() };
        assert_eq!((judged(&low).unfit.len(), judged(&low).warnings.len()), (0, 1));
    }

    #[test]
    fn a_full_spool_is_unfit_and_a_full_run_directory_is_everybodys() {
        let full = v1::Health { state_free: Some(0), ..well() };
        assert!(judged(&full).unfit[0].contains("state directory"));
        let run = v1::Health { run_free: Some(0), ..well() };
        assert_eq!(judged(&run).unfit, Vec::<String>::new());
        assert!(judged(&run).warnings[0].contains("run directory"));
    }

    #[test]
    fn a_clock_is_judged_by_what_is_sure_of_it() {
        let second = Duration::from_secs(1);
        let by = |ms: u64| Skew::measured(1_000_000, 1_000_000 + ms, Duration::ZERO);
        let judged = |skew| judge(None, Some(skew), &Limits::default());
        assert_eq!(judged(by(4_000)), Judgement::default());
        assert_eq!(judged(by(6_000)).warnings, ["its clock is off by -6.0 s (± 0.000 s)"]);
        assert!(judged(by(700_000)).unfit[0].contains("-700.0 s"));
        let unsure = Skew::measured(1_006_000, 1_000_000, 4 * second);
        assert_eq!((unsure.ms, unsure.error_ms), (8_000.0, 2_000.0));
        let slow = Skew::measured(1_006_000, 1_000_000, 20 * second);
        assert_eq!(judged(slow).warnings.len(), 1, "16 ± 10 s is more than 5 s");
        let slower = Skew::measured(1_000_000, 1_000_000, 20 * second);
        assert_eq!(judged(slower), Judgement::default(), "10 ± 10 s may be nothing");
    }

    #[test]
    fn a_broken_gpu_is_unfit_and_a_slow_one_is_said() {
        let good = v1::DeviceHealth {
            uuid: "GPU-1".to_owned(),
            ecc_uncorrected: Some(0),
            link_width: 16,
            max_link_width: 16,
            ..v1::DeviceHealth::default()
        };
        let of = |device| judged(&v1::Health { devices: vec![device], ..well() });
        assert_eq!(of(good.clone()), Judgement::default());
        for (device, words) in [
            (v1::DeviceHealth { ecc_uncorrected: Some(2), ..good.clone() }, "2 memory errors"),
            (v1::DeviceHealth { remap_failed: true, ..good.clone() }, "could not be remapped"),
            (v1::DeviceHealth { remap_pending: true, ..good.clone() }, "waits to be remapped"),
        ] {
            assert!(of(device).unfit[0].contains(words), "{words}");
        }
        for (device, words) in [
            (v1::DeviceHealth { link_width: 8, ..good.clone() }, "8 of 16 lanes"),
            (v1::DeviceHealth { throttled: vec!["hw_thermal".to_owned()], ..good.clone() }, "hw_thermal"),
            (v1::DeviceHealth { pids: vec![7], ..good }, "processes 7"),
        ] {
            let judged = of(device);
            assert!(judged.unfit.is_empty() && judged.warnings[0].contains(words), "{judged:?}");
        }
    }

    #[test]
    fn the_figures_fit_into_a_ticket() {
        let skew = Skew { ms: 12.0, error_ms: 1.0 };
        assert_eq!(
            figures(Some(&well()), Some(skew)),
            "8192 MiB of memory available; 16384 MiB of memory in all; 10240 MiB free in the state directory; \
             10240 MiB free in the run directory; clock +0.012 s ± 0.001 s"
        );
    }
}
